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
from infinity.errors import BudgetTooSmallError, ModelError
from tests.exactness.lockstep import everything_on_nvme

# dynamo looks at `.grad` of what goes into a graph, and hides the warning in a way that does not help where it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _each_block(model: Any, backend: Any) -> None:
    for layer in model.layers:
        layer.compile(backend=backend)


def _wrapped_blocks(model: Any, backend: Any) -> None:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=backend)


def _inner(model: Any, backend: Any) -> None:
    for layer in model.layers:
        layer.up = torch.compile(layer.up, backend=backend)


def _forwards(model: Any, backend: Any) -> None:
    for layer in model.layers:
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


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _engine(model: nn.Module, directory: Path, **changes: Any) -> Any:
    """With the smallest budget that is accepted: no unit stays where it is."""
    own = {"host_memory_budget": 1, "page_bytes": None}
    config = everything_on_nvme(directory, {"optimizer": None, "infinity": own, **changes})
    with pytest.raises(BudgetTooSmallError) as refused:
        infinity.initialize(model=model, optimizer=_optimizer(model), config=config)
    config["infinity"]["host_memory_budget"] = refused.value.minimum_bytes
    return infinity.initialize(model=model, optimizer=_optimizer(model), config=config)[0]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    weights = {}
    for name, parameter in model.named_parameters():
        with infinity.GatheredParameters(parameter):
            weights[name] = parameter.detach().clone()
    return weights


def _plain(compile_it: Callable[[Any, Any], None], backend: Any, num_steps: int) -> tuple[list[Tensor], nn.Module]:
    torch.manual_seed(3)
    model = Model()
    compile_it(model, backend)
    optimizer = _optimizer(model)
    losses = []
    for step in range(num_steps):
        losses.append(model(*_batch(step)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    torch._dynamo.reset()
    return losses, model


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("compile_it", [_each_block, _wrapped_blocks, _forwards, _model, _engine_or_model])
def test_compiled_blocks_are_those_of_plain_torch(
    compile_it: Callable[[Any, Any], None], is_before: bool, tmp_path: Path
) -> None:
    losses, plain = _plain(_each_block, "aot_eager", 2)
    torch.manual_seed(3)
    model = Model()
    if is_before:
        compile_it(model, "aot_eager")
    with _engine(model, tmp_path) as engine:
        if not is_before:
            engine.eval()(*_batch(9))  # hooks have run on the model as it was
            engine.train()
            compile_it(engine if compile_it is _engine_or_model else model, "aot_eager")
        for step, expected in enumerate(losses):
            loss = engine(*_batch(step))
            engine.backward(loss)
            engine.step()
            assert torch.equal(loss, expected)
        for (name, weight), expected in zip(_weights(model).items(), plain.parameters(), strict=True):
            assert torch.equal(weight, expected), name


@pytest.mark.deep
def test_graphs_are_whole_blocks(tmp_path: Path) -> None:
    expected, found = Counting(), Counting()
    _plain(_each_block, expected, 2)
    torch.manual_seed(3)
    model = Model()
    _each_block(model, found)
    with _engine(model, tmp_path) as engine:
        for step in range(2):
            engine.backward(engine(*_batch(step)))
            engine.step()
    assert found.graphs == expected.graphs and expected.graphs


@pytest.mark.deep
def test_a_part_of_a_block_is_compiled_later(tmp_path: Path) -> None:
    """Nothing of ours is inside a block, so what is compiled there is what plain torch compiles."""
    losses, _ = _plain(_inner, "eager", 4)
    torch.manual_seed(3)
    model = Model()
    with _engine(model, tmp_path) as engine:
        _inner(model, "eager")
        for step, expected in enumerate(losses):
            loss = engine(*_batch(step))
            engine.backward(loss)
            engine.step()
            assert torch.equal(loss, expected)


@pytest.mark.deep
def test_a_whole_graph_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'Model' was compiled as a whole.*engine\.compile"):
        _engine(torch.compile(Model(), backend="eager"), tmp_path)
    model = Model()
    with _engine(model, tmp_path) as engine:
        with pytest.raises(ModelError, match=r"cannot trace .*engine\.compile"):
            torch.compile(model, backend="eager")(*_batch(0))
        engine.reset()
        torch._dynamo.reset()
        engine.backward(engine(*_batch(0)))
        engine.step()


@pytest.mark.deep
def test_the_vertical_schedule_takes_compiled_blocks(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = Model()
    _each_block(plain, "aot_eager")
    optimizer = _optimizer(plain)
    torch.manual_seed(3)
    model = Model()
    _each_block(model, "aot_eager")
    with _engine(model, tmp_path, gradient_accumulation_steps=2) as engine:
        for step in range(2):
            batches = [_batch(2 * step + micro_batch) for micro_batch in range(2)]
            for batch in batches:
                (plain(*batch) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.train_batch(iter(batches))
        assert engine.report.schedule == "vertical"
        for (name, weight), expected in zip(_weights(model).items(), plain.parameters(), strict=True):
            assert torch.equal(weight, expected), name


def test_a_copy_of_a_paged_model_can_be_compiled_whole_and_exported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with _engine(model, tmp_path) as engine:
        twin = copy.deepcopy(engine.module)
        wanted = twin(x)
        compiled = torch.compile(twin, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), wanted)
        exported = torch.export.export(twin, (x,)).module()
        assert torch.equal(exported(x), wanted)


@pytest.mark.deep
def test_a_copy_of_a_compiled_model_is_a_model_of_its_own(tmp_path: Path) -> None:
    model = Model()
    _each_block(model, "eager")
    with _engine(model, tmp_path) as engine:
        engine.backward(engine(*_batch(0)))
        engine.step()
        twin: Any = copy.deepcopy(model)
        with torch.no_grad():
            before = twin(*_batch(1))
            for parameter in twin.layers.parameters():
                parameter.zero_()
            assert not torch.equal(twin(*_batch(1)), before)
        engine.close(restore_weights=True)
    assert all(layer._compiled_call_impl is not None and "forward" not in layer.__dict__ for layer in model.layers)
    assert "compile" not in model.__dict__
