"""Config text: comments, trailing commas, places of errors, duplicate keys."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from infinity.config.load import load_config, read_file, read_text
from infinity.errors import ConfigError


def test_comments_and_trailing_commas() -> None:
    text = """
    // head
    {
      "a": 1,  # one
      /* a block
         over lines, with a comma, */
      "list": [1, 2, /* three */ ],  // end
      "inner": {"x": 2,},
    }
    # tail
    """
    assert read_text(text) == {"a": 1, "list": [1, 2], "inner": {"x": 2}}


@pytest.mark.parametrize("value", ["http://host/#top", "/* no */", "a, ]", 'quote \\" // still', "back\\\\", ",}"])
def test_texts_are_left_alone(value: str) -> None:
    expected = value.replace('\\"', '"').replace("\\\\", "\\")
    assert read_text(f'{{"a": "{value}",}} // comment') == {"a": expected}


def test_numbers_as_people_write_them() -> None:
    assert read_text('{"a": 1e9, "b": 5e-5, "c": Infinity}') == {"a": 1e9, "b": 5e-5, "c": float("inf")}


def test_error_names_line_and_column_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('// comment\n/* two\nlines */\n{\n  "a": 1,\n  "b" 2\n}\n')
    with pytest.raises(ConfigError, match=r"ds_config.json'.*line 6, column 7.*double quotes"):
        read_file(path)


_HJSON = """
{
  # as DeepSpeed's users write it
  train_batch_size: 8
  zero_optimization: {
    stage: 3
    offload_param: {
      device: nvme
      nvme_path: '/data'
    }
  }
  bf16: {"enabled": true},
}
"""


def test_hjson_is_read_as_deepspeed_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(_HJSON)
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match=r"line 4, column 3.*double quotes, unless.*pip install hjson"):
        read_file(path)
    monkeypatch.undo()
    hjson = pytest.importorskip("hjson")
    assert read_file(path) == hjson.loads(_HJSON)
    with pytest.raises(ConfigError, match="key 'a' occurs twice"):
        read_text("{a: 1, a: 2}")


@pytest.mark.parametrize("text", ["{", '{"a": True}', '{"a" 1}', '{"a": 1,,}', '{"a": "x}', "[1, 2,, 3]"])
def test_broken_text(text: str) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        read_text(text)


@pytest.mark.parametrize("text", ['{"a": ' + "9" * 5000 + "}", "[" * 100_000], ids=["long number", "deep"])
def test_what_the_parser_gives_up_on(text: str) -> None:
    with pytest.raises(ConfigError, match="no config has a value that long, or objects nested that deep"):
        read_text(text)


@pytest.mark.parametrize("text", ["[]", "3", '"stage"'])
def test_not_an_object(text: str) -> None:
    with pytest.raises(ConfigError, match="not an object"):
        read_text(text)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "a"),
        ('{"zero": {"stage": 1, "stage": 2}}', "zero.stage"),
        ('{"list": [{}, {"x": 1, "x": 1}]}', "list.1.x"),
    ],
)
def test_duplicate_keys(text: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{key}' occurs twice") as caught:
        read_text(text)
    assert caught.value.key == key


def test_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_file(path) == {"a": 1}


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.json'.*does not exist"):
        read_file(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match="': Is a directory"):
        read_file(tmp_path)
    with pytest.raises(ConfigError, match="config text: it is empty"):
        load_config("")
    # JSON text behind a comment is taken for a path.
    for name, words in (("// config\n" + "x" * 5000, "File name too long"), ("a\0b", "null byte")):
        with pytest.raises(ConfigError, match=words):
            read_file(Path(name))
    (tmp_path / "empty.json").write_text(" \n")
    with pytest.raises(ConfigError, match=r"empty.json': it is empty\. Write"):
        read_file(tmp_path / "empty.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError, match=r"binary.json'.*decode"):
        read_file(tmp_path / "binary.json")
