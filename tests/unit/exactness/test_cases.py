"""The cases are what their names say, and hard enough: a shape that has lost its point would pass for nothing."""

from __future__ import annotations

import pytest
import torch

from tests.exactness.case import Case, Draw, PlannedFailure
from tests.exactness.driver import NUM_STEPS, reference_record, reference_trainer, train
from tests.exactness.families import FAMILIES
from tests.exactness.grid import Row
from tests.exactness.optimizers import MAX_NORM, parameter_groups
from tests.exactness.record import require_equal
from tests.exactness.shapes import SHAPES

_CPU = torch.device("cpu")
_ALL = (*SHAPES, *FAMILIES)
_BY_NAME = {case.name: case for case in _ALL}


def test_names_are_unique() -> None:
    assert len(_BY_NAME) == len(_ALL)


@pytest.mark.deep(but=6)
@pytest.mark.parametrize("case", _ALL, ids=lambda case: case.name)
def test_a_case_is_reproducible_trains_and_is_clipped(case: Case) -> None:
    row = Row(checkpointing="reentrant" if case.has_checkpointing else "none", dtype="bf16", clipping=True)
    record = reference_record(case, row.numerics)
    again = train(reference_trainer(case, row), case.batch, dtype=row.compute_dtype, accumulation=1)
    require_equal(record, again, context="the reference against itself")

    assert record.final is not None
    initial = dict(case.make("none").named_parameters())
    assert any(not torch.equal(record.final.main_weights[fqn], initial[fqn]) for fqn in record.final.main_weights)
    norms = [value.item() for what, value in record.events if what.startswith("norm")]
    assert len(norms) == NUM_STEPS
    assert min(norms) > MAX_NORM
    assert all(torch.isfinite(value).all() for _, value in record.tensors())


@pytest.mark.deep(but=17)
@pytest.mark.parametrize("case", [case for case in _ALL if case.has_checkpointing], ids=lambda case: case.name)
def test_checkpointing_is_really_on(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.checkpoint

    calls = []
    for name in ("_checkpoint_without_reentrant_generator", "CheckpointFunction"):
        if not hasattr(torch.utils.checkpoint, name):
            pytest.skip("this torch names its two kinds of checkpointing differently")
    original = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    monkeypatch.setattr(
        torch.utils.checkpoint,
        "_checkpoint_without_reentrant_generator",
        lambda *args, **kwargs: calls.append("non_reentrant") or original(*args, **kwargs),
    )
    original_apply = torch.utils.checkpoint.CheckpointFunction.apply
    monkeypatch.setattr(
        torch.utils.checkpoint.CheckpointFunction,
        "apply",
        lambda *args: calls.append("reentrant") or original_apply(*args),
    )
    for kind in ("reentrant", "non_reentrant"):
        calls.clear()
        batch = case.batch(Draw(7, 0, torch.float32, _CPU))
        case.make(kind).float()(**batch)
        assert set(calls) == {kind}
    calls.clear()
    case.make("none").float()(**case.batch(Draw(7, 0, torch.float32, _CPU)))
    assert not calls


def _called(case: Case, step: int) -> set[str]:
    """FQNs of the modules that a forward calls."""
    model = case.make("none")
    called: set[str] = set()
    for fqn, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, fqn=fqn: called.add(fqn))
    model(**case.batch(Draw(step, 0, torch.float32, _CPU)))
    return called


def test_experts_are_really_skipped() -> None:
    experts = {f"blocks.0.experts.{index}" for index in range(4)}
    visited = [_called(_BY_NAME["experts"], step) & experts for step in range(NUM_STEPS)]
    assert all(calls < experts for calls in visited)
    assert set.union(*visited) > visited[0]
    case = _BY_NAME["mixtral_one_by_one"]
    counts = [len([fqn for fqn in _called(case, step) if fqn.endswith("gate_up")]) for step in range(NUM_STEPS)]
    assert max(counts) < 16


def test_blocks_are_really_skipped() -> None:
    assert "blocks.3" not in _called(_BY_NAME["skipped_blocks"], 0)
    assert "blocks.3" in _called(_BY_NAME["skipped_blocks"], 3)


def test_a_weight_is_read_without_its_module_being_called() -> None:
    case = _BY_NAME["direct_forward"]
    assert not any(fqn in _called(case, 0) for fqn in ("blocks.0", "blocks.1", "blocks.2"))


def test_tied_and_frozen_parameters() -> None:
    tied = _BY_NAME["tied_weights"].make("none")
    assert tied.head.weight is tied.embedding.weight
    for name in ("gpt2", "t5", "qwen2"):
        model = _BY_NAME[name].make("none")
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    lora = dict(_BY_NAME["lora"].make("none").named_parameters())
    assert {fqn for fqn, param in lora.items() if param.requires_grad} == {fqn for fqn in lora if "lora" in fqn}


def test_layouts_are_kept_where_the_shape_is_about_them() -> None:
    transposed = _BY_NAME["transposed"].make("none")
    assert not transposed.blocks[0].up.is_contiguous()
    convolutions = _BY_NAME["convolutions"].make("none")
    weight = convolutions.blocks[1].conv.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


def test_the_big_embedding_is_larger_than_all_else() -> None:
    sizes = {fqn: param.numel() for fqn, param in _BY_NAME["big_embedding"].make("none").named_parameters()}
    assert 2 * sizes["embedding.weight"] > sum(sizes.values())


def test_some_batches_fail_in_the_first_and_in_later_micro_batches() -> None:
    case = _BY_NAME["failing_forward"]
    failures = set()
    for step in range(NUM_STEPS):
        for micro_batch in range(3):
            try:
                case.make("none")(**case.batch(Draw(step, micro_batch, torch.float32, _CPU)))
            except PlannedFailure:
                failures.add((step, micro_batch))
    assert {(0, 0), (2, 2)} <= failures
    assert len(failures) < 6


def test_most_cases_have_several_parameter_groups() -> None:
    counts = {}
    for case in _ALL:
        named = {fqn: param for fqn, param in case.make("none").named_parameters() if param.requires_grad}
        groups = parameter_groups(named)
        members = [param for group in groups for param in group["params"]]
        assert len({id(param) for param in members}) == len(members) == len(named)
        counts[case.name] = len(groups)
    assert sum(count == 3 for count in counts.values()) > 0.9 * len(counts)
