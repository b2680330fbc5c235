"""How files are read and written: the backend, the measurement, and who decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.config import InfinityConfig, load_config
from infinity.errors import ConfigError

BASE: dict[str, Any] = {"train_batch_size": 1}


def _load(aio: dict[str, Any] | None = None, **infinity: Any) -> InfinityConfig:
    return load_config(BASE | {"aio": aio or {}, "infinity": infinity})


def _decided(config: InfinityConfig) -> dict[str, tuple[object, str]]:
    return {key: (value, who) for key, value, who in config.decisions}


@pytest.mark.parametrize("name", ["threads", "uring", "aiofiles"])
def test_backend(name: str) -> None:
    for written in (name, name.upper(), f" {name} "):
        config = _load(io_backend=written)
        assert config.io.backend == name
        assert config.io.is_from_config
        assert _decided(config)["infinity.io_backend"] == (name, "config")


@pytest.mark.parametrize("value", ["auto", "Auto", None])
def test_backend_left_open(value: object) -> None:
    config = _load(io_backend=value)
    assert config.io.backend == "auto"
    assert not config.io.is_from_config


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("io_uring", 'expected one of "auto".*Did you mean "uring"'),
        ("libaio", 'expected one of "auto", "threads", "uring", "aiofiles"'),
        (3, 'expected one of "auto"'),
    ],
)
def test_no_such_backend(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        _load(io_backend=value)
    assert caught.value.key == "infinity.io_backend"


@pytest.mark.parametrize(
    ("aio", "is_from_config"),
    [
        ({}, False),
        ({"block_size": "auto", "queue_depth": "auto", "intra_op_parallelism": "auto"}, False),
        ({"block_size": "4MiB"}, True),
        ({"queue_depth": 16, "block_size": None}, True),
        ({"thread_count": 8}, True),
        ({"single_submit": True}, False),
    ],
)
def test_what_the_user_wrote_is_known(aio: dict[str, Any], is_from_config: bool) -> None:
    assert _load(aio).io.is_from_config == is_from_config


@pytest.mark.parametrize(
    ("aio", "key", "said"),
    [
        ({"block_size": 5000}, "aio.block_size", "8192 (5000 rounded up to a multiple of 4096)"),
        ({"block_size": 8192}, "aio.block_size", 8192),
        ({"thread_count": 1}, "aio.intra_op_parallelism", "4 (1 raised to the fewest that keep a drive busy)"),
        ({"thread_count": 6}, "aio.intra_op_parallelism", 6),
    ],
)
def test_what_is_rounded_or_raised_is_said(aio: dict[str, Any], key: str, said: object) -> None:
    assert _decided(_load(aio))[key] == (said, "config")


def test_who_asks_for_gds_is_told_where_data_goes() -> None:
    (told,) = _load({"use_gds": True}).notices
    assert told.startswith("aio.use_gds: no effect: GPUDirect Storage is not implemented")
    assert _load({"use_gds": False}).notices == ()


def test_the_table_names_capacities(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": [{"path": str(tmp_path), "capacity": "1MiB"}]}
    config = load_config(BASE | {"zero_optimization": {"offload_param": offload}})
    assert f"{tmp_path} (at most 1048576 bytes)" in config.describe()


def test_checksums_are_off_unless_asked_for() -> None:
    assert _load().io.verify_checksums is False
    assert _decided(_load())["infinity.verify_checksums"] == (False, "default")
    for written in (True, "true"):
        config = _load(verify_checksums=written)
        assert config.io.verify_checksums is True
        assert _decided(config)["infinity.verify_checksums"] == (True, "config")
    assert _load(verify_checksums="auto").io.verify_checksums is False
    with pytest.raises(ConfigError) as caught:
        _load(verify_checksums="crc32c")
    assert caught.value.key == "infinity.verify_checksums"
