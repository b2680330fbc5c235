"""One call of a block by one micro-batch: its forward, and the same once more for backward.

[Note: calls]
In a vertical step a unit's weights have to come twice, whatever the number of micro-batches: once when all of them call
it, and once for all their backwards. Two blocks and two micro-batches compute 1 1 2 2, and backward 2 2 1 1 once more. Between
those, nothing of the inside of a call may be left: its activations would fill the memory that the weights have left.

    forward     inputs -> kept (`ActivationCheckpoints`), detached -> `Entered` -> the module -> results -> detached ->
    `Returned` -> caller
    backward    kept -> leaves -> the module again -> results <- gradients that `Returned` has received
                what has come for the inputs from later calls -> the leaves' sums, which begin with it, as in autograd
                gradients of the leaves -> to the edges where the inputs came from (see [Note: inter-block graph] in
                ``infinity.vertical.inter_block_graph``); gradients of the parameters -> accumulated, as ever

Both times the module sees what it would see in plain torch: the same values, gradient mode, autocast, random numbers and
buffers. Then both have the same bits, and the gradients are those of the first. What
must hold is looked at, and raises `UnsupportedSchedule` before anything has been updated:
  * nothing outlives the call but what it returns: all that autograd saved inside keeps a `_Trail` alive, and the trail has to
    be gone, after garbage was collected if need be;
  * inputs are not written to (`Entered` makes them no leaves, so that it can be tried, and is seen), results are no views of
    inputs or of each other;
  * in the first step (``is_trial``) the second results have the checksums of the first.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.activations.activation_checkpoints import ActivationCheckpoint, ActivationCheckpoints
from infinity.activations.caches import without_caches
from infinity.activations.unsupported import UnsupportedSchedule
from infinity.device.compute import ComputeDevice
from infinity.paging.saved_tensors import is_saved_otherwise
from infinity.torch_internals.names import has_transforms, version_of
from infinity.units.unit import Unit
from infinity.vertical.arguments import Tree, is_same
from infinity.vertical.buffers import BlockBuffers, BufferValues
from infinity.vertical.thread_state import RandomState, ThreadState

Edge = tuple[Any, int]
"""A node of autograd's graph and the number of one of its outputs in forward."""
_BLOCK_NUMEL = 1 << 18


class Block:
    """A module that is computed as a whole: all its parameters lie in one unit, or are shared with others."""

    def __init__(self, name: str, module: nn.Module, unit: Unit) -> None:
        self.name = name
        self.module = module
        self.unit = unit
        self.buffers = BlockBuffers(module)
        self.leaves_cycles = False
        """Whether its forward leaves garbage that only the collector finds."""


class _Trail:
    """Lives as long as anything of a call's own graph lives."""


class Entered(torch.autograd.Function):
    """An input as a call gets it: no leaf, so that it may be modified in place, which shows in its version."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, trail: _Trail) -> torch.Tensor:
        ctx.trail = trail
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Returned(torch.autograd.Function):
    """The node of a call: its outputs are results of a computation that is not in the graph."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, anchor: torch.Tensor, results: list[torch.Tensor]) -> Any:
        """``anchor`` requires a gradient, so the outputs do. ``results`` is emptied."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = tuple(results)
        results.clear()
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.call.receive(gradients)
        return None, None, None


def edge_of(tensor: torch.Tensor) -> Edge:
    """Where the gradient of ``tensor``, which requires one, goes."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


_enter: Any = Entered.apply
_return: Any = Returned.apply


