"""Builds an engine: makes its parts, moves the model's weights into them, and connects the engine."""

from __future__ import annotations

import contextlib
from typing import TypeVar

from torch import nn

from infinity.config import InfinityConfig
from infinity.device.compute import ComputeDevice
from infinity.device.host_memory import trim_heap
from infinity.distributed.meshes import Mesh
from infinity.engine.engine import Engine
from infinity.engine.parts import Parts
from infinity.optim.wrapped_optimizer import WrappedOptimizer
from infinity.units.buffers import BufferCast, buffers_of, restore_buffers
from infinity.units.originals import Originals

EngineClass = TypeVar("EngineClass", bound=Engine)


def build(
    engine_class: type[EngineClass],
    model: nn.Module,
    config: InfinityConfig,
    wrapped_optimizer: WrappedOptimizer,
    device: ComputeDevice,
    mesh: Mesh,
    undo: contextlib.ExitStack,
    engine: EngineClass | None = None,
    before: Parts | None = None,
) -> tuple[EngineClass, Originals]:
    """Make the parts, and move the model's weights and the optimizer's states into them.

    Args:
        engine_class: of a new engine.
        mesh: who has which part of the model.
        undo: gets callbacks that undo everything, for a failure before the engine is the caller's.
        engine: for a relayout: gets the new parts. None: a new engine is made.
        before: for a relayout: the engine's present parts.

    Returns:
        The engine, and a record of what its parameters were before.

    Raises:
        BudgetTooSmallError, ConfigError: the config asks for something that is not possible here.
    """
    # Opens files and memory, and raises what the config cannot have. The model is unchanged until `store_model`.
    parts = Parts(model, config, wrapped_optimizer, device, mesh, undo, before)
    buffers = BufferCast(model, parts.config.compute_dtype, parts.config.buffer_dtype)
    originals = Originals(
        parts.plan.units,
        cuts_nans=parts.plan.has_remainder,
        stored=parts.access.stored,
        open_space=parts.storage.open_more,
        close_space=parts.storage.close_more,
    )
    # Undo runs in reverse: hooks go first, then buffers and parameters become ordinary again, then the optimizer gets
    # its states back. All of that is read from the engine's storage, so the engine is closed last. It does not exist
    # yet, hence a stack for its close.
    built = undo.enter_context(contextlib.ExitStack())
    undo.callback(wrapped_optimizer.restore_states, parts.access.state)
    undo.callback(originals.restore)  # what is paged out comes back, as far as it can be read
    undo.callback(restore_buffers, buffers_of(model))
    undo.callback(parts.module_hooks.uninstall)
    parts.store_model(originals, undo)
    if engine is None:
        engine = engine_class(parts.config, parts)
    else:
        engine.relay(parts)
    built.callback(engine.close, restore_weights=False)
    buffers.apply(device.torch_device)
    parts.module_hooks.handles_of_others.append(buffers.explain_failures())
    # The originals were freed unit by unit, and the heap keeps their memory in gaps.
    trim_heap()
    return engine, originals
