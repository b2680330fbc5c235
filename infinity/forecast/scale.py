"""The same training on 1, 2, 4, ... 512 ranks: what each holds and moves, and how long a step takes. Nothing is measured.

Knows plans and clusters; must not know processes, or how anything is shown.

[Note: what is counted]
Every rank is planned by the engine's own draft, for its share of the states and of its node: N ranks of a node have 1/N of
its memory and of its drives each, so drives add up with the nodes (the paper's bandwidth-centric partitioning). Ranks
have the same number of tokens each, whatever their number: weak scaling. Per step and rank, with T trainable elements and
model weights of W bytes, of which w belong to what trains:

    stage       sent and received                 over PCIe to the GPU       from it
    0           8 T        all-reduce in fp32     weights that do not rest   gradients in the compute dtype, each
    1, 2        4 T + w    means to owners, new   there, for each pass; new  micro-batch; nothing where states rest
                           weights to all         ones of those that do      on the GPU
    3           4 T + 2 W for each pass           1/N of that                1/N of that

A pass is a forward with its backward: one per micro-batch, or one in all with the vertical schedule. What is sent is times
(N-1)/N, as in a ring, which goes through each node's network once. Where weights are divided within groups of G ranks
(``zero_hpz_partition_size``), a pass sends 2 W (G-1)/G, which stays inside a node that has the group, and a step w (N/G-1)/N
besides: what a rank has updated goes to its likes in the other groups. Activations, latencies, the optimizer's arithmetic and
waiting for the slowest rank are not counted.
Stage 3 in full is a model of 1/N the size, with room for the gathered weights of those units that are needed together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from infinity.config.load import ConfigSource
from infinity.forecast.efficiency import StepTime
from infinity.forecast.ladder import Ladder, Outcome, Part
from infinity.forecast.machine import Machine
from infinity.planning.bandwidth_cache import Bandwidth
from infinity.planning.inputs import FP32_BYTES
from infinity.planning.plan import Plan

NUM_RANKS = tuple(1 << power for power in range(10))
"""1 to 512."""
STAGES = (0, 1, 2, 3)
DRIVES, PCIE, LINK, NETWORK = "drives", "PCIe", "link", "network"
MODEL, STATES = "weights and gradients", "optimizer states"


@dataclass(frozen=True)
class Cluster:
    """Equal nodes, with equal GPUs.

    Attributes:
        node: one of them: its memory and drives, and of one of its GPUs the memory and the speed.
        gpus_per_node: each has a rank.
        pcie_bytes_per_second: between host and one GPU, each way, while all are busy. None: no limit.
        link_bytes_per_second: of one GPU, to and from others of its node, each way. None: no limit.
        network_bytes_per_second: of one node, to and from others, each way. None: no limit.
    """

    node: Machine
    gpus_per_node: int
    pcie_bytes_per_second: float | None = None
    link_bytes_per_second: float | None = None
    network_bytes_per_second: float | None = None

    def num_nodes(self, num_ranks: int) -> int:
        """On which so many ranks are."""
        return -(-num_ranks // self.gpus_per_node)

    def share(self, num_ranks: int) -> Machine:
        """What one of so many ranks has of its node."""
        sharing, node = min(num_ranks, self.gpus_per_node), self.node
        speed = node.bandwidth
        if speed is not None:
            speed = Bandwidth(
                speed.read_bytes_per_second / sharing,
                speed.write_bytes_per_second / sharing,
                speed.mixed_bytes_per_second / sharing,
                speed.measured_at,
            )
        return dataclasses.replace(
            node,
            host_free_bytes=node.host_free_bytes // sharing,
            drive_free_bytes=None if node.drive_free_bytes is None else node.drive_free_bytes // sharing,
            bandwidth=speed,
            has_its_drives=node.has_its_drives and sharing == 1,
        )


@dataclass(frozen=True)
class Scaled:
    """One training on so many ranks.

    Attributes:
        stage: of ZeRO.
        num_ranks, num_nodes: that train together.
        outcome: what one of the ranks comes to.
        sent_bytes: per step and rank, to other ranks; as many are received.
        network_bytes: those of them that go through a node's network, where there are several nodes.
        time: of a step; None where it does not fit, or nobody knows how fast drives or processors are.
    """

    stage: int
    num_ranks: int
    num_nodes: int
    outcome: Outcome
    sent_bytes: int
    network_bytes: int
    time: StepTime | None

    @property
    def tokens(self) -> int:
        """Of a step, all ranks together."""
        return self.outcome.tokens * self.num_ranks

    @property
    def tokens_per_second(self) -> float | None:
        """At most: everything overlaps."""
        return None if self.time is None else self.tokens / self.time.overlapped_seconds


class Scale:
    """One model and config on a cluster, with any number of ranks."""

    def __init__(
        self,
        model: nn.Module,
        config: ConfigSource | None,
        cluster: Cluster,
        nvme_path: Sequence[str],
        tokens: int,
        offload: str | None = None,
    ) -> None:
        """
        Args:
            model: may lie on the meta device.
            config: what is planned for; None: bf16 with AdamW, with whatever is offloaded that has to be.
            cluster: where.
            nvme_path: for what is offloaded to drives.
            tokens: of a step and rank.
            offload: one of `offloads.OFFLOADS`; None: the config's, or the least that fits.
        """
        self._model = model
        self._config = config
        self._cluster = cluster
        self._nvme_path = list(nvme_path)
        self._tokens = tokens
        self._offload = offload
        self._taken: dict[tuple[int, int], Scaled] = {}

    def choices(self, stage: int, num_ranks: int) -> Iterator[Scaled]:
        """Each choice of what is offloaded, the least first."""
        for outcome in self._ladder(stage, num_ranks).rungs():
            yield self._scaled(stage, num_ranks, outcome)

    def taken(self, stage: int, num_ranks: int) -> Scaled:
        """The choice that is asked for, or the config's; without both, the first that fits, or the last."""
        alike = (1 if stage == 2 else stage, num_ranks)  # they differ in nothing that is counted
        if alike not in self._taken:
            self._taken[alike] = self._chosen(*alike)
        return dataclasses.replace(self._taken[alike], stage=stage)

    def _chosen(self, stage: int, num_ranks: int) -> Scaled:
        if self._offload is not None:
            param, _, optimizer = self._offload.partition("/")
            return self._scaled(stage, num_ranks, self._ladder(stage, num_ranks).rung(param, optimizer))
        if self._config is not None:
            return self._scaled(stage, num_ranks, self._ladder(stage, num_ranks).given())
        for last in self.choices(stage, num_ranks):  # there is one at least
            if last.outcome.fits:
                break
        return last

    def _ladder(self, stage: int, num_ranks: int) -> Ladder:
        machine = self._cluster.share(num_ranks)
        part = Part(num_ranks, stage)
        return Ladder(self._model, self._config, machine, self._nvme_path, self._tokens, part)

    def _scaled(self, stage: int, num_ranks: int, outcome: Outcome) -> Scaled:
        nodes, plan = self._cluster.num_nodes(num_ranks), outcome.plan
        group = min(outcome.weight_group_size or num_ranks, num_ranks)
        elsewhere, inside = (
            (0, 0) if plan is None else _sent_bytes(plan, outcome.weight_itemsize, stage, num_ranks, group)
        )
        through_network = elsewhere + inside * (group > self._cluster.gpus_per_node)
        sent = elsewhere + inside
        time = None if plan is None else self._time(outcome, plan, stage, num_ranks, sent, through_network)
        return Scaled(stage, num_ranks, nodes, outcome, sent, through_network if nodes > 1 else 0, time)

    def _time(
        self, outcome: Outcome, plan: Plan, stage: int, num_ranks: int, sent_bytes: int, network_bytes: int
    ) -> StepTime | None:
        cluster = self._cluster
        if not outcome.fits or plan.compute_seconds is None or plan.predicted_io_seconds is None:
            return None
        moved = plan.predicted_read_bytes_per_step + plan.predicted_write_bytes_per_step
        states = sum(outcome.moved_kinds.get("optimizer state", (0, 0)))
        of_states = plan.predicted_io_seconds * states / moved if moved else 0.0
        model = {DRIVES: plan.predicted_io_seconds - of_states}
        if cluster.pcie_bytes_per_second and not cluster.node.shares_host_memory:
            model[PCIE] = _pcie_bytes(outcome, plan, stage, num_ranks) / cluster.pcie_bytes_per_second
        if cluster.link_bytes_per_second:
            model[LINK] = sent_bytes / cluster.link_bytes_per_second
        if cluster.network_bytes_per_second and cluster.num_nodes(num_ranks) > 1:
            model[NETWORK] = network_bytes / cluster.network_bytes_per_second
        return StepTime(plan.compute_seconds, {MODEL: model, STATES: {DRIVES: of_states}})