@dataclass(eq=False)
class BlockCall:
    """Runs a block on detached inputs and keeps what it needs to do so again."""

    block: Block
    """The module."""
    _forward: Callable[..., Any]
    """Its forward."""
    micro_batch: int
    """The number of the micro-batch."""
    _checkpoints: ActivationCheckpoints
    """Keeps the inputs."""
    _device: ComputeDevice
    """The compute device."""
    is_trial: bool
    """Look closely at everything that might differ the second time."""
    _tree: Tree | None = None
    _inputs: list[ActivationCheckpoint | nn.Parameter] = field(default_factory=list)
    _edges: list[Edge | None] = field(default_factory=list)
    _unreported_edges: list[Edge] = field(default_factory=list)
    _results: list[int] = field(default_factory=list)
    _sums: list[torch.Tensor] = field(default_factory=list)
    _gradients: list[torch.Tensor | None] = field(default_factory=list)
    _state: ThreadState | None = None
    _random: RandomState | None = None
    _buffer_values: BufferValues | None = None
    _is_forward_over = False
    _is_differentiated = False
    is_over = False
    """Whether no gradient may come any more."""

    # ----------------------------------------------------------------------------------------------------- forward

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[[Callable[[], Tree]], Tree]
    ) -> tuple[Any, list[Any]]:
        """The call as the user's code makes it.

        Args:
            args, kwargs: of the module's forward.
            compute: calls a function, in whatever thread.

        Returns:
            What the module returns, and the tensors in it; those that have a gradient come from a `Returned` node.

        Raises:
            Refusal: the call has effects that are not seen here.
        """
        self._check_surroundings()
        tree = Tree(without_caches(args, kwargs))
        trail = _Trail()
        reference = weakref.ref(trail)
        marks, random = self.block.buffers.marks(), RandomState(self._device.torch_device)
        if self.is_trial or self.block.buffers.are_written:
            self._buffer_values = self.block.buffers.capture()
        self._state = ThreadState(self._device)
        given, versions = self._enter(tree, trail)
        form = tree.build(given)
        before = tree_leaves(form)
        saving = torch.autograd.graph.saved_tensors_hooks(*self._checkpoints.hooks_with(trail))
        result = compute(functools.partial(self._first, saving, form))
        if not is_same(before, tree_leaves(form)):
            raise UnsupportedSchedule(f"{self.block.name} changes a container that it is given")
        del trail, form, saving, before
        if [version_of(tensor) for tensor in given] != versions:
            raise UnsupportedSchedule(f"{self.block.name} writes to its input")
        if self.block.buffers.marks() != marks:
            self._record_written_buffers()
        else:
            self._buffer_values = None
        self._random = None if random.is_unchanged() else random
        outputs = self._leave(tree, given, result)
        returned = result.build(outputs)
        del result, given
        tree.forget()
        self._check_gone(reference)
        if not self._results:
            self.drop()
        return returned, outputs

    def _check_surroundings(self) -> None:
        if has_transforms():
            raise UnsupportedSchedule(
                f"a torch.func transform is active around {self.block.name}, and would not see it recomputed"
            )
        if is_saved_otherwise():
            raise UnsupportedSchedule(
                f"hooks for saved tensors are active around {self.block.name}, and would not see it recomputed"
            )

    def _check_gone(self, reference: weakref.ref[_Trail]) -> None:
        if reference() is not None and not self.block.leaves_cycles:
            gc.collect()
            if reference() is not None:
                raise UnsupportedSchedule(f"{self.block.name} gives tensors away other than by returning them")
            self.block.leaves_cycles = self.is_trial

    def _first(self, saving: contextlib.AbstractContextManager[Any], form: tuple[Any, Any]) -> Tree:
        with saving:
            return Tree(self._forward(*form[0], **form[1]))

    def _enter(self, tree: Tree, trail: _Trail) -> tuple[list[torch.Tensor], list[int]]:
        given: list[torch.Tensor] = []
        for tensor in tree.tensors:
            if isinstance(tensor, nn.Parameter):
                self._inputs.append(tensor)
                self._edges.append(None)
                given.append(tensor)
                continue
            self._inputs.append(self._checkpoints.keep(tensor))
            self._edges.append(edge_of(tensor) if tensor.requires_grad else None)
            given.append(_enter(tensor.detach().requires_grad_(), trail) if tensor.requires_grad else tensor)
        self._tree = tree
        self._unreported_edges = [edge for edge in self._edges if edge is not None]
        return given, [version_of(tensor) for tensor in given]

    def _record_written_buffers(self) -> None:
        self.block.buffers.on_write()
        if not self._checkpoints.hooks_are_innermost():
            raise UnsupportedSchedule(
                f"{self.block.name} writes to its buffers, and would do so again under its own checkpointing"
            )
        if self._buffer_values is None:
            raise UnsupportedSchedule(f"{self.block.name} begins to write to its buffers")

    def _leave(self, tree: Tree, given: Sequence[torch.Tensor], result: Tree) -> list[Any]:
        passed = {id(tensor): original for tensor, original in zip(given, tree.tensors, strict=True)}
        memory = {_address(tensor) for tensor in given}
        outputs: list[Any] = []
        carried: list[torch.Tensor] = []
        for index, tensor in enumerate(result.tensors):
            outputs.append(passed.get(id(tensor), tensor))
            if id(tensor) in passed or not tensor.requires_grad or isinstance(tensor, nn.Parameter):
                continue
            address = _address(tensor)
            if address is not None and address in memory:
                raise UnsupportedSchedule(f"{self.block.name} returns views of one tensor")
            memory.add(address)
            self._results.append(index)
            carried.append(self._checkpoints.without_weights(tensor.detach()))
        if self.is_trial:
            self._sums = [_checksum(tensor) for tensor in carried]
        if carried:
            self._gradients = [None] * len(carried)
            anchor = torch.zeros((), requires_grad=True, dtype=torch.float32, device=self._device.torch_device)
            for index, tensor in zip(self._results, _return(self, anchor, carried), strict=True):
                outputs[index] = tensor
        return outputs

    # ---------------------------------------------------------------------------------------------------- backward

    def end_forward(self) -> None:
        """The micro-batch has its loss: gradients may come.

        Raises:
            Refusal: one has come before.
        """
        if self._is_differentiated:
            raise _differentiated()
        self._is_forward_over = True

    def pop_edges(self) -> list[Edge]:
        """Where the gradients of the inputs go, or would go if the call gave something new back; told once."""
        edges, self._unreported_edges = self._unreported_edges, []
        return edges

    @property
    def kept(self) -> list[ActivationCheckpoint]:
        """What is kept for backward."""
        return [item for item in self._inputs if isinstance(item, ActivationCheckpoint)]

    def receive(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients of the results have come at its node: the sums of all that came so far."""
        if not self._is_forward_over:
            self._is_differentiated = True  # the model may catch what is raised here
            raise _differentiated()
        if self.is_over:
            raise RuntimeError(f"a gradient of {self.block.name} came after its backward")
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._gradients[index] = gradient

    def pop(self, number: int) -> torch.Tensor | None:
        """What has come for a result so far. It comes again, as part of a sum."""
        gradient, self._gradients[number] = self._gradients[number], None
        return gradient

    @property
    def has_gradient(self) -> bool:
        """Whether there is anything to do in backward."""
        return any(gradient is not None for gradient in self._gradients)

    def backward(
        self,
        recomputing: Callable[[], contextlib.AbstractContextManager[None]],
        take: Callable[[Edge], torch.Tensor | None],
    ) -> list[tuple[Edge, torch.Tensor]]:
        """Compute once more, and differentiate. Gradients of parameters are accumulated in the parameters.

        Args:
            recomputing: surrounds the computation.
            take: gives what has come for an input so far, and forgets it. The sum begins with that, as in one single backward.

        Returns:
            The gradients of the inputs so far, and where they go.
        """
        gradients, self._gradients = self._gradients, []
        leaves = [
            item
            if isinstance(item, nn.Parameter)
            else self._checkpoints.load(item).detach().requires_grad_(edge is not None)
            for item, edge in zip(self._inputs, self._edges, strict=True)
        ]
        with contextlib.ExitStack() as stack:
            if self._random is not None:  # what is drawn is what was drawn then, and afterwards what would come now
                stack.callback(RandomState(self._device.torch_device).restore)
                self._random.restore()
            if self._buffer_values is not None:
                stack.callback(self.block.buffers.capture().restore)
                self._buffer_values.restore()
            earlier = [None if edge is None else take(edge) for edge in self._edges]
            with recomputing():
                # What is no leaf takes gradients part by part.
                given = [x if g is None else _enter(x, None) for x, g in zip(leaves, earlier, strict=True)]
                results = self._compute(given)
            if self.is_trial and not all(
                torch.equal(a, _checksum(b)) for a, b in zip(self._sums, results, strict=True)
            ):
                raise UnsupportedSchedule(f"{self.block.name} gives another result when it is computed again")
            roots = [(x, g) for x, g in zip([*given, *results], [*earlier, *gradients], strict=True) if g is not None]
            del given, earlier
            del results, gradients
            torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])
        pairs = zip(self._edges, leaves, strict=True)
        found = [(edge, leaf.grad) for edge, leaf in pairs if edge is not None and leaf.grad is not None]
        self.drop()
        return found

    def _compute(self, leaves: list[Any]) -> list[torch.Tensor]:
        if self._tree is None or self._state is None:
            raise RuntimeError(f"{self.block.name} has been computed again already")
        args, kwargs = self._tree.build(leaves)
        result = self._state.run(lambda: Tree(self._forward(*args, **kwargs)))
        if self._results[-1] >= len(result.tensors):
            raise UnsupportedSchedule(f"{self.block.name} returns less when it is computed again")
        return [result.tensors[index] for index in self._results]

    def drop(self) -> None:
        """Nothing will be computed any more."""
        for kept in self.kept:
            self._checkpoints.release(kept)
        self._inputs.clear()
        self._edges.clear()
        self._gradients = []
        self._sums.clear()
        self._tree = self._state = self._random = self._buffer_values = None
        self.is_over = True


def _differentiated() -> UnsupportedSchedule:
    return UnsupportedSchedule("the model's forward differentiates through its blocks itself")


def _address(tensor: torch.Tensor) -> int | None:
    if isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return tensor.untyped_storage().data_ptr()


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes with any bit of the tensor."""
    values = tensor.detach().contiguous()
    if values.dtype.is_complex:
        values = torch.view_as_real(values)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    # torch widens what it sums as a whole: block by block that is bounded.
    blocks = values.flatten().view(integers).split(_BLOCK_NUMEL)
    return torch.stack([block.sum(dtype=torch.int64) for block in blocks]).sum()
