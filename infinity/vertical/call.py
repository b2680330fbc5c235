"""One call of a block by one micro-batch: its forward, and the same once more for backward.

[Note: calls]
In a vertical step a unit's weights are fetched twice, whatever the number of micro-batches: once for all forwards, and
once for all backwards. Two blocks and two micro-batches compute 1 1 2 2 in forward, and 2 2 1 1 in backward. Between
these, no activation inside a call may stay in memory.

    forward     inputs -> kept (`ActivationCheckpoints`), detached -> `Entered` -> the module -> results -> detached ->
    `Returned` -> caller
    backward    kept -> leaves -> the module again -> results <- gradients that `Returned` has received
                what has come for the inputs from later calls -> the leaves' sums, which begin with it, as in autograd
                gradients of the leaves -> to the edges where the inputs came from (see [Note: inter-block graph] in
                ``infinity.vertical.inter_block_graph``); gradients of the parameters -> accumulated, as ever

Both times the module sees what it would see in plain torch: the same values, gradient mode, autocast, random numbers and
buffers. So both computations have the same bits, and the gradients are those of the first. These conditions are
checked, and `UnsupportedSchedule` is raised before anything is updated:
  * Only what the call returns outlives it. Everything that autograd saves inside keeps a `_Sentinel` alive, and that
    must be gone after the call.
  * Inputs are not written to, and results are no views of inputs or of each other. `Entered` makes inputs non-leaves,
    so that an in-place write is no error in torch, and shows in the version.
  * In the first step (``is_trial``) the results of the second computation have the checksums of the first.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from infinity.activations.activation_checkpoints import ActivationCheckpoint, ActivationCheckpoints
from infinity.activations.recomputation import without_caches
from infinity.activations.unsupported import UnsupportedSchedule
from infinity.device.compute import ComputeDevice
from infinity.numerics.random_states import are_unchanged, random_states, set_random_states
from infinity.paging.saved_tensors import is_saved_otherwise
from infinity.torch_internals.names import transform, version_of
from infinity.units.unit import Unit
from infinity.vertical.restoring import BlockBuffers, ThreadState

Edge = tuple[Any, int]
"""A node of autograd's graph and the number of one of its outputs in forward."""
# Elements per partial sum of a checksum: a sum in int64 converts its input, 2 MiB at a time.
_BLOCK_NUMEL = 1 << 18


# Not searched for tensors. The immutable ones may be compared by value; modules, whose parameters do not count as
# arguments, have no `==` of their own and compare by identity.
_ATOMS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, type, nn.Module, torch.dtype, torch.device)


@dataclass(frozen=True)
class _TensorIndex:
    """Takes the place of a tensor in the form: its index in ``Tree.tensors``."""

    number: int


@dataclass(frozen=True)
class _Fields:
    """A dataclass instance taken apart, since torch's pytrees treat it as a leaf. transformers' outputs are
    dataclasses."""

    empty: Any
    forms: dict[str, Any]


def _is_size(value: Any) -> bool:
    # A torch.Size is a tuple: tree_map would build a plain tuple of it, which has no `numel`.
    return isinstance(value, torch.Size)


def _refilled(value: Any, values: dict[str, Any]) -> Any:
    # A copy and object.__setattr__, since __init__ may compute or check things, and a frozen dataclass forbids
    # assignment.
    fresh = copy.copy(value)
    for name, item in values.items():
        object.__setattr__(fresh, name, item)
    return fresh


