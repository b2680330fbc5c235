"""The files in `configs/` load, as they are, in any directory, and are described."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from infinity.config import load_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FILES = sorted(CONFIGS.glob("*.json"))
README = (CONFIGS / "README.md").read_text()


def test_the_four_are_there() -> None:
    assert [path.name for path in FILES] == [
        "cpu_offload.json",
        "nvme_optimizer.json",
        "small_ram.json",
        "zero3_nvme.json",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_loads_and_every_key_has_an_effect(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(path)
    assert config.notices == ()
    assert config.optimizer is not None
    for section in (config.offload_param, config.offload_optimizer):
        assert section.nvme_paths == ((tmp_path,) if section.device == "nvme" else ())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_is_plain_json(path: Path) -> None:
    """No comments: other programs read these files too."""
    json.loads(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_has_its_line_in_the_readme(path: Path) -> None:
    assert f"| `{path.name}` |" in README


def test_readme_names_no_other_file() -> None:
    assert set(re.findall(r"\w+\.json", README)) == {path.name for path in FILES}
