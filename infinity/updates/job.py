"""One optimizer update of one unit, as the training thread and the update stream see it.

[Note: who may touch a unit's weights]
A job is created by the training thread, and only for a unit that no backward needs any more (`Unit.unbind_unused`). From
then on the weights belong to the job until it is done: the coordinator waits for it before it opens or fetches the unit. If the
unit is resident, the job writes its new weights into the flat buffer as well; if it is not, the coordinator may hand it an
empty buffer until it begins (`attach`), and the job fills it. That saves reading what was just written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import torch

from infinity.device.compute import ComputeDevice, Fence, FlatBuffer
from infinity.gradients.main_gradients import GradientSource
from infinity.threads.denormals import flushes_denormals
from infinity.units.layout import Chunk, Slot
from infinity.units.unit import Arrival, Unit
from swapper import Latch

PROMOTED = -1
"""The rank of a job that somebody waits for; others begin at 0."""


@dataclass
class ParameterState:
    """What the optimizer keeps per parameter besides its per-element state."""

    scalars: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    """Which of the per-element states that its unit's records hold the parameter has; None while it `is_fresh`."""
    num_updates: int = 0
    """Counted from the beginning, or from the "step" of a state that was loaded."""

    @property
    def is_fresh(self) -> bool:
        """Whether it has no state yet. The optimizer makes it in the first update that needs it."""
        return self.names is None

    def load(self, scalars: dict[str, Any], names: tuple[str, ...] | None, num_updates: int) -> None:
        """Replace the state. Without ``names`` the optimizer creates it in the next update."""
        # Neither names nor scalars: as if it had never been updated, so the optimizer creates its state in the next
        # update.
        self.scalars, self.names, self.num_updates = scalars, names if names or scalars else None, num_updates

    def check(self, slot: Slot, stored: Sequence[str], values: Mapping[str, Any]) -> None:
        """Raise ValueError if ``values`` cannot take its place; ``stored``: the per-element states that the records hold."""
        fqn = slot.spec.fqn
        known = (*(self.names or ()), *(["step"] if "step" in self.scalars else []))
        missing = [] if self.is_fresh else [name for name in known if name not in values]
        if missing:
            raise ValueError(
                f"the state for '{fqn}' lacks {', '.join(map(repr, missing))}. Give all of {', '.join(map(repr, known))}; "
                "infinity.GatheredParameters changes weights"
            )
        for name, value in values.items():
            is_tensor = isinstance(value, torch.Tensor)
            if name in stored:
                shape = tuple(value.shape) if is_tensor else type(value).__name__
                if shape != tuple(slot.spec.shape) or not value.is_floating_point() or value.device.type == "meta":
                    raise ValueError(
                        f"the state '{name}' for '{fqn}' is {shape}, {getattr(value, 'dtype', 'no tensor')}, on "
                        f"{getattr(value, 'device', 'no device')}. Give a floating-point tensor of shape "
                        f"{tuple(slot.spec.shape)}"
                    )
            elif is_tensor and value.numel() != 1:
                raise ValueError(
                    f"the state for '{fqn}' has '{name}' of shape {tuple(value.shape)}, which the optimizer does not "
                    f"keep. Give {', '.join(map(repr, stored)) or 'none'} per element, and scalars"
                )


def advance(states: Mapping[tuple[int, int], ParameterState], job: UpdateJob) -> None:
    """Store what a finished update has given its parameters; names of states count while a parameter `is_fresh`."""
    for index, (names, scalars) in job.advanced.items():
        state = states[job.unit.index, index]
        state.scalars = scalars
        state.num_updates += 1
        # An SGD without momentum keeps neither names nor scalars: its parameters stay fresh for good.
        if state.names is None and (names or scalars):
            state.names = names


