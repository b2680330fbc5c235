"""The I/O profile's own arithmetic, its reading of fio, and what it writes into configs; drives and fio are played here."""

from __future__ import annotations

import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity.config import load_config
from io_profile import arguments, config_file, copies, places, report
from io_profile.advice import advise, block_for, default_setting, reproduces
from io_profile.display import Display
from io_profile.effort import FULL, LEAST_PAIRS, QUICK
from io_profile.fio import Fio, FioFailed, FioJob, FioSample, job_at
from io_profile.grid import WORKLOADS, Grid, Point, setting_at
from io_profile.model import ModelRefused, facts_of, read_model
from io_profile.results import Comparison, Results
from io_profile.session import Plan, Session
from io_profile.spread import median_interval, spread_percent
from io_profile.training import Outlook
from swapper.errors import ArgumentError, WrongDataError
from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import Sample
from swapper.volumes.file_system import Drive, describe_drive

_MIB = 1 << 20
_GRID = Grid.of((_MIB, 4 * _MIB), (4, 8))


def sample(setting: IOSetting, workload: Workload, rate: float, cpu_seconds: float = 0.1) -> Sample:
    """One second at `rate` bytes per second."""
    return Sample(setting, workload, int(rate), 0, 1.0, cpu_seconds)


def fio_sample(job: FioJob, workload: Workload, rate: float) -> FioSample:
    """fio at `rate`."""
    return FioSample(job, workload, rate, 0.0, 0, 0.1)


def results_of(rates: dict[IOSetting, float]) -> Results:
    """A sweep in which every setting does everything at the same rate."""
    results = Results(request_sizes=(_MIB, 4 * _MIB, 16 * _MIB))
    for setting, rate in rates.items():
        results.backends[setting.backend] = None
        for workload in WORKLOADS:
            results.add(sample(setting, workload, rate))
    return results


# ------------------------------------------------------------------------------------------------------------ spread


def test_the_interval_of_seven_is_smallest_to_largest() -> None:
    interval = median_interval([0.97, 1.01, 0.95, 1.2, 0.99, 1.0, 0.98])
    assert (interval.low, interval.high) == (0.95, 1.2)
    assert interval.level == pytest.approx(1 - 2 / 2**7)


@pytest.mark.parametrize("num_values", [3, 7, 9, 12])
def test_the_level_of_the_interval_is_that_of_coin_tosses(num_values: int) -> None:
    values = list(range(num_values))
    interval = median_interval(values)
    cut = int(interval.low)
    # The median lies inside unless too few or too many of the values fall below it.
    inside = sum(cut < sum(tosses) < num_values - cut for tosses in itertools.product((0, 1), repeat=num_values))
    assert interval.level == pytest.approx(inside / 2**num_values)
    assert interval.level >= 0.95 or cut == 0
    assert interval.high == num_values - 1 - cut


def test_more_values_give_a_narrower_interval() -> None:
    assert median_interval(range(20)).low > 0


def test_the_spread_is_half_the_range() -> None:
    assert spread_percent([1.0, 2.0, 3.0]) == pytest.approx(50.0)


# -------------------------------------------------------------------------------------------------------------- grid


@pytest.mark.parametrize("effort", [FULL, QUICK])
def test_every_setting_can_be_put_into_a_config(effort: Any) -> None:
    grid = Grid.of(effort.request_sizes, effort.depths)
    for setting in grid.settings(("threads", "uring", "aiofiles")):
        assert reproduces(block_for(setting, is_direct=True), setting), setting


@pytest.mark.parametrize("effort", [FULL, QUICK])
def test_the_engines_default_is_among_what_is_measured(effort: Any) -> None:
    assert default_setting() in Grid.of(effort.request_sizes, effort.depths).settings(("threads",))


@pytest.mark.parametrize("backend", ["threads", "uring", "aiofiles"])
def test_as_many_requests_are_under_way_as_the_point_says(backend: Any) -> None:
    for point in Grid.of(FULL.request_sizes, FULL.depths).points:
        assert setting_at(backend, point).num_inflight == point.depth


