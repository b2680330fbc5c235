"""Mixtures of experts whose weights are one tensor, ``[experts, ...]``, and are paged expert by expert.

[Note: experts] transformers keeps the weights of all experts of a layer in one parameter. Here each expert is a tile of
it (see ``infinity.units.tiles``). The parameter supports the three ways in which transformers' implementations use it:

    eager         weight[expert]                                    -> that tile
    batched_mm    weight[experts], one for each token and choice    -> the tiles that occur, once each, and then the choice
    grouped_mm    grouped_mm(tokens by expert, weight.transpose(-2, -1), offs=...) -> one grouped_mm for each tile with tokens

The model's own code runs and calls its usual kernels, so outputs and gradients have the same bits. Activations, gates
and sums are whole tensors.

In torch the gradient of such a parameter is one tensor, with zeros for experts that got no token. An optimizer with
momentum or weight decay changes those experts as well. So they get zeros here, too (`give_zeros`), unless ``touched_only``
is set. Then they get no gradient, as in a list of modules.

[Note: experts of ranks] In stage 3 all ranks gather the same units in the same order (see [Note: the same units on all
ranks] in ``infinity.paging.parameter_cache``), but a router chooses experts for the tokens of its own rank. So in each
call of a module of experts, ranks add up the tokens of each expert. All of them use the experts that have any:

    grouped_mm     tensor by tensor, experts with most tokens first
    batched_mm     tensor by tensor, experts by number
    eager          expert by expert, by number

A rank without tokens for an expert *visits* it: the expert is fetched and released as on the other ranks, and nothing is
computed. Example: rank 0 has tokens for experts 1 and 4, rank 1 for 4 and 6, by ``eager``:

    rank 0   gate_up1  down1  gate_up4  down4 (gate_up6) (down6)       (visits in brackets)
    rank 1  (gate_up1)(down1) gate_up4  down4  gate_up6   down6

Backward needs the same experts in the reverse order, on ranks without tokens as well. So each use, with tokens or
without, adds a node to the graph that saves the weight (`_Visit`). Autograd runs the nodes of a graph in the reverse
order of their creation. So these nodes ask for the weights in one order on all ranks. A product asks for its weight right
before or after its own node does, which fetches nothing more. The nodes form a chain, from the module's input to its
output, of numbers that are 0:

    input -> _Visit -> _Visit -> _Visit -> ... -> _Attach (with the output) -> output

A trained expert gets a gradient of zeros from a visit, as it has in torch as a part of the gradient of all experts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from infinity.optim.groups import TiledParameter
from infinity.torch_internals.names import without_torch_function
from infinity.torch_internals.operations import name_of
from infinity.units.parameter import placeholder
from infinity.units.tiles import Tile, TiledWeight, Tiles


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield name, module and names of cuttable parameters for each module of experts in transformers' form."""
    # Not cut: parameters under a PEFT wrapper, which adds to the whole tensor, and shared parameters, whose other owner
    # may use them in any way. Hooks on a parameter would have to see one gradient for all experts.
    wrapped = _in_wrappers(model)
    num_owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for prefix, module in model.named_modules():
        if not _has_experts(module) or id(module) in wrapped:
            continue
        number = module.num_experts
        names = [
            name
            for name, parameter in module._parameters.items()
            if type(parameter) is nn.Parameter
            and parameter.dim() == 3
            and len(parameter) == number > 1
            and parameter.is_contiguous()
            and num_owners[id(parameter)] == 1
            and not parameter._backward_hooks
            and not getattr(parameter, "_post_accumulate_grad_hooks", None)
        ]
        if names:
            yield prefix, module, names


def _has_experts(module: nn.Module) -> bool:
    """Whether ``module`` is one of transformers' modules of experts."""
    # transformers' decorator `use_experts_implementation` sets `is_transposed` in each module's __init__.
    return isinstance(getattr(module, "num_experts", None), int) and hasattr(module, "is_transposed")


def _in_wrappers(model: nn.Module) -> set[int]:
    """``id`` of each module under a PEFT wrapper for ``target_parameters``, which adds to all experts by one
    operation."""
    return {id(inner) for module in model.modules() if hasattr(module, "parameter_name") for inner in module.modules()}


