"""What is not left to chance: two engines, copies, forks, compilation, changes to a held model, how a process ends."""

from __future__ import annotations

import copy
import os
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from infinity.errors import EngineClosedError
from tests.children import run_python
from tests.exactness.lockstep import SHAPES_BY_NAME, Lockstep
from tests.exactness.shapes.blocks import LENGTH, VOCABULARY
from tests.forked import require_in_child

_CLIPPED = {"gradient_clipping": 0.1}


# ----------------------------------------------------------------------------------------- two engines


def test_two_engines_in_one_process_and_directory(tmp_path: Path) -> None:
    first = Lockstep.start(tmp_path)
    second = Lockstep.start(tmp_path, case=SHAPES_BY_NAME["tied_weights"], changes=_CLIPPED)
    with first, second:
        for step in range(3):
            first.engine_step(step)
            second.engine_step(step)
        first.require_equal()
        second.require_equal()
        first.engine.close()
        second.engine_step(3)
        second.require_equal()


# ---------------------------------------------------------------------------------------------- copies


@pytest.mark.deep
def test_a_deep_copy_is_an_ordinary_model_with_the_true_weights(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["tied_weights"]) as both:
        both.engine_step(0)
        twin = copy.deepcopy(both.model)
        for fqn, param in twin.named_parameters():
            assert type(param) is nn.Parameter
            assert torch.equal(param, both.reference.model.get_parameter(fqn)), fqn
        assert twin.head.weight is twin.embedding.weight
        both.engine_step(1)
        # The copy lives on its own: an EMA, or an evaluation in another thread.
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        loss = twin(**both.batch(5))
        loss.backward()
        optimizer.step()
        assert twin(**both.batch(5)) < loss
        both.engine_step(2)
        both.require_equal()


# ----------------------------------------------------------------------------------------------- forks


class TokenData(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {key: torch.randint(VOCABULARY, (LENGTH,), generator=generator) for key in ("tokens", "labels")}


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_loader_workers_that_fork(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        loader = DataLoader(TokenData(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        for _ in range(2):
            for batch in loader:
                both.reference.backward(both.reference.forward(batch))
                both.reference.step()
                both.engine.backward(both.engine(**batch))
                both.engine.step()
        both.require_equal()


@pytest.mark.deep
def test_a_forked_child_neither_hangs_nor_harms(tmp_path: Path) -> None:
    """A child that ends, or tries to close its copy of the engine, leaves the parent's files and threads alone."""
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)

        def close() -> None:
            with pytest.raises(EngineClosedError, match="forked"):
                both.engine.close()

        require_in_child(close)
        both.engine_step(1)
        both.require_equal()


# --------------------------------------------------------------------------------------- process exits


_TRAIN = """
    import os, sys
    from pathlib import Path
    import torch, infinity
    torch.set_num_threads(1)
    from tests.exactness.lockstep import PLAIN, engine_on_nvme, make_batch, take_steps
    engine = engine_on_nvme(Path(sys.argv[1]), PLAIN.make("none"))
    take_steps(engine, 0, 1)
    {end}
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("print('end')", (0, "end\n", "")),
        ("raise SystemExit(7)", (7, "", "")),
        ("engine(**make_batch(3)); os.kill(os.getpid(), 9)", (-9, "", "")),
    ],
)
def test_a_process_that_ends_without_close(end: str, found: tuple[int, str, str], tmp_path: Path) -> None:
    code = textwrap.dedent(_TRAIN).format(end=end)
    done = run_python("-W", "error", "-c", code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == found
    assert os.listdir(tmp_path) == []