def test_all_settings_of_a_default_run_fit_into_its_file() -> None:
    for effort in (FULL, QUICK):
        assert Grid.of(effort.request_sizes, effort.depths).least_file_bytes <= effort.file_bytes


def test_the_portable_backend_gets_the_whole_grid_where_it_is_alone() -> None:
    assert _GRID.points_for("aiofiles", ("aiofiles",)) == _GRID.points
    assert len(_GRID.points_for("aiofiles", ("threads", "aiofiles"))) < len(_GRID.points)


# --------------------------------------------------------------------------------------------------------------- fio


@pytest.fixture
def played_fio(tmp_path: Path) -> Callable[[str], Fio]:
    """A function that makes a `fio` out of the given Python source, on one file of 64 MiB."""
    file = tmp_path / "file"
    with file.open("wb") as handle:
        handle.truncate(64 * _MIB)

    def make(source: str) -> Fio:
        program = tmp_path / "fio"
        program.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{source}\n")
        program.chmod(0o755)
        return Fio(str(program), [str(file)], is_direct=True, read_share=0.54)

    return make


def answer(read: float = 1e9, write: float = 0.0, error: int = 0) -> str:
    """Source of a program that prints what fio would, with a warning in front as fio does."""
    direction = "{'bw_bytes': %r, 'io_bytes': int(%r)}"
    return (
        "print('note: both iodepth >= 1 and synchronous I/O engine are selected')\n"
        f"print(json.dumps({{'jobs': [{{'error': {error}, 'usr_cpu': 5.0, 'sys_cpu': 15.0, "
        f"'read': {direction % (read, read)}, 'write': {direction % (write, write)}}}]}}))"
    )


def test_fio_is_read(played_fio: Callable[[str], Fio]) -> None:
    found = played_fio(answer(2e9, 1e9)).measure(FioJob("libaio", _MIB, 1, 8), Workload.MIXED, 0.1)
    assert found.bytes_per_second == 3e9
    assert found.written_bytes == 10**9
    assert found.cpu_cores == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print('fio: engine libaio not loadable', file=sys.stderr); sys.exit(1)", "engine libaio not loadable"),
        (answer(error=1), "Operation not permitted"),
        ("print('no JSON')", "cannot be read"),
        ("sys.exit(7)", "exit code 7"),
    ],
)
def test_what_fio_cannot_do_is_said_in_its_words(played_fio: Callable[[str], Fio], source: str, words: str) -> None:
    with pytest.raises(FioFailed, match=words):
        played_fio(source).measure(FioJob("libaio", _MIB, 1, 8), Workload.READ, 0.1)