def adapted_experts(model: nn.Module) -> str | None:
    """Name of the first module of experts under such a wrapper; None if there is none."""
    wrapped = _in_wrappers(model)
    found = (name for name, module in model.named_modules() if id(module) in wrapped and _has_experts(module))
    return next(found, None)


def experts_to_cut(model: nn.Module, choice: str, *, is_paged: bool) -> list[tuple[str, nn.Module, list[str]]]:
    """`fused_experts`, reduced to the parameters that are paged expert by expert.

    Args:
        model: whose.
        choice: the config's ``infinity.experts``.
        is_paged: whether weights come from drives.
    """
    if choice == "whole" or (choice == "auto" and not is_paged):
        return []
    found = []
    for prefix, module, names in fused_experts(model):
        # Frozen experts alone: a trained one that gets no token would still be read and written in every update, for
        # its zeros.
        if choice == "auto":
            names = [name for name in names if not module.get_parameter(name).requires_grad]
        if names:
            found.append((prefix, module, names))
    return found


# ------------------------------------------------------------------------------------------------- experts of all ranks


class Walk:
    """One call of a module of experts on one of several ranks. See [Note: experts of ranks]."""

    def __init__(self, routed: Sequence[int], tensors: Sequence[Sequence[Tile]], anchor: torch.Tensor) -> None:
        """
        Args:
            routed: the experts that have tokens on any rank, those with most tokens first.
            tensors: of each tensor (gate_up, down), all experts by number.
            anchor: the beginning of the chain, see `anchor_of`.
        """
        self.routed = list(routed)
        # In the order of `eager`. The others use all experts of a tensor at once, and leave none to be visited.
        self._left = dict.fromkeys(tensor[e] for e in sorted(routed) for tensor in tensors)
        self._anchor = anchor

    def use(self, tile: Tile, weight: torch.Tensor, *, has_tokens: bool, is_saved: bool = True) -> None:
        """This rank has fetched an expert, and computed with it if it has tokens.

        Args:
            tile: the expert.
            weight: its weight in memory, without the dimension of experts.
            has_tokens: whether this rank's own graph has the weight, and gives it a gradient.
            is_saved: whether backward needs the weight.
        """
        self._left.pop(tile, None)
        if torch.is_grad_enabled():
            self._anchor = visit(self._anchor, weight, has_tokens, is_saved)

    def go_to(self, tile: Tile) -> None:
        """This rank is about to use an expert: visit those that other ranks use before it."""
        while tile in self._left and (first := next(iter(self._left))) is not tile:
            self._visit(first)

    def _visit(self, tile: Tile) -> None:
        self.use(tile, tile(lambda _, weight: weight[0], None), has_tokens=False)

    def end(self, output: torch.Tensor) -> torch.Tensor:
        """Visit the experts that are left. Returns the module's output, with the chain in its graph."""
        while self._left:
            self._visit(next(iter(self._left)))
        # A copy: autograd forbids to change a view in place that comes from `attach`, as models may.
        return attach(output, self._anchor, True) if self._anchor.requires_grad else output


def anchor_of(x: torch.Tensor, *, trains: bool) -> torch.Tensor:
    """The beginning of a chain: a number that depends on the module's input ``x``, if that requires a gradient.

    ``trains``: whether any parameter of the module requires one. The chain must have a gradient wherever a product with
    a weight has one, so that backward asks for the weights on all ranks or on none.
    """
    zero = torch.zeros((), dtype=torch.float32, device=x.device)
    if torch.is_grad_enabled() and x.requires_grad:
        # A zero that depends on ``x``. `apply` takes no keywords: has_tokens=True, so ``x`` gets no gradient of it, and
        # is_saved=False, so it is not kept for backward.
        begun: torch.Tensor = visit(zero, x, True, False)
        return begun
    return zero.requires_grad_(trains and torch.is_grad_enabled())


