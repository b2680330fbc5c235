"""The files in `configs/` load, as they are, in any directory, and are described."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import infinity.config
from infinity.config import load_config
from infinity.config.load import ready_names
from infinity.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FILES = sorted(CONFIGS.glob("*.json"))
README = (CONFIGS / "README.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_comes_with_the_package_by_its_name(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(path.stem) == load_config(Path(path.stem)) == load_config(path)
    Path(path.stem).write_text(json.dumps({"train_batch_size": 7}))
    assert load_config(path.stem).train_batch_size == 7, "an existing file comes first"


def test_another_name_is_told_those_that_are_ready() -> None:
    with pytest.raises(ConfigError, match=r"cpu_offload, nvme_optimizer, small_ram, zero3_nvme"):
        load_config("zero3")


def test_every_one_of_the_package_is_in_the_folder() -> None:
    """In the repository the folder holds links to them; a source distribution has copies."""
    assert [path.stem for path in FILES] == ready_names()
    package = Path(infinity.config.__file__).parent
    assert all(path.read_bytes() == (package / "ready" / path.name).read_bytes() for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_loads_and_every_key_has_an_effect(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(path)
    assert config.notices == ()
    assert config.optimizer is not None
    for section in (config.offload_param, config.offload_optimizer):
        assert section.nvme_paths == ((tmp_path,) if section.device == "nvme" else ())
    assert not list(tmp_path.iterdir())


def test_each_has_its_line_in_the_readme_and_no_other_file_is_named() -> None:
    names = {path.name for path in FILES}
    assert set(re.findall(r"\| `(\w+\.json)` \|", README)) == set(re.findall(r"\w+\.json", README)) == names
