"""Settings written into configs that hold other things."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from infinity.config import load_config
from infinity.machine import config_file

_BLOCK = {
    "aio": {"block_size": 4194304, "queue_depth": 2, "intra_op_parallelism": 8},
    "infinity": {"io_backend": "threads", "direct_io": True, "page_bytes": "auto"},
}
_CONFIG = """{
  // a comment with "quotes" and { braces
  "train_batch_size": 1,   # another
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
  "aio": {
    "block_size": "1MiB", /* small */
    "queue_depth": 16,
  },
  "infinity": {"host_memory_budget": "2GB", "page_bytes": "8MiB"},
}
"""


def apply(path: Path) -> list[config_file.Change]:
    return config_file.apply(path, _BLOCK, "a test")


def test_only_the_settings_change_in_a_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(_CONFIG)
    path.chmod(0o640)
    changes = {change.key: (change.before, change.after) for change in apply(path)}
    assert changes == {
        "aio.block_size": ("1MiB", 4194304),
        "aio.queue_depth": (16, 2),
        "aio.intra_op_parallelism": (None, 8),
        "infinity.io_backend": (None, "threads"),
        "infinity.direct_io": (None, True),
    }
    text = path.read_text()
    for kept in (
        '// a comment with "quotes" and { braces',
        "# another",
        "/* small */",
        '{"type": "AdamW", "params": {"lr": 3e-4}}',
        '"host_memory_budget": "2GB", "page_bytes": "8MiB"',
    ):
        assert kept in text
    assert '    "queue_depth": 2,\n    "intra_op_parallelism": 8' in text, "indented as its neighbours"
    before, after = (load_config(text, check_storage=False) for text in (_CONFIG, text))
    assert (after.io.request_bytes, after.io.num_threads, after.io.max_inflight) == (4194304, 8, 16)
    assert after.optimizer == before.optimizer
    assert after.infinity == before.infinity
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]


def test_the_config_remembers_what_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(_CONFIG)
    apply(path)
    assert f'"{config_file.NOTE_KEY}": "a test, ' in path.read_text()
    assert "aio.queue_depth: 16 -> 2" in path.read_text()
    text = path.read_text()
    assert apply(path) == [], "the second time there is nothing to do"
    assert path.read_text() == text


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"train_batch_size": 1}',
        '\ufeff{\r\n\t"train_batch_size": 1\r\n}\r\n',
        '{"train_batch_size": 1, "aio": {}, "infinity": {}}',
        '{"train_batch_size": 1, "aio": null, "infinity": {"page_bytes": "auto",},}',
        '{"train_batch_size": 1, "aio": {"thread_count": 1, "block_size": "auto"}}',
        '{"aio": {"queue_depth": 1}, "train_batch_size": 1 // the end\n}',
    ],
)
def test_configs_of_every_form_give_the_measured_setting(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode())
    apply(path)
    written = path.read_bytes().decode()
    plain = config_file.read_text(written.lstrip("\ufeff"))
    io = load_config({"train_batch_size": 1} | plain, check_storage=False).io
    assert (io.backend, io.request_bytes, io.num_threads, io.max_inflight) == ("threads", 4194304, 8, 16)
    assert written.startswith("\ufeff") == text.startswith("\ufeff")
    assert ("\r\n" in written) == ("\r\n" in text)
    assert "\n" not in written.replace("\r\n", "") or "\r\n" not in text


def test_every_ready_config_can_be_changed(tmp_path: Path) -> None:
    for source in (Path(__file__).resolve().parents[3] / "configs").glob("*.json"):
        path = tmp_path / source.name
        path.write_bytes(source.read_bytes())
        assert apply(path)
        kept, changed = json.loads(source.read_text()), json.loads(path.read_text())
        for name, value in kept.items():
            assert changed[name] == value if not isinstance(value, dict) else value.items() <= changed[name].items()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("config.json", "not an object"),  # HJSON takes it for a text
        ('{"train_batch_size": }', "line 1"),
        ("[1]", "not an object"),
        ('{"train_batch_size": 1, "aoi": {}}', "aio"),
        ('{"train_batch_size": 1, "aio": {"block_size": "big"}}', "block_size"),
    ],
)
def test_what_is_no_config_is_refused_and_left_alone(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for use in (config_file.check, apply):
        with pytest.raises(config_file.ConfigRefused, match=words):
            use(path)
    assert path.read_text() == text
