"""`python -m infinity launch`: which hosts, with which command; shown with an ssh of our own."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.internals import main
from tests.waiting import wait_until

_HOSTS = {"worker-1": [0, 1, 2, 3], "worker-2": [0, 1]}


@pytest.fixture(autouse=True)
def _logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun leaves them there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("# ours\nworker-1 slots=4\n\nworker-2 slots=2 # the small one\n")
    return path


def _fake_ssh(directory: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """Writes its arguments, each on a line, to a file with the host's name."""
    path = directory / "ssh"
    path.write_text(
        f'#!/bin/sh\nhost=$(eval echo \\${{$(($# - 1))}})\nprintf "%s\\n" "$@" > {directory}/$host\n{then}\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


_SECRETS = {
    "HF_TOKEN": "hf_secret",
    "HF_HUB_TOKEN": "hf_secret",
    "HF_API_KEY": "hf_secret",
    "NCCL_SECRET": "hf_secret",
    "HF_PASSWORD": "hf_secret",
    "HF_ENDPOINT": "https://me:hf_secret@hub",
    "WANDB_API_KEY": "hf_secret",
}


def test_secrets_are_not_in_command_lines(
    hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _fake_ssh(tmp_path, monkeypatch, f"tr '\\0' '\\n' < /proc/$$/cmdline > {tmp_path}/$host.line; env > {tmp_path}/env")
    for name, value in _SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", "/data/my hub; true")
    assert main(["launch", "--hostfile", str(hostfile), "train.py"]) == 0
    for host in _HOSTS:
        line = (tmp_path / f"{host}.line").read_text()
        assert "BatchMode" in line and "hf_secret" not in line
        assert "HF_HOME=/data/my hub; true" in shlex.split((tmp_path / host).read_text().splitlines()[-1])
    assert "HF_TOKEN" in caplog.text and "WANDB" not in caplog.text and "hf_secret" not in caplog.text


def test_torchrun_on_each_host(hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_ssh(tmp_path, monkeypatch, "exit 0")
    monkeypatch.setenv("NCCL_DEBUG", "a b")
    options = ["--hostfile", str(hostfile), "--exclude", "worker-1:0", "--num_gpus", "2", "--ssh_port", "2222"]
    assert main(["launch", *options, "train.py", "--lr", "it's 1"]) == 0
    for rank, (host, slots) in enumerate({"worker-1": "1,2", "worker-2": "0,1"}.items()):
        *before, there = (tmp_path / host).read_text().splitlines()
        assert before == ["-tt", "-o", "BatchMode=yes", "-p", "2222", "--", host]
        words = shlex.split(there)
        assert words[:3] == ["cd", str(Path.cwd()), "&&"]
        assert {f"CUDA_VISIBLE_DEVICES={slots}", "NCCL_DEBUG=a b", f"--node-rank={rank}"} <= set(words)
        assert words[words.index(sys.executable) : words.index(f"--node-rank={rank}")] == [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2")
        ]
        assert words[-7:-4] == ["--nproc-per-node=2", "--master-addr=worker-1", "--master-port=29500"]
        assert Path(words[-4]).is_file() and words[-3:] == ["train.py", "--lr", "it's 1"]


def test_the_first_host_without_its_user_is_the_address(
    hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_ssh(tmp_path, monkeypatch, "exit 0")
    hostfile.write_text("me@worker-1 slots=1\nme@worker-2 slots=1\n")
    assert main(["launch", "--hostfile", str(hostfile), "train.py"]) == 0
    assert "--master-addr=worker-1" in shlex.split((tmp_path / "me@worker-2").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [
        ("0", 2, "0 is not in the range"),
        ("-1", 2, "-1 is not in the range"),
        ("3", 1, "--num_nodes 3: there are 2 hosts"),
    ],
)
def test_numbers_of_hosts_that_are_refused(
    number: str, status: int, words: str, hostfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--hostfile", str(hostfile), "--num_nodes", number, "train.py"]) == status
    assert words in capsys.readouterr().err


def test_a_host_that_fails_ends_the_others(
    hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fake_ssh(tmp_path, monkeypatch, f'[ "$host" = worker-2 ] && exit 3; echo $$ > {tmp_path}/pid; exec sleep 1000')
    assert main(["launch", "--hostfile", str(hostfile), "train.py"]) == 1
    assert "worker-2 ended with status 3" in capsys.readouterr().err
    pid = (
        (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
    )  # it may have been ended before its first line
    assert not pid or not _is_running(int(pid))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("there", ["ends", "ignores it"])
def test_a_signal_ends_all_hosts(
    number: int, status: int, there: str, hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ssh runs starts a process of its own, as torchrun does. One that does not listen is killed at the second signal."""
    start = "exec " if there == "ends" else "trap '' TERM; "
    _fake_ssh(tmp_path, monkeypatch, f"sleep 1001 & echo $! $$ > {tmp_path}/$host.pids; {start}sleep 1002; wait")
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            try:
                os._exit(main(["launch", "--hostfile", str(hostfile), "train.py"]))
            except SystemExit as error:
                os._exit(int(error.code or 0))
        os._exit(99)
    files = [tmp_path / f"{host}.pids" for host in _HOSTS]
    wait_until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
    started = [int(pid) for file in files for pid in file.read_text().split()]
    os.kill(child, number)
    if there != "ends":
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        wait_until(lambda: not _is_running(started[0]))  # it was told once
        os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    wait_until(lambda: not any(map(_is_running, started)))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_host_that_is_killed_is_named(
    hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fake_ssh(tmp_path, monkeypatch, '[ "$host" = worker-1 ] && kill -9 $$; exec sleep 1000')
    assert main(["launch", "--hostfile", str(hostfile), "train.py"]) == 1
    assert "worker-1 ended by signal 9" in capsys.readouterr().err


@pytest.mark.deep
@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        (["--num_gpus", "2"], "-", "-"),
        (["--include", "localhost:1,2"], "1,2", "1,2"),
        (["--num_gpus", "2", "--exclude", "localhost:1"], "0,2", "0,2"),
        (["--hostfile", "hostfile", "--exclude", "localhost:0"], "1,2", "1,2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_host_needs_no_ssh(
    options: list[str], first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, sys\nfile = pathlib.Path(sys.argv[1], os.environ['RANK'])\n"
        "file.write_text(os.environ.get('CUDA_VISIBLE_DEVICES', '-'))\n"
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hostfile").write_text("localhost slots=3\n")
    options = [str(tmp_path / word) if word == "hostfile" else word for word in options]
    assert main(["launch", *options, "--master_port", "0", str(script), str(tmp_path)]) == 0
    assert {path.name: path.read_text() for path in tmp_path.glob("[0-9]")} == {"0": first, "1": second}


@pytest.mark.deep
def test_a_rank_that_fails_before_it_joins_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    import missing_of_ours\ntime.sleep(600)\n")
    assert main(["launch", "--num_gpus", "2", "--master_port", "0", str(script)]) == 1
    told = capfd.readouterr().err
    cause = told[told.rindex("Root Cause") :]
    assert "rank      : 1 " in cause and "No module named 'missing_of_ours'" in cause
    assert "localhost ended with status 1" in cause
