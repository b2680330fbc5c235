"""Wheel and sdist hold what the tree holds, and work where nothing else of it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from infinity import __version__

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("infinity", "swapper")
_SMOKE = """
import torch, infinity
offload = {"device": "nvme", "nvme_path": "."}
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
          "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload}}
engine, *_ = infinity.initialize(model=torch.nn.Linear(8, 8), config=config)
with engine:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
print(infinity.__file__)
"""


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a wheel and an sdist, and a copy of the tree that they were made of."""
    folder = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in _PACKAGES:
        shutil.copytree(_ROOT / name, folder / "tree" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, folder / "tree")
    build = "from setuptools import build_meta as b; b.build_sdist('..'); b.build_wheel('..')"
    _run(sys.executable, "-c", build, cwd=folder / "tree")
    return folder


def _sources(tree: Path) -> set[str]:
    kinds = (".py", ".typed", "METADATA")
    found = (path for name in _PACKAGES for path in (tree / name).rglob("*") if path.name.endswith(kinds))
    return {str(path.relative_to(tree)) for path in found}


def test_both_hold_every_module(built: Path) -> None:
    expected = _sources(_ROOT)
    (wheel,) = built.glob("*.whl")
    assert expected <= set(zipfile.ZipFile(wheel).namelist())
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert expected <= {name.partition("/")[2] for name in archive.getnames()}
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__ and __version__ in wheel.name and __version__ in sdist.name


def test_the_wheel_works_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """Its dependencies are this environment's, by a path: nothing is downloaded."""
    _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    place = _run(python, "-c", _SMOKE, cwd=tmp_path).strip()
    assert Path(place).is_relative_to(site)
    program = tmp_path / "env" / "bin" / "infinity"
    assert __version__ in _run(program, "--version", cwd=tmp_path)