class Tree:
    """A value taken apart: ``tensors`` (each once, however often it occurs), and the form around them.

    Containers are those of `torch.utils._pytree`, and dataclasses. Any other object is part of the form.
    """

    # Worked example: (x, {"mask": m, "again": x}, 3) has tensors [x, m] and the form (P0, {"mask": P1, "again": P0},
    # 3). `build([a, b])` returns (a, {"mask": b, "again": a}, 3).

    def __init__(self, value: Any) -> None:
        """
        Raises:
            UnsupportedSchedule: an object that is no container has tensors with gradients in its attributes.
        """
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, _TensorIndex] = {}
        self._form = tree_map(self._flatten, value, is_leaf=_is_size)

    def _flatten(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._places:
                self._places[id(leaf)] = _TensorIndex(len(self.tensors))
                self.tensors.append(leaf)
            return self._places[id(leaf)]
        if is_dataclass(leaf) and not isinstance(leaf, type):
            found = {each.name: getattr(leaf, each.name) for each in fields(leaf) if hasattr(leaf, each.name)}
            return _Fields(_refilled(leaf, dict.fromkeys(found)), tree_map(self._flatten, found, is_leaf=_is_size))
        if any(tensor.requires_grad for tensor in _tensors_inside(leaf)):
            raise UnsupportedSchedule(f"a block is given a {type(leaf).__name__} that carries gradients")
        return leaf

    def forget(self) -> None:
        """Release the tensors, and keep the form."""
        self.tensors.clear()
        self._places.clear()

    def build(self, tensors: Sequence[Any]) -> Any:
        """Return the value in fresh containers, with ``tensors`` in place of its own; as many as there were."""
        return _filled(self._form, tensors)


def _filled(form: Any, tensors: Sequence[Any]) -> Any:
    # Not one function that calls itself: its cell would keep the tensors until the garbage collector runs.
    def put_in(leaf: Any) -> Any:
        if isinstance(leaf, _TensorIndex):
            return tensors[leaf.number]
        if isinstance(leaf, _Fields):
            return _refilled(leaf.empty, _filled(leaf.forms, tensors))
        return leaf

    return tree_map(put_in, form, is_leaf=_is_size)


def is_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects, or equal ones of immutable types."""
    return len(before) == len(now) and all(
        a is b or (isinstance(a, _ATOMS) and isinstance(b, _ATOMS) and bool(a == b))
        for a, b in zip(before, now, strict=True)
    )


def _tensors_inside(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an object's attributes, at any depth."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        # Callables are skipped: a function or bound method may reach the whole model.
        elif not isinstance(item, _ATOMS) and not callable(item) and id(item) not in seen:
            seen.add(id(item))
            waiting += tree_leaves(list(getattr(item, "__dict__", {}).values()))


class Block:
    """A module that is computed as a whole: all its parameters lie in one unit, or are shared with others."""

    def __init__(self, name: str, module: nn.Module, unit: Unit) -> None:
        self.name = name
        self.module = module
        self.unit = unit  # of the repeated block that the module is, or is inside of
        self.buffers = BlockBuffers(module)
        self.leaves_cycles = False
        """Whether its forward leaves reference cycles, which only the garbage collector frees."""


class _Sentinel:
    """Lives as long as any node or saved tensor of a call's own graph: a weak reference shows whether one is left."""


class Entered(torch.autograd.Function):
    """Makes a call's input a non-leaf with a version of its own: see [Note: calls]."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sentinel: _Sentinel) -> torch.Tensor:
        ctx.sentinel = sentinel
        return tensor.data  # the same memory, without being a view for autograd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Returned(torch.autograd.Function):
    """The node of a call in the micro-batch's graph. The computation of its outputs is not in that graph."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, anchor: torch.Tensor, results: list[torch.Tensor]) -> Any:
        """``anchor`` requires a gradient, so the outputs do. ``results`` is emptied."""
        ctx.call = call
        ctx.set_materialize_grads(False)  # None and zeros differ: a result without a gradient is no root in backward
        outputs = tuple(results)
        results.clear()  # in a list, because autograd would link tensors that are arguments
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.call.receive(gradients)
        return None, None, None


def edge_of(tensor: torch.Tensor) -> Edge:
    """The node that receives the gradient of ``tensor``, and the number of its input there."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


_enter: Any = Entered.apply
_return: Any = Returned.apply


@dataclass(eq=False)
class BlockCall:
    """Runs a block on detached inputs and keeps what it needs to do so again."""

    block: Block
    _forward: Callable[..., Any]
    micro_batch: int
    """The number of the micro-batch."""
    _checkpoints: ActivationCheckpoints
    """Keeps the inputs until backward."""
    _device: ComputeDevice
    is_trial: bool
    """Compare the two computations."""
    _tree: Tree | None = None  # the form of the arguments
    # Parallel lists, one entry per tensor of the arguments. The edge is None for an input without gradient.
    _inputs: list[ActivationCheckpoint | nn.Parameter] = field(default_factory=list)
    _edges: list[Edge | None] = field(default_factory=list)
    # Parallel lists, one entry per result with a gradient: its index among the tensors of the results, its checksum (in
    # a trial), and the sum of the gradients that have come for it.
    _results: list[int] = field(default_factory=list)
    _sums: list[torch.Tensor] = field(default_factory=list)
    _gradients: list[torch.Tensor | None] = field(default_factory=list)
    # What the second computation needs besides: settings of the thread, and random states and buffers if forward
    # changes them.
    _state: ThreadState | None = None
    _random: dict[str, Any] | None = None
    _restore_buffers: Callable[[], None] | None = None
    _is_forward_over = False
    _is_differentiated = False
    is_over = False
    """Whether no gradient may come any more."""

    # ----------------------------------------------------------------------------------------------------- forward

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[[Callable[[], Tree]], Tree]
    ) -> tuple[Any, list[Any], list[Edge]]:
        """Compute the call for the user's code.

        Args:
            args, kwargs: the arguments of the module's forward.
            compute: calls a function, maybe in another thread.

        Returns:
            What the module returns; the tensors in it, of which those with a gradient are outputs of a `Returned` node; and
            the edges of the inputs that have a gradient.

        Raises:
            UnsupportedSchedule: the call cannot be repeated, see [Note: calls].
        """
        self._check_surroundings()
        tree = Tree(without_caches(args, kwargs))
        sentinel = _Sentinel()
        reference = weakref.ref(sentinel)
        marks, random = self.block.buffers.marks(), random_states()
        # Copied only where a write is possible: in a trial always, later in blocks that the trial saw writing.
        if self.is_trial or self.block.buffers.are_written:
            self._restore_buffers = self.block.buffers.capture()
        self._state = ThreadState(self._device)
        given, versions = self._enter(tree, sentinel)
        edges = [edge for edge in self._edges if edge is not None]
        form = tree.build(given)
        # A block that appends to a list or sets a key of a dict that it is given would do so again in the second
        # computation.
        before = tree_leaves(form)
        saving = torch.autograd.graph.saved_tensors_hooks(*self._checkpoints.hooks_with(sentinel))
        result = compute(functools.partial(self._first, saving, form))
        if not is_same(before, tree_leaves(form)):
            raise UnsupportedSchedule(f"{self.block.name} changes a container that it is given")
        del sentinel, form, saving, before  # the last references from here into the graph of the call
        if [version_of(tensor) for tensor in given] != versions:
            raise UnsupportedSchedule(f"{self.block.name} writes to its input")
        if self.block.buffers.marks() != marks:
            self._record_written_buffers()
        else:
            self._restore_buffers = None
        self._random = None if are_unchanged(random) else random
        outputs = self._leave(tree, given, result)
        returned = result.build(outputs)
        del result, given
        tree.forget()  # the inputs are kept as checkpoints, which may leave memory
        self._check_gone(reference)
        if not self._results:
            self.drop()  # no gradient can come
        return returned, outputs, edges

    def _check_surroundings(self) -> None:
        if transform() is not None:
            raise UnsupportedSchedule(
                f"a torch.func transform is active around {self.block.name}, and would not see it recomputed"
            )
        if is_saved_otherwise():
            raise UnsupportedSchedule(
                f"hooks for saved tensors are active around {self.block.name}, and would not see it recomputed"
            )

    def _check_gone(self, reference: weakref.ref[_Sentinel]) -> None:
        # A block that leaves cycles (a module that stores a closure over its output, say) is collected once, in the
        # trial. Later the check is skipped for it, as a full collection for each call would take longer than many
        # blocks compute.
        if reference() is not None and not self.block.leaves_cycles:
            gc.collect()
            if reference() is not None:
                raise UnsupportedSchedule(f"{self.block.name} hands tensors out other than by returning them")
            self.block.leaves_cycles = self.is_trial

    def _first(self, saving: contextlib.AbstractContextManager[Any], form: tuple[Any, Any]) -> Tree:
        with saving:
            return Tree(self._forward(*form[0], **form[1]))

    def _enter(self, tree: Tree, sentinel: _Sentinel) -> tuple[list[torch.Tensor], list[int]]:
        given: list[torch.Tensor] = []
        for tensor in tree.tensors:
            # A parameter is passed as it is: its gradient is accumulated in it both ways, and it needs no checkpoint.
            if isinstance(tensor, nn.Parameter):
                self._inputs.append(tensor)
                self._edges.append(None)
                given.append(tensor)
                continue
            self._inputs.append(self._checkpoints.keep(tensor))
            self._edges.append(edge_of(tensor) if tensor.requires_grad else None)
            given.append(_enter(tensor.detach().requires_grad_(), sentinel) if tensor.requires_grad else tensor)
        self._tree = tree
        return given, [version_of(tensor) for tensor in given]

    def _record_written_buffers(self) -> None:
        self.block.buffers.on_write()
        # A block that checkpoints inside would recompute a part of itself in the backward of the second computation,
        # and so write a third time.
        if not self._checkpoints.hooks_are_innermost():
            raise UnsupportedSchedule(
                f"{self.block.name} writes to its buffers, and would do so again under its own checkpointing"
            )
        if self._restore_buffers is None:
            raise UnsupportedSchedule(f"{self.block.name} begins to write to its buffers")

    def _leave(self, tree: Tree, given: Sequence[torch.Tensor], result: Tree) -> list[Any]:
        # A result that is an input itself is returned as the caller's own tensor, with its own graph.
        passed = {id(tensor): original for tensor, original in zip(given, tree.tensors, strict=True)}
        # Results over the memory of an input or of each other would be separate tensors for the caller. In torch they
        # are views: an in-place write to one changes the other.
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
            # A custom function's outputs require a gradient only if an input does. The call's real inputs are no inputs
            # of this node.
            anchor = torch.zeros((), requires_grad=True, dtype=torch.float32, device=self._device.torch_device)
            for index, tensor in zip(self._results, _return(self, anchor, carried), strict=True):
                outputs[index] = tensor
        return outputs

    # ---------------------------------------------------------------------------------------------------- backward

    def end_forward(self) -> None:
        """Allow gradients to come: the micro-batch has its loss.

        Raises:
            UnsupportedSchedule: one has come before.
        """
        if self._is_differentiated:
            raise _differentiated()
        self._is_forward_over = True

    @property
    def kept(self) -> list[ActivationCheckpoint]:
        """The checkpoints of the inputs."""
        return [item for item in self._inputs if isinstance(item, ActivationCheckpoint)]

    def receive(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Store the gradients of the results: each is the sum of all that have come so far."""
        if not self._is_forward_over:
            self._is_differentiated = True  # the model may catch this error, so `end_forward` raises it again
            raise _differentiated()
        if self.is_over:
            raise RuntimeError(f"a gradient of {self.block.name} came after its backward")
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._gradients[index] = gradient

    def pop(self, number: int) -> torch.Tensor | None:
        """Take the gradient that has come for a result so far. The caller adds to it, and delivers the sum."""
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
            recomputing: a context around the computation.
            take: removes and returns the gradient that has come for an edge so far.

        Returns:
            The edges of the inputs, with the sums of their gradients so far.
        """
        # Worked example: the block computes y = 5 * x, and x also goes past it (a residual). Gradients: 7 for y, and 1
        # for x from the later use. In one single backward the later use comes first, so the sum at x is 1 + 35. Hence 1
        # is a root at the node of `given`, which autograd fills before 35 arrives there. The result is (edge of x, 36).
        gradients, self._gradients = self._gradients, []
        leaves = [
            item
            if isinstance(item, nn.Parameter)
            else self._checkpoints.load(item).detach().requires_grad_(edge is not None)
            for item, edge in zip(self._inputs, self._edges, strict=True)
        ]
        with contextlib.ExitStack() as stack:
            # The same random numbers are drawn again. At the end the generators return to where they are now.
            if self._random is not None:
                stack.callback(set_random_states, random_states())
                set_random_states(self._random)
            if self._restore_buffers is not None:
                stack.callback(self.block.buffers.capture())
                self._restore_buffers()
            earlier = [None if edge is None else take(edge) for edge in self._edges]
            with recomputing():
                # A leaf's AccumulateGrad would add both parts to `.grad` by itself, the later one last. At a node in
                # between they are summed first, beginning with the root's.
                given = [x if g is None else _enter(x, None) for x, g in zip(leaves, earlier, strict=True)]
                results = self._compute(given)
            if self.is_trial and not all(
                torch.equal(a, _checksum(b)) for a, b in zip(self._sums, results, strict=True)
            ):
                raise UnsupportedSchedule(f"{self.block.name} gives another result when it is computed again")
            roots = [(x, g) for x, g in zip([*given, *results], [*earlier, *gradients], strict=True) if g is not None]
            # Only `roots` and the graph hold them now, so that autograd can free each as soon as it has been used.
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
        """Release everything. No gradient may come any more."""
        for kept in self.kept:
            self._checkpoints.release(kept)
        self._inputs.clear()
        self._edges.clear()
        self._gradients = []
        self._sums.clear()
        self._tree = self._state = self._random = self._restore_buffers = None
        self.is_over = True


def _differentiated() -> UnsupportedSchedule:
    return UnsupportedSchedule("the model's forward differentiates through its blocks itself")


def _address(tensor: torch.Tensor) -> int | None:
    # None for tensors whose memory is not compared: parameters, other layouts, and empty ones, which all have address
    # 0.
    if isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return tensor.untyped_storage().data_ptr()


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the tensor's elements read as integers, modulo 2**64: it changes if any single bit does."""
    # Summed as integers, so that the order of the sum does not matter, and NaN has no special meaning.
    values = tensor.detach().contiguous()
    if values.dtype.is_complex:
        values = torch.view_as_real(values)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    blocks = values.flatten().view(integers).split(_BLOCK_NUMEL)
    return torch.stack([block.sum(dtype=torch.int64) for block in blocks]).sum()
