"""torch.compile, by each of its ways in: equal to the same compiled blocks in plain torch, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import ModelError
from tests.exactness.shapes.blocks import Net
from tests.twins import Twins

# dynamo looks at `.grad` of what goes into a graph, and hides the warning in a way that does not help where it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def _each_block(model: Any, backend: Any) -> None:
    for layer in model.blocks:
        layer.compile(backend=backend)


def _wrapped_blocks(model: Any, backend: Any) -> None:
    for index, layer in enumerate(model.blocks):
        model.blocks[index] = torch.compile(layer, backend=backend)


def _inner(model: Any, backend: Any) -> None:
    for layer in model.blocks:
        layer.up = torch.compile(layer.up, backend=backend)


def _forwards(model: Any, backend: Any) -> None:
    for layer in model.blocks:
        layer.forward = torch.compile(layer.forward, backend=backend)


def _model(model: Any, backend: Any) -> None:
    model.compile(backend=backend)


def _engine_or_model(engine: Any, backend: Any) -> None:
    engine.compile(backend=backend)


class Counting:
    """A backend that counts the operations of each graph it is given, and runs it."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(16, (2, 3), generator=generator), torch.randint(16, (2, 3), generator=generator)


def _losses(step: int) -> Callable[[Any], Tensor]:
    return lambda model: model(*_batch(step))


def _models(compile_it: Callable[[Any, Any], None], backend: Any) -> tuple[Net, Net]:
    """A plain model that is compiled, and an equal one that is not yet."""
    torch.manual_seed(3)
    model = Net("none")
    plain = copy.deepcopy(model)
    compile_it(plain, backend)
    return plain, model


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("compile_it", [_each_block, _wrapped_blocks, _forwards, _model, _engine_or_model])
def test_compiled_blocks_are_those_of_plain_torch(
    compile_it: Callable[[Any, Any], None], is_before: bool, tmp_path: Path
) -> None:
    plain, model = _models(_each_block, "aot_eager")
    if is_before:
        compile_it(model, "aot_eager")
    with Twins(tmp_path, model, is_tight=True, plain=plain) as twins:
        if not is_before:
            twins.engine.eval()(*_batch(9))  # hooks have run on the model as it was
            twins.engine.train()
            compile_it(twins.engine if compile_it is _engine_or_model else model, "aot_eager")
        for step in range(2):
            twins.step(_losses(step))
        _require_equal(twins)


def _require_equal(twins: Twins) -> None:
    """Whatever wrappers have made of the names."""
    for parameter, other in zip(twins.model.parameters(), twins.plain.parameters(), strict=True):
        with infinity.GatheredParameters(parameter):
            assert torch.equal(parameter, other)


@pytest.mark.deep
def test_graphs_are_whole_blocks(tmp_path: Path) -> None:
    expected, found = Counting(), Counting()
    plain, model = _models(_each_block, expected)
    _each_block(model, found)
    with Twins(tmp_path, model, is_tight=True, plain=plain) as twins:
        for step in range(2):
            twins.step(_losses(step))
    assert found.graphs == expected.graphs and expected.graphs


@pytest.mark.deep
def test_a_part_of_a_block_is_compiled_later(tmp_path: Path) -> None:
    """Nothing of ours is inside a block, so what is compiled there is what plain torch compiles."""
    plain, model = _models(_inner, "eager")
    with Twins(tmp_path, model, is_tight=True, plain=plain) as twins:
        _inner(model, "eager")
        for step in range(4):
            twins.step(_losses(step))


@pytest.mark.deep
def test_a_whole_graph_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'Net' was compiled as a whole.*engine\.compile"):
        Twins(tmp_path, torch.compile(Net("none"), backend="eager"), plain=Net("none"))
    model = Net("none")
    with Twins(tmp_path, model, is_tight=True) as twins:
        engine = twins.engine
        with pytest.raises(ModelError, match=r"cannot trace .*engine\.compile"):
            torch.compile(model, backend="eager")(*_batch(0))
        engine.reset()
        torch._dynamo.reset()
        engine.backward(engine(*_batch(0)))
        engine.step()


@pytest.mark.deep
def test_the_vertical_schedule_takes_compiled_blocks(tmp_path: Path) -> None:
    plain, model = _models(_each_block, "aot_eager")
    _each_block(model, "aot_eager")
    with Twins(tmp_path, model, is_tight=True, plain=plain, gradient_accumulation_steps=2) as twins:
        for step in range(2):
            batches = [_batch(2 * step + micro_batch) for micro_batch in range(2)]
            for batch in batches:
                (plain(*batch) / 2).backward()
            twins.expected.step()
            twins.expected.zero_grad()
            twins.engine.train_batch(iter(batches))
        assert twins.engine.report.schedule == "vertical"
        _require_equal(twins)


def test_a_copy_of_a_paged_model_can_be_compiled_whole_and_exported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with Twins(tmp_path, model, is_tight=True) as twins:
        engine = twins.engine
        twin = copy.deepcopy(engine.module)
        wanted = twin(x)
        compiled = torch.compile(twin, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), wanted)
        exported = torch.export.export(twin, (x,)).module()
        assert torch.equal(exported(x), wanted)