class _Visit(torch.autograd.Function):
    """Returns a zero that depends on ``anchor`` and ``weight``.

    Its backward asks for the weight if that ``is_saved``, and gives it zeros unless it ``has_tokens``, and so gets a
    gradient from them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weight: torch.Tensor, has_tokens: bool, is_saved: bool) -> torch.Tensor:
        # A weight that is not saved is neither held nor fetched in backward. Metadata needs no values.
        ctx.save_for_backward(*[weight] * is_saved)
        ctx.form = weight.shape, weight.dtype, weight.device
        ctx.has_tokens = has_tokens
        return torch.zeros_like(anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _ = ctx.saved_tensors  # looking it up fetches it
        shape, dtype, device = ctx.form
        gives_zeros = ctx.needs_input_grad[1] and not ctx.has_tokens
        zeros = torch.zeros(shape, dtype=dtype, device=device) if gives_zeros else None
        return gradients[0], zeros, None, None


class _Attach(torch.autograd.Function):
    """Returns a copy or a view of ``x``; its backward also sends a zero to ``anchor``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, copies: bool) -> torch.Tensor:
        ctx.form = anchor.dtype, anchor.device
        return x.clone() if copies else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dtype, device = ctx.form
        return gradients[0], torch.zeros((), dtype=dtype, device=device), None


visit: Any = _Visit.apply
attach: Any = _Attach.apply


# ------------------------------------------------------------------------------------------------- in place of a weight

FetchGroups = Callable[[Sequence[int]], Iterator[tuple[Sequence[int], AbstractContextManager[object]]]]
"""Called with experts' numbers, in the order of their use. Yields groups of them, each with a context manager that
keeps the group's weights in memory together."""


