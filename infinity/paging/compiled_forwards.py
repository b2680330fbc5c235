"""torch.compile on a model whose parameters come and go.

[Note: compiled modules]
A graph must not begin before the unit's parameters are bound, nor span units. torch captures the frame of a module's
``forward``, and runs the hooks of that module, but of no module inside it, as ordinary code: so a compiled module keeps
the engine's hooks, and those inside it get none. What is captured is then what plain torch captures, to the bit.
``Module.compile`` puts the compiled call in the place of the whole call, hooks included, which leaves nobody a
``forward`` to take hold of; it is turned into a compiled ``forward``. For a module around several units that means: the
``forward`` of each block inside it is compiled, with the same settings.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from infinity.errors import ModelError

_CURE = "Compile its blocks instead: engine.compile(...) after infinity.initialize does that for all of them"


class InPlaceOfMethod:
    """A callable in a module's ``__dict__`` that hides a method of its class. A copy of the module has the method again."""

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._module = weakref.ref(module)
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self._module()))
        return self if copy is None else types.MethodType(getattr(type(copy), self._name), copy)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module(), self._name)  # of a module that has no attributes yet: its class's


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module, or its ``forward``, is compiled as a whole."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module, "_orig_mod")
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def inside_compiled(model: nn.Module) -> set[int]:
    """``id`` of every module inside a compiled one, these themselves left out."""
    inside: set[int] = set()
    for module in model.modules():
        if id(module) not in inside and is_compiled(module):
            inside.update(id(child) for child in module.modules() if child is not module)
    return inside


class CompiledForwards:
    """Turns compiled calls into compiled forwards, and back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._undo = contextlib.ExitStack()

    def move_into_blocks(self, blocks: Mapping[str, nn.Module]) -> None:
        """Leave nothing compiled that spans several blocks, and no compiled call.

        Args:
            blocks: by FQN, the modules that became units of their own.

        Raises:
            ModelError: something around several blocks was compiled, and cannot be taken apart.
        """
        for fqn, module in list(self._model.named_modules()):
            if not is_compiled(module):
                continue
            members = {id(child) for child in module.modules()} - {id(module)}
            spanned = [block for block in blocks.values() if id(block) in members]
            # torch.compile(block) wraps one.
            spans = len(spanned) > 1 or (module is self._model and bool(spanned))
            compiled = getattr(module, "_compiled_call_impl", None)
            if compiled is None and not spans:
                continue
            compile_function = _settings_of(compiled)
            if compiled is None or compile_function is None:
                name = fqn or type(getattr(module, "_orig_mod", module)).__name__
                problem = f"module '{name}' was compiled as a whole, and its parameters are not in memory all at once"
                raise ModelError(problem, cure=_CURE, fqn=fqn)
            self.put(module, "_compiled_call_impl", None)
            for part in spanned if spans else [module]:
                self.put(part, "forward", InPlaceOfMethod(part, "forward", compile_function(part.forward)))

    def compile_units(self, blocks: Callable[[], Sequence[nn.Module]]) -> None:
        """From now on ``model.compile(...)`` compiles each of the blocks that there are then."""

        def compile_each(*args: Any, **kwargs: Any) -> None:
            for block in blocks():
                block.compile(*args, **kwargs)

        self.put(self._model, "compile", InPlaceOfMethod(self._model, "compile", compile_each))

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Put something in the place of an attribute, or method, of a module, until `restore`."""
        put(self._undo, module, name, value)

    def restore(self) -> None:
        """The modules are as they were. May be repeated."""
        self._undo.close()


def put(undo: contextlib.ExitStack, module: nn.Module, name: str, value: Any) -> None:
    """Put something in the place of an attribute, or method, of a module, until ``undo`` is closed."""
    attributes = module.__dict__
    if name in attributes:
        undo.callback(attributes.__setitem__, name, attributes[name])
    else:
        undo.callback(attributes.pop, name, None)
    attributes[name] = value


def _settings_of(compiled: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """What ``torch.compile`` with the same arguments does to a function; None if this torch does not tell.

    The wrapper that ``torch.compile`` returns closes over its context, which has no public name (torch 2.6 to 2.13).
    """
    try:
        context = inspect.getclosurevars(compiled).nonlocals.get("self")
    except (TypeError, ValueError):
        return None
    return context if callable(context) else None


def refuse_tracing(module: nn.Module) -> None:
    """Raise `ModelError`: a graph of more than one unit is being made."""
    raise ModelError(
        f"torch.compile cannot trace {type(module).__name__} together with what is around it while an engine pages its "
        "parameters",
        cure=_CURE,
    )
