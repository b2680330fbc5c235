"""What one micro-batch computes between its units, as autograd recorded it, and its backward segment by segment.

[Note: inter-block graph]
In a vertical step the backward of a unit is run for all micro-batches before that of the unit below. But a loss knows only
one backward, which runs through everything. What lies between the units (embedding, residual paths, masks, the loss) has to
be run in parts, each at its time, and still give the bits of one single backward.
A unit's call is a node (`Returned`) at which backward stops: it hands the gradients of the call's results over and goes no
further. So the graph of a micro-batch falls into segments, one before each call and one behind the last:

    forward     x = e * 3  ->  call 1: y1 = 5 * x  ->  call 2: y2 = 7 * y1  ->  loss = y2 + x
    segment       1: x                                 2: empty                 3: the sum
    backward    run(3): 1 for y2, which call 2 receives, and 1 for x, which is of segment 1: it is caught at the *cut*
                        and waits                                                                    waiting: x: 1
                call 2 computes again, gives 7 for y1; run(2): nothing                               waiting: x: 1, y1: 7
                call 1 receives 7, gives 35 for x, which adds to what waits                          waiting: x: 1 + 35
                run(1): x runs, once, with 36                                                        e.grad = 108

What must hold:
  * Each node runs once, when all gradients that meet in it have come. Were x run in `run(3)` as well, e would get 3 + 105
    instead of 3 * 36, which is rounded differently, and a hook would see two gradients.
  * What meets in a node is added up in autograd's order. Autograd runs nodes from the highest number to the lowest,
    and they are numbered as they are made. So a node belongs to the segment in which it was *made*, not to the first call that
    needs it, as in an earlier version: s = 2 * x, made before call 2 and needed by the loss alone, is of segment 2. In
    ``run(3)`` it would come before call 2, and where that uses x as well, the sum at x would begin with another term.
  * What waits at a cut goes first into the next sum there, for it came first.
  * Calls without a gradient have a position and no node: they cut nothing (`on_block_call`).
A segment that can reach what it catches also *through* a cut (it *crosses*: in ``loss = y2 + x + e``, e is an end of segment
3 and lies behind x as well) would be run on into the earlier segment, to find all that comes for e. There, nothing is let
through the nodes at cuts, and the graph is kept for their own time: e gets 1 now and 108 later.
Refused (`UnsupportedSchedule`, then the step goes in the ordinary order) is what would see gradients in parts: hooks on what is
caught or on what comes from several segments, and the user's own functions behind a crossing, which may give gradients for
nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from infinity.activations.unsupported import UnsupportedSchedule
from infinity.torch_internals.names import backward_position
from infinity.vertical.call import BlockCall, Edge, Returned, edge_of


class _GraphSegment:
    """The nodes that run when one call's backward has run."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.cuts: dict[Edge, None] = {}
        """Edges into nodes of earlier segments."""
        self.ends: dict[Edge, None] = {}
        """Edges into calls and parameters."""
        self.crosses = False
        """See `InterBlockGraph._crosses`."""


