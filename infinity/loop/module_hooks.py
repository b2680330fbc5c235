"""The hooks in a model's modules, which tell the coordinator which unit is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import nn

from infinity.errors import EngineBusyError, ModelError
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.paging.compiled_forwards import CompiledForwards, InPlaceOfMethod, inside_compiled, refuse_tracing
from infinity.paging.parameter_map import ParameterMap
from infinity.paging.rank_weights import sum_over_ranks
from infinity.threads.engine_lock import refuse_reentry
from infinity.threads.frames import callers
from infinity.torch_internals.names import is_tracing, outside_modes, untraced
from infinity.units.experts import ExpertTiles, experts_of, walk_along
from infinity.units.layout import Slot
from infinity.units.unit import Unit


@dataclass(eq=False)
class _HooksOfModule:
    """The hooks of one module."""

    _coordinator: ParameterCoordinator
    _unit: Unit | None
    """The unit that a call enters."""
    _owned: list[tuple[Unit, list[Slot]]]
    _looked_at: list[Unit]
    """Units whose parameters the module reads before it calls its children, in evaluation: see `_with_fast_path`."""
    _keep_alive: object
    """The engine: as long as a model has hooks, it lives."""
    _of_model: ModuleHooks | None
    """For the model itself: all hooks."""
    _is_inside: bool
    """Whether the module is inside of a block."""
    entered: dict[int, list[bool | None]] = field(default_factory=dict)
    """Thread -> for each running call of the module (it may call itself) whether it has entered the unit; None: it was
    refused."""

    def before(self, module: nn.Module, args: Any) -> None:
        of_model, unit = self._of_model, self._unit
        if of_model is not None:
            self._before_root(module, of_model)
        # A script calls a module inside a block by itself: gradients of the block's parameters may then come in parts.
        if self._is_inside and unit is not None and not self._coordinator.is_computing and torch.is_grad_enabled():
            self._coordinator.backwards.collector.on_partial_gradients(unit, by_script=True)
        is_outermost = self._coordinator.begin_forward(is_root=of_model is not None)
        entered = self.entered.setdefault(get_ident(), [])
        # After `begin_forward`, which may refuse the call: then `after` finds nothing to leave.
        entered.append(False)
        if of_model is not None and is_outermost:
            of_model.follow_compilation()
        if self._coordinator.is_training_forward:
            for owner, slots in self._owned:
                self._coordinator.backwards.collector.on_module_call(owner, slots)
        if unit is not None:
            self._coordinator.enter(unit)
            entered[-1] = True
        evaluates = not module.training and not torch.is_grad_enabled()
        if self._looked_at and evaluates and self._coordinator.parameter_cache.has_room(self._looked_at):
            # Opening them is enough: in a forward they stay bound after `held`, until unused units are closed.
            with self._coordinator.held(self._looked_at):
                pass

    def _before_root(self, module: nn.Module, of_model: ModuleHooks) -> None:
        if is_tracing():
            raise ModelError(
                "torch.jit.trace would record the weights as constants, but the engine moves them",
                cure="Trace a copy: copy.deepcopy(model)",
            )
        if self._coordinator.is_in_forward:
            try:
                refuse_reentry("running the model")
            except EngineBusyError:
                self.entered.setdefault(get_ident(), []).append(None)  # torch calls `after` for this call, too
                raise
            if not _is_called_by_itself(module):
                of_model.abandon_calls()  # torch runs no hooks after a KeyboardInterrupt, so the last call seems to go on

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.entered:
            return  # always_call: an earlier pre-hook of the script has raised, before ours ran
        me = get_ident()  # not before: torch.compile cannot trace it, and is to be refused by name
        entered = self.entered.get(me)
        if not entered:
            return
        has_entered = entered.pop()
        if not entered:
            del self.entered[me]
        if has_entered is None:
            return
        try:
            if has_entered and self._unit is not None:
                self._coordinator.leave(self._unit)
        finally:
            self._coordinator.end_forward()


_CALL = nn.Module._call_impl.__code__


def _is_called_by_itself(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs inside another call of it, in this thread."""
    # A recursive model calls itself in its forward. A cut-off call has no frame on the stack any more.
    return sum(frame.f_code is _CALL and frame.f_locals.get("self") is module for frame in callers()) > 1


def _with_fast_path(module: nn.Module) -> nn.Module | None:
    """The module whose parameters ``module`` inspects in evaluation, to decide whether torch's fused kernel can run."""
    # A parameter that is paged out fails that check, and torch would take the slow path, unlike in plain torch.
    if isinstance(module, nn.TransformerEncoder):
        return module.layers[0] if len(module.layers) else None
    return module if isinstance(module, nn.TransformerEncoderLayer | nn.MultiheadAttention) else None


