"""Weights and states from outside the loop: no byte more than was changed is stored, and what fails changes nothing.

What is read and written is in tests/integration: test_gathered_parameters, test_state_dtype, test_state_edits, test_resuming.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from infinity.checkpoint.state_access import StateAccess
from infinity.checkpoint.stored_weights import StoredWeights
from infinity.device.compute import ComputeDevice
from infinity.distributed.collectives import Ranks
from infinity.distributed.meshes import Division
from infinity.errors import BudgetTooSmallError
from infinity.numerics.chunk_format import RECORD_GRANULE, ChunkBuffer, ChunkFormat, MainWeight
from infinity.numerics.remainder import split_bits
from infinity.paging.parameter_map import ParameterMap
from infinity.tiers.state_store import PagedStateStore
from infinity.tiers.weight_exchange import WeightExchange
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import CHUNK_GRANULE, Slot, UnitLayout
from infinity.units.parameter import hold
from infinity.units.shares import Shares
from infinity.units.unit import Unit, spec_of
from infinity.updates.job import ParameterState
from swapper import StagingArena, Swapper
from tests.unit.stage import make_handler, make_pager

_NAMES = ("exp_avg", "exp_avg_sq")
_FP32 = ChunkFormat(torch.float32, MainWeight.MODEL_WEIGHT)
_BF16 = ChunkFormat(torch.bfloat16, MainWeight.FP32)
_HALVES = ChunkFormat(torch.bfloat16, MainWeight.REMAINDER)
_DTYPES = {_FP32: torch.float32, _BF16: torch.bfloat16, _HALVES: torch.bfloat16}


class _Model(nn.Module):
    """Two units: one with a transposed weight, a bias and a frozen part; one of a single weight."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.wide = nn.Parameter(torch.randn(90, 70, generator=draw).t())  # three chunks and a bit
        self.bias = nn.Parameter(torch.randn(70, generator=draw))
        self.frozen = nn.Parameter(torch.randn(5, 5, generator=draw), requires_grad=False)
        self.long = nn.Parameter(torch.randn(5000, generator=draw), requires_grad=False)
        self.other = nn.Parameter(torch.randn(40, 60, generator=draw))