class ExpertTiles(Tiles):
    """The experts of a weight."""

    def __init__(self, tiled: TiledParameter, *, touched_only: bool) -> None:
        """``touched_only``: an expert without a token gets no gradient. Otherwise it gets zeros, as in torch."""
        super().__init__(tiled)
        self.touched_only = touched_only
        self.counts: list[int] | None = None
        """Of each expert, the tokens of the running call that are routed to it; None: unknown."""
        self.routed: list[int] | None = None
        """The experts used by the running call, those with most tokens first; None: unknown."""
        self.x: torch.Tensor | None = None
        """The input of the running call."""
        self.walk: Walk | None = None
        """Set by the engine for a call in which ranks use the same experts. None: this rank uses its own."""
        self.fetch_groups: FetchGroups | None = None
        """Set by the engine for a call whose routing is known: fetches several experts at a time. None: one at a
        time."""
        self._gives_zeros = True
        """Whether the running call still has to give zeros to unused experts."""

    def experts(self) -> list[Any]:
        """The `Tile` modules, by number of the expert."""
        return list(self.children())

    def grouped_mm(
        self, multiply: Callable[..., torch.Tensor], x: torch.Tensor, offs: torch.Tensor, *, is_turned: bool
    ) -> torch.Tensor:
        """Compute ``multiply(x, weight, offs=offs)``, with the weight's last two dimensions swapped if ``is_turned``.

        Shapes: ``x`` [tokens, in], sorted by expert; ``offs`` [experts], int32, the end of each expert's rows.
        """
        # Worked example: 3 experts, x has 6 rows, offs = [2, 2, 5]. Expert 0 has rows 0-1, expert 1 none, expert 2 rows
        # 2-4, and row 5 belongs to nobody. counts = [2, 0, 3], used = [2, 0], the parts have 2, 0, 3 and 1 rows. Expert
        # 2 is multiplied as `multiply(rows 2-4, weight[2:3], offs=[3])`, expert 0 with offs=[2]. The result joins the
        # rows of expert 0, those of expert 2 and one row of zeros.
        ends = offs.tolist()
        counts = [end - start for start, end in itertools.pairwise([0, *ends])]
        # The longest computation comes first: the experts behind it are read meanwhile.
        used = busiest_first(counts)
        parts = self._with_zeros(x, used).split([*counts, len(x) - ends[-1]])
        numbers = torch.tensor([counts[e] for e in used], dtype=offs.dtype, device=offs.device).split(1)
        end_of = dict(zip(used, numbers, strict=True))

        def multiply_one(e: int, weight: torch.Tensor) -> torch.Tensor:
            return multiply(parts[e], weight.transpose(-2, -1) if is_turned else weight, offs=end_of[e])

        results = self._of_each(used, multiply_one, order=None if self.walk is None else self.walk.routed)
        width = self.tiled.shape[-2 if is_turned else -1]
        # torch leaves the rows behind the last offset undefined. Zeros keep NaN out of them.
        rest = x.new_zeros(len(parts[-1]), width)
        return torch.cat([*(results[e] for e in sorted(results)), rest])

    def _of_each(
        self,
        used: Collection[int],
        function: Callable[[int, torch.Tensor], torch.Tensor],
        *,
        order: Sequence[int] | None = None,
        is_saved: bool = True,
    ) -> dict[int, torch.Tensor]:
        """Call ``function(expert, weight)`` for each expert; ``weight`` is [1, ...]. Returns the results by expert.

        ``order``: in a `Walk`, the experts of all ranks. ``is_saved``: backward needs the weights.
        """
        visited = function if order is None else self._visiting(used, function, order, is_saved=is_saved)
        return {e: result for e, result in self._fetched(order or used, visited) if result is not None}

    def _fetched(
        self, order: Iterable[int], function: Callable[[int, torch.Tensor], torch.Tensor | None]
    ) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Yield each expert, and what ``function`` returns while it is in memory."""
        if self.fetch_groups is None:
            modules = self.experts()
            # Calling a `Tile` runs the engine's hooks: they fetch the expert before its forward and release it after.
            yield from ((e, modules[e](function, e)) for e in order)
            return
        tiles = self.tiled.tiles
        for experts, in_memory in self.fetch_groups(list(order)):
            with in_memory:
                for e in experts:
                    yield e, function(e, tiles[e])

    def _visiting(
        self,
        used: Collection[int],
        function: Callable[[int, torch.Tensor], torch.Tensor],
        order: Sequence[int],
        *,
        is_saved: bool,
    ) -> Callable[[int, torch.Tensor], torch.Tensor | None]:
        """``function`` for the experts in ``used``, and a visit for the others. See [Note: experts of ranks]."""
        walk, modules = self.walk, self.experts()
        if walk is None or not set(used) <= set(order):
            raise self.tiled.access_error("an expert that is not in the router's choice")

        def compute_or_visit(e: int, weight: torch.Tensor) -> torch.Tensor | None:
            result = function(e, weight) if e in used else None
            walk.use(modules[e], weight[0], has_tokens=e in used, is_saved=is_saved)
            return result

        return compute_or_visit

    def pick(self, index: Any) -> torch.Tensor:
        """Compute ``weight[index]`` for one expert (int or 0-dim tensor) or for a tensor of experts."""
        tiles = self.experts()
        if isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.dim() and _is_index(index)):
            number = int(index)
            if not -len(tiles) <= number < len(tiles):
                raise IndexError(f"index {number} is out of bounds for dimension 0 with size {len(tiles)}")
            return self._pick_one(number % len(tiles))
        if not isinstance(index, torch.Tensor) or not _is_index(index):
            raise self.tiled.access_error("an index")
        # batched_mm indexes with one expert per token and choice, for example [2, 0, 2]: numbers = [0, 2], places = [1,
        # 0, 1]. Each expert is fetched once and the copies are repeated by [places]. They are copies because the tile
        # may be released before they are used.
        numbers, places = index.remainder(len(tiles)).unique(return_inverse=True)
        used = numbers.tolist()
        order = None if self.walk is None else sorted(self.walk.routed)
        # Products save the copies, so backward does not need the weights.
        copies = self._of_each(used, lambda _, weight: weight.clone(), order=order, is_saved=False)
        return self._with_zeros(torch.cat([copies[e] for e in used]), used)[places]

    def _pick_one(self, number: int) -> torch.Tensor:
        """Compute ``weight[number]``."""
        tile = self.experts()[number]
        if self.walk is not None:
            self.walk.go_to(tile)
        chosen: torch.Tensor = tile(lambda _, weight: weight[0], None)
        if self.walk is not None:
            self.walk.use(tile, chosen, has_tokens=True)
        if not self._gives_zeros:
            return chosen
        # Zeros for all unused experts hang on the first expert of a call. Without a known routing, every pick gives
        # zeros to all others: autograd adds them up, and zeros do not change the sum.
        self._gives_zeros = self.routed is None
        return self._with_zeros(chosen, self.routed or [number])

    def _with_zeros(self, x: torch.Tensor, used: Collection[int]) -> torch.Tensor:
        """Return ``x``; when it gets its gradient, the experts that are not in ``used`` get zeros."""
        if self.walk is not None or not used:  # a walk has them in its own chain
            return x
        anchor = self.give_zeros(torch.zeros((), dtype=torch.float32, device=x.device), used)
        return attach(x, anchor, False) if anchor.requires_grad else x

    def give_zeros(self, anchor: torch.Tensor, used: Collection[int]) -> torch.Tensor:
        """Return a zero; when it gets its gradient, so do ``anchor`` and the experts that are not in ``used``."""
        # The graph: tile 1 -> visit -> tile 3 -> visit -> ... -> anchor (0-dim) -> attach -> x. Backward through attach
        # passes x's gradient on, and sends a zero along the chain of anchors, at which each tile gets its zeros.
        if not self.touched_only and torch.is_grad_enabled() and self.tiled.tiles[0].requires_grad:
            for e in self.others(used):
                anchor = visit(anchor, self.tiled.tiles[e], False, False)
        return anchor

    def begin_call(self, counts: list[int] | None = None, x: torch.Tensor | None = None) -> None:
        """Reset the state of a call: when it begins with its routing and its input, and when it ends with None."""
        self.counts, self.x, self.routed = counts, x, None if counts is None else busiest_first(counts)
        self.walk, self.fetch_groups, self._gives_zeros = None, None, True

    def use_groups(self, fetch_groups: FetchGroups) -> None:
        """Fetch several experts at a time, by ``fetch_groups``, until the call ends."""
        self.fetch_groups = fetch_groups

    def others(self, used: Iterable[int]) -> list[int]:
        """The experts that are not in ``used``."""
        known = set(used)
        return [e for e in range(len(self.tiled.tiles)) if e not in known]


class ExpertWeight(TiledWeight):
    """The class of a weight of all experts while they are paged one by one. See [Note: experts]."""

    tiles: ExpertTiles

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, ExpertWeight):
            if func is torch.Tensor.__getitem__:
                return first.tiles.pick(args[1])
            if _is_transpose(func, args[1:], kwargs):
                return _TransposedWeight.of(first)
        # Reached without a transpose in models with `is_transposed`, which store [experts, in, out].
        if name_of(func) in _GROUPED and isinstance(args[1], ExpertWeight):
            return _grouped(func, *args, **kwargs)
        return cls.look_at(func, args, kwargs)


class _TransposedWeight(torch.Tensor):
    """``weight.transpose(-2, -1)`` of an `ExpertWeight`. It has no values, and only grouped_mm accepts it."""

    weight: ExpertWeight

    @staticmethod
    def of(weight: ExpertWeight) -> _TransposedWeight:
        """Make it: shape [experts, in, out] for a weight [experts, out, in]."""
        shape = torch.Size((weight.shape[0], weight.shape[2], weight.shape[1]))
        made = placeholder(weight.dtype, weight.device, shape).as_subclass(_TransposedWeight)
        made.weight = weight
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if name_of(func) in _GROUPED and isinstance(args[1], _TransposedWeight):
            return _grouped(func, *args, **kwargs)
        if func in _OF_SHAPE:  # the only metadata in which it differs from the weight
            with without_torch_function():
                return func(*args, **kwargs)
        weight = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, _TransposedWeight))
        return TiledWeight.look_at(func, tuple(weight.weight if arg is weight else arg for arg in args), kwargs)


_SHAPE: Any = torch.Tensor.shape
_OF_SHAPE = frozenset({_SHAPE.__get__, torch.Tensor.size})

# torch._grouped_mm before torch 2.10, functional.grouped_mm since, and transformers' own operator for other devices.
_GROUPED = frozenset({"_grouped_mm", "grouped_mm", "grouped_mm_fallback"})


def _grouped(func: Callable[..., Any], x: torch.Tensor, weight: Any, offs: Any = None, **others: Any) -> torch.Tensor:
    is_turned = isinstance(weight, _TransposedWeight)
    tiles: ExpertTiles = weight.weight.tiles if is_turned else weight.tiles
    # The batched form (3-dim x, no offs), a bias and an output dtype are not needed by transformers.
    if offs is None or x.dim() != 2 or any(value is not None for value in others.values()):
        raise tiles.tiled.access_error(name_of(func))
    return tiles.grouped_mm(func, x, offs, is_turned=is_turned)


def _is_transpose(func: Callable[..., Any], dims: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name_of(func) == ".mT":
        return True
    # Modulo 3, as the tensor has 3 dimensions: (-2, -1), (1, 2) and (2, 1) all swap the last two.
    return name_of(func) == "transpose" and sorted(int(each) % 3 for each in (*dims, *kwargs.values())) == [1, 2]


def _is_index(index: torch.Tensor) -> bool:
    # For torch, a bool or uint8 tensor is a mask, not a list of positions.
    return not index.is_floating_point() and index.dtype not in (torch.bool, torch.uint8)


# ------------------------------------------------------------------------------------------------------------- routing


def route(module: nn.Module, tiles: Sequence[ExpertTiles]) -> list[Any]:
    """Register hooks that read the router's choice from each call of ``module``. Returns their handles."""
    # always_call: a forward that raises must not leave its routing behind for the next call.
    return [
        module.register_forward_pre_hook(_Routing(tiles).begin, with_kwargs=True),
        module.register_forward_hook(_Routing(tiles).end, always_call=True),
    ]


