"""The graph of what one micro-batch computes between its units, and its backward segment by segment.

[Note: inter-block graph]
In a vertical step the backward of a unit runs for all micro-batches before that of the unit below. But
``loss.backward()`` runs through everything at once. So the graph between the units (embedding, residual paths, masks,
the loss) is run in parts, each at its time, and must still give the bits of one single backward.
A unit's call is a node (`Returned`) at which backward stops: it stores the gradients of the call's results. So the
graph of a micro-batch falls into segments, one before each call and one behind the last:

    forward     x = e * 3  ->  call 1: y1 = 5 * x  ->  call 2: y2 = 7 * y1  ->  loss = y2 + x
    segment       1: x                                 2: empty                 3: the sum
    backward    run(3): 1 for y2, which call 2 receives, and 1 for x, which is of segment 1: it is caught at the *cut*
                        and waits                                                                    waiting: x: 1
                call 2 computes again, gives 7 for y1; run(2): nothing                               waiting: x: 1, y1: 7
                call 1 receives 7, gives 35 for x, which adds to what waits                          waiting: x: 1 + 35
                run(1): x runs, once, with 36                                                        e.grad = 108

What must hold:
  * Each node runs once, when all its gradients have come. If x ran in `run(3)` as well, e would get 3 + 105 instead of
    3 * 36, which is rounded differently, and a hook would see two gradients.
  * Gradients of a node are added in autograd's order. Autograd runs nodes from the highest number to the lowest, and
    numbers them as they are made. So a node belongs to the segment in which it was *made*, not to that of the first
    call that needs it. For example s = 2 * x, made before call 2 and used by the loss only, is in segment 2. In
    ``run(3)`` it would run before call 2. If call 2 uses x as well, the sum at x would begin with another term.
  * A gradient that waits at a cut is the first term of the next sum there, because it came first.
  * Calls without a gradient have a position and no node: they cut nothing (`on_block_call`).
A segment *crosses* if an edge at which it stops can also be reached through one of its cuts. In ``loss = y2 + x + e``,
e is an end of segment 3 and also lies behind x. Autograd would run on through x to find all gradients for e. So hooks
at the cuts stop all gradients there, and the graph is kept for the later run: e gets 1 now and 108 later.
Whatever would see gradients in parts raises `UnsupportedSchedule`, and the step goes in the ordinary order. These are
hooks on a caught tensor or on one used in several segments, and the user's own functions behind a crossing, which may
return gradients for None.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        # Dicts as ordered sets: the order of edges decides the order in which gradients are added.
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
        self._inputs: list[list[Edge]] = []  # by call: the edges of its inputs
        # Worked example: call 1 has a gradient and ends when autograd has made 5 nodes, call 2 has none, call 3 ends at
        # 9. marks = [5, 9], positions = [1, 3], and `seal` appends 4, the position of the loss. Node number 3 was
        # made before call 1 (segment 1), number 6 before call 3 (segment 3), and number 10 before the loss (segment 4).
        self._marks: list[int] = []
        """For each call with a gradient, autograd's next number at its end."""
        self._positions: list[int] = []
        """The positions of these calls, and finally that of the loss."""
        self._segment_of: dict[Any, int] = {}
        """Autograd node -> position of the call at which its segment ends."""
        self._segments: dict[int, _GraphSegment] = {}
        """By the same position."""
        self._waiting: dict[Edge, torch.Tensor] = {}
        """Sums of the gradients that have come for an edge whose node runs later."""
        self._watched: list[weakref.ref[torch.Tensor]] = []
        self._hooked: set[Edge] = set()
        """Edges of tensors with hooks of the user."""
        self.repeated: set[int] = set()
        """``id`` of each parameter that is used more than once between two calls."""

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look for gradient hooks of the user on these tensors until the forward ends: hooks must see whole
        gradients."""
        self._watched += [weakref.ref(tensor) for tensor in tensors if tensor.requires_grad]

    def on_hook(self, tensor: torch.Tensor) -> None:
        """Record a hook that the user has put on ``tensor``."""
        if tensor.requires_grad and not tensor.is_leaf:
            self._hooked.add(edge_of(tensor))

    def find_hooks(self) -> None:
        """Record the hooks on watched tensors."""
        # Called at each call of a block, before tensors die: a hook stays in the graph when its tensor is gone.
        alive = [(reference, tensor) for reference in self._watched if (tensor := reference()) is not None]
        self._hooked.update(edge_of(tensor) for _, tensor in alive if tensor._backward_hooks)
        self._watched = [reference for reference, _ in alive]

    def on_block_call(self, edges: Sequence[Edge] | None) -> None:
        """Record a call of a block. Must run on the thread of the forward, as autograd counts nodes per thread.

        ``edges``: of its inputs; None for a call without gradient.
        """
        self._inputs.append(list(edges or ()))
        if edges is not None:
            self._marks.append(backward_position())
            self._positions.append(len(self._inputs))

    def seal(self, loss: torch.Tensor) -> None:
        """Divide the graph into segments. Forward is complete, and backward starts from ``loss`` (0-dim, divided
        already).

        Raises:
            UnsupportedSchedule: a hook or a function of the user would see gradients in parts, or micro-batches share
                graphs.
        """
        loss_edge = edge_of(loss)
        self._positions.append(len(self._inputs) + 1)
        # Earlier calls first: a node that several calls need belongs to the first of them, if it was made before that.
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
        self._positions.clear()
        self.add(loss_edge, torch.ones_like(loss))

    def _check_hooks(self) -> None:
        """Raise if a hook would see parts of a gradient, or see a caught gradient twice."""
        # A gradient comes in parts if its edge is an end of several segments. It is caught by autograd.grad, which runs
        # the hooks of a tensor, and they run again when the sum is passed on.
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
        """Mark the segments that cross. Raise if a function of the user's would run behind a cut of such a segment."""
        # There, the hooks at cuts pass None on. torch's own nodes return None for None; a function of the user's may
        # not.
        for segment in self._segments.values():
            cuts = [edge[0] for edge in segment.cuts]
            caught = {edge[0] for edge in (*segment.cuts, *segment.ends)}
            # A node at a cut or an end can also be reached through one of the cuts. What is behind a call does not count.
            segment.crosses = any(node in caught for node in _behind(cuts, stops=self._is_call))
            # Nodes of torch.autograd.Function subclasses in Python have `_forward_cls`.
            if segment.crosses and any(
                hasattr(node, "_forward_cls") and not self._is_call(node)
                for node in (*cuts, *_behind(cuts, stops=lambda node: False))
            ):
                raise UnsupportedSchedule(
                    "a function of your own computes the value that decides which blocks are skipped"
                )

    def _claim(self, start: Any, latest: int) -> None:
        """Find the segments of ``start`` and of all nodes behind it that have none yet. Position ``latest`` depends on
        them."""
        # Depth first, without recursion, as graphs may be deeper than Python's stack. A node is pushed twice: it is
        # left, with True, when all its followers have their segments.
        seen: set[Any] = set()
        stack = [(start, False)]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                # A node that another thread made has a number from that thread's count. It cannot belong to an earlier
                # segment than its followers, nor to a later one than the call that needs it.
                followers = [self._place_behind(follower) for follower, _ in node.next_functions]
                self._segment_of[node] = min(latest, max(self._place(node), *followers, 1))
            elif node not in seen and node not in self._segment_of and not self._is_call(node):
                seen.add(node)
                stack.append((node, True))
                stack += [(edge[0], False) for edge in node.next_functions if not self._is_end(edge[0])]

    def _place(self, node: Any) -> int:
        """The position of the first call with a gradient that was made after ``node``, or that of the loss."""
        return self._positions[bisect.bisect_right(self._marks, node._sequence_nr())]

    def _place_behind(self, node: Any) -> int:
        """The position of the first segment that may use the output of ``node``."""
        # Of a call: the segment behind it. A call's own number is below its mark, hence the + 1. Parameters and
        # constants may be used anywhere.
        if self._is_end(node):
            if node is None or not self._is_call(node):
                return 1
            return self._positions[min(bisect.bisect_right(self._marks, node._sequence_nr()) + 1, len(self._marks))]
        return self._segment_of[node]

    def _add_to_segment(self, node: Any, position: int) -> None:
        segment = self._segments[position]
        segment.nodes.append(node)
        for edge in node.next_functions:
            if edge[0] is None:
                continue
            if self._is_end(edge[0]):
                # If the parameter is tied, a third part of its gradient: [Note: parts] in ``infinity.vertical.step``.
                if edge in segment.ends:
                    self.repeated.add(id(getattr(edge[0], "variable", None)))
                segment.ends[edge] = None
            elif self._segment_of[edge[0]] != position:
                segment.cuts[edge] = None

    def _is_end(self, node: Any) -> bool:
        return node is None or self._is_call(node) or not node.next_functions

    def _is_call(self, node: Any) -> bool:
        call = getattr(node, "call", None) if getattr(node, "_forward_cls", None) is Returned else None
        # A model that keeps a tensor of one micro-batch in an attribute may use it in the next one.
        if call is not None and call.micro_batch != self._micro_batch:
            raise UnsupportedSchedule("micro-batches of one step use each other's results")
        return call is not None

    def add(self, edge: Edge, gradient: torch.Tensor) -> bool:
        """Add a gradient that has come for ``edge``. Returns whether there was one before."""
        before = self.pop(edge)
        self._waiting[edge] = gradient if before is None else before + gradient
        return before is not None

    def pop(self, edge: Edge) -> torch.Tensor | None:
        """Remove and return the sum of the gradients that have come for ``edge`` so far."""
        if edge not in self._waiting and self._is_call(edge[0]):
            call: BlockCall = edge[0].call
            return call.pop(edge[1])
        return self._waiting.pop(edge, None)

    def deliver(self, call: BlockCall) -> None:
        """Pass on the gradients that wait for the results of ``call``. All of them have come."""
        # By autograd, so that a hook of the user on such a result runs, once, and with the whole gradient.
        edges = [edge for edge in self._waiting if getattr(edge[0], "call", None) is call]
        if edges:
            gradients = [self._waiting.pop(edge) for edge in edges]
            torch.autograd.backward(_edges(edges), gradients)

    def run(self, position: int) -> None:
        """Run the segment at ``position``, after the backward of the call at that position."""
        segment = self._segments.pop(position)
        starts = [edge for edge in self._waiting if self._segment_of.get(edge[0]) == position]
        gradients = [self._waiting.pop(edge) for edge in starts]
        # What has come before for an edge at which this segment ends is a root there. autograd.grad then returns the
        # whole sum, with that as its first term.
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
            del self._segment_of[node]  # the last references to the nodes, and to what they have saved

    def _run_to_cuts(self, segment: _GraphSegment, starts: list[Edge], gradients: list[torch.Tensor]) -> None:
        wanted = [*segment.cuts, *segment.ends]
        with contextlib.ExitStack() as stack:
            # A pre-hook that replaces the gradients by None: autograd reaches the node, and passes nothing on.
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
            else:  # a parameter or a call: into `.grad`, or to `BlockCall.receive`
                torch.autograd.backward(_edges([edge]), [gradient])

    def clear(self) -> None:
        """Release the graph."""
        groups = self._inputs, self._marks, self._positions, self._segment_of, self._segments, self._waiting
        for group in (*groups, self._watched, self._hooked):
            group.clear()


def _behind(starts: Iterable[Any], stops: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the nodes behind some nodes, each once. Those behind a node at which it ``stops`` are left out."""
    seen: set[Any] = set()
    stack = list(starts)
    while stack:
        for follower, _ in stack.pop().next_functions:
            if follower is not None and follower not in seen:
                seen.add(follower)
                yield follower
                if not stops(follower):
                    stack.append(follower)


def _nothing(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None, ...]:
    return (None,) * len(gradients)


def _edges(edges: Sequence[Edge]) -> Any:
    return [GradientEdge(node, number) for node, number in edges]