class InterBlockGraph:
    """The graph of one micro-batch. Positions count its calls from 1; the loss comes after the last."""

    def __init__(self, micro_batch: int) -> None:
        """``micro_batch``: its number."""
        self._micro_batch = micro_batch
        self._inputs: list[list[Edge]] = []
        self._marks: list[int] = []
        """By call that is not without gradient: nodes made before it have lower numbers."""
        self._places: list[int] = []
        """The positions of these calls; in the end that of the loss as well."""
        self._segment_of: dict[Any, int] = {}
        self._segments: dict[int, _GraphSegment] = {}
        self._waiting: dict[Edge, torch.Tensor] = {}
        self._watched: list[weakref.ref[torch.Tensor]] = []
        self._hooked: set[Edge] = set()
        self.repeated: set[int] = set()
        """Parameters, by ``id``, that are used more than once between two calls."""

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """The user may put hooks on these tensors, which have to see whole gradients."""
        self._watched += [weakref.ref(tensor) for tensor in tensors if tensor.requires_grad]

    def on_hook(self, tensor: torch.Tensor) -> None:
        """The user has put a hook on ``tensor``."""
        if tensor.requires_grad and not tensor.is_leaf:
            self._hooked.add(edge_of(tensor))

    def find_hooks(self) -> None:
        """See which of the watched tensors that are still alive have hooks by now."""
        alive = [(reference, tensor) for reference in self._watched if (tensor := reference()) is not None]
        self._hooked.update(edge_of(tensor) for _, tensor in alive if tensor._backward_hooks)
        self._watched = [reference for reference, _ in alive]

    def on_block_call(self, edges: Sequence[Edge] | None) -> None:
        """A call has been made. The calling thread is that of the forward.

        Args:
            edges: of its inputs; None for a call without gradient.
        """
        self._inputs.append(list(edges or ()))
        if edges is not None:
            self._marks.append(backward_position())
            self._places.append(len(self._inputs))

    def seal(self, loss: torch.Tensor) -> None:
        """Forward is complete, and ``loss`` is what backward starts from (0-dim, divided already).

        Raises:
            Refusal: micro-batches share parts of their graphs.
        """
        loss_edge = edge_of(loss)
        self._places.append(len(self._inputs) + 1)
        for position, edges in enumerate([*self._inputs, [loss_edge]], start=1):
            self._segments[position] = _GraphSegment()
            for edge in edges:
                self._claim(edge[0], position)
        for node, position in self._segment_of.items():
            self._add_to_segment(node, position)
        self._check_hooks()
        self._check_crossings()
        self._inputs.clear()
        self._marks.clear()
        self._places.clear()
        self.add(loss_edge, torch.ones_like(loss))

    def _check_hooks(self) -> None:
        """A gradient that comes in parts would go through a hook part by part; one that is caught, once more."""
        cuts = {edge for segment in self._segments.values() for edge in segment.cuts}
        num_parts: Counter[Edge] = Counter()
        caught = set(cuts)
        for segment in self._segments.values():
            num_parts.update(segment.ends.keys())
            if segment.cuts:
                caught.update(segment.ends)
        for edge in self._hooked:
            is_input = any(edge in edges for edges in self._inputs)
            if edge in caught or num_parts[edge] + is_input > 1:
                raise UnsupportedSchedule("a tensor that several blocks use has a hook for its gradient")
        for edge, number in num_parts.items():
            if (edge in caught or number > 1) and getattr(getattr(edge[0], "variable", None), "_backward_hooks", None):
                raise UnsupportedSchedule("a parameter that is used between blocks has a hook for its gradient")

    def _check_crossings(self) -> None:
        """Functions of the user's own may give gradients even for nothing."""
        for segment in self._segments.values():
            segment.crosses = self._crosses(segment)
            if segment.crosses:
                seen: set[Any] = set()
                stack = [edge[0] for edge in segment.cuts]
                while stack:
                    node = stack.pop()
                    if node not in seen:
                        seen.add(node)
                        if hasattr(node, "_forward_cls") and not self._is_call(node):
                            raise UnsupportedSchedule(
                                "blocks are skipped by a value that a function of the user's own has computed"
                            )
                        stack += [edge[0] for edge in node.next_functions if edge[0] is not None]

    def _crosses(self, segment: _GraphSegment) -> bool:
        """Whether what is caught at the cuts of ``segment``, or at its ends, can also be reached through a cut."""
        caught = {edge[0] for edge in (*segment.cuts, *segment.ends)}
        seen: set[Any] = set()
        stack = [edge[0] for edge in segment.cuts]
        while stack:
            for follower, _ in stack.pop().next_functions:
                if follower in caught:
                    return True
                if follower is not None and follower not in seen and not self._is_call(follower):
                    seen.add(follower)
                    stack.append(follower)
        return False

    def _claim(self, start: Any, latest: int) -> None:
        """Find the segment of all that ``start`` leads to and that has none yet. The call at ``latest`` depends on it."""
        seen: set[Any] = set()
        stack = [(start, False)]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                # A node from another thread has a number of another count: it comes behind what it is made of.
                followers = [self._place_behind(follower) for follower, _ in node.next_functions]
                self._segment_of[node] = min(latest, max(self._place(node), *followers, 1))
            elif node not in seen and node not in self._segment_of and not self._is_call(node):
                seen.add(node)
                stack.append((node, True))
                stack += [(edge[0], False) for edge in node.next_functions if not self._is_end(edge[0])]

    def _place(self, node: Any) -> int:
        """The position of the first call that was made after ``node``, or that of the loss."""
        return self._places[bisect.bisect_right(self._marks, node._sequence_nr())]

    def _place_behind(self, node: Any) -> int:
        """The position of the first segment that may use what ``node`` has given."""
        if self._is_end(node):
            if node is None or not self._is_call(node):
                return 1
            return self._places[min(bisect.bisect_right(self._marks, node._sequence_nr()) + 1, len(self._marks))]
        return self._segment_of[node]

    def _add_to_segment(self, node: Any, position: int) -> None:
        segment = self._segments[position]
        segment.nodes.append(node)
        for edge in node.next_functions:
            if edge[0] is None:
                continue
            if self._is_end(edge[0]):
                if edge in segment.ends:
                    self.repeated.add(id(getattr(edge[0], "variable", None)))
                segment.ends[edge] = None
            elif self._segment_of[edge[0]] != position:
                segment.cuts[edge] = None

    def _is_end(self, node: Any) -> bool:
        return node is None or self._is_call(node) or not node.next_functions

    def _is_call(self, node: Any) -> bool:
        call = getattr(node, "call", None) if getattr(node, "_forward_cls", None) is Returned else None
        if call is not None and call.micro_batch != self._micro_batch:
            raise UnsupportedSchedule("micro-batches of one step use each other's results")
        return call is not None

    def add(self, edge: Edge, gradient: torch.Tensor) -> bool:
        """A gradient has come for ``edge``. Returns whether it was not the first."""
        before = self.pop(edge)
        self._waiting[edge] = gradient if before is None else before + gradient
        return before is not None

    def pop(self, edge: Edge) -> torch.Tensor | None:
        """What has come for ``edge`` so far. What comes next is added to it, part by part, as in one single backward."""
        if edge not in self._waiting and self._is_call(edge[0]):
            call: BlockCall = edge[0].call
            return call.pop(edge[1])
        return self._waiting.pop(edge, None)

    def deliver(self, call: BlockCall) -> None:
        """All gradients of the call's results have come: what still waits for them is given to it.

        Through autograd, so that a hook of the user for such a result sees the gradient once, and whole.
        """
        edges = [edge for edge in self._waiting if getattr(edge[0], "call", None) is call]
        if edges:
            gradients = [self._waiting.pop(edge) for edge in edges]
            torch.autograd.backward(_edges(edges), gradients)

    def run(self, position: int) -> None:
        """The backward of the call at ``position`` has run: run what depended on it alone."""
        segment = self._segments.pop(position)
        starts = [edge for edge in self._waiting if self._segment_of.get(edge[0]) == position]
        gradients = [self._waiting.pop(edge) for edge in starts]
        for edge in (*segment.cuts, *segment.ends) if starts else ():
            before = self.pop(edge)
            if before is not None:
                starts.append(edge)
                gradients.append(before)
        if starts and segment.cuts:
            self._run_to_cuts(segment, starts, gradients)
        elif starts:
            torch.autograd.backward(_edges(starts), gradients)
        for node in segment.nodes:
            del self._segment_of[node]

    def _run_to_cuts(self, segment: _GraphSegment, starts: list[Edge], gradients: list[torch.Tensor]) -> None:
        wanted = [*segment.cuts, *segment.ends]
        with contextlib.ExitStack() as stack:
            for node in {edge[0] for edge in segment.cuts} if segment.crosses else ():
                stack.callback(node.register_prehook(_nothing).remove)
            found = torch.autograd.grad(
                _edges(starts), _edges(wanted), gradients, retain_graph=segment.crosses, allow_unused=True
            )
        gradients.clear()
        for edge, gradient in zip(wanted, found, strict=True):
            if gradient is None:
                continue
            if edge in segment.cuts:
                self._waiting[edge] = gradient
            else:
                torch.autograd.backward(_edges([edge]), [gradient])

    def clear(self) -> None:
        """Release the graph."""
        self._inputs.clear()
        self._marks.clear()
        self._places.clear()
        self._segment_of.clear()
        self._segments.clear()
        self._waiting.clear()
        self._watched.clear()
        self._hooked.clear()


def _nothing(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None, ...]:
    return (None,) * len(gradients)


def _edges(edges: Sequence[Edge]) -> Any:
    return [GradientEdge(node, number) for node, number in edges]
