"""Finds out whether a model trains on a machine, with which offload, and which smallest change makes it fit.

Every figure is that of the plan that an engine would make. The rungs are those of DeepSpeed's tutorials, from
everything in memory to everything on drives. Each one is slower than the one before, and needs less memory.
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
from infinity.plan.placement import HOST_KEY, with_codes_on_device
from infinity.plan.plan import Plan
from infinity.plan.sizes import UnitSize, guessed_order
from infinity.plan.staging_sizes import STAGING_KEY
from infinity.plan.volumes import Volumes
from infinity.torch_internals.names import without_compiler
from infinity.units.tiling import Tiling

FLOPS_PER_PARAMETER = 6
"""For one token: 2 in forward, 4 in backward. Activation checkpointing adds a second forward, so 8."""
# A multiplication and an addition per parameter. Backward needs two such products: gradients of inputs and of weights.
_FORWARD = 2
PLAIN: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {}},
    "zero_optimization": {"stage": 3},
}
"""The config if none is given."""
ON_CPU = (("none", "none"), ("none", "nvme"), ("nvme", "nvme"))
ON_GPU = (("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("none", "nvme"), ("cpu", "nvme"), ("nvme", "nvme"))
"""The choices that `infinity plan` compares, each as tiers of (weights, states)."""
_TILES = ("256MiB", "64MiB")  # of infinity.tile_above, the larger first: more tiles cost more time
MOST_LAYERS = 1 << 10
"""`Ladder.largest` tries no more layers: with tiny ones it would take minutes."""


@dataclass(frozen=True)
class Outcome:
    """The result of one config on a machine.

    Attributes:
        param_tier, optimizer_tier: "none", "cpu" or "nvme".
        changes: differences from the given config, by dotted key.
        plan: the engine's plan; None if the engine would refuse the config.
        minimum_bytes: the least host memory budget; 0 if a GPU's memory is too small.
        problem: why it does not fit; None if it does.
        lacks_room: whether memory or drives are too small; otherwise an engine would refuse the config on any machine.
    """

    param_tier: str
    optimizer_tier: str
    changes: Mapping[str, Any]
    plan: Plan | None
    minimum_bytes: int
    problem: str | None
    lacks_room: bool = True

    @property
    def fits(self) -> bool:
        """Whether it trains there."""
        return self.problem is None

    @property
    def seconds(self) -> float | None:
        """The least time of a step; None if the drives' speed is unknown."""
        seconds = None if self.plan is None else self.plan.predicted_step_seconds
        return seconds or None  # 0: nothing is moved, and the speed of computing is unknown

    def differences_from(self, given: Outcome) -> dict[str, Any]:
        """The changes that turn ``given`` into this one: keys with another value there, without directories."""
        same = {
            "zero_optimization.offload_param.device": given.param_tier,
            "zero_optimization.offload_optimizer.device": given.optimizer_tier,
        }
        changes = self.changes.items()
        return {k: v for k, v in changes if not k.endswith("nvme_path") and (k not in same or same[k] != v)}


