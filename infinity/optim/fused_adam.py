"""torch's fused Adam and AdamW on split main weights: join, update and split in one pass over memory.

`FusedAdam` does so on the CPU, `GpuAdam` on a GPU, each only where it gives the bits of torch's own kernel there.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim.adam import adam

from infinity.errors import StepError
from infinity.numerics.remainder import join, split
from infinity.optim.executor import OptimizerExecutor, hyperparameters
from infinity.optim.wrapped_optimizer import WrappedOptimizer
from infinity.torch_internals.names import Launch, compiled_for

logger = logging.getLogger(__name__)

VECTOR_NUMEL = 16  # fp32 elements of an AVX-512 register, the widest
"""Multiples of this many elements go through torch's vector code, whatever the processor's vectors are."""
STATES = ("exp_avg", "exp_avg_sq")
"""Names of the per-element states, in the order in which torch makes them."""
ADAM = Path(__file__).with_name("adam.cu").read_text("utf-8")
# Threads per block, and most blocks per launch: a thread loops over elements that are a grid (2**21) apart.
THREADS = 256
MOST_BLOCKS = 1 << 13
# Elements per launch. The kernel's int index exceeds them by at most one grid: 2**30 + 2**21 fits into 31 bits.
MOST_NUMEL = 1 << 30

_PROBE_NUMEL = 1 << 13  # elements; a multiple of VECTOR_NUMEL
# Counts before the step: the first ones, where the corrections for bias are largest, and late ones, where they are
# nearly 1.
_PROBE_STEPS = (0, 1, 2, 999, 123_456)
# Each way through the kernel: with decay and without, and both sides of torch's interpolation.
_PROBE_VARIANTS: tuple[dict[str, Any], ...] = (
    {"betas": (0.9, 0.999), "weight_decay": 0.01},
    {"betas": (0.3, 0.95), "weight_decay": 0.0},
)


class FusedAdam:
    """One Adam step on a slice of a parameter, on the CPU, with the bits that torch's own fused kernel gives.

    See [Note: bits as in torch] in ``infinity.numerics.kernels``.
    """

    vector_numel = VECTOR_NUMEL
    """It takes multiples of this many elements."""
    takes_tables = True
    """Whether there is `update_slices`."""

    def __init__(self, is_decoupled: bool, device: torch.device) -> None:
        """``is_decoupled``: AdamW's weight decay where a group does not say itself."""
        self._is_decoupled = is_decoupled
        self._device = device

    def _prepare(self) -> bool:
        """Whether there is a kernel here."""
        # torch's code has to have a fused multiply-add, as ours has. Without, ours would be slow besides.
        if self._device.type != "cpu" or torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"):
            return False
        from infinity.numerics.compiling import can_compile  # late, see infinity.numerics.remainder

        if not can_compile():
            return False
        from infinity.numerics.kernels import adam

        self._adam = adam
        return True

    @classmethod
    def of(
        cls, wrapped_optimizer: WrappedOptimizer, device: torch.device, *, has_remainder: bool = True
    ) -> Self | None:
        """The kernel for the wrapped optimizer's, or None if there is none that gives the bits of torch's.

        That is found out by running both, where updates run, with the torch that is installed. ``has_remainder``: main weights
        are split (bf16 weight and 16-bit remainder); False: as fp32.
        """
        kind = type(wrapped_optimizer.optimizer)
        if kind not in (torch.optim.Adam, torch.optim.AdamW):
            return None
        # GradScaler with a fused optimizer sets it: torch's kernel then divides by it, which ours does not.
        if getattr(wrapped_optimizer.optimizer, "grad_scale", None) is not None:
            return None
        fused = cls(is_decoupled=kind is torch.optim.AdamW, device=device)
        groups = [group for group in map(hyperparameters, wrapped_optimizer.param_groups) if fused.runs(group)]
        if not groups:
            logger.info(
                "%s without fused=True runs in torch's own loops, which are slower: they read and write the states "
                "several times. Pass fused=True",
                kind.__name__,
            )
        if not groups or not fused._prepare():
            return None
        executor = wrapped_optimizer.executor()
        # Groups that differ in more than the learning rate.
        distinct = {
            (*each["betas"], each["eps"], each["weight_decay"], fused._is_decoupled_in(each)): each for each in groups
        }
        for group in distinct.values():
            # The group itself first, then each path of the kernel that its numbers may not take.
            for variant in ({}, *_PROBE_VARIANTS):
                tried = {**group, **variant}
                if not fused._agrees(executor, dict(tried), has_remainder=has_remainder) and not fused._leaves_out(
                    tried
                ):
                    logger.info("%s: torch's kernel runs, ours gives other bits on %s", kind.__name__, device)
                    return None
        return fused

    def _leaves_out(self, group: Mapping[str, Any]) -> bool:
        """Whether groups like this one can be left to torch from now on, and others not."""
        return False

    def _is_decoupled_in(self, group: Mapping[str, Any]) -> bool:
        return bool(group.get("decoupled_weight_decay", self._is_decoupled))

    def runs(self, group: Mapping[str, Any]) -> bool:
        """Whether a group with these hyperparameters can be updated here."""
        if not group.get("fused") or any(map(group.get, ("amsgrad", "maximize", "differentiable", "capturable"))):
            return False
        numbers = (*group.get("betas", (None,)), group.get("eps"), group.get("weight_decay"))
        return {*map(type, numbers)} <= {float, int, bool}

    def update(
        self,
        group: Mapping[str, Any],
        weight: Tensor,
        remainder: Tensor | None,
        gradient: Tensor,
        scale: Tensor | None,
        state: Mapping[str, Tensor],
        scalars: Mapping[str, Any],
    ) -> dict[str, Any]:
        """One step on a multiple of `vector_numel` elements. All tensors are 1-D without gaps, on the CPU.

        Args:
            group: hyperparameters for which `runs` holds.
            weight, remainder: bf16 and int16 (see ``infinity.numerics.remainder``), or fp32 and None; changed in place.
            gradient: float32 or bf16; not modified.
            scale: 0-dim float32 that the gradient is multiplied with first, or None.
            state: float32 ``exp_avg`` and ``exp_avg_sq``, changed in place; zeros before the first step.
            scalars: the parameter's, as they were before this step. Not modified, and not to be changed later.

        Returns:
            The scalars after the step.
        """
        # fp32, as torch counts: above 2**24 steps it stays where it is, in both.
        step = torch.as_tensor(scalars.get("step", 0.0), dtype=torch.float32, device="cpu") + 1
        values = np.array([self.values(group, 1.0 if scale is None else float(scale), float(step))])
        where = np.array([(0, weight.numel())], dtype=np.int64)
        self.update_slices(weight, remainder, gradient, state, where, np.zeros(1, dtype=np.int64), values)
        return {"step": step}

    def update_slices(
        self,
        main: Tensor,
        remainder: Tensor | None,
        gradient: Tensor,
        states: Mapping[str, Tensor],
        where: npt.NDArray[np.int64],
        rows_of_values: npt.NDArray[np.int64],
        values: npt.NDArray[np.float32],
    ) -> None:
        """One step on each of some slices of a chunk's tensors, which are 1-D without gaps, on the CPU.

        Args:
            main: fp32, or bf16 if there are remainders.
            remainder: int16, or None.
            gradient: fp32 or bf16.
            states: fp32, by `STATES`.
            where: a row for each slice: its first element, and how many it has, a multiple of `vector_numel`.
            rows_of_values: of each slice, which row of ``values``.
            values: each row is what `values` gave.
        """
        average, square = states[STATES[0]], states[STATES[1]]
        # Five tensors, columns 0, 1, 2, 4, 5 of the kernel's rows: address = base + first element * bytes of an
        # element. Example: slices (0, 992) and (1024, 512) of a bf16 weight at address 4096 give the addresses 4096 and
        # 6144.
        bases, sizes = np.zeros(5, dtype=np.int64), np.zeros(5, dtype=np.int64)
        for column, tensor in enumerate((main, remainder, gradient, average, square)):
            if tensor is not None:
                bases[column], sizes[column] = tensor.data_ptr(), tensor.element_size()
        rows = np.empty((len(where), 8), dtype=np.int64)
        rows[:, [0, 1, 2, 4, 5]] = bases + where[:, :1] * sizes
        rows[:, 3] = gradient.dtype == torch.bfloat16
        rows[:, 6] = where[:, 1]
        rows[:, 7] = rows_of_values
        self._adam(rows, values)  # releases the GIL; the tensors live as long as the caller's arguments

    def update_whole(self, group: Mapping[str, Any], *tensors: list[Tensor]) -> None:
        """One step on tensors of any length by torch's own kernel: all fp32, 1-D, and changed in place.

        Args:
            group: hyperparameters for which `runs` holds.
            tensors: weights, gradients, averages, squares, and step counts before the step, 0-dim fp32.
        """
        weights, gradients, averages, squares, steps = tensors
        (beta1, beta2), is_decoupled = group["betas"], self._is_decoupled_in(group)
        rates: dict[str, Any] = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": group["eps"]}
        rates |= {"beta1": beta1, "beta2": beta2, "decoupled_weight_decay": is_decoupled}
        # As `torch.optim.Adam.step` calls it.
        adam(weights, gradients, averages, squares, [], steps, fused=True, amsgrad=False, maximize=False, **rates)

    def values(self, group: Mapping[str, Any], scale: float, count: float) -> tuple[np.float32, ...]:
        """The kernel's numbers.

        Args:
            group: hyperparameters for which `runs` holds.
            scale: every gradient is multiplied with it.
            count: the parameter's step count after the step.

        Raises:
            StepError: they give no number, as a beta above 1 does.
        """
        lr, (beta1, beta2), weight_decay = float(group["lr"]), group["betas"], group["weight_decay"]
        is_decoupled = self._is_decoupled_in(group)
        try:
            # In Python's float64, and rounded to fp32 only at the end: that is how torch computes its scalars.
            corrections = math.sqrt(1 - beta2**count), -(lr / (1 - beta1**count))
        except (ArithmeticError, ValueError) as error:
            raise StepError(
                f"betas ({beta1}, {beta2}) and step count {count:g} give no correction for bias: {error}. A part of this "
                "step may be done: make a new engine, with 'betas' from 0 to below 1, and load the last checkpoint"
            ) from error
        # torch.lerp's two formulas; see `_stepped` in infinity.numerics.kernels.
        lerp_weight = np.float32(1 - beta1)
        is_from_average = bool(lerp_weight < 0.5)
        numbers = (
            scale,
            1 - lr * weight_decay if is_decoupled else 1.0,
            0.0 if is_decoupled else weight_decay,
            lerp_weight if is_from_average else lerp_weight - np.float32(1),
            is_from_average,
            beta2,
            1 - beta2,
            corrections[0],
            group["eps"],
            corrections[1],
        )
        return tuple(map(np.float32, numbers))

    def _agrees(self, executor: OptimizerExecutor, group: dict[str, Any], *, has_remainder: bool = True) -> bool:
        """Whether a few steps give the same bits as torch's."""
        if float(group["lr"]) == 0:
            group["lr"] = 1e-3  # a warm-up's first step would compare nothing
        generator = torch.Generator().manual_seed(0)
        main = _draw(generator, 0).to(self._device)
        weight, remainder = main.clone(), None
        if has_remainder:
            weight = torch.empty(_PROBE_NUMEL, dtype=torch.bfloat16, device=self._device)
            remainder = torch.empty(_PROBE_NUMEL, dtype=torch.int16, device=self._device)
            split(main, weight, remainder)
        ours = {name: torch.zeros(_PROBE_NUMEL, dtype=torch.float32, device=self._device) for name in STATES}
        theirs: dict[str, Any] = {name: value.clone() for name, value in ours.items()}
        for count in _PROBE_STEPS:
            gradient = _draw(generator, 24).to(self._device)
            step = torch.tensor(float(count), dtype=torch.float32, device=self._device)
            scalars = self.update(group, weight, remainder, gradient, None, ours, {"step": step})
            # Copies, because torch writes to what it gets.
            (theirs,) = executor.run(dict(group), [main], [gradient.clone()], [{**theirs, "step": step.clone()}])
            joined = weight
            if remainder is not None:
                joined = torch.empty_like(main)
                join(weight, remainder, joined)
            pairs = [(main, joined), *((theirs[name], ours[name]) for name in STATES)]
            # As integers: NaN and the sign of zero count.
            if not all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs):
                return False
            if not torch.equal(theirs["step"], scalars["step"]):
                return False
        return True