@dataclass(eq=False, repr=False)
class UpdateJob:
    """One update of one unit. The training thread creates it and waits for it; the stream runs it.

    Args:
        is_held: wait with the job until somebody attaches a buffer or needs the unit, if one can be attached.
        is_shard: other processes update other chunks, see `infinity.units.shards`.
        uses_flat: read and write weights in the unit's flat buffer, if it has one.
    """

    unit: Unit
    """What is updated."""
    chunks: Sequence[Chunk]
    """The chunks that hold updated parameters."""
    gradients: GradientSource
    """Its gradients; the job releases them."""
    groups: Mapping[int, dict[str, Any]]
    """Slot index -> snapshot of its parameter group's hyperparameters. A parameter without is not updated."""
    clip_coefficient: torch.Tensor | None
    """0-dim fp32 tensor every gradient is multiplied with, or None."""
    after: Fence
    """The gradients are complete at this point of the compute stream."""
    _: KW_ONLY
    is_held: bool = False
    """Whether it waits; see `UpdateStream.release_all`."""
    rank: int = 0
    """Jobs of a lower one go first, those of one rank in the order of their submission."""
    is_shard: InitVar[bool] = False
    uses_flat: InitVar[bool] = True

    def __post_init__(self, is_shard: bool, uses_flat: bool) -> None:
        unit, chunks = self.unit, self.chunks
        # Parameters in no group, and those without a gradient, are not updated.
        self.slots = self.groups.keys() & {slot.index for slot in self.gradients.slots}
        segment = unit.layout.trainable
        self.updates_all = segment is not None and len(self.slots) == len(segment.slots)
        """Whether all trainable parameters of the unit are."""
        self.chunks = [chunk for chunk in chunks if chunk.slices]
        if not self.updates_all:
            self.chunks = [chunk for chunk in chunks if any(each.slot.index in self.slots for each in chunk.slices)]
        self.numbers: Any = None
        """`ChunkUpdater`'s numbers for all chunks of the job; None until a worker has computed them."""
        self.weights: torch.Tensor | None = None
        """The unit's trained weights in `flat`, if there is one: 1-D, compute dtype. From `begin` to `finish`."""
        self.advanced: dict[int, tuple[tuple[str, ...], dict[str, Any]]] = {}
        """Slot index -> the parameter's states and scalars after the update, from the end of its last slice on."""
        self.flat = unit.flat if uses_flat else None
        self.flat_arrival: Arrival | None = unit.arrival if uses_flat else None
        """Weights still on their way into ``flat``; they must be there before the job writes over them."""
        self.flat_is_current = self.flat is not None
        """Whether ``flat`` holds the present weights (else the job fills it)."""
        # Only then would the update fill every byte of an empty buffer: frozen segments, chunks without slices and
        # other ranks' shards are written by nobody.
        is_whole = len(self.chunks) == len(chunks) and not is_shard
        self._covers_all = is_whole and segment is not None and len(unit.layout.segments) == 1
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        self._arriving = threading.Lock()
        """Held by the worker that waits for `flat_arrival`. Taken alone."""
        self.has_begun = False
        """Whether the stream has taken it."""
        self._finished = Latch()
        self.done = self._finished.is_set
        self._error: BaseException | None = None
        # A worker computes as the training thread would: denormals and numbers of threads are settings of each thread.
        self.flushes_denormals = flushes_denormals()
        """Whether the thread that asks for the update flushes denormal numbers to zero."""
        self.num_threads = torch.get_num_threads()
        """On how many OpenMP threads it computes."""
        self.is_held = self.is_held and self.accepts_buffer
        self._on_release: Callable[[], None] = lambda: None

    def add_release_callback(self, on_release: Callable[[], None]) -> None:
        """Call ``on_release``, from any thread, when the job is not held back any longer."""
        self._on_release = on_release

    def begin(self) -> None:
        """Begin the job: no buffer can be attached any more. For the worker that takes it."""
        # Locked, or `attach` on the training thread could give a buffer to a job whose first chunk is already under
        # way.
        with self._lock:
            self.has_begun = True
        if self.flat is not None and self.chunks:
            self.weights = self.unit.trainable_view(self.flat.tensor())

    def await_flat(self, device: ComputeDevice) -> None:
        """Wait for the arrival of weights that the job will overwrite. The thread's stream has waited for `after`."""
        if self.flat_arrival is None:
            return
        with self._arriving:  # of several workers one waits, and the others for that one
            if self.flat_arrival is not None:
                self.flat_arrival.wait()
                # That wait ordered this thread's stream; the copies run on streams of their own.
                self.after = device.mark()
                self.flat_arrival = None

    def fetch_coefficient(self, device: ComputeDevice) -> None:
        """Copy the clipping coefficient to host memory. The thread's stream has waited for `after`."""
        coefficient = self.clip_coefficient
        if coefficient is not None and coefficient.device.type != "cpu":
            here = torch.empty(1, dtype=coefficient.dtype, device="cpu")
            device.synchronize(device.download(here, coefficient.reshape(1), device.mark()))
            self.clip_coefficient = here[0]  # any worker: all of them find the same

    @property
    def accepts_buffer(self) -> bool:
        # See [Note: who may touch a unit's weights].
        return self._covers_all and self.flat is None and not self.has_begun

    def attach(self, flat: FlatBuffer, after: Fence = None) -> bool:
        with self._lock:
            if not self.accepts_buffer:
                return False
            self.flat = flat
            self.flat_is_current = False
            self.after = after
        self.release()
        return True

    def finish(self, error: BaseException | None) -> None:
        """End the job: all that it launched on the device has run, or it has failed with ``error``."""
        self._error = error
        # The flat buffer's memory is not freed while a view of it exists.
        self.flat = self.weights = None
        self.flat_arrival = None
        # Last: whoever waits may look at everything above.
        self._finished.set()

    def promote(self) -> None:
        """Run the job next: the unit is waited for."""
        # Before the release: the worker that it wakes takes the lowest rank.
        self.rank = PROMOTED
        self.release()

    def release(self) -> None:
        """Hold the job back no longer."""
        self.is_held = False
        self._on_release()

    def wait(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error
