"""The examples of tools/examples run as they stand, and say what they claim."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.children import run_python
from tests.warm_process import run_script

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = _ROOT / "tools" / "examples"

_PRINTS = {
    "own_module": ["host memory budget +6.0 MB", "losses equal: True", "weights equal: True"],
    "lora": ["trainable params: 16,384 ", r"adapters saved to \./adapters", r"merged model saved to \./merged"],
    "micro_batches": [r"The vertical schedule read [3-9]\.\d times less\."],
    "resume": ["killed by signal 9", "again:\n  begins at step [45]\n", "weights equal: True"],
    "generate": ["tokens equal: True"],
    "hf_trainer": [r"step 8: loss (\d\.\d+) with the engine, \1 without", "losses equal: True"],
    "lightning_classifier": [r"accuracy: 0\.[6-9]\d \(guessing: 0\.25\)"],
    "ray_train": ["killed and begun again: True", "weights equal: True"],
    "tensor_parallel": ["rank 0 has 64 of 128 rows", "rank 1 has 64 of 128 rows", "but for the last bits: True"],
    "pipeline_stages": [r"loss \d\.\d+, then \d\.\d+\. It fell: True"],
    "two_processes": ["rank 0 of 2: loss", "rank 1 of 2: loss", "weights equal on both: True"],
}
"""What each has to print, as patterns."""
_SLOWER = {"ray_train": pytest.mark.timeout(1800)}
"""Beside 18 busy processes on two processors, Ray takes 13 minutes until it begins to train."""
_LEAVES = {
    "lora": {"adapters", "merged"},
    "resume": {"run-killed", "run-whole"},
    "generate": {"weights"},
    "hf_trainer": {"model", "plain", "paged"},
    "ray_train": {"checkpoints", "drive", "killed", "ray", "trained"},
}
"""What each leaves in the directory in which it is started."""


@pytest.mark.deep
@pytest.mark.timeout(600)  # the first waits for what takes longest, the imports
@pytest.mark.parametrize("name", [pytest.param(name, marks=_SLOWER.get(name, [])) for name in _PRINTS])
def test_it_runs_and_prints_what_it_claims(name: str, tmp_path: Path) -> None:
    for library in ("peft", "transformers", "lightning", "ray"):
        is_imported = re.search(rf"^(import|from) {library}\b", (_EXAMPLES / f"{name}.py").read_text(), re.MULTILINE)
        if is_imported and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    (tmp_path / "here").mkdir()
    # torchrun leaves its logs in TMPDIR.
    status, printed = run_script(_EXAMPLES / f"{name}.py", tmp_path / "here", {"TMPDIR": str(tmp_path)})
    assert status == 0, printed
    assert not re.search("equal.*: False", printed), printed
    for pattern in _PRINTS[name]:
        assert re.search(pattern, printed), f"{pattern} is not in:\n{printed}"
    assert {path.name for path in (tmp_path / "here").iterdir()} == _LEAVES.get(name, set())


def test_each_is_run_and_short() -> None:
    scripts = {path.stem: path.read_text().splitlines() for path in _EXAMPLES.glob("*.py")}
    assert scripts.keys() == _PRINTS.keys()
    assert {name: len(lines) for name, lines in scripts.items() if len(lines) >= 80} == {}


@pytest.mark.deep
@pytest.mark.parametrize("notebook", sorted(_EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_in_jupyter(notebook: Path, tmp_path: Path) -> None:
    for library in ("nbconvert", "ipykernel"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install {library}")
    shutil.copy(notebook, tmp_path)  # cells run in the notebook's folder
    folders = {name: str(tmp_path / "jupyter") for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    words = ["--execute", "--to", "notebook", "--output", "executed", notebook.name]
    done = run_python("-m", "nbconvert", *words, cwd=tmp_path, **folders)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "executed.ipynb").read_text())["cells"]
    printed = "".join(
        text
        for cell in cells
        for output in cell.get("outputs", ())
        for text in output.get("text", output.get("data", {}).get("text/plain", ()))
    )
    assert re.search(r"loss \d\.\d+, then \d\.\d+", printed), printed
