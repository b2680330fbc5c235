"""The engine's hold on a model: which parameter lies where, and the hooks in its modules.

Knows modules, units and parameters; must not know optimizers or files.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.errors import EngineBusyError, ModelError
from infinity.paging.compiled_forwards import CompiledForwards, InPlaceOfMethod, inside_compiled, refuse_tracing
from infinity.threads.engine_lock import refuse_in_between
from infinity.torch_internals.modes import outside_modes, untraced
from infinity.torch_internals.names import is_tracing
from infinity.units.layout import Slot
from infinity.units.parameter import PagedView
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.paging.pager import Pager


@dataclass(eq=False)
class _HooksOfModule:
    """The hooks of one module."""

    _pager: Pager
    _units: list[Unit]
    _owned: list[tuple[Unit, list[Slot]]]
    _looked_at: list[Unit]
    """The module looks at their parameters before it calls others, when it evaluates."""
    _keep_alive: object
    _abandon: Callable[[], None] | None
    """For the model itself: forget the calls that were cut off."""
    _is_inside: bool
    """Of a block."""
    _entered: dict[int, list[int | None]] = field(default_factory=dict)
    """Thread -> how many units each running call of the module holds (a module may call itself); None if it was refused."""

    def before(self, module: nn.Module, args: Any) -> None:
        if self._abandon is not None:
            self._before_root(module, self._abandon)
        if self._is_inside and not self._pager.is_computing and torch.is_grad_enabled():
            for unit in self._units:
                self._pager.note_parts(unit, by_script=True)
        self._pager.begin_forward(is_root=self._abandon is not None)
        entered = self._entered.setdefault(get_ident(), [])
        entered.append(0)
        if self._pager.is_training_forward:
            for unit, slots in self._owned:
                self._pager.note_use(unit, slots)
        for number, unit in enumerate(self._units, start=1):
            self._pager.enter(unit)
            entered[-1] = number
        evaluates = not module.training and not torch.is_grad_enabled()
        if self._looked_at and evaluates and self._pager.residency.has_room(self._looked_at):
            with self._pager.held(self._looked_at):
                pass

    def _before_root(self, module: nn.Module, abandon: Callable[[], None]) -> None:
        if is_tracing():
            raise ModelError(
                "torch.jit.trace makes constants of the weights, and they do not stay where they are",
                cure="Trace a copy: copy.deepcopy(model)",
            )
        if self._pager.is_in_forward:
            try:
                refuse_in_between("running the model")
            except EngineBusyError:
                self._entered.setdefault(get_ident(), []).append(None)  # it will end all the same
                raise
            if not _is_called_by_itself(module):
                abandon()  # torch runs no hooks after a KeyboardInterrupt, so the last call seems to go on

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._entered:
            return  # the call failed before our hook ran
        me = get_ident()  # not before: torch.compile cannot trace it, and is to be refused by name
        entered = self._entered.get(me)
        if not entered:
            return
        num_entered = entered.pop()
        if not entered:
            del self._entered[me]
        if num_entered is None:
            return
        try:
            for unit in reversed(self._units[:num_entered]):
                self._pager.leave(unit)
        finally:
            self._pager.end_forward()

    def forget(self) -> None:
        """Calls that an exception cut off are over."""
        self._entered.clear()


_CALL = nn.Module._call_impl.__code__


def callers() -> Iterator[FrameType]:
    """The frames of the calling thread, from the one that asks outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_called_by_itself(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs inside another call of it, in this thread."""
    return sum(frame.f_code is _CALL and frame.f_locals.get("self") is module for frame in callers()) > 1


def _with_fast_path(module: nn.Module) -> nn.Module | None:
    """At whose parameters ``module`` looks to see whether a fused kernel will do, which it will not if they are paged out."""
    if isinstance(module, nn.TransformerEncoder):
        return module.layers[0] if len(module.layers) else None
    return module if isinstance(module, nn.TransformerEncoderLayer | nn.MultiheadAttention) else None


class _BoundHook:
    """A function as a callable that torch can mark. That of a copy of the module does nothing."""

    def __init__(self, function: Callable[..., None] | None = None, *, comes_before: bool = False) -> None:
        self._function = function
        self._comes_before = comes_before

    def __deepcopy__(self, memo: dict[int, Any]) -> _BoundHook:
        return _BoundHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _BoundHook, ()

    def __call__(self, *args: Any) -> None:
        if self._function is None:
            return  # a copy: nothing keeps it from being compiled or exported
        if torch.compiler.is_compiling() and self._comes_before:
            refuse_tracing(args[0])
        self._run(self._function, *args)

    @untraced
    @outside_modes
    def _run(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)


class ModuleHooks:
    """Where each parameter of a model lies, and the hooks that tell the pager what is needed. Answers for the parameters."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        blocks: Sequence[str] = (),
        recomputed: type[InPlaceOfMethod] | None = None,
    ) -> None:
        """
        Args:
            blocks: FQNs of the modules that were made units of their own.
            recomputed: a class for their forwards, called with module, forward, pager and the units that it enters; None
                leaves them as they are.
        """
        self._recomputed: Any = recomputed
        self.model = model
        self.units = list(units)
        self._places_of_blocks = [
            (fqn, model.get_submodule(fqn.rpartition(".")[0]), fqn.rpartition(".")[2]) for fqn in blocks
        ]
        self._forwards = CompiledForwards(model)
        self._compiled: list[Any] = []
        self.covered: set[int] = set()
        """``id`` of the modules inside compiled ones, which have no hooks: see [Note: compiled modules] in
        ``infinity.paging.compiled_forwards``."""
        self.places: dict[int, tuple[Unit, Slot]] = {
            id(parameter): (unit, slot)
            for unit in units
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True)
        }
        self._handles: list[Any] = []
        self._call_handles: list[Any] = []
        self._hook_calls: Callable[[], None] = lambda: None
        self.handles_of_others: list[Any] = []
        """Of hooks that go with those of the modules."""
        self._hooks: list[_HooksOfModule] = []
        self._inside_of: dict[int, list[nn.Module]] = {}
        """Unit index -> children of the modules that enter it, as long as they have no hooks: see `hook_inside`."""
        self._open_loads: dict[_LoadHooks, None] = {}
        """Those whose ``load_state_dict`` has begun and not ended."""

    def locate(self, parameter: torch.Tensor) -> tuple[Unit, Slot]:
        """The unit and slot of a parameter of the model.

        Raises:
            ModelError: it is not one of the model's.
        """
        place = self.places.get(id(parameter))
        if place is None:
            raise ModelError(
                f"a tensor of shape {tuple(parameter.shape)} is no parameter of the engine's model. Pass one of "
                "engine.module.parameters()"
            )
        return place

    def locate_any(self, tensor: torch.Tensor) -> tuple[Unit, Slot]:
        """The same for a parameter, or a view that stands for one or for a part of it."""
        return (tensor.place.unit, tensor.place.slot) if isinstance(tensor, PagedView) else self.locate(tensor)

    def holds(self, parameter: object) -> bool:
        """Whether this is a parameter of the model."""
        return id(parameter) in self.places

    def parameters_now(self) -> dict[int, nn.Parameter]:
        """The parameters that the model's modules have now, by ``id``, in the order of ``model.parameters()``."""
        # As that does, but ten times as fast: it is asked for in every forward.
        found: dict[int, nn.Parameter] = {}
        seen: set[int] = set()
        rest: list[nn.Module] = [self.model]
        while rest:
            module = rest.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None:
                    found.setdefault(id(parameter), parameter)
            for child in reversed(module._modules.values()):
                if child is not None:
                    rest.append(child)
        return found

    def num_owners(self) -> dict[tuple[int, int], int]:
        """(unit index, slot index) -> how many modules have the parameter as their own."""
        owners: dict[tuple[int, int], int] = {}
        for module in self.model.modules():
            for parameter in {id(p): p for p in module.parameters(recurse=False) if self.holds(p)}.values():
                unit, slot = self.locate(parameter)
                owners[unit.index, slot.index] = owners.get((unit.index, slot.index), 0) + 1
        return owners

    def install(
        self,
        pager: Pager,
        keep_alive: object,
        before_load: Callable[[list[nn.Parameter]], Any],
        after_load: Callable[[Any], None],
    ) -> None:
        """Hook the modules that hold several units, and those inside them that hold one (blocks), which enter it.

        A module that holds several enters none: it would keep them through its whole forward, and operations on its own
        parameters fault them in anyway. What is inside a block needs no hooks (see `hook_inside`).
        """
        for module in self.model.modules():
            held = [parameter for parameter in module.parameters(recurse=False) if self.holds(parameter)]
            if held:
                load = _LoadHooks(held, before_load, after_load, pager.copies.forget_written, self._open_loads)
                before = _BoundHook(load.before, comes_before=True)
                self._handles.append(module.register_load_state_dict_pre_hook(before))
                self._handles.append(module.register_load_state_dict_post_hook(_BoundHook(load.after)))
        before = _BoundHook(lambda *_: pager.begin_state_dict(), comes_before=True)
        self._handles.append(self.model.register_state_dict_pre_hook(before))
        self._handles.append(self.model.register_state_dict_post_hook(_BoundHook(lambda *_: pager.end_state_dict())))
        if self._places_of_blocks and self._places_of_blocks[0][0]:
            self._forwards.compile_units(lambda: [*self._blocks_now().values()])
        self._hook_calls = functools.partial(self._hook_each_call, pager, keep_alive)
        self._hook_calls()

    def _hook_each_call(self, pager: Pager, keep_alive: object) -> None:
        self._forwards.convert(self._blocks_now())
        if self._recomputed is not None:
            for block in self._blocks_now().values():
                if not isinstance(block.__dict__.get("forward"), self._recomputed):
                    forward = self._recomputed(block, block.forward, pager, self._entered_by(block))
                    self._forwards.put(block, "forward", forward)
        self._compiled = self._compilation()
        self.covered = inside_compiled(self.model)
        self._inside_of.clear()
        rest, seen = [self.model], set[int]()
        while rest:
            module = rest.pop()
            units = self._units_in(module)
            if id(module) in seen or id(module) in self.covered or (not units and module is not self.model):
                continue
            seen.add(id(module))
            children = [child for child in module.children() if id(child) not in seen]
            is_root = module is self.model
            if len(units) == 1:
                self._inside_of.setdefault(units[0].index, []).extend(children)
            else:
                rest += children
            if not (is_root and self._hooks):  # the model itself may be in the midst of a call
                self._hook(module, pager, keep_alive, is_root=is_root)

    def _hook(
        self, module: nn.Module, pager: Pager, keep_alive: object, *, is_root: bool, is_inside: bool = False
    ) -> None:
        """Hook a module. ``is_inside``: of a block, whose calls are those that count as uses of its parameters."""
        own = [] if is_inside else self._own_slots(module)
        first = self._units_in(_with_fast_path(module))
        abandon = functools.partial(self._abandon_calls, pager) if is_root else None
        hooks = _HooksOfModule(pager, self._entered_by(module), own, first, keep_alive, abandon, is_inside)
        self._hooks.append(hooks)
        handles = self._handles if is_root else self._call_handles
        before = _BoundHook(hooks.before, comes_before=True)
        handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.append(module.register_forward_hook(_BoundHook(hooks.after), always_call=True))

    def hook_inside(self, unit: Unit, pager: Pager) -> bool:
        """An operation needs the unit that no module has entered: if a module inside a block is called by itself, as by a
        checkpoint in the block's forward, such modules enter the unit from now on. Else each operation would bring it anew.

        Returns whether that has begun now.
        """
        if unit.index not in self._inside_of or not self.are_running():
            return False
        for child in self._inside_of.pop(unit.index):
            for module in child.modules():
                if self._entered_by(module) and id(module) not in self.covered:
                    self._hook(module, pager, None, is_root=False, is_inside=True)
        return True

    def follow_compilation(self) -> None:
        """The model is about to be called: if blocks were compiled since the last time, their hooks have to go elsewhere.

        Only while none of its modules is inside its forward: such a call would not find the hook that ends it.
        """
        if self._compiled != self._compilation():
            for handle in self._call_handles:
                handle.remove()
            self._call_handles.clear()
            del self._hooks[1:]  # the first is the model's own
            self._hook_calls()

    def _blocks_now(self) -> dict[str, nn.Module]:
        """The modules that are now where blocks were, by their names then."""
        found = {fqn: parent._modules.get(name) for fqn, parent, name in self._places_of_blocks}
        return {fqn: block for fqn, block in found.items() if block is not None}

    def _compilation(self) -> list[Any]:
        """What changes when one of the blocks is compiled."""
        return [
            (fqn, id(block), block.__dict__.get("_compiled_call_impl"), block.__dict__.get("forward"))
            for fqn, block in self._blocks_now().items()
        ]

    def _units_in(self, module: nn.Module | None) -> list[Unit]:
        """Those in which parameters of the module, and of those inside it, lie."""
        parameters = () if module is None else module.parameters()
        found = {self.locate(p)[0].index for p in parameters if self.holds(p)}
        return [self.units[index] for index in sorted(found)]

    def _entered_by(self, module: nn.Module) -> list[Unit]:
        reached = self._units_in(module)
        return reached if len(reached) == 1 else []

    def _own_slots(self, module: nn.Module) -> list[tuple[Unit, list[Slot]]]:
        """The parameters of which a call of the module is a use: all inside it, where they are of one unit; else its own."""
        own: dict[int, tuple[Unit, list[Slot]]] = {}
        for parameter in filter(self.holds, module.parameters(recurse=len(self._units_in(module)) == 1)):
            unit, slot = self.locate(parameter)
            own.setdefault(unit.index, (unit, []))[1].append(slot)
        return list(own.values())

    def _abandon_calls(self, pager: Pager) -> None:
        self.forget_calls()
        pager.abandon_forward()

    def settle_loads(self) -> None:
        """Let go of what a ``load_state_dict`` holds that somebody's hook has cut off."""
        loading = nn.Module.load_state_dict.__code__
        open_ones = self._open_loads
        if open_ones and all(frame.f_code is not loading for frame in callers()):
            for load in tuple(open_ones):
                load.after()

    def are_running(self) -> bool:
        """Whether modules of the model are being called in this thread."""
        called = {id(frame.f_locals.get("self")) for frame in callers() if frame.f_code is _CALL}
        return len(called) > 0 and any(id(module) in called for module in self.model.modules())

    def forget_calls(self) -> None:
        """An exception has cut off whatever was running."""
        for hooks in self._hooks:
            hooks.forget()

    def uninstall(self) -> None:
        """Remove the hooks."""
        for handle in (*self._handles, *self._call_handles, *self.handles_of_others):
            handle.remove()
        self._handles.clear()
        self._call_handles.clear()
        self.handles_of_others.clear()
        self._hooks.clear()
        self._open_loads.clear()
        self._forwards.restore()


@dataclass(eq=False)
class _LoadHooks:
    """``load_state_dict`` on one module: its parameters are gathered before and written back after."""

    _parameters: list[nn.Parameter]
    _before_load: Callable[[list[nn.Parameter]], Any]
    _after_load: Callable[[Any], None]
    _note_load: Callable[[], None]
    _open: dict[_LoadHooks, None]
    gathered: Any = None
    """What holds the module's parameters open."""

    def before(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise ModelError(
                "load_state_dict(assign=True) would replace parameters that an engine holds",
                cure="Call load_state_dict without assign, or before infinity.initialize",
                fqn=prefix.rstrip("."),
            )
        self.after()
        self._note_load()
        self.gathered = self._before_load(self._parameters)
        self._open[self] = None

    def after(self, *_: Any) -> None:
        """Let go of what the load holds, also if an exception has cut it off; what it has loaded so far is stored."""
        gathered, self.gathered = self.gathered, None
        self._open.pop(self, None)
        if gathered is not None:
            self._after_load(gathered)