@dataclass(eq=False)
class _ExpertCalls:
    """Fetches the experts that the router has chosen, for a module whose experts are paged one by one.

    See [Note: experts] in `infinity.units.experts`.
    """

    _coordinator: ParameterCoordinator
    _experts: list[ExpertTiles]
    _units: list[list[Unit]]
    """For each tensor of experts (gate_up, down), the unit of each expert."""
    _group: int
    """Id of this layer's group of experts in the prefetch schedule."""

    def before(self, module: nn.Module, args: Any) -> None:
        """Pre-hook of the module: start to read the experts that the router has chosen, in the order of their use."""
        if self._coordinator.parameter_cache.is_divided:
            self._agree(module)
        routed = self._experts[0].routed
        if routed is None:
            return
        if self._coordinator.is_training_forward:
            for tiles, units in zip(self._experts, self._units, strict=True):
                # As in torch, where the gradient of the whole tensor has zeros for experts without tokens.
                for expert in () if tiles.touched_only else tiles.others(routed):  # they get zeros
                    unit = units[expert]
                    self._coordinator.backwards.collector.on_module_call(unit, unit.layout.slots)
        # The order in which the model's own code uses the tiles. With experts 4 and 1 routed, in this order:
        #   grouped_mm     gate_up4 gate_up1 down4 down1    tensor by tensor, experts as routed
        #   batched_mm     gate_up1 gate_up4 down1 down4    tensor by tensor, experts by number
        #   eager          gate_up1 down1 gate_up4 down4    expert by expert
        implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if implementation == "grouped_mm":
            order = [units[expert] for units in self._units for expert in routed]
        elif implementation == "batched_mm":
            order = [units[expert] for units in self._units for expert in sorted(routed)]
        else:  # one expert after the other
            order = [units[expert] for expert in sorted(routed) for units in self._units]
        self._coordinator.route(self._group, [unit.index for unit in order])
        if not self._coordinator.is_shared:  # else each expert waits until its own moment
            for tiles, units in zip(self._experts, self._units, strict=True):
                tiles.use_groups(functools.partial(self._fetch_groups, units))

    def _agree(self, module: nn.Module) -> None:
        """All ranks use the experts that the routers of all of them have chosen. All ranks come here."""
        first = self._experts[0]
        name = first.tiled.fqn.rpartition(".")[0]
        if first.counts is None:
            raise ModelError(
                f"'{name}' is called without the router's choice (a tensor of integers), so ranks cannot agree on which "
                "experts to gather",
                cure='Set infinity.experts to "whole"',
                fqn=name,
            )
        counts = sum_over_ranks(self._coordinator.parameter_cache, f"routing to {name}", first.counts)
        walk_along(module, self._experts, counts)

    def _fetch_groups(
        self, units: list[Unit], experts: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], AbstractContextManager[None]]]:
        """Yield groups of experts that take half of the room each. Meanwhile the next group is read into the other
        half."""
        # Room for 10 experts: 5 are computed with while the next 5 arrive. One at least, even if that takes all the
        # room.
        size = max(self._coordinator.parameter_cache.room_bytes // 2 // units[0].num_bytes, 1)
        for start in range(0, len(experts), size):
            part = experts[start : start + size]
            yield part, self._coordinator.inside_module([units[expert] for expert in part])


class _BoundHook:
    """A hook as an object: copying or pickling the module gives a hook that does nothing."""

    def __init__(self, function: Callable[..., None] | None = None, *, comes_before: bool = False) -> None:
        self._function = None if function is None else untraced(outside_modes(function))
        self._comes_before = comes_before

    def __deepcopy__(self, memo: dict[int, Any]) -> _BoundHook:
        return _BoundHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _BoundHook, ()

    def __call__(self, *args: Any) -> None:
        if self._function is None:
            return  # a copy: nothing keeps it from being compiled or exported
        if self._comes_before and torch.compiler.is_compiling():
            refuse_tracing(args[0])
        self._function(*args)


class ModuleHooks:
    """All hooks of one model: they tell the coordinator which unit is needed."""

    def __init__(
        self,
        parameter_map: ParameterMap,
        coordinator: ParameterCoordinator,
        blocks: Sequence[str] = (),
        recomputed: type[InPlaceOfMethod] | None = None,
    ) -> None:
        """
        Args:
            coordinator: called by the hooks.
            blocks: FQNs of the modules that were made units of their own.
            recomputed: `RecomputedForward`, which replaces the blocks' forwards; None: they stay.
        """
        self._recomputed: Any = recomputed
        self._map = parameter_map
        self._coordinator = coordinator
        self._model = model = parameter_map.model
        # Parent and name, not the block itself: torch.compile(block) and PEFT put another module in its place.
        self._places_of_blocks = [
            (fqn, model.get_submodule(fqn.rpartition(".")[0]), fqn.rpartition(".")[2]) for fqn in blocks
        ]
        self._compiled_forwards = CompiledForwards(model)
        self._compiled: list[Any] = []
        self.covered: set[int] = set()
        """``id`` of the modules inside compiled ones, which have no hooks: see [Note: compiled modules] in
        ``infinity.paging.compiled_forwards``."""
        self._handles: list[Any] = []
        self._call_handles: list[Any] = []
        self.handles_of_others: list[Any] = []
        """Handles of other parts' hooks, removed together with these."""
        self._keep_alive: object = None
        self._hooks: list[_HooksOfModule] = []
        self._inside_of: dict[int, list[nn.Module]] = {}
        """Unit index -> children of the modules that enter it, as long as they have no hooks: see `hook_inside`."""

    def install(self, keep_alive: object) -> None:
        """Hook the modules that hold several units, and those inside them that hold one (blocks), which enter it.

        A module that holds several enters none: it would keep them through its whole forward, and operations on its own
        parameters fault them in anyway. What is inside a block needs no hooks (see `hook_inside`).
        """
        for module in self._model.modules():
            if any(map(self._map.holds, module.parameters(recurse=False))):
                before = _BoundHook(self._before_load, comes_before=True)
                self._handles.append(module.register_load_state_dict_pre_hook(before))
        before = _BoundHook(lambda *_: self._coordinator.begin_state_dict(), comes_before=True)
        self._handles.append(self._model.register_state_dict_pre_hook(before))
        self._handles.append(
            self._model.register_state_dict_post_hook(_BoundHook(lambda *_: self._coordinator.end_state_dict()))
        )
        # An empty FQN is the model itself: a model of one block compiles as a whole.
        if self._places_of_blocks and self._places_of_blocks[0][0]:
            self._compiled_forwards.compile_units(lambda: [*self._blocks_now().values()])
        self._keep_alive = keep_alive
        self._hook_calls()

    def _before_load(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *_: Any) -> None:
        """Pre-hook of ``load_state_dict``, which copies into parameters by ordinary operations."""
        if local_metadata.get("assign_to_params_buffers"):
            raise ModelError(
                "load_state_dict(assign=True) would replace parameters that an engine holds",
                cure="Call load_state_dict without assign, or before infinity.initialize",
                fqn=prefix.rstrip("."),
            )
        self._coordinator.copies.forget_written()

    def _hook_calls(self) -> None:
        self._compiled_forwards.move_into_blocks(self._blocks_now())
        if self._recomputed is not None:
            for block in self._blocks_now().values():
                if not isinstance(block.__dict__.get("forward"), self._recomputed):
                    forward = self._recomputed(block, self._coordinator.inside_module, self._entered_by(block))
                    self._compiled_forwards.put(block, "forward", forward)
        self._compiled = self._compilation()
        self.covered = inside_compiled(self._model)
        self._inside_of.clear()
        # Decoder with units 0 (embedding), 1 and 2 (blocks) and 3 (head): the model has several units and is hooked
        # without entering any. So are lists around blocks. Each block has one unit: it is hooked and enters it, and its
        # children get no hooks until `hook_inside`.
        rest, seen = [self._model], set[int]()
        while rest:
            module = rest.pop()
            units = self._units_in(module)
            if id(module) in seen or id(module) in self.covered or (not units and module is not self._model):
                continue
            seen.add(id(module))
            children = [child for child in module.children() if id(child) not in seen]
            is_root = module is self._model
            if len(units) == 1:
                self._inside_of.setdefault(units[0].index, []).extend(children)
            else:
                rest += children
            if not (is_root and self._hooks):  # the model itself may be in the midst of a call
                self._hook(module, is_root=is_root)

    def _hook(self, module: nn.Module, *, is_root: bool, is_inside: bool = False) -> None:
        """Hook a module. ``is_inside``: of a block, whose calls are those that count as uses of its parameters."""
        own = [] if is_inside else self._own_slots(module)
        looked_at = self._units_in(_with_fast_path(module))  # by torch, before the children are called
        of_model = self if is_root else None
        unit = next(iter(self._entered_by(module)), None)
        hooks = _HooksOfModule(self._coordinator, unit, own, looked_at, self._keep_alive, of_model, is_inside)
        self._hooks.append(hooks)
        handles = self._handles if is_root else self._call_handles
        before = _BoundHook(hooks.before, comes_before=True)
        # First of the pre-hooks and with always_call: the weights are there for hooks of the script, and the unit is
        # left after an exception as well.
        handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.append(module.register_forward_hook(_BoundHook(hooks.after), always_call=True))
        if experts := experts_of(module):
            units = [[self._map.locate(tile)[0] for tile in tiles.tiled.tiles] for tiles in experts]
            group = self._coordinator.parameter_cache.group_of(units[0][0])
            routing = _BoundHook(_ExpertCalls(self._coordinator, experts, units, group).before, comes_before=True)
            handles.append(module.register_forward_pre_hook(routing))

    def hook_inside(self, unit: Unit) -> bool:
        """An operation needs a unit that no module has entered. If a module inside a block is being called by itself,
        as by a checkpoint in the block's forward, hook the modules inside the block, so that they enter the unit from
        now on.

        Returns whether they were hooked now.
        """
        if unit.index not in self._inside_of or not self.are_running():
            return False
        # Popped: once hooked, the children stay hooked.
        for child in self._inside_of.pop(unit.index):
            for module in child.modules():
                if self._entered_by(module) and id(module) not in self.covered:
                    self._hook(module, is_root=False, is_inside=True)
        return True

    def follow_compilation(self) -> None:
        """Before a call of the model: if blocks were compiled or replaced since the last one, install the hooks anew.

        Only while none of its modules is inside its forward: such a call would miss the hook that ends it.
        """
        # Asked in each call of the model, so it compares identities only.
        if self._compiled != self._compilation():
            for handle in self._call_handles:
                handle.remove()
            self._call_handles.clear()
            del self._hooks[1:]  # the first is the model's own
            self._hook_calls()

    def _blocks_now(self) -> dict[str, nn.Module]:
        """FQN of a block in `initialize` -> the module that is at this place now."""
        found = {fqn: parent._modules.get(name) for fqn, parent, name in self._places_of_blocks}
        return {fqn: block for fqn, block in found.items() if block is not None}

    def _compilation(self) -> list[Any]:
        """A value that changes when one of the blocks is compiled or replaced."""
        return [
            (fqn, id(block), block.__dict__.get("_compiled_call_impl"), block.__dict__.get("forward"))
            for fqn, block in self._blocks_now().items()
        ]

    def _units_in(self, module: nn.Module | None) -> list[Unit]:
        """Units of the parameters of the module and its children, by index."""
        parameters = () if module is None else module.parameters()
        found = {self._map.locate(p)[0].index for p in parameters if self._map.holds(p)}
        return [self._map.units[index] for index in sorted(found)]

    def _entered_by(self, module: nn.Module) -> list[Unit]:
        """The unit that a call of the module enters. Empty for a module of several units: its children enter them."""
        reached = self._units_in(module)
        return reached if len(reached) == 1 else []

    def _own_slots(self, module: nn.Module) -> list[tuple[Unit, list[Slot]]]:
        """The parameters that a call of the module uses: all inside it if they are of one unit, else its own."""
        own: dict[int, tuple[Unit, list[Slot]]] = {}
        for parameter in filter(self._map.holds, module.parameters(recurse=len(self._units_in(module)) == 1)):
            unit, slot = self._map.locate(parameter)
            own.setdefault(unit.index, (unit, []))[1].append(slot)
        return list(own.values())

    def abandon_calls(self) -> None:
        """Forget calls and forwards that an exception has cut off."""
        self.forget_calls()
        self._coordinator.abandon_forward()

    def are_running(self) -> bool:
        """Whether modules of the model are being called in this thread."""
        # `_call_impl` is the frame of Module.__call__; its `self` is the module.
        called = {id(frame.f_locals.get("self")) for frame in callers() if frame.f_code is _CALL}
        return len(called) > 0 and any(id(module) in called for module in self._model.modules())

    def forget_calls(self) -> None:
        """Forget all running calls, which an exception has cut off."""
        for hooks in self._hooks:
            hooks.entered.clear()

    def uninstall(self) -> None:
        """Remove the hooks."""
        for handles in (self._handles, self._call_handles, self.handles_of_others):
            for handle in handles:
                handle.remove()
            handles.clear()
        self._hooks.clear()
        self._compiled_forwards.restore()
