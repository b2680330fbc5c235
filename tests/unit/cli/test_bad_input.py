"""Every command, with input that it cannot use: one line that says what to do, and the right exit status."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from infinity.cli.main import COMMANDS, commands, main
from infinity.cli.output import print_json

_NOBODY = 65534


def _leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command that does something, by its words."""
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _leaves(found, (*path, name))


_ALL = sorted(_leaves(commands))
_MISUSED, _FAILED = 2, 1

_WITH_A_PATH: dict[tuple[str, ...], list[str]] = {
    ("checkpoint", "inspect"): ["PATH"],
    ("checkpoint", "verify"): ["PATH"],
    ("checkpoint", "seal"): ["PATH"],
    ("checkpoint", "export"): ["PATH", "out"],
    ("export",): ["PATH", "out"],
    ("import-deepspeed",): ["PATH", "out"],
    ("config", "check"): ["PATH"],
    ("config", "show"): ["PATH"],
    ("doctor",): ["--config", "PATH", "--no-measure"],
    ("report",): ["PATH"],
    ("watch",): ["PATH"],
    ("launch",): ["--hostfile", "PATH", "train.py"],
    ("plan",): ["PATH", "--no-measure"],
    ("profile",): ["PATH"],
    ("clean",): ["PATH", "--yes"],
}
"""Each command that reads something, and where the path of it stands."""
_TAKES_ANY_DIRECTORY = {("profile",), ("clean",)}
_PATHS_ARE_TEXTS = {("launch",), ("plan",), ("profile",)}
_WITHOUT = {("completion",), ("config", "schema")}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def without_rights(tmp_path: Path) -> Iterator[Path]:
    """A directory that nobody may look into, root neither."""
    path = tmp_path / "closed"
    path.mkdir()
    (path / "config.json").write_text("{}")
    path.chmod(0)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(_NOBODY)
    yield path
    if was_root:
        os.seteuid(0)
    path.chmod(0o700)


def _told(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; nothing else may stand there."""
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
    return err


def _filled(command: tuple[str, ...], path: Path) -> list[str]:
    return [*command, *(str(path) if word == "PATH" else word for word in _WITH_A_PATH[command])]


def test_every_command_stands_in_the_table() -> None:
    assert set(_ALL) == {*_WITH_A_PATH, *_WITHOUT}


@pytest.mark.parametrize("command", _ALL, ids=" ".join)
def test_help_has_an_example(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.lower().startswith(f"usage: infinity {' '.join(command)}")
    assert f"infinity {' '.join(command[-2:])}".split()[-1] in out.split("\n  Examples:\n    infinity ")[1]


@pytest.mark.parametrize("command", _ALL, ids=" ".join)
def test_an_unknown_option(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--no-such-option"]) == _MISUSED
    assert "--help" in _told(capsys)


@pytest.mark.parametrize("command", _WITH_A_PATH, ids=" ".join)
def test_a_missing_path(command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_filled(command, tmp_path / "missing")) in (_FAILED, _MISUSED)
    assert "missing" in _told(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.deep(but=9)
@pytest.mark.parametrize("kind", ["directory", "binary", "text", "list"])
@pytest.mark.parametrize("command", _WITH_A_PATH, ids=" ".join)
def test_a_wrong_file(command: tuple[str, ...], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong"
    if kind == "directory":
        if command in _TAKES_ANY_DIRECTORY:
            return
        path.mkdir()
    else:
        path.write_bytes({"binary": bytes(range(256)), "text": b"not what is wanted\n", "list": b"[1]"}[kind])
    assert main(_filled(command, path)) in (_FAILED, _MISUSED)
    assert "wrong" in _told(capsys)
    assert [each.name for each in tmp_path.iterdir()] == ["wrong"]


@pytest.mark.parametrize("command", _WITH_A_PATH, ids=" ".join)
def test_a_directory_without_rights(
    command: tuple[str, ...], without_rights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_filled(command, without_rights / "config.json")) in (_FAILED, _MISUSED)
    assert str(without_rights) in _told(capsys)


@pytest.mark.parametrize("command", sorted(_WITH_A_PATH.keys() - _PATHS_ARE_TEXTS), ids=" ".join)
def test_an_empty_path(command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable that is not set: it is not the present directory."""
    filled = _filled(command, tmp_path)
    for place in range(len(command), len(filled)):
        if filled[place].startswith("-"):
            continue
        assert main([*filled[:place], "", *filled[place + 1 :]]) == _MISUSED
        assert "--help" in _told(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "option", "number", "told"),
    [
        *(
            ("plan --params 1b --no-measure", option, number, "is not a finite number")
            for option in ("--tflops", "--tbw")
            for number in ("nan", "inf", "1e999")
        ),
        *(("profile .", "--minutes", number, "is not in the range") for number in ("0", "1e9")),
        ("plan --params 1m --no-measure", "--lora", "9" * 20, "is not in the range"),
        *(("plan --no-measure", "--params", number, "neither a number of parameters") for number in ("7q", "-7b")),
        *(("launch", "--num_gpus", number, "is not in the range") for number in ("-1", "0", "9" * 23)),
        *(("launch", "--master_port", number, "is not in the range") for number in ("-1", "65536")),
    ],
)
def test_what_is_no_such_number(
    command: str, option: str, number: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), option, number]) == _MISUSED
    err = _told(capsys)
    assert told in err and option in err


