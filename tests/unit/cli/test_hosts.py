"""Which hosts a launch uses: a hostfile, and a choice of its hosts and slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.cli.launch import chosen, read_hostfile
from infinity.cli.main import main
from infinity.errors import ConfigError

_HOSTS = {"worker-1": [0, 1, 2, 3], "worker-2": [0, 1]}


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("# ours\nworker-1 slots=4\n\nworker-2 slots=2 # the small one\n")
    return path


def test_a_hostfile_and_a_choice_of_it(hostfile: Path) -> None:
    assert read_hostfile(hostfile) == _HOSTS
    assert chosen(_HOSTS, "", "") == _HOSTS
    assert chosen(_HOSTS, "worker-2@worker-1:0,2", "") == {"worker-1": [0, 2], "worker-2": [0, 1]}
    assert chosen(_HOSTS, "", "worker-2@worker-1:0") == {"worker-1": [1, 2, 3]}


@pytest.mark.parametrize(
    "text", ["worker-1", "a slots=x", "a slots=0", "a slots=99999", "a slots=1\na slots=2", "# nobody"]
)
def test_hostfiles_that_are_refused(text: str, hostfile: Path) -> None:
    hostfile.write_text(text)
    with pytest.raises(ConfigError, match="hostfile"):
        read_hostfile(hostfile)


@pytest.mark.parametrize(
    ("include", "exclude"),
    [("worker-3", ""), ("worker-2:2", ""), ("worker-2:a", ""), ("", "worker-1@worker-2"), ("worker-1", "worker-2")],
)
def test_choices_that_are_refused(include: str, exclude: str) -> None:
    with pytest.raises(ConfigError):
        chosen(_HOSTS, include, exclude)


@pytest.mark.parametrize("host", ["me@worker-1", "10.0.0.1", "fe80::1%eth0", "[::1]", "node_1.local", "a.b-c@d"])
def test_hosts_that_are_accepted(host: str, hostfile: Path) -> None:
    hostfile.write_text(f"{host} slots=1")
    assert read_hostfile(hostfile) == {host: [0]}


@pytest.mark.parametrize(
    "host",
    ["-oProxyCommand=touch$IFS/tmp/x", "me@-oProxyCommand=x", "-me@host", "a;b", "$(id)", "a'b", "a\x1b[2Jb", "a/b"],
)
def test_hosts_that_are_refused(host: str, hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostfile.write_text(f"{host} slots=1\n")
    with pytest.raises(ConfigError, match=r"line 1: .* is not the name or address of a host"):
        read_hostfile(hostfile)
    assert main(["launch", "--hostfile", str(hostfile), "train.py"]) == 1
    assert "\x1b" not in capsys.readouterr().err
