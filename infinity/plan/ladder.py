"""Will a model train on a machine, with which offload, and what is the smallest change that makes it.

Knows drafts and machines; every figure is that of the plan that an engine would make. The rungs are those of DeepSpeed's
tutorials: from everything in memory to everything on drives, each one slower than the one before and needing less memory.
"""

from __future__ import annotations

import copy
import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.config import InfinityConfig, load_config
from infinity.config.load import ConfigSource
from infinity.config.reading import tidy
from infinity.config.resolved import OptimizerSection
from infinity.config.schema.block import Findings
from infinity.device.host_memory import find_free_memory
from infinity.errors import BudgetTooSmallError, ConfigError, OptimizerNotPageableError, format_bytes
from infinity.optim.wrapped_optimizer import WrappedOptimizer, no_optimizer, wrap_optimizer
from infinity.plan.cost_model import place_for_schedule
from infinity.plan.inputs import PlanInputs, experts_of_config
from infinity.plan.machine import Machine, RoomBytes
from infinity.plan.model_shapes import active_share
from infinity.plan.placement import HOST_KEY
from infinity.plan.plan import Plan
from infinity.plan.sizes import UnitSize, guessed_order
from infinity.plan.staging_sizes import STAGING_KEY
from infinity.plan.volumes import Volumes
from infinity.torch_internals.names import without_compiler
from infinity.units.tiling import Tiling