def test_a_fio_that_hangs_is_ended(played_fio: Callable[[str], Fio], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("io_profile.fio._PATIENCE_SECONDS", 0.1)
    started: list[subprocess.Popen[str]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(FioFailed, match="no answer"):
        played_fio("time.sleep(1000)").measure(FioJob("libaio", _MIB, 1, 8), Workload.READ, 0.1)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_fio_goes_on_where_it_ended(played_fio: Callable[[str], Fio], tmp_path: Path) -> None:
    fio = played_fio(
        f"open({str(tmp_path / 'seen')!r}, 'a').write([a for a in sys.argv if a.startswith('--offset=')][0] + ' ')\n"
        + answer(read=20 * _MIB)
    )
    for _ in range(3):
        fio.measure(FioJob("libaio", _MIB, 1, 8), Workload.READ, 0.1)
    # The third run would have less than half of the file left.
    assert (tmp_path / "seen").read_text().split() == ["--offset=0", f"--offset={20 * _MIB}", "--offset=0"]


@pytest.mark.parametrize(
    ("engine", "depth", "num_files", "num_cores", "num_jobs"),
    [
        ("libaio", 32, 1, 2, 1),
        ("libaio", 32, 2, 2, 2),
        ("io_uring", 32, 4, 2, 1),
        ("psync", 32, 1, 2, 2),
        ("psync", 4, 1, 16, 4),
        ("psync", 8, 3, 7, 6),
    ],
)
def test_fio_has_no_more_jobs_than_cores(
    engine: str, depth: int, num_files: int, num_cores: int, num_jobs: int
) -> None:
    job = job_at(engine, Point(_MIB, depth), num_files=num_files, num_cores=num_cores)
    assert job.num_jobs == num_jobs <= num_cores
    assert job.point == Point(_MIB, depth)


# ----------------------------------------------------------------------------------------------------------- results


def test_a_setting_is_compared_with_fios_best_at_its_size_and_depth() -> None:
    setting = setting_at("threads", Point(_MIB, 8))
    results = results_of({setting: 1e9})
    results.add_fio(fio_sample(FioJob("libaio", _MIB, 1, 8), Workload.READ, 2e9))
    results.add_fio(fio_sample(FioJob("psync", _MIB, 2, 8), Workload.READ, 4e9))
    results.add_fio(fio_sample(FioJob("libaio", _MIB, 1, 32), Workload.READ, 8e9))
    assert results.share_of_fio(setting, Workload.READ) == pytest.approx(0.25)
    assert results.share_of_fio(setting, Workload.WRITE) is None


def test_small_requests_take_no_part_in_the_comparison_of_the_best() -> None:
    small, large = setting_at("threads", Point(_MIB // 4, 8)), setting_at("threads", Point(_MIB, 8))
    assert results_of({small: 9e9, large: 1e9}).best(Workload.READ) == large


def test_the_same_point_as_fios_is_taken_only_where_it_is_as_good() -> None:
    best, near = setting_at("uring", Point(4 * _MIB, 8)), setting_at("threads", Point(_MIB, 4))
    point = Point(_MIB, 4)
    assert results_of({best: 1.00e9, near: 0.96e9}).best(Workload.READ, near=point) == near
    assert results_of({best: 1.00e9, near: 0.90e9}).best(Workload.READ, near=point) == best


def test_cores_are_stated_for_two_gigabytes_per_second_at_4_mib() -> None:
    setting = setting_at("uring", Point(4 * _MIB, 8))
    results = Results(request_sizes=(4 * _MIB,))
    results.add(sample(setting, Workload.READ, 4e9, cpu_seconds=0.5))
    assert results.cores_at_reference_rate("uring", Workload.READ) == pytest.approx(0.25)
    assert results.cores_at_reference_rate("threads", Workload.READ) is None


# ------------------------------------------------------------------------------------------------------------ advice


def test_the_default_stays_where_nothing_is_better() -> None:
    default, other = default_setting(), setting_at("uring", Point(4 * _MIB, 8))
    advice = advise(results_of({default: 1.00e9, other: 1.03e9}), is_direct=True)
    assert advice is not None
    assert advice.setting == default
    assert advice.default_share == 1.0


def test_a_backend_that_proves_itself_faster_is_taken() -> None:
    default, faster = default_setting(), setting_at("uring", Point(4 * _MIB, 8))
    results = results_of({default: 1.0e9, faster: 1.3e9})
    results.backends["aiofiles"] = "no such library"
    advice = advise(results, is_direct=True)
    assert advice is not None
    assert advice.setting == faster
    io = load_config(json.loads(json.dumps(advice.block)) | {"train_batch_size": 1}, check_storage=False).io
    assert (io.backend, io.request_bytes, io.num_threads, io.max_inflight, io.direct) == (
        "uring",
        4 * _MIB,
        faster.num_threads,
        faster.max_inflight,
        True,
    )
    assert advice.default_share == pytest.approx(1 / 1.3)
    reasons = dict(advice.reasons)
    assert set(reasons) == {f"{block}.{key}" for block, values in advice.block.items() for key in values}
    assert "aiofiles cannot be used here" in reasons["infinity.io_backend"]


def test_requests_longer_than_the_engines_are_not_recommended() -> None:
    long, useful = setting_at("threads", Point(16 * _MIB, 8)), setting_at("threads", Point(4 * _MIB, 8))
    advice = advise(results_of({long: 2e9, useful: 1e9}), is_direct=False)
    assert advice is not None
    assert advice.setting == useful
    assert advice.block["infinity"]["direct_io"] is False


def test_a_sweep_without_all_workloads_gives_no_advice() -> None:
    results = Results(request_sizes=(_MIB,))
    results.add(sample(default_setting(), Workload.READ, 1e9))
    assert advise(results, is_direct=True) is None


# ------------------------------------------------------------------------------------------------------- config file

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
    for source in (Path(__file__).resolve().parents[2] / "configs").glob("*.json"):
        path = tmp_path / source.name
        path.write_bytes(source.read_bytes())
        assert apply(path)
        kept, changed = json.loads(source.read_text()), json.loads(path.read_text())
        for name, value in kept.items():
            assert changed[name] == value if not isinstance(value, dict) else value.items() <= changed[name].items()


def test_a_link_to_a_config_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(_CONFIG)
    link = tmp_path / "link.json"
    link.symlink_to("real.json")
    apply(link)
    assert link.is_symlink()
    assert "intra_op_parallelism" in (tmp_path / "real.json").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("config.json", "Expecting value"),
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


def test_a_config_that_cannot_be_written_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(_CONFIG)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(config_file.ConfigRefused, match="No space left"):
        apply(path)
    assert path.read_text() == _CONFIG
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]


# ---------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("text", "num_parameters"),
    [("7B", 7 * 10**9), ("374m", 374 * 10**6), ("1.5 b", 15 * 10**8), ("1e6", 10**6), ("1_000", 1000), ("3", 3)],
)
def test_models_by_number(text: str, num_parameters: int) -> None:
    assert facts_of(*read_model(text)).num_parameters == num_parameters


@pytest.mark.parametrize("text", ["0", "-7B", "seven", "7X", "", "1e300", "meta-llama/Llama-3-8B"])
def test_models_that_are_none(text: str) -> None:
    with pytest.raises(ModelRefused):
        read_model(text or " ")


def test_a_hugging_face_config_is_counted(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, intermediate_size=128, num_attention_heads=4, vocab_size=100
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    expected = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters())
    for path in (tmp_path, tmp_path / "config.json"):
        assert facts_of(*read_model(str(path))).num_parameters == expected


def test_a_config_without_a_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ModelRefused, match="config"):
        read_model(str(tmp_path))


def test_what_the_drives_speed_means() -> None:
    facts = facts_of(*read_model("1B"))
    moved = facts.least.read + facts.least.write
    outlook = Outlook(facts, moved / 10.0, 300.0, "given", is_compute_estimated=False, tbw_bytes=1e15, num_drives=2)
    assert outlook.io_seconds == pytest.approx(10.0)
    assert outlook.hiding_tokens == pytest.approx(3000.0)
    assert outlook.life_steps(1e15) == pytest.approx(1e15 / facts.least.write)
    words = " ".join(" ".join(line) for line in outlook.lines())
    assert "3,000 tokens per step" in words
    assert "1,000 TB written in all on 2 drives" in words


def test_without_a_rating_the_example_is_called_one() -> None:
    outlook = Outlook(
        facts_of(*read_model("1B")), 1e9, 1.0, "given", is_compute_estimated=False, tbw_bytes=None, num_drives=1
    )
    assert "as an example" in dict(outlook.lines())["life of the drives"]
    assert outlook.as_json()["life_steps"] is None


# ------------------------------------------------------------------------------------------------------------ places


def refusal(paths: list[Path], file_bytes: int = _MIB, least_bytes: int = _MIB) -> str:
    with pytest.raises(places.PlaceRefused) as caught:
        places.look_at(paths, file_bytes, least_bytes)
    return str(caught.value)


def test_directories_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "no such directory" in refusal([tmp_path / "missing"])
    assert "not a directory" in refusal([tmp_path / "file"])
    assert "not a directory" in refusal([tmp_path / "dangling"])


def test_a_directory_that_is_given_twice(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert "twice" in refusal([tmp_path, tmp_path])
    assert "same directory" in refusal([tmp_path, tmp_path / "link"])


def test_two_directories_on_one_drive_are_said(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    found = places.look_at([tmp_path / "a", tmp_path / "b"], _MIB, _MIB)
    assert found.num_drives == 1
    assert any("on one drive" in remark for remark in found.remarks)


def test_tmpfs_is_said_and_a_size_that_is_proposed_fits(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(40 * _MIB)
    assert any("is tmpfs" in remark for remark in places.look_at([directory], _MIB, _MIB).remarks)
    words = refusal([directory], 64 * _MIB)
    assert "40 MiB are free" in words
    proposed = int(words.partition("--size ")[2].partition("MiB")[0])
    assert places.look_at([directory], proposed * _MIB, _MIB).is_memory
    assert "at least 60 MiB" in refusal([directory], 64 * _MIB, 60 * _MIB)


def test_directories_on_one_file_system_share_its_space(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(40 * _MIB)
    (directory / "inner").mkdir()
    words = refusal([directory, directory / "inner"], 30 * _MIB)
    assert "each of the 2 directories" in words
    proposed = int(words.partition("--size ")[2].partition("MiB")[0])
    places.look_at([directory, directory / "inner"], proposed * _MIB, _MIB)


def test_a_network_file_system_gets_the_portable_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(path: Path) -> Drive:
        return replace(describe_drive(path), file_system="nfs4", is_network=True)

    monkeypatch.setattr(places, "describe_drive", describe)
    parsed = arguments.parse([str(tmp_path), "--quick"], "")
    assert parsed.backend_names == ("aiofiles",)
    assert any("network file system" in remark for remark in parsed.remarks)


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "0"], "more than 0"),
        (["--size", "-5"], "must be a size"),
        (["--size", "many"], "must be a size"),
        (["--size", "1MiB"], "too small"),
        (["--size", "900TB"], "are free"),
        (["--seconds", "0"], "above 0"),
        (["--seconds", "nan"], "above 0"),
        (["--seconds", "1e9"], "too long"),
        (["--repetitions", "0"], "whole number"),
        (["--repetitions", "1.5"], "whole number"),
        (["--pairs", "few"], "no number"),
        (["--request-sizes", "1MiB,,4MiB"], "must be a size"),
        (["--request-sizes", "4GiB"], "at most"),
        (["--in-flight", "-4"], "whole number"),
        (["--backends", "magic"], "choose from"),
        (["--tokens-per-second", "inf"], "above 0"),
        (["--tbw", "0"], "above 0"),
        (["--tbw", "inf"], "terabytes"),
        (["--model", "nothing"], "neither"),
        (["--json", "/nowhere/at/all.json"], "no directory"),
        (["--json", "/"], "is a directory"),
        (["--apply", "/nowhere.json"], "no such file"),
    ],
)
def test_bad_options_are_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        arguments.parse([str(tmp_path), *options], "")
    assert caught.value.code == 2
    message = capsys.readouterr().err.rpartition("error: ")[2]
    assert words in message
    assert options[0].removeprefix("--") in message or "free" in message or "such file" in message


def test_sizes_are_rounded_and_that_is_said(tmp_path: Path) -> None:
    options = ["--size", "400000001", "--request-sizes", "1000000,4MiB", "--in-flight", "6,8"]
    parsed = arguments.parse([str(tmp_path), *options], "")
    assert parsed.effort.file_bytes % 4096 == 0
    assert parsed.effort.file_bytes - 400000001 < 4096
    assert parsed.effort.request_sizes == (1003520, 4 * _MIB)
    assert parsed.effort.depths == (8,)
    for words in ("--size: 400000001 bytes", "--request-sizes: 1000000 bytes", "--in-flight"):
        assert any(words in remark for remark in parsed.remarks)


def test_ratings_are_terabytes(tmp_path: Path) -> None:
    for text, num_bytes in (("600", 600e12), ("0.6PB", 0.6e15), ("1200TB", 1.2e15)):
        assert arguments.parse([str(tmp_path), "--quick", "--tbw", text], "").tbw == pytest.approx(num_bytes)


def test_pictures_need_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        arguments.parse([str(tmp_path), "--quick", "--png", str(tmp_path / "io.png")], "")
    assert "pip install" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- session


class PlayedDrive:
    """Answers like a `DriveTest`, at once."""

    def __init__(self, log: list[str], errors: dict[str, Exception] | None = None) -> None:
        self.paths = ["/proc/self/fd/0"]
        self.num_bytes = 1 << 30
        self._log = log
        self._errors = errors or {}
        self.filled_bytes = self.num_bytes

    def prepare(self, progress: Callable[[int, int], None], *, max_seconds: float) -> None:
        progress(self.filled_bytes, self.num_bytes)
        self.num_bytes = self.filled_bytes

    def verify(self, setting: IOSetting) -> None:
        if error := self._errors.get(f"verify {setting.backend}"):
            raise error

    def measure(self, setting: IOSetting, workload: Workload, seconds: float, **_: object) -> Sample:
        if error := self._errors.get(setting.backend):
            raise error
        self._log.append(f"ours {workload.value}")
        return Sample(setting, workload, 10**9, 10**8, seconds, 0.01)


class PlayedFio:
    """Answers like a `Fio`."""

    num_files = 1

    def __init__(self, log: list[str], broken: str = "", interrupt_after: int | None = None) -> None:
        self._log = log
        self._broken = broken
        self._left = interrupt_after
        self.part = 1.0
        self.num_failures = 0

    def use_part(self, part: float) -> None:
        self.part = part

    def measure(self, job: FioJob, workload: Workload, seconds: float) -> FioSample:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        if job.engine == self._broken:
            self.num_failures += 1
            raise FioFailed("Operation not permitted")
        self._log.append(f"fio {workload.value}")
        return FioSample(job, workload, 1e9 if job.engine == "libaio" else 0.5e9, 0.0, 0, 0.1)


def play(
    drive: PlayedDrive, fio: PlayedFio | None, results: Results, backends: tuple[Any, ...] = ("threads", "uring")
) -> None:
    """A whole session."""
    engines = ("psync", "libaio", "io_uring") if fio is not None else ()
    plan = Plan(QUICK, _GRID, backends, engines, 0.54)
    session = Session(plan, results, Display(Console(quiet=True), plan.total_seconds(1)))
    session.run(drive, fio)  # type: ignore[arg-type]


def fresh() -> Results:
    return Results(request_sizes=(_MIB, 4 * _MIB))


def test_everything_is_measured_in_turns() -> None:
    log: list[str] = []
    results = fresh()
    play(PlayedDrive(log), PlayedFio(log), results)
    assert results.backends == {"threads": None, "uring": None}
    assert results.verified == ["threads", "uring"]
    settings = _GRID.settings(("threads", "uring"))
    for setting, workload in itertools.product(settings, WORKLOADS):
        assert len(results.ours[setting, workload]) == QUICK.num_repetitions
        assert results.share_of_fio(setting, workload) is not None
    for comparison in results.comparisons.values():
        assert comparison.job.engine == "libaio"
        assert len(comparison.pairs) == LEAST_PAIRS
    # The pairs come last: three workloads each, and who begins changes from pair to pair.
    pairs = [each.split()[0] for each in log[-LEAST_PAIRS * 6 :]]
    assert pairs[:6] == ["ours", "fio"] * 3
    assert pairs[6:12] == ["fio", "ours"] * 3


def test_without_fio_the_sweep_is_the_same() -> None:
    results = fresh()
    play(PlayedDrive([]), None, results)
    assert results.fio == {} == results.comparisons
    assert len(results.ours) == len(WORKLOADS) * len(_GRID.settings(("threads", "uring")))


def test_an_interruption_loses_nothing() -> None:
    results, log = fresh(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        play(PlayedDrive(log), PlayedFio(log, interrupt_after=15), results)
    assert results.ours
    assert results.fio


def test_an_engine_that_is_missing_is_listed_and_tried_no_more() -> None:
    results, log = fresh(), list[str]()
    fio = PlayedFio(log, broken="io_uring")
    play(PlayedDrive(log), fio, results)
    assert fio.num_failures == 1
    assert results.engines == {"psync": None, "libaio": None, "io_uring": "Operation not permitted"}
    assert all(len(comparison.pairs) == LEAST_PAIRS for comparison in results.comparisons.values())


def test_a_fio_that_can_do_nothing_does_not_end_the_sweep() -> None:
    results, log = fresh(), list[str]()
    fio = PlayedFio(log)
    fio.measure = lambda *_: (_ for _ in ()).throw(FioFailed("broken"))  # type: ignore[method-assign]
    play(PlayedDrive(log), fio, results)
    assert results.comparisons == {}
    assert len(results.ours) == len(WORKLOADS) * len(_GRID.settings(("threads", "uring")))


def test_a_backend_that_is_missing_is_listed() -> None:
    results = fresh()
    play(PlayedDrive([], {"uring": ArgumentError("the kernel forbids io_uring")}), None, results)
    assert results.backends == {"threads": None, "uring": "the kernel forbids io_uring"}
    assert {setting.backend for setting in results.settings} == {"threads"}


def test_no_backend_at_all_is_an_error_with_the_reasons() -> None:
    errors: dict[str, Exception] = {name: ArgumentError(f"no {name}") for name in ("threads", "uring")}
    with pytest.raises(ArgumentError, match=r"threads: no threads; uring: no uring"):
        play(PlayedDrive([], errors), None, fresh())


def test_wrong_data_end_it() -> None:
    error = WrongDataError.__new__(WrongDataError)
    Exception.__init__(error, "byte 4096 of the scratch file")
    with pytest.raises(WrongDataError, match="4096"):
        play(PlayedDrive([], {"verify uring": error}), None, fresh())


def test_a_slow_drive_is_measured_on_what_could_be_written() -> None:
    results, log = fresh(), list[str]()
    drive, fio = PlayedDrive(log), PlayedFio(log)
    drive.filled_bytes = drive.num_bytes // 4
    play(drive, fio, results)
    assert fio.part == 0.25
    assert any("256 MiB of the 1 GiB" in note for note in results.notes)


def test_rounds_are_left_out_where_they_would_take_too_long() -> None:
    results = fresh()
    effort = replace(QUICK, num_repetitions=5, limit_seconds=0.0)
    plan = Plan(effort, _GRID, ("threads",), (), 0.54)
    Session(plan, results, Display(Console(quiet=True), plan.total_seconds(1))).run(
        PlayedDrive([]),  # type: ignore[arg-type]
        None,
    )
    assert {len(samples) for samples in results.ours.values()} == {1}
    assert any("1 of 5 rounds" in note for note in results.notes)


# ----------------------------------------------------------------------------------------------------------- display


def test_the_time_left_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    display = Display(Console(quiet=True), expected_seconds=100.0)
    assert display.seconds_left == pytest.approx(100.0)
    now = 150.0  # 50 seconds for what should have taken 25
    display.advance(25.0)
    assert display.seconds_left == pytest.approx(150.0)
    display.skip(25.0)
    assert display.seconds_left == pytest.approx(100.0)


def test_elsewhere_than_on_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(Console(force_terminal=False), expected_seconds=10.0) as display:
        display.phase("sweep")
        display.advance(5.0)
        display.phase("pairs")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[  0 %] sweep")
    assert lines[1].startswith("[ 50 %] pairs")


# ------------------------------------------------------------------------------------------------------------ copies


@pytest.mark.gpu
def test_copies_to_and_from_the_gpu_are_measured() -> None:
    found = list(copies.measure_copies())
    assert [each.num_bytes for each in found] == list(copies.SIZES)
    assert all(each.to_device_bytes_per_second > 0 < each.to_host_bytes_per_second for each in found)


def test_without_a_gpu_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no CUDA device" in (copies.why_not() or "")


# ------------------------------------------------------------------------------------------------------------ report


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "io.json"
    report.write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        report.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["io.json"]


def test_a_comparison_is_the_median_of_its_ratios() -> None:
    setting, job = setting_at("uring", Point(_MIB, 8)), FioJob("libaio", _MIB, 1, 8)
    comparison = Comparison(Workload.READ, setting, job)
    for ours in (0.9e9, 0.95e9, 1.0e9, 1.05e9, 1.1e9, 0.98e9, 0.97e9):
        comparison.pairs.append((sample(setting, Workload.READ, ours), fio_sample(job, Workload.READ, 1e9)))
    assert comparison.share == pytest.approx(0.98)
    assert comparison.interval.low == pytest.approx(0.9)
    assert comparison.interval.high == pytest.approx(1.1)
