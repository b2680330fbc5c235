"""Groups of ranks that divide states, each group for itself: ``mics_shard_size``, and ``dp_replicate`` of a DeviceMesh.

And smaller ones that divide weights: ``zero_hpz_partition_size``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import infinity
from infinity.errors import ConfigError, ModelError
from swapper import TransferRecord
from tests.distributed.common import offload, require_same, states_of, weights_of
from tests.internals import Pulls, predict, world
from tests.ranks import require_ranks

pytestmark = pytest.mark.deep

_WIDTH = 96


class _Model(nn.Module):
    def __init__(self, width: int = _WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(width, 4)
        self.rarely = nn.Linear(width, 4, bias=False)

    def forward(self, x: torch.Tensor, *, is_rare: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        found: torch.Tensor = self.rarely(x) if is_rare else self.head(x)
        return found


def _config(directory: Path, stage: int, tier: str = "none", size: int = -1, **changes: Any) -> dict[str, Any]:
    where = offload(tier, directory)
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": where, "mics_shard_size": size}
    if stage == 3:
        zero["offload_param"] = where
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    section = {"progress_bars": False} | ({"keep_in_memory": False} if tier == "nvme" else {})
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.05,
        "optimizer": adam,
        "zero_optimization": zero,
        "infinity": section,
    } | changes


def _step(engine: Any, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    width = engine.module.head.in_features
    x, y = torch.randn(4, width, generator=generator), torch.randn(4, 4, generator=generator)
    loss = mse_loss(engine(x.to(engine.config.compute_dtype), is_rare=number == rank).float(), y)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def _trained(config: dict[str, Any], rank: int, **options: Any) -> dict[str, torch.Tensor]:
    with infinity.initialize(model=_Model(), config=config, **options)[0] as engine:
        found: dict[str, torch.Tensor] = {}
        for number in range(4):
            found[f"loss {number}"] = _step(engine, rank, number)
            found[f"norm {number}"] = torch.tensor(engine.get_global_grad_norm())
        return found | weights_of(engine) | states_of(engine)


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, {"fp16": {"enabled": True}}, {"communication_data_type": "bf16"}])
def test_groups_of_any_size_give_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    def train(rank: int) -> None:
        expected = _trained(_config(tmp_path, 0, **changes), rank)
        for stage, tier, size in [(1, "nvme", 2), (2, "cpu", 2), (3, "nvme", 2), (3, "none", 1), (3, "nvme", 4)]:
            require_same(_trained(_config(tmp_path, stage, tier, size, **changes), rank), expected)

    require_ranks(4, train, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("names", [("dp_replicate", "dp_shard"), ("shard", "replicate")])
def test_a_mesh_says_who_has_copies(names: tuple[str, str], tmp_path: Path) -> None:
    def train(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        expected = _trained(_config(tmp_path, 0), rank)
        config = _config(tmp_path, 3, "nvme")
        with infinity.initialize(model=_Model(), config=config, mesh_param=mesh)[0] as engine:
            division = engine._parts.exchange.division
            mine = mesh.mesh.tolist()[rank // 2] if names[1] == "dp_shard" else mesh.mesh.t().tolist()[rank % 2]
            assert list(division.sharers.members) == mine and division.copies.num == 2
        require_same(_trained(config, rank, mesh_param=mesh), expected)

    require_ranks(4, train, tmp_path)


def test_what_a_group_divides_and_sends(tmp_path: Path) -> None:
    """States and weights are divided by the group's size; weights go between its members alone."""

    def train(rank: int) -> None:
        kept, sent = {}, {}
        for size in (2, 4):
            with infinity.initialize(model=_Model(512), config=_config(tmp_path, 3, "nvme", size))[0] as engine:
                units = engine._parts.parameter_map.units
                kept[size] = sum(unit.extent.num_bytes for unit in units if unit.extent is not None)
                before = world().sent_bytes["gradients"]
                for number in range(10, 12):
                    _step(engine, rank, number)
                division = engine._parts.exchange.division
                group = division.sharers
                assert group.num == size and all(member // size == rank // size for member in group.members)
                copies = division.copies.sent_bytes["gradients"] if size == 2 else 0
                sent[size] = world().sent_bytes["gradients"] - before, copies
        whole = sum(unit.num_bytes for unit in units if unit.extent is not None)
        assert kept[2] == pytest.approx(whole / 2, rel=0.02) and kept[4] == pytest.approx(whole / 4, rel=0.02)
        assert sent[2][0] == pytest.approx(sent[4][0], rel=0.02)  # to means of parts
        assert sent[2][1] == pytest.approx(sent[2][0] / 3, rel=0.02)  # which those with the same share exchange

    require_ranks(4, train, tmp_path)


@pytest.mark.deep
def test_a_durable_run_of_groups_goes_on(tmp_path: Path) -> None:
    def run(size: int, first: int, last: int) -> Callable[[int], None]:
        def train(rank: int) -> None:
            config = _config(tmp_path / "drive", 3, "nvme", size)
            config["infinity"] |= {"durable": True}
            with infinity.initialize(model=_Model(), config=config)[0] as engine:
                assert engine.global_steps == first
                for number in range(first, last):
                    _step(engine, rank, number)
                torch.save(weights_of(engine) | states_of(engine), tmp_path / f"state {size} {last} {rank}")

        return train

    for name in ("once", "twice", "other"):
        (tmp_path / name).mkdir()
    require_ranks(4, run(2, 0, 2), tmp_path / "once")
    require_ranks(4, run(2, 2, 4), tmp_path / "twice")

    def refused(rank: int) -> None:
        with pytest.raises(ModelError, match="divides states among 2 processes, not 4"):
            run(4, 4, 5)(rank)
        expected = _trained(_config(tmp_path, 0), rank)
        found = torch.load(tmp_path / f"state 2 4 {rank}")
        require_same(found, {name: value for name, value in expected.items() if name in found})

    require_ranks(4, refused, tmp_path / "other")


def _near(config: dict[str, Any], size: int) -> dict[str, Any]:
    """The config with weights divided among so many."""
    return config | {"zero_optimization": config["zero_optimization"] | {"zero_hpz_partition_size": size}}


def _used(config: dict[str, Any], rank: int, directory: Path) -> dict[str, torch.Tensor]:
    """What comes of a training in which weights and main weights are read and replaced, and of a checkpoint of it."""
    with infinity.initialize(model=_Model(), config=config)[0] as engine:
        found = {f"loss {number}": _step(engine, rank, number) for number in range(2)}
        for parameter in (engine.module.layers[0].weight, engine.module.head.weight):
            main = infinity.safe_get_full_fp32_param(parameter)
            assert main is not None
            infinity.safe_set_full_fp32_param(parameter, main * 1.3)
        with torch.no_grad():
            engine.module.layers[1].weight.mul_(0.75)
            engine.module.head.weight.data.add_(0.01)
            with infinity.GatheredParameters(engine.module.layers[2].parameters(), modifier_rank=1):
                if rank == 1:
                    engine.module.layers[2].weight.mul_(1.1)
        found["loss 2"] = _step(engine, rank, 2)
        engine.module.load_state_dict({n: v * 0.5 for n, v in engine.module.state_dict().items()})
        found["loss 3"] = _step(engine, rank, 3)
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        engine.save_checkpoint(directory / "saved", tag="last")
        found |= {f"then {number}": _step(engine, rank, number) for number in range(4, 6)}
        found |= weights_of(engine) | states_of(engine)
        engine.load_checkpoint(directory / "saved", tag="last")
        assert [found[f"then {number}"] for number in range(4, 6)] == [
            _step(engine, rank, number) for number in range(4, 6)
        ]
        require_same(found | weights_of(engine) | states_of(engine), found)
    return found


@pytest.mark.deep
@pytest.mark.parametrize(
    ("num", "kinds", "changes"),
    [
        (4, [("nvme", -1, 2)], {"bf16": {"enabled": True}}),
        (4, [("cpu", -1, 2), ("none", -1, 2)], {"gradient_accumulation_steps": 2}),
        (6, [("nvme", -1, 2)], {}),
        (8, [("nvme", 4, 2)], {"fp16": {"enabled": True}}),
    ],
)
def test_weights_divided_among_fewer_have_the_same_bits(
    num: int, kinds: list[tuple[str, int, int]], changes: dict[str, Any], tmp_path: Path
) -> None:
    def train(rank: int) -> None:
        expected = _used(_config(tmp_path, 0, **changes), rank, tmp_path)
        for tier, size, near in kinds:
            config = _near(_config(tmp_path, 3, tier, size, **changes), near)
            config["infinity"] |= {"keep_in_memory": False}
            require_same(_used(config, rank, tmp_path), expected)

    require_ranks(num, train, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("written", "others"),
    [((3, 2, None), [(3, 4, None), (0, -1, None), (1, 1, None)]), ((3, -1, 2), [(3, -1, None), (0, -1, None)])],
    ids=["copies", "small-groups"],
)
def test_checkpoints_and_exports_of_groups(
    written: tuple[int, int, int | None], others: list[tuple[int, int, int | None]], tmp_path: Path
) -> None:
    """Each with its stage, ``mics_shard_size`` and ``zero_hpz_partition_size``."""

    def config_of(stage: int, size: int, near: int | None) -> dict[str, Any]:
        config = _config(tmp_path, stage, "nvme", size)
        return config if near is None else _near(config, near)

    def train(rank: int) -> None:
        with infinity.initialize(model=_Model(), config=config_of(*written))[0] as engine:
            for number in range(2):
                _step(engine, rank, number)
            engine.save_checkpoint(tmp_path / "saved")
            engine.save_16bit_model(tmp_path / "exported")
            weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
            then = [_step(engine, rank, number) for number in range(2, 4)]
            expected = weights_of(engine) | states_of(engine)
        exported: dict[str, torch.Tensor] = {}
        for path in (tmp_path / "exported").glob("*.safetensors"):
            exported |= load_file(path)
        require_same(exported, weights)
        for other in (written, *others):
            with infinity.initialize(model=_Model(), config=config_of(*other))[0] as engine:
                engine.load_checkpoint(tmp_path / "saved")
                assert [_step(engine, rank, number) for number in range(2, 4)] == then
                require_same(weights_of(engine) | states_of(engine), expected)

    require_ranks(4, train, tmp_path)


@pytest.mark.deep
def test_what_small_groups_keep_read_write_and_send(tmp_path: Path) -> None:
    """Weights are divided by the small group's size, states by all; fetches stay inside, new weights go once to the others."""

    def train(rank: int) -> None:
        kept, sent = {}, {}
        for near in (2, 4):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))
            config = _near(_config(tmp_path, 3, "nvme", optimizer={"type": "SGD", "params": {"lr": 0.01}}), near)
            config["infinity"] |= {"host_memory_budget": "900KB"}
            asked: set[int] = set()
            send = Pulls.send

            def noting(
                pulls: Pulls, what: str, to: int, *numbers: int, asked: set[int] = asked, send: Any = send
            ) -> None:
                asked.add(to)
                send(pulls, what, to, *numbers)

            Pulls.send = noting  # type: ignore[method-assign]  # in this process, which ends soon
            with infinity.initialize(model=model, config=config)[0] as engine:
                storage, exchange = engine._parts.storage, engine._parts.exchange
                units, own = engine._parts.parameter_map.units, exchange._holders
                whole = sum(unit.num_bytes for unit in units)
                assert all(exchange.divides(unit) for unit in units)
                written: Counter[str] = Counter()

                def note(record: TransferRecord, written: Counter[str] = written) -> None:
                    if "weights of" in record.extent_name:
                        written[record.direction.name] += record.num_bytes

                storage.observe(note)
                before = world().sent_bytes["fetches"], own.sent_bytes["weights"]
                for _ in range(2):
                    engine.backward(engine(torch.ones(2, 128, requires_grad=True)).sum())
                    engine.step()
                    engine.flush()
                    infinity.deepspeed.comm.barrier()
                trace = engine._parts.pager.residency.training_trace
                given = storage._sizes, storage._request, storage._placement, trace.order, trace.backward_start
                predicted = predict(*given).kinds["weights"]
                resting = storage.resting_bytes()["nvme"]
                kept[near] = resting["weights"] / whole
                sent[near] = own.sent_bytes["weights"] - before[1]
                assert written["WRITE"] / 2 == predicted[1] == whole / near
                assert 0.5 * predicted[0] <= written["READ"] / 2 <= 2 * predicted[0]
                assert asked == {other for other in range(4) if other // near == rank // near and other != rank}
            Pulls.send = send  # type: ignore[method-assign]
        assert kept == {2: 1 / 2, 4: 1 / 4}
        assert sent == {2: 2 * whole / 4, 4: 0}

    require_ranks(4, train, tmp_path)


def test_sizes_that_do_not_fit_are_refused() -> None:
    weights = _near(_config(Path("/tmp"), 3), 3)
    with pytest.raises(ConfigError, match=r"zero_hpz_partition_size.*into groups of 3\. Set it to one of 1, 2, 4"):
        infinity.load_config(weights, world_size=4)
    for num in (1, 2, 6):
        assert infinity.load_config(weights, world_size=num).weight_group_size == 3
    config = _config(Path("/tmp"), 3, size=3)
    with pytest.raises(ConfigError, match=r"into groups of 3\. Set it to one of 1, 2, 4"):
        infinity.load_config(config, world_size=4)
    assert infinity.load_config(config, world_size=6).shard_size == 3
    assert infinity.load_config(config, world_size=1).shard_size == 3