def test_all_and_one_tag_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(tmp_path), "--all", "--tag", "x"]) == _MISUSED
    assert "leave out --tag or --all" in _told(capsys)


def test_json_has_no_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"a\xff")  # no text
    print_json({"a": [float("nan"), 1.5], "b": {"c": (float("-inf"), Path(name))}})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": [None, 1.5], "b": {"c": [None, name]}} and out.isascii()


def test_a_script_or_a_slot_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    for arguments, told in (
        (["missing.py"], "there is no such script"),
        (["--exclude", "localhost:" + "9" * 12, "train.py"], "has the slots"),
    ):
        assert main(["launch", *arguments]) == _FAILED
        err = capfd.readouterr().err
        assert told in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ({"type": "AdamW", "params": {"weight_decya": 0.1}}, "Did you mean 'weight_decay'"),
        ({"type": "AdamW", "params": {"lr": -1}}, "Invalid learning rate"),
        ({"type": "AdamW", "params": {"betas": [0.9]}}, "Correct its arguments"),
        ({"type": "MuSGD"}, "MuSGD"),
    ],
    ids=str,
)
def test_an_optimizer_that_initialize_refuses(
    optimizer: dict[str, object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 1, "optimizer": optimizer}))
    assert main(["config", "check", "ds.json"]) == _FAILED
    assert told in _told(capsys)


def test_a_block_that_is_null_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 1, "infinity": null}')
    arguments = ["plan", "--params", "1m", "--no-measure", "--config", "ds.json", "--frozen-dtype", "nf4"]
    assert main(arguments) == 0, capsys.readouterr().err


def _raising(error: BaseException) -> Callable[..., object]:
    def invoke(*arguments: object, **more: object) -> object:
        raise error

    return invoke


@pytest.mark.parametrize("command", _ALL, ids=" ".join)
def test_an_interrupt(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(click.Context, "invoke", _raising(KeyboardInterrupt()))
    arguments = (
        _filled(command, Path("x")) if command in _WITH_A_PATH else [*command, *["bash"][: command == ("completion",)]]
    )
    assert main(arguments) == 130
    assert _told(capsys) == "Interrupted.\n"


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("arguments", [["config", "schema"], ["config", "show", "ds.json"], ["--help"]], ids=str)
def test_a_closed_pipe(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 1}')
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(os.fdopen(writing, "wb")) as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main(arguments) == 141
    assert capsys.readouterr().err == ""


def test_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doktor"]) == _MISUSED
    line = _told(capsys)
    assert "'doktor'" in line and (
        "Did you mean 'doctor'? See" in line or not hasattr(click.exceptions, "NoSuchCommand")
    )
    assert main(["plan", "--params"]) == _MISUSED
    assert "See `infinity plan --help`" in _told(capsys)
    assert main([]) == _MISUSED
    told = capsys.readouterr()
    assert all(name in told.err + told.out for name in COMMANDS)  # click 8.1 prints it to stdout


def test_a_config_is_shown_in_a_narrow_terminal_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"train_batch_size": 1, "fp16": {"enabled": "auto"}}')
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["config", "show", "config.json"]) == 0
    assert "decided" in capsys.readouterr().out  # the other columns have room, too
    for arguments in (["config", "check"], ["config", "show"]):
        assert main([*arguments, "config.json", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["file"] == "config.json"


def test_shells_are_told_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "zsh"]) == 0
    assert "_INFINITY_COMPLETE=zsh_complete" in capsys.readouterr().out
    monkeypatch.setenv("_INFINITY_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "infinity checkpoint ver")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert main([]) == 0
    assert capsys.readouterr().out == "plain,verify\n"
    monkeypatch.delenv("COMP_CWORD")
    for instruction in ("bash_complete", "nonsense"):
        monkeypatch.setenv("_INFINITY_COMPLETE", instruction)
        assert main([]) == _MISUSED
        assert "unset it" in _told(capsys)