class Ladder:
    """The choices of where weights and states are stored, for one model on one machine. Each choice is a rung.

    Rungs go from all in memory to all on drives: `ON_CPU`, `ON_GPU`.
    """

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
            model: may be on the meta device.
            config: the config to plan for; None: bf16 with AdamW.
            machine: the machine to plan for.
            nvme_path: directory for offload to drives, if the config names none.
            tokens: per step.
            room_bytes: returns how many bytes fit into directories; None: as ``machine`` says.
        """
        self._model = model
        self._source: ConfigSource = PLAIN if config is None else config
        self._machine = machine
        self._room_bytes = room_bytes or machine.room_bytes
        self._nvme_path = nvme_path
        self._tokens = tokens

    def given(self) -> Outcome:
        """The outcome of the config as it is."""
        return self.outcome({})

    def rungs(self) -> Iterator[Outcome]:
        """Yield the outcome of each choice that the rest of the config allows; that of the config itself if none is."""
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
        """The first change that fits, tried from the cheapest to the most intrusive; None if none does."""
        # In this order: staging buffers of the engine's own size (if the config's are the problem), a larger budget,
        # all free memory, keeping things in memory, the tiers below, the tiers above, large layers in tiles, narrower
        # states.
        lowest = self._tiers("nvme", "nvme")
        staging_buffer = {STAGING_KEY: None} if STAGING_KEY in (given.problem or "") else {}
        candidates: list[dict[str, Any]] = [{}] if staging_buffer else []
        # 5 % stay free: a budget of all free memory would leave nothing for the script and other programs.
        if given.minimum_bytes and given.minimum_bytes < 0.95 * self._machine.host_free_bytes:
            candidates.append({HOST_KEY: given.minimum_bytes})
        unlimited, kept = {HOST_KEY: None}, {"infinity.keep_in_memory": True}
        candidates += [unlimited, kept, {**unlimited, **kept}]
        rungs = ON_CPU if self._machine.uses_host_memory else ON_GPU
        present = (given.param_tier, given.optimizer_tier)
        place = rungs.index(present) if present in rungs else -1  # -1: all rungs count as below the config
        candidates += [self._tiers(*tiers) for tiers in (*rungs[place + 1 :], *rungs[: max(place, 0)][::-1])]
        candidates += [{**lowest, "infinity.tile_above": limit} for limit in _TILES]
        candidates += [{**lowest, "infinity.state_dtype": dtype} for dtype in ("bf16", "int8")]
        found = self._outcomes({**staging_buffer, **each} for each in candidates)
        return next((outcome for outcome in found if outcome.fits), None)

    def _outcomes(self, candidates: Iterable[Mapping[str, Any]]) -> Iterator[Outcome]:
        """Yield the outcomes of those changes that give a valid config: not every tier goes with every other key."""
        for keys in candidates:
            try:
                found = self.outcome(keys)
            except ConfigError:
                continue
            yield found

    def outcome(self, keys: Mapping[str, Any]) -> Outcome:
        """The outcome of the config with these changes.

        Raises:
            ConfigError: that config is not valid.
        """
        config = self._config(keys)
        cut = self._cut(config)
        tiers = (config.offload_param.device, config.offload_optimizer.device)
        try:
            inputs = self._inputs(config, *cut)
            plan = inputs.plan(*inputs.place(), self._room_bytes)
        except BudgetTooSmallError as error:
            memory, least, given = "memory", error.minimum_bytes, "given"
            if error.key != HOST_KEY:  # gradients and states have taken their part of it
                memory, least, given = "GPU memory for weights", 0, "left for them"
            have = f"{format_bytes(max(0, error.budget_bytes))} are {given}"
            too_small = f"{memory}: {format_bytes(error.minimum_bytes, is_least=True)} are needed at least, {have}"
            return Outcome(*tiers, keys, None, least, too_small)
        except (ConfigError, OptimizerNotPageableError) as error:  # as an engine would
            return Outcome(*tiers, keys, None, 0, str(error), lacks_room=False)
        machine = self._machine
        plan = dataclasses.replace(
            plan,
            drive_tbw=machine.drive_tbw or plan.drive_tbw,
            link_bytes_per_second=None if machine.uses_host_memory else machine.link_bytes_per_second,
            compute_seconds=self._compute_seconds(plan, config),
        )
        problem = inputs.volumes(plan.placement).problem(self._room_bytes)
        if problem is None and plan.host_budget_bytes > machine.host_free_bytes:
            taken = plan.placement.host_bytes(inputs.request)
            if taken > machine.host_free_bytes:
                free = format_bytes(machine.host_free_bytes)
                problem = f"the budget takes {format_bytes(taken)} of memory, and {free} are free"
        return Outcome(*tiers, keys, plan, plan.minimum_budget_bytes, problem)

    def _compute_seconds(self, plan: Plan, config: InfinityConfig) -> float | None:
        """Forward and backward, and updates by the CPU, as far as the machine's speeds are known."""
        machine, seconds = self._machine, 0.0
        if machine.flops_per_second:
            # A frozen parameter has no gradient of its own, but backward still computes that of its inputs: 4 in place
            # of 6. With LoRA (1 % trained) that is 6 - 2 * 0.99 = 4.02 FLOPs per parameter and token.
            trained = plan.num_trainable / max(plan.num_parameters, 1)
            whole = FLOPS_PER_PARAMETER - _FORWARD * (1 - trained) + 2 * config.infinity.activation_checkpointing
            per_parameter = whole if plan.num_trainable else _FORWARD
            num_active = plan.num_parameters * active_share(self._model)  # of a mixture of experts, those a token uses
            seconds = per_parameter * num_active * self._tokens / machine.flops_per_second
        if machine.updates_per_second and not plan.request.records_on_device:
            updates = plan.num_trainable / machine.updates_per_second
            # A GPU computes the next forward while the CPU updates; on the CPU both take the same processors.
            seconds = seconds + updates if machine.uses_host_memory else max(seconds, updates)
        return seconds or None

    def _config(self, keys: Mapping[str, Any]) -> InfinityConfig:
        return load_config(self._source, overrides=keys, world_size=1, check_storage=False)

    def _cut(self, config: InfinityConfig) -> tuple[nn.Module, WrappedOptimizer]:
        """The model, with tiles if the config asks for them, and its optimizer."""
        model, limit = self._model, config.infinity.tile_above
        if limit is not None or experts_of_config(model, config):
            model = copy.deepcopy(model)  # cheap on the meta device; the given model stays as it is for the next rung
        tiling = Tiling(model, limit, config.compute_dtype.itemsize, ())
        touched_only = config.infinity.experts == "touched_only"
        tiling.cut_experts(experts_of_config(model, config), touched_only=touched_only)
        fqns = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
        named = [(fqns[id(each)], each) for each in tiling.groups.with_tiles(model.parameters()) or ()]
        if not any(parameter.requires_grad for _, parameter in named):  # an engine makes no optimizer then either
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
        """The most layers with which a model like this one fits, everything on drives, and its number of parameters.

        At most `MOST_LAYERS`. None if the model has no repeated layers, or does not fit with one of them.
        """
        config = self._config(self._tiers("nvme", "nvme"))
        try:
            inputs = self._inputs(config, *self._cut(config))
        except (ConfigError, OptimizerNotPageableError):
            return None
        # The layer is the most frequent kind of unit, where units of equal sizes count as equal.
        kinds = [(size.weight_bytes, size.trainable_numel) for size in inputs.sizes]
        kind, num_layers = Counter(kinds).most_common(1)[0]
        if num_layers < 2:
            return None
        layers = [index for index, each in enumerate(kinds) if each == kind]

        def fits(count: int) -> bool:
            sizes, together = _repeated(inputs, layers, count)
            request = dataclasses.replace(inputs.request, used_together=together)
            order = guessed_order(len(sizes))
            try:
                sizes = with_codes_on_device(sizes, request)
                placement, _ = place_for_schedule(config.infinity.schedule, sizes, request, order)
            except BudgetTooSmallError:
                return False
            return Volumes.of(config, sizes, request, placement).problem(self._room_bytes) is None

        # Binary search: the index of the first count that does not fit, which is the number of counts that do. About 10
        # placements.
        count = bisect_left(range(1, MOST_LAYERS + 1), True, key=lambda count: not fits(count))
        numels = [sum(slot.numel for slot in unit.layout.slots) for unit in inputs.units]
        return None if not count else (count, sum(numels) + (count - num_layers) * numels[layers[0]])


def _repeated(
    inputs: PlanInputs, layers: Sequence[int], count: int
) -> tuple[list[UnitSize], tuple[frozenset[int], ...]]:
    """Sizes of the units, and the groups used together, of a model with ``count`` layers; ``layers``: the units that are."""
    # Fewer layers: the last ones are taken out. More: copies of the first are appended; their place does not matter.
    gone = set(layers[count:])
    kept = [index for index in range(len(inputs.sizes)) if index not in gone]
    new_index = {old: new for new, old in enumerate(kept)}
    sizes = [inputs.sizes[index] for index in kept] + [inputs.sizes[layers[0]]] * (count - len(layers))
    together = (frozenset(new_index[i] for i in each if i in new_index) for each in inputs.request.used_together)
    return sizes, tuple(filter(None, together))
