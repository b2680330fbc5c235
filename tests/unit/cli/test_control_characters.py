"""What files and models are called cannot write to the terminal: control characters are shown as escapes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.table import Table
from rich.text import Text
from torch import nn

import infinity
from infinity.cli.main import main
from infinity.console import Console

_EVIL = "\x1b]0;evil\x9b2J\u202egnp-exe\x7f"
_SHOWN = r"\x1b]0;evil\x9b2J\u202egnp-exe\x7f"
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("kind", ["text", "Text", "cell", "title", "markup"])
def test_control_characters_are_shown_as_escapes(kind: str, is_terminal: bool) -> None:
    table = Table(title=_EVIL if kind == "title" else None)
    table.add_column()
    table.add_row(_EVIL if kind == "cell" else " " * 40)
    what: Any = {"text": _EVIL, "Text": Text(_EVIL), "markup": f"[bold]{_EVIL}[/]"}.get(kind, table)
    to = io.StringIO()
    Console(file=to, force_terminal=is_terminal, width=200).print(what)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", to.getvalue())
    assert _SHOWN in plain and not _CONTROL.search(plain)


def test_a_live_display_still_moves_the_cursor() -> None:
    to = io.StringIO()
    with Console(file=to, force_terminal=True, width=80).status(_EVIL):
        pass
    assert "\x1b[?25l" in to.getvalue() and "]0;evil" in to.getvalue() and "\x1b]0" not in to.getvalue()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A run, a log and a checkpoint in which every name is hostile."""
    model = nn.Module()
    model.register_parameter(f"w{_EVIL}", nn.Parameter(torch.ones(2)))
    model.forward = lambda x: (x * next(model.parameters())).sum()  # type: ignore[method-assign]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "infinity": {"run_log": str(tmp_path / "run")},
    }
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        engine.backward(engine(torch.ones(2)))
        engine.step()
        engine.save_checkpoint(tmp_path / "saved", tag=f"tag{_EVIL}", client_state={_EVIL: 1})
    log = tmp_path / "run" / "log.jsonl"
    with log.open("a") as file:
        file.write(json.dumps({"kind": "note", "step": 1, "time": 1, "text": _EVIL}) + "\n")
    (tmp_path / f"dir{_EVIL}").mkdir()
    (tmp_path / f"dir{_EVIL}" / "log.jsonl").write_bytes(log.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({_EVIL: 1, "train_batch_size": 1}))
    return tmp_path


@pytest.mark.deep(but=2)
@pytest.mark.parametrize(
    "command",
    [
        ["watch", "run", "--once"],
        ["report", "run"],
        ["watch", f"dir{_EVIL}", "--once"],
        ["report", f"missing{_EVIL}"],
        ["checkpoint", "inspect", "saved", "--tensors"],
        ["checkpoint", "verify", "saved"],
        ["checkpoint", "inspect", "saved", "--tag", _EVIL],
        ["config", "check", "config.json"],
        ["doctor", f"dir{_EVIL}", "--no-measure"],
        ["clean", f"missing{_EVIL}"],
        [f"nothing{_EVIL}"],
    ],
    ids=str,
)
def test_commands_print_no_control_characters(
    command: list[str], made: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    capfd.readouterr()
    main(command)
    told = capfd.readouterr()
    assert "evil" in told.out + told.err or command == ["report", "run"]
    assert not _CONTROL.search(told.out + told.err)