FLOPS_PER_PARAMETER = 6
"""Of a token's forward and backward; 8 where blocks are computed once more (activation checkpointing)."""
_FORWARD = 2
"""Of a token's forward alone, where nothing is trained."""
PLAIN: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {}},
    "zero_optimization": {"stage": 3},
}
"""What is planned for where nobody gives a config."""
ON_CPU = (("none", "none"), ("none", "nvme"), ("nvme", "nvme"))
ON_GPU = (("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("none", "nvme"), ("cpu", "nvme"), ("nvme", "nvme"))
"""Where weights and states may go: the choices that `infinity plan` compares, each as tiers of (weights, states)."""
_TILES = ("256MiB", "64MiB")
MOST_LAYERS = 1 << 10
"""`Ladder.largest` looks no further: models of tiny layers could be stacked for minutes."""


@dataclass(frozen=True)
class Outcome:
    """What one config comes to on a machine.

    Attributes:
        param_tier, optimizer_tier: "none", "cpu" or "nvme".
        changes: what it differs in from the config that was given, by dotted key.
        plan: the engine's; None if it would refuse.
        minimum_bytes: the least host memory with which an engine begins; 0 where a GPU's is too small.
        problem: why it does not fit; None if it does.
        tokens: of a step.
        lacks_room: whether it is memory or drives that it does not fit into; else an engine would refuse it anywhere.
    """

    param_tier: str
    optimizer_tier: str
    changes: Mapping[str, Any]
    plan: Plan | None
    minimum_bytes: int
    problem: str | None
    tokens: int
    lacks_room: bool = True

    @property
    def fits(self) -> bool:
        """Whether it trains there."""
        return self.problem is None

    @property
    def seconds(self) -> float | None:
        """Of a step, at least; None if the drives' speed is unknown."""
        seconds = None if self.plan is None else self.plan.predicted_step_seconds
        return seconds or None

    def beyond(self, given: Outcome) -> dict[str, Any]:
        """Its changes whose values are not those of the config that was given; paths aside."""
        same = {
            "zero_optimization.offload_param.device": given.param_tier,
            "zero_optimization.offload_optimizer.device": given.optimizer_tier,
        }
        changes = self.changes.items()
        return {k: v for k, v in changes if not k.endswith("nvme_path") and (k not in same or same[k] != v)}


class Ladder:
    """All offload choices for one model on one machine."""

    def __init__(
        self,
        model: nn.Module,
        config: ConfigSource | None,
        machine: Machine,
        nvme_path: Any,
        tokens: int,
        room_bytes: RoomBytes | None = None,
    ) -> None:
        """
        Args:
            model: may lie on the meta device.
            config: what is planned for; None: bf16 with AdamW.
            machine: where.
            nvme_path: for what is offloaded to drives, where the config names no directory.
            tokens: of a step.
            room_bytes: looks at directories and says what they have room for; None: that is what ``machine`` says.
        """
        self._model = model
        self._source: ConfigSource = PLAIN if config is None else config
        self._machine = machine
        self._room_bytes = room_bytes or machine.room_bytes
        self._nvme_path = nvme_path
        self._tokens = tokens

    def given(self) -> Outcome:
        """The config as it is."""
        return self.outcome({})

    def rungs(self) -> Iterator[Outcome]:
        """Each choice of tiers that goes with the rest of the config as it is; the config's own if none does."""
        tiers = ON_CPU if self._machine.uses_host_memory else ON_GPU
        found = list(self._outcomes(self._tiers(*each) for each in tiers))
        yield from found or [self.given()]

    def _tiers(self, param: str, optimizer: str) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        zero = tidy(self._config({}), Findings()).get("zero_optimization", {})
        for name, tier in (("offload_param", param), ("offload_optimizer", optimizer)):
            keys[f"zero_optimization.{name}.device"] = tier
            if tier == "nvme" and not zero.get(name, {}).get("nvme_path"):
                keys[f"zero_optimization.{name}.nvme_path"] = self._nvme_path
        return keys

    def smallest_change(self, given: Outcome) -> Outcome | None:
        """The first that fits of: staging buffers of the engine's own size where the config's are too small, more of the memory
        that is free, the next rungs and those before, large layers in tiles, narrower states."""
        lowest = self._tiers("nvme", "nvme")
        staging_buffer = {STAGING_KEY: None} if STAGING_KEY in (given.problem or "") else {}
        candidates: list[dict[str, Any]] = [{}] if staging_buffer else []
        if given.minimum_bytes and given.minimum_bytes < 0.95 * self._machine.host_free_bytes:
            candidates.append({HOST_KEY: given.minimum_bytes})
        unlimited, kept = {HOST_KEY: None}, {"infinity.keep_in_memory": True}
        candidates += [unlimited, kept, {**unlimited, **kept}]
        rungs = ON_CPU if self._machine.uses_host_memory else ON_GPU
        present = (given.param_tier, given.optimizer_tier)
        place = rungs.index(present) if present in rungs else -1
        candidates += [self._tiers(*tiers) for tiers in (*rungs[place + 1 :], *rungs[: max(place, 0)][::-1])]
        candidates += [{**lowest, "infinity.tile_above": limit} for limit in _TILES]
        candidates += [{**lowest, "infinity.state_dtype": dtype} for dtype in ("bf16", "int8")]
        return next(
            (found for found in self._outcomes({**staging_buffer, **each} for each in candidates) if found.fits), None
        )

    def _outcomes(self, candidates: Iterable[Mapping[str, Any]]) -> Iterator[Outcome]:
        """Of those changes with which there is a config: not every tier goes with every other key."""
        for keys in candidates:
            try:
                found = self.outcome(keys)
            except ConfigError:
                continue
            yield found

    def outcome(self, keys: Mapping[str, Any]) -> Outcome:
        """What the config with these changes comes to.

        Raises:
            ConfigError: there is no config with them.
        """
        config = self._config(keys)
        cut = self._cut(config)
        tiers = (config.offload_param.device, config.offload_optimizer.device)
        try:
            inputs = self._inputs(config, *cut)
            tracker = inputs.tracker(*inputs.place(), self._room_bytes, self._machine.bandwidth)
        except BudgetTooSmallError as error:
            least = error.minimum_bytes if error.key == HOST_KEY else 0
            return Outcome(*tiers, keys, None, least, _too_small(error), self._tokens)
        except (ConfigError, OptimizerNotPageableError) as error:  # as an engine would
            return Outcome(*tiers, keys, None, 0, str(error), self._tokens, lacks_room=False)
        plan = tracker.first
        machine = self._machine
        speed = machine.flops_per_second
        is_trained = plan.num_trainable > 0
        # What is frozen has no gradients of its own, only passes on those of its inputs.
        trained = plan.num_trainable / max(plan.num_parameters, 1)
        whole = FLOPS_PER_PARAMETER - _FORWARD * (1 - trained) + 2 * config.infinity.activation_checkpointing
        per_parameter = whole if is_trained else _FORWARD
        num_active = plan.num_parameters * active_share(self._model)
        plan = dataclasses.replace(
            plan,
            drive_tbw=machine.drive_tbw or plan.drive_tbw,
            link_bytes_per_second=None if machine.uses_host_memory else machine.link_bytes_per_second,
            compute_seconds=None if not speed else per_parameter * num_active * self._tokens / speed,
        )
        problem = inputs.volumes(plan.placement).problem(self._room_bytes)
        if problem is None and plan.host_budget_bytes > machine.host_free_bytes:
            taken = plan.placement.host_bytes(inputs.request)
            if taken > machine.host_free_bytes:
                free = format_bytes(machine.host_free_bytes)
                problem = f"the budget takes {format_bytes(taken)} of memory, of which {free} are free"
        return Outcome(*tiers, keys, plan, plan.minimum_budget_bytes, problem, self._tokens)

    def _config(self, keys: Mapping[str, Any]) -> InfinityConfig:
        return load_config(self._source, overrides=keys, world_size=1, check_storage=False)

    def _cut(self, config: InfinityConfig) -> tuple[nn.Module, WrappedOptimizer]:
        """The model, in tiles if it is to be, and its optimizer."""
        model, limit = self._model, config.infinity.tile_above
        if limit is not None or experts_of_config(model, config):
            model = copy.deepcopy(model)  # without data: tiles are not taken back
        tiling = Tiling(model, limit, config.compute_dtype.itemsize, ())
        touched_only = config.infinity.experts == "touched_only"
        tiling.cut_experts(experts_of_config(model, config), touched_only=touched_only)
        fqns = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
        named = [(fqns[id(each)], each) for each in tiling.groups.with_tiles(model.parameters()) or ()]
        if not any(parameter.requires_grad for _, parameter in named):  # as an engine: it evaluates only
            return model, no_optimizer(named, torch.device("cpu"))
        source = config.optimizer or OptimizerSection("AdamW", {})
        with without_compiler():
            return model, wrap_optimizer(source, named, torch.device("cpu"), tiled=tiling.groups)

    def _inputs(self, config: InfinityConfig, model: nn.Module, wrapped_optimizer: WrappedOptimizer) -> PlanInputs:
        machine = self._machine
        free_memory = find_free_memory(holds_activations=machine.uses_host_memory, all_bytes=machine.host_free_bytes)
        with without_compiler():
            return PlanInputs.of(
                model,
                config,
                wrapped_optimizer,
                free_memory,
                uses_host_memory=machine.uses_host_memory,
                device_free_bytes=machine.device_free_bytes,
                bandwidth=machine.bandwidth,
            )

    # ---------------------------------------------------------------------------------------------------------- largest

    def largest(self) -> tuple[int, int] | None:
        """The most layers with which a model like this one trains here, everything on drives, and its parameters.

        It looks no further than `MOST_LAYERS`. None if it has no repeated layers, or does not train with one of them.
        """
        config = load_config(self._source, overrides=self._tiers("nvme", "nvme"), world_size=1, check_storage=False)
        try:
            inputs = self._inputs(config, *self._cut(config))
        except (ConfigError, OptimizerNotPageableError):
            return None
        layers = _Layers.of(inputs)
        if layers is None:
            return None

        def fits(count: int) -> bool:
            sizes, together = layers.repeated(count)
            request = dataclasses.replace(inputs.request, used_together=together)
            order = guessed_order(len(sizes))
            try:
                placement, _ = place_for_schedule(config.infinity.schedule, sizes, request, order)
            except BudgetTooSmallError:
                return False
            return Volumes.of(config, sizes, request, placement).problem(self._room_bytes) is None

        count = bisect_left(range(1, MOST_LAYERS + 1), True, key=lambda count: not fits(count))
        return None if not count else (count, layers.num_parameters(count))


def _too_small(error: BudgetTooSmallError) -> str:
    memory = "memory" if error.key == HOST_KEY else "GPU memory"
    least, given = error.minimum_bytes, max(0, error.budget_bytes)
    return f"{memory}: {format_bytes(least)} are needed at least, {format_bytes(given)} are given"


@dataclass(frozen=True)
class _Layers:
    """A model as layers that repeat, and the rest."""

    sizes: Sequence[UnitSize]
    used_together: tuple[frozenset[int], ...]
    repeated_at: Sequence[int]
    others_numel: int
    layer_numel: int

    @classmethod
    def of(cls, inputs: PlanInputs) -> _Layers | None:
        kinds = Counter((size.weight_bytes, size.trainable_numel) for size in inputs.sizes)
        kind, count = kinds.most_common(1)[0]
        if count < 2:
            return None
        at = [i for i, size in enumerate(inputs.sizes) if (size.weight_bytes, size.trainable_numel) == kind]
        numels = [sum(slot.numel for slot in unit.layout.slots) for unit in inputs.units]
        layer = numels[at[0]]
        return cls(inputs.sizes, inputs.request.used_together, at, sum(numels) - layer * count, layer)

    def repeated(self, count: int) -> tuple[list[UnitSize], tuple[frozenset[int], ...]]:
        """Sizes and what is used together, with so many layers."""
        gone = set(self.repeated_at[count:])
        kept = [index for index in range(len(self.sizes)) if index not in gone]
        new_index = {old: new for new, old in enumerate(kept)}
        sizes = [self.sizes[index] for index in kept]
        sizes += [self.sizes[self.repeated_at[0]]] * (count - len(self.repeated_at))
        together = tuple(frozenset(new_index[i] for i in each if i in new_index) for each in self.used_together)
        return sizes, tuple(each for each in together if each)

    def num_parameters(self, count: int) -> int:
        return self.others_numel + count * self.layer_numel