class _Routing:
    def __init__(self, tiles: Sequence[ExpertTiles]) -> None:
        self._tiles = tiles

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the router's choice: the only tensor of integers among the arguments, any shape, numbers of experts."""
        given = (*args, *kwargs.values())
        chosen = next((each for each in given if _may_be_routing(each)), None)
        x = next((each for each in given if isinstance(each, torch.Tensor) and each.is_floating_point()), None)
        counts = None
        if chosen is not None:
            num = len(self._tiles[0].tiled.tiles)
            # `tolist` waits for the GPU. The router's choice has to be known on the host before reads can begin.
            counts = torch.bincount(chosen.reshape(-1), minlength=num)[:num].tolist()
        for each in self._tiles:
            each.begin_call(counts, x)

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forget the routing: outside of calls it is unknown. In a `Walk`, returns the output with its chain."""
        walk = self._tiles[0].walk
        try:
            # After an exception in the module there is no output.
            return walk.end(output) if walk is not None and isinstance(output, torch.Tensor) else None
        finally:
            for each in self._tiles:
                each.begin_call()


def busiest_first(counts: Sequence[int]) -> list[int]:
    """The experts that have tokens, by their numbers of tokens: those with most first."""
    return sorted((e for e, count in enumerate(counts) if count), key=lambda e: -counts[e])


def walk_along(module: nn.Module, tiles: Sequence[ExpertTiles], counts: Sequence[int]) -> None:
    """In this call, use the experts of all ranks. See [Note: experts of ranks].

    Args:
        module: the module of experts.
        tiles: its tensors.
        counts: the tokens of each expert on all ranks.
    """
    x = tiles[0].x
    if x is None:
        raise tiles[0].tiled.access_error("a call without an input tensor")
    routed = busiest_first(counts)
    anchor = anchor_of(x, trains=any(parameter.requires_grad for parameter in module.parameters()))
    for each in tiles:
        anchor = each.give_zeros(anchor, routed)
    walk = Walk(routed, [each.experts() for each in tiles], anchor)
    for each in tiles:
        each.walk, each.routed = walk, walk.routed  # until the call ends


def _may_be_routing(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.dtype in (torch.int64, torch.int32)


def expert_groups(model: nn.Module, locate: Callable[[nn.Parameter], tuple[Any, Any]]) -> dict[int, int]:
    """Index of each expert's unit -> a number for its module. The prefetch schedule counts uses per module."""
    modules = [experts for module in model.modules() if (experts := experts_of(module))]
    return {
        locate(tile)[0].index: number
        for number, experts in enumerate(modules)
        for tiles in experts
        for tile in tiles.tiled.tiles
    }


def routed_experts(model: nn.Module) -> set[int]:
    """``id`` of each expert that a step leaves alone if no token goes to it: frozen, or ``touched_only``."""
    return {
        id(tile)
        for module in model.modules()
        for tiles in experts_of(module)
        for tile in tiles.tiled.tiles
        if tiles.touched_only or not tile.requires_grad
    }


def experts_of(module: nn.Module) -> list[ExpertTiles]:
    """The `ExpertTiles` among a module's children."""
    return [child for child in module.children() if isinstance(child, ExpertTiles)]
