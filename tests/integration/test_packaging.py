"""Wheel and sdist hold what the tree holds, and work where nothing else of it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from infinity import __version__

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("infinity", "swapper")
_NOT_COPIED = (".*", "__pycache__", "*.pyc", "*.egg-info", "build", "dist", "node_modules")


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
    shutil.copytree(_ROOT, folder / "tree", symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    build = "from setuptools import build_meta as b; b.build_sdist('..'); b.build_wheel('..')"
    _run(sys.executable, "-c", build, cwd=folder / "tree")
    return folder


def _files(*patterns: str) -> set[str]:
    return {str(path.relative_to(_ROOT)) for pattern in patterns for path in _ROOT.glob(pattern) if path.is_file()}


@pytest.mark.deep
def test_both_hold_every_file(built: Path) -> None:
    data = (
        "infinity/**/METADATA",
        "infinity/config/ready/*.json",
        "infinity/config/schema/inert.toml",
        "infinity/deepspeed/contents/refused.toml",
        "infinity/optim/*.cu",
        "infinity/optim/*.toml",
        "infinity/reporting/*.j2",
        "*/py.typed",
    )
    expected = _files(*(f"{name}/**/*.py" for name in _PACKAGES), *data)
    (wheel,) = built.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= held
    assert {name.split("/")[0] for name in held} == {*_PACKAGES, f"infinity_offload-{__version__}.dist-info"}
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert expected | _files("*.md", "*.toml", "constraints.txt", "configs/*", "tests/**/*.py", "tools/*") <= held
    assert __version__ in wheel.name and __version__ in sdist.name


@pytest.mark.deep
def test_the_wheel_runs_the_code_of_the_readme_in_an_empty_directory(built: Path, tmp_path: Path) -> None:
    """Its dependencies are this environment's, by a path: nothing is downloaded."""
    environment, empty = tmp_path / "env", tmp_path / "empty"
    empty.mkdir()
    _run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    site = next((environment / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (code,) = re.findall(r"^```python\n(.*?)^```", (_ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    place = _run(python, "-c", f"{code}\nprint(infinity.__file__)", cwd=empty).strip()
    assert Path(place).is_relative_to(site)
    assert ".safetensors" in {path.suffix for path in (empty / "out").iterdir()}
    program = environment / "bin" / "infinity"
    assert __version__ in _run(program, "--version", cwd=empty)


@pytest.mark.deep
def test_the_sdist_can_be_tested(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    test = "tests/unit/config/test_ready_configs.py"
    said = _run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test, cwd=folder)
    assert " passed" in said


def test_the_image_copies_what_the_package_is_built_from() -> None:
    """It is built where nobody tests it: each file must be there, and be let into the context."""
    dockerfile, ignored = ((_ROOT / name).read_text().splitlines() for name in ("Dockerfile", ".dockerignore"))
    copied = [word for line in dockerfile if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "infinity", "swapper"} <= {*copied}
    assert [name for name in copied if not (_ROOT / name).exists() or f"!{name}" not in ignored] == []
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', "\n".join(dockerfile))
    known = re.findall(r"^(\w+) = \[", (_ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {*extras.split(",")} <= {*known}