class _Bench:
    """The model's weights and states in a store, of which one page at a time is worked on: one that is lost is missed."""

    def __init__(
        self, form: ChunkFormat, swapper: Swapper, *, is_paged: bool = True, num_resident: int = 0, room: int = 2
    ) -> None:
        self.model = _Model()
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.originals = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.form, dtype = form, _DTYPES[form]
        parts = [["wide", "bias", "frozen", "long"], ["other"]]
        self.units: list[Unit] = []
        for index, names in enumerate(parts):
            parameters = [self.model.get_parameter(name) for name in names]
            layout = UnitLayout([spec_of(name, p, dtype) for name, p in zip(names, parameters, strict=True)])
            self.units.append(Unit(index, f"unit {index}", parameters, layout))
            self.units[-1].stays_resident = not is_paged or index < num_resident
        chunks = [unit.layout.chunks(CHUNK_GRANULE) for unit in self.units]
        arena = StagingArena(-(-form.workspace_bytes(CHUNK_GRANULE, 2) // 4096) * 4096, 1, deadline_seconds=60)
        self.records = PagedStateStore(swapper, arena, form)
        self.weights = WeightStore(swapper, ComputeDevice()) if is_paged else None
        for unit in self.units:
            self.records.allocate(unit, chunks[unit.index], _NAMES)
            if self.weights is not None and not unit.stays_resident:
                self.weights.allocate(unit)
        capacity = sum(sorted(unit.num_bytes for unit in self.units)[-room:])
        source: Any = self.weights
        exchange = WeightExchange(Division.among(Ranks()), Shares(), self.weights, ComputeDevice())
        parameter_map = ParameterMap(self.model, self.units)
        self.states = {
            (unit.index, slot.index): ParameterState()
            for unit in self.units
            for slot in unit.layout.slots
            if slot.spec.is_trainable
        }
        self.stored = StoredWeights(self.records, self.weights, self.states, chunks, form, exchange)
        self.pager = make_pager(self.units, source, capacity, prefetches=False)
        self.copies = self.pager.copies
        self.access = StateAccess(parameter_map, self.pager, self.records, self.states, self.stored)
        _, self.handler = make_handler(parameter_map, self.pager)
        for unit in self.units:
            flat = self.pager.residency.pool.allocate(unit.num_bytes)
            assert flat is not None
            flat.tensor().fill_(77)
            self.pager.residency.place(unit, flat)
            self.stored.store(unit, [parameter.detach() for parameter in unit.parameters])
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                hold(parameter, self.handler, slot.spec.dtype, torch.device("cpu"))
            self.pager.residency.evict(unit)

    def place(self, name: str) -> tuple[Unit, Slot]:
        parameter = self.model.get_parameter(name)
        unit = next(unit for unit in self.units if any(p is parameter for p in unit.parameters))
        return unit, next(slot for slot in unit.layout.slots if unit.parameters[slot.index] is parameter)

    def main(self, name: str) -> torch.Tensor:
        return self.access.main_weight(self.model.get_parameter(name))

    def rested(self, name: str) -> torch.Tensor:
        """The model weight, from where it rests."""
        for unit in self.units:
            self.pager.residency.evict(unit)
        return self.pager.copy_of(*self.place(name))

    def cast(self, main: torch.Tensor) -> torch.Tensor:
        """As it is rounded to the model weight."""
        if self.form is _HALVES:
            return split_bits(main.contiguous())[0].view(torch.bfloat16).reshape(main.shape)
        return main.to(_DTYPES[self.form])

    def check(self, **expected: torch.Tensor) -> None:
        """All weights are the original ones but those that are given."""
        for name, original in self.originals.items():
            main = expected.get(name, original)
            is_frozen = name in ("frozen", "long")
            assert torch.equal(self.main(name), self.cast(main).float() if is_frozen else main), name
            assert torch.equal(self.rested(name), self.cast(main)), name

    def change(self, name: str) -> torch.Tensor:
        """Write to some elements of an open weight. Returns what its main weight has to become."""
        unit, slot = self.place(name)
        weight, kept = unit.weight(slot), self.main(name)
        weight[1:3] = 0.3
        kept[1:3] = weight[1:3].float()
        return kept


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    with Swapper.in_memory(1 << 21) as opened:
        yield opened


@pytest.fixture(params=[_FP32, _BF16, _HALVES], ids=["fp32", "bf16", "remainder"])
def form(request: pytest.FixtureRequest) -> ChunkFormat:
    return request.param


@pytest.fixture(params=[True, False], ids=["paged", "resident"])
def bench(request: pytest.FixtureRequest, form: ChunkFormat, swapper: Swapper) -> _Bench:
    return _Bench(form, swapper, is_paged=request.param)


def _state(bench: _Bench, name: str, start: float = 0) -> dict[str, Any]:
    shape = bench.originals[name].shape
    first = (torch.arange(shape.numel()) + start).reshape(shape).float()
    return {"exp_avg": first, "exp_avg_sq": first * 2, "step": torch.tensor(5.0)}


def test_either_way_of_rounding_is_a_cast(swapper: Swapper) -> None:
    bench = _Bench(_HALVES, swapper)
    tie = torch.full((70,), 1.0 + 2**-8)  # rounded to even: down; rounded half up: up
    for came in (tie.bfloat16().float(), split_bits(tie)[0].view(torch.bfloat16).float()):
        bench.access.load_main_weight(bench.model.bias, came)
        bench.access.resume_main_weight(bench.model.bias, tie)
        assert torch.equal(bench.main("bias"), tie)


@pytest.mark.deep(but=4)
def test_blocks_inside_each_other_store_each_what_was_written_in_it(bench: _Bench) -> None:
    access, unit = bench.access, bench.units[0]
    outer = access.gather([bench.model.wide], compares=True)
    expected = bench.change("wide")
    inner = access.gather([bench.model.wide], compares=True)
    assert torch.equal(bench.main("wide"), expected)  # stored before the inner one began
    unit.weight(bench.place("bias")[1])[:] = 2
    bench.stored.scatter(inner)
    assert unit.is_bound and unit.num_active == 1
    version = unit.version
    bench.stored.scatter(outer)
    assert unit.version == version  # there was nothing left to store
    bench.check(wide=expected, bias=torch.full((70,), 2.0))


def test_a_unit_that_stays_in_memory_is_changed_there_beside_those_on_a_drive(
    form: ChunkFormat, swapper: Swapper
) -> None:
    bench = _Bench(form, swapper, num_resident=1)
    gathered = bench.access.gather([bench.model.wide, bench.model.other], compares=True)
    expected = {name: bench.change(name) for name in ("wide", "other")}
    bench.stored.scatter(gathered)
    bench.check(**expected)
    new = torch.full((70,), 1 / 3)
    bench.access.load_main_weight(bench.model.bias, new)
    bench.check(**expected, bias=new)


# ------------------------------------------------------------------------------------------------------ no byte more


def _written(swapper: Swapper) -> int:
    swapper.flush()
    return swapper.statistics().write_bytes


def test_at_first_only_main_weights_are_stored(bench: _Bench) -> None:
    for unit in bench.units:
        expected = [bench.form.main_bytes(chunk.numel) for chunk in unit.layout.chunks(CHUNK_GRANULE)]
        assert bench.records.valid_bytes()[unit.index] == (
            expected if bench.access.has_main_weights else [0] * len(expected)
        )


@pytest.mark.parametrize("name", ["wide", "frozen", "other"])
def test_a_changed_weight_is_stored_without_what_lies_around_it(form: ChunkFormat, swapper: Swapper, name: str) -> None:
    bench = _Bench(form, swapper)
    unit, slot = bench.place(name)
    before = _written(swapper)
    with bench.pager.opened(unit):
        bench.stored.store_modified(unit, [slot])
    written = _written(swapper) - before
    touched = [
        c for c in unit.layout.chunks(CHUNK_GRANULE) if any(piece.slot.index == slot.index for piece in c.pieces)
    ]
    records = sum(form.record_bytes(chunk.numel, len(_NAMES)) for chunk in touched)
    weights = written - (records if bench.access.has_main_weights else 0)
    start = slot.offset_bytes // RECORD_GRANULE
    stop = -(-(slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize) // RECORD_GRANULE)
    assert weights == min((stop - start) * RECORD_GRANULE, unit.num_bytes - start * RECORD_GRANULE)


def test_elements_that_follow_are_not_stored_twice(form: ChunkFormat, swapper: Swapper) -> None:
    bench = _Bench(form, swapper)
    before = _written(swapper)
    with bench.access.elements_following():
        bench.access.load_state(bench.model.wide, _state(bench, "wide"))
    assert _written(swapper) == before
    assert bench.access.scalars(bench.model.wide) == {"step": torch.tensor(5.0)}


def test_units_that_do_not_fit_together_are_not_gathered(form: ChunkFormat, swapper: Swapper) -> None:
    bench = _Bench(form, swapper, room=1)
    with pytest.raises(BudgetTooSmallError, match="2 units are gathered at once"):
        bench.access.gather([bench.model.wide, bench.model.other])
    assert not any(unit.num_active for unit in bench.units)
    bench.check()


def test_a_gathering_that_fails_lets_go_of_what_it_had(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = bench.stored._kept

    def fail(unit: Unit) -> torch.Tensor | None:
        if unit.index == 1:
            raise OSError("gone")
        return kept(unit)

    monkeypatch.setattr(bench.stored, "_kept", fail)
    with pytest.raises(OSError, match="gone"):
        bench.access.gather([bench.model.wide, bench.model.other])
    assert not any(unit.num_active or (unit.is_bound and not unit.stays_resident) for unit in bench.units[:1])


def test_a_change_that_fails_stores_nothing_and_keeps_no_memory(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    if bench.form is _FP32:
        pytest.skip("its records hold no main weight")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="in the midst"):

        def write(self: ChunkBuffer, span: slice, values: torch.Tensor) -> None:
            (self.main if self.main is not None else self.remainder).zero_()  # type: ignore[union-attr]
            raise OSError("in the midst")

        patch.setattr(ChunkBuffer, "write_main", write)
        bench.access.load_main_weight(bench.model.other, torch.ones(40, 60))
    bench.check()