class _LastStepCount(threading.local):
    """The last step count of a thread: each has a stream of its own."""

    scalars: Mapping[str, Any] | None = None
    step: Tensor | None = None


class GpuAdam(FusedAdam):
    """One Adam step on a slice of a parameter, on a GPU, with the bits that torch's own fused kernel gives there.

    It asks the GPU for no number: step count and gradient scale stay where they are.
    """

    vector_numel = 1
    takes_tables = False
    _adds_decay = True
    """Whether it has torch's bits where weight decay is added to the gradient. nvcc contracts that into a multiply-add for
    three of the four elements that a thread of torch's kernel takes, and not for the first (seen in the code of torch
    2.11 for Hopper): those groups are left to torch."""

    def _leaves_out(self, group: Mapping[str, Any]) -> bool:
        if self._is_decoupled_in(group) or not group["weight_decay"]:
            return False
        self._adds_decay = False
        return True

    def _prepare(self) -> bool:
        self._of_thread = _LastStepCount()
        self._launch: Launch | None = compiled_for(self._device, ADAM, "adam_on_split_weights", THREADS)
        return self._launch is not None

    def _agrees(self, executor: OptimizerExecutor, group: dict[str, Any], *, has_remainder: bool = True) -> bool:
        try:
            return super()._agrees(executor, group, has_remainder=has_remainder)
        except Exception as error:
            logger.info("the GPU kernel for Adam cannot be launched: %s", error)
            return False

    def runs(self, group: Mapping[str, Any]) -> bool:
        """Whether a group with these hyperparameters can be updated here: a learning rate on a GPU would be waited for."""
        lr = group.get("lr")
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            return False
        return super().runs(group) and (self._adds_decay or self._is_decoupled_in(group) or not group["weight_decay"])

    def update(
        self,
        group: Mapping[str, Any],
        weight: Tensor,
        remainder: Tensor | None,
        gradient: Tensor,
        scale: Tensor | None,
        state: Mapping[str, Tensor],
        scalars: Mapping[str, Any],
    ) -> dict[str, Any]:
        """As `FusedAdam.update`, with remainders, on any number of elements. All tensors are on the GPU; ``scale`` may be on the
        host."""
        if self._launch is None or remainder is None:
            raise RuntimeError("the kernel was not compiled")
        step = self._stepped(scalars)
        # Without a scale the kernel does not read the argument, but a launch needs a tensor for it.
        factor = step if scale is None else scale.to(self._device)
        flags = [int(scale is not None), int(gradient.dtype == torch.bfloat16), int(self._is_decoupled_in(group))]
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        # Given as the bits of fp32 numbers, which are 32-bit integers.
        rates = np.array([lr, beta1, beta2, group["weight_decay"], group["eps"]], dtype=np.float32)
        numbers = [step, factor, *flags, *rates.view(np.int32).tolist()]
        tensors = [weight, remainder, gradient, *(state[name] for name in STATES)]
        for start in range(0, weight.numel(), MOST_NUMEL):
            parts = [tensor[start : start + MOST_NUMEL] for tensor in tensors]
            numel = parts[0].numel()
            self._launch(min(-(-numel // THREADS), MOST_BLOCKS), [*parts, *numbers, numel])
        return {"step": step}

    def _stepped(self, scalars: Mapping[str, Any]) -> Tensor:
        """The step count after the step. Slices of a parameter, which follow each other, share it."""
        if not scalars:  # the first step: no state yet
            return torch.ones((), dtype=torch.float32, device=self._device)
        last = self._of_thread
        if last.step is None or last.scalars is not scalars:
            # By identity: slices of a parameter get the very same mapping, and a new step gives a new one.
            last.scalars, last.step = scalars, scalars["step"].to(self._device) + 1
        return last.step


def _draw(generator: torch.Generator, num_decades: int) -> Tensor:
    """Normal numbers; with ``num_decades``, scaled down by up to so many powers of ten, and every tenth zero."""
    values = torch.randn(_PROBE_NUMEL, generator=generator, dtype=torch.float32, device="cpu")
    if num_decades:
        decades = torch.rand(_PROBE_NUMEL, generator=generator, dtype=torch.float32, device="cpu") * num_decades
        values *= 10.0**-decades
        values[::10] = 0
    return values