def _sent_bytes(plan: Plan, weight_itemsize: int, stage: int, num_ranks: int, group: int) -> tuple[int, int]:
    """By a rank in a step, among all, and inside its group of those that divide weights."""
    trained = plan.num_trainable
    if stage < 3:
        volume = 2 * FP32_BYTES if stage == 0 else FP32_BYTES + weight_itemsize
        return volume * trained * (num_ranks - 1) // num_ranks, 0
    means = FP32_BYTES * trained * (num_ranks - 1) // num_ranks
    new_weights = weight_itemsize * trained * (num_ranks // group - 1) // num_ranks
    return means + new_weights, 2 * _passes(plan) * _weight_bytes(plan) * (group - 1) // group


def _pcie_bytes(outcome: Outcome, plan: Plan, stage: int, num_ranks: int) -> int:
    """To the GPU or from it, whichever is more: both ways are busy at the same time."""
    resident = sum(plan.units[index][1] for index in plan.placement.resident_units)
    updates_there = outcome.optimizer_tier == "none"
    up = 2 * _passes(plan) * (_weight_bytes(plan) - resident) + (0 if updates_there else resident)
    down = 0 if updates_there else plan.num_micro_batches * outcome.weight_itemsize * plan.num_trainable
    return max(up, down) // (num_ranks if stage == 3 else 1)


def _passes(plan: Plan) -> int:
    return 1 if plan.traffic.is_vertical else plan.num_micro_batches


def _weight_bytes(plan: Plan) -> int:
    return sum(size for _, size in plan.units)


def beyond(stages: Sequence[int]) -> list[str]:
    """What in these forecasts the engine does not do yet."""
    lines = [
        "Ranks exchange through host memory today, by gloo between machines; links are taken as if they did so directly."
    ]
    if 3 in stages:
        lines.append(
            "Stage 3 is shown in full: weights divided wherever they rest, gathered for each pass. Today's engine keeps them "
            'whole on each GPU where offload_param is "none" and they fit there.'
        )
    return lines


def as_plain(scaled: Scaled) -> Mapping[str, Any]:
    """For JSON; bytes are per rank."""
    time = scaled.time
    return {
        "stage": scaled.stage,
        "num_gpus": scaled.num_ranks,
        "num_nodes": scaled.num_nodes,
        **scaled.outcome.as_plain(),
        "sent_bytes_per_step": scaled.sent_bytes,
        "network_bytes_per_step": scaled.network_bytes,
        "busy_seconds": None if time is None else time.busy_seconds,
        "bound_by": None if time is None else time.bound_by,
        "step_seconds": None if time is None else time.overlapped_seconds,
        "step_seconds_without_overlap": None if time is None else time.seconds,
        "tokens_per_step": scaled.tokens,
        "tokens_per_second": scaled.tokens_per_second,
        "efficiency": None if time is None else time.efficiency,
        "efficiency_with_overlap": None if time is None else time.overlapped_efficiency,
    }
