"""Files that are damaged or hostile, by the thousands: each ends in success or in one of the packages' errors.

    python -m tests.fuzz.files FORMAT FIRST COUNT

The same number gives the same file. Files are tried in a forked child, so a crash of the interpreter, a hang or memory without
end is one failure and not the end. An audit hook tells of files that are written, and programs that are started, outside of the
file's own directory.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import io
import json
import os
import pickletools
import random
import resource
import select
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import safetensors.torch
import torch
import zarr
from torch import nn
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

import infinity
from infinity.checkpoint import manifest as manifests
from infinity.checkpoint.saved import Checkpoint, seal
from infinity.cli.main import main
from infinity.config.load import load_config
from infinity.deepspeed.importer.conversion import convert
from infinity.errors import InfinityError
from infinity.metrics import RunLog, read_run, showing
from infinity.reporting.verdict import judge
from swapper import SwapperError
from tests.exactness.lockstep import BF16, everything_on_nvme

SECONDS = 60.0
"""Longer than any file takes on a busy machine."""
_MEMORY = 6 << 30
_HERE = Path(__file__).parents[1]
Change = Callable[[random.Random, Path], None]

# ------------------------------------------------------------------------------------------------------------ mutations

_NUMBERS = [0, 1, -1, 127, 255, 2**31 - 1, 2**31, 2**32, 2**61, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30]
_VALUES: list[Any] = [
    *_NUMBERS,
    *(None, True, False, "", "x", "..", "/etc/passwd", "\0", "\ud800", "a" * 5000, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), [], {}, [[]], {"a": 1}, [0] * 70, [2**61] * 63 + [0], {"__is__": "tensor"}),
]


def in_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bytes are others, gone, more, or elsewhere."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not found:
            break
        place, length = rng.randrange(len(found)), rng.choice((1, 2, 4, 8, 64))
        kind = rng.randrange(6)
        if kind == 0:
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[place:]
        elif kind == 2:
            del found[place : place + length]
        elif kind == 3:
            other = rng.randrange(len(found))
            found[place:place] = found[other : other + rng.choice((length, 500))]
        elif kind == 4:
            found[place : place + length] = rng.randbytes(length)
        else:
            number = rng.choice(_NUMBERS) % 2**64
            found[place : place + 8] = number.to_bytes(8, rng.choice(("little", "big")))
    return bytes(found)


def in_json(rng: random.Random, value: Any) -> Any:
    """A few values are of another type, gone, or elsewhere."""
    box = [value]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places: list[tuple[Any, Any]] = []
        _places(box, places)
        holder, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind < 5:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))  # which the next change may change
        elif kind == 5 and holder is not box:
            del holder[key]
        elif kind == 6:
            other, other_key = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[other_key]))
        elif isinstance(holder, dict):
            holder[rng.choice(("x", "", "__is__", "params", "step"))] = holder.pop(key)
        else:
            holder[key] = [holder[key]]
    return box[0]


def _places(value: Any, found: list[tuple[Any, Any]]) -> None:
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            _places(value[key], found)


_SNIPPETS = [
    b"cos\nsystem\nX\x09\0\0\0touch ran\x85R",
    b"cnumpy\ndtype\nX\2\0\0\0O8\x85R",
    b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85X\1\0\0\0btR",
    b"\x8e" + struct.pack("<Q", 1 << 40),
    b"r" + struct.pack("<I", 0xFFFFFFFF),
    b"\x8b" + struct.pack("<i", 1 << 30),
    b"]q\1h\1a",
    b"(" * 500,
    b"\x85" * 500,
    b"2\x86" * 40,
    b"c__builtin__\nset\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"}K\1K\1s",
    b"N",
    b"K\7",
    b"X\1\0\0\0x",
]
_OPCODES = [each.code.encode("latin1") for each in pickletools.opcodes]


def in_pickle(rng: random.Random, data: bytes) -> bytes:
    """A few operations are others, gone, twice, or elsewhere."""
    starts = [place for _, _, place in pickletools.genops(data) if place is not None]
    pieces = [data[one:other] for one, other in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place, kind = rng.randrange(1, len(pieces)), rng.randrange(7)
        if kind == 0:
            pieces[place] = rng.choice(_OPCODES) + pieces[place][1:]
        elif kind == 1 and len(pieces) > 2:
            del pieces[place]
        elif kind == 2:
            pieces.insert(place, rng.choice(pieces))
        elif kind == 3:
            pieces.insert(place, rng.choice(_SNIPPETS))
        elif kind == 4:
            pieces[place] = rng.choice(_SNIPPETS)
        elif kind == 5:
            pieces[place] = pieces[place][:1] + in_bytes(rng, pieces[place][1:])
        else:
            other = rng.randrange(1, len(pieces))
            pieces[place], pieces[other] = pieces[other], pieces[place]
    return b"".join(pieces)


def _raw(rng: random.Random, path: Path) -> None:
    path.write_bytes(in_bytes(rng, path.read_bytes()))


def _archive(rng: random.Random, path: Path) -> None:
    """The pickle in an archive of torch, or something else in it, with checksums that are right."""
    with zipfile.ZipFile(path) as archive:
        members = {each.filename: archive.read(each) for each in archive.infolist()}
    target = next(name for name in members if name.endswith("data.pkl"))
    if rng.randrange(10):
        members[target] = in_pickle(rng, members[target])
    else:
        name = rng.choice([*members])
        members[name] = in_bytes(rng, members[name])
    with zipfile.ZipFile(path, "w", rng.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _text(rng: random.Random, path: Path) -> None:
    if rng.randrange(5):
        path.write_text(json.dumps(in_json(rng, json.loads(path.read_bytes()))), errors="surrogatepass")
    else:
        _raw(rng, path)


def _lines(rng: random.Random, path: Path) -> None:
    lines = path.read_bytes().splitlines()
    if rng.randrange(5) == 0:
        _raw(rng, path)
        return
    place = rng.randrange(len(lines))
    lines[place] = json.dumps(in_json(rng, json.loads(lines[place]))).encode()
    if rng.randrange(4) == 0:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    path.write_bytes(b"\n".join(lines) + b"\n")


def _safetensors(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.randrange(4) == 0:
        _raw(rng, path)
        return
    header = json.dumps(in_json(rng, json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def _sealed(rng: random.Random, path: Path) -> None:
    """A file of a checkpoint, in three of four cases with checksums that are right."""
    folder = next(each for each in path.parents if (each / manifests.MANIFEST).exists())
    (_text if path.suffix == ".json" and path.name != manifests.MANIFEST else _raw)(rng, path)
    if rng.randrange(4) == 0:
        return
    with contextlib.suppress(ValueError):
        contents = json.loads((folder / manifests.MANIFEST).read_bytes())
        if path.name == manifests.MANIFEST:
            contents = in_json(rng, contents)
        name = str(path.relative_to(folder))
        files = contents.get("files") if isinstance(contents, dict) else None
        if isinstance(files, dict) and name in files:
            data = path.read_bytes()
            files[name] = [len(data), manifests.checksum_of(data)]
        if isinstance(contents, dict):
            contents.pop("crc32c", None)
            (folder / manifests.MANIFEST).write_bytes(manifests._sealed(contents))


def _manifest(rng: random.Random, path: Path) -> None:
    contents = in_json(rng, json.loads(path.read_bytes()))
    if isinstance(contents, dict):
        contents.pop("crc32c", None)
        path.write_bytes(manifests._sealed(contents))


def _commit(rng: random.Random, path: Path) -> None:
    """One of a commit's parts, in nine of ten cases with a checksum that is right."""
    data = path.read_bytes()
    head = struct.Struct("<6sHQ32s")
    *_, number, _ = head.unpack_from(data)
    lengths = struct.unpack_from(f"<{number}Q", data, head.size)
    parts, place = [], head.size + 8 * number
    for length in lengths:
        parts.append(data[place : place + length])
        place += length
    index, kind = rng.randrange(len(parts)), rng.randrange(10)
    if kind < 7 and index:
        text, rest = (parts[index], b"") if index == 1 else _unpacked(parts[index])
        changed = json.dumps(in_json(rng, json.loads(text))).encode()
        parts[index] = changed if index == 1 else len(changed).to_bytes(8, "little") + changed + rest
    elif kind < 9:
        parts[index] = in_bytes(rng, parts[index])
    data = data[: head.size] + b"".join(struct.pack("<Q", len(each)) for each in parts) + b"".join(parts)
    if kind == 9:
        data = in_bytes(rng, data)
    path.write_bytes(data + struct.pack("<I", google_crc32c.value(data) ^ (rng.randrange(10) == 0)))


def _unpacked(part: bytes) -> tuple[bytes, bytes]:
    end = 8 + int.from_bytes(part[:8], "little")
    return part[8:end], part[end:]


# -------------------------------------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class Format:
    """What is tried.

    Attributes:
        make: writes a sample, which nothing is wrong with, into a directory.
        changes: pattern of files in it -> how one of them is changed.
        use: what the packages do with it.
    """

    make: Callable[[Path], None]
    changes: dict[str, tuple[Change, ...]]
    use: Callable[[Path], None]


def _config(drive: Path, **settings: Any) -> dict[str, Any]:
    drive.mkdir(exist_ok=True)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return everything_on_nvme(drive, {**BF16, "optimizer": optimizer, "infinity": settings})


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Linear(40, 8))
    return model


def _trained(engine: Any) -> None:
    engine.backward(engine(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().mean())
    engine.step()


def _make_checkpoint(place: Path) -> None:
    with infinity.initialize(model=_model(), config=_config(place / "drive"))[0] as engine:
        _trained(engine)
        state = {"large": torch.ones(30_000), "numbers": [1, 2.5, None, (1, {2}), b"x"], "of": {(1, "a"): 2}}
        engine.save_checkpoint(place / "saved", tag="one", client_state=state)
    shutil.rmtree(place / "drive")


def _make_foreign(place: Path) -> None:
    _make_checkpoint(place)
    group: Any = zarr.open_group(place / "saved" / "one" / "tensors.zarr", mode="r+")
    for number, (name, node) in enumerate(sorted(group.members(max_depth=None))):
        if isinstance(node, zarr.Array) and node.ndim:
            values, codec = node[...], [ZstdCodec(), GzipCodec(), BloscCodec(), None][number % 4]
            attributes = dict(node.attrs)
            chunks = (7, *values.shape[1:])
            made = group.create_array(
                name,
                shape=values.shape,
                dtype=values.dtype,
                chunks=chunks,
                compressors=codec,
                attributes=attributes,
                overwrite=True,
            )
            made[...] = values
    seal(place / "saved" / "one")


_engines: list[Any] = []


def _use_checkpoint(place: Path) -> None:
    found = Checkpoint.open(place / "saved")
    found.training_state(), found.omitted
    found.verify()
    for tensor in found.tensors:
        tensor.read()
    if not _engines:
        drive = Path(tempfile.mkdtemp(dir=place.parent, prefix="drive"))
        _engines.append(infinity.initialize(model=_model(), config=_config(drive))[0])
    _engines[0].load_checkpoint(place / "saved")


def _make_commits(place: Path) -> None:
    with infinity.initialize(model=_model(), config=_config(place / "drive", durable=True))[0] as engine:
        for _ in range(2):
            _trained(engine)


def _use_commits(place: Path) -> None:
    config = _config(place / "drive", durable=True)
    config = json.loads(json.dumps(config).replace("PLACE", str(place)))
    with infinity.initialize(model=_model(), config=config)[0] as engine:
        _trained(engine)


def _make_deepspeed(place: Path) -> None:
    for name in ("stage1", "stage2-fp16", "stage3"):
        with tarfile.open(_HERE / "deepspeed_checkpoints" / f"{name}.tar.xz") as archive:
            archive.extractall(place / name, filter="data")
        (place / name / "expected.pt").unlink()


def _use_deepspeed(place: Path) -> None:
    for name in ("stage1", "stage2-fp16", "stage3"):
        if (place / name / "changed").exists():
            convert(place / name / "checkpoint", place / "ours", skips_unknown=True)


def _deepspeed(rng: random.Random, path: Path) -> None:
    rng.choice((_raw, _archive, _archive, _archive))(rng, path)
    next(each for each in path.parents if (each / "checkpoint").exists()).joinpath("changed").touch()


def _make_pickle(place: Path) -> None:
    torch.save(_model().state_dict(), place / "weights.bin")
    torch.save(_model().state_dict(), place / "legacy.bin", _use_new_zipfile_serialization=False)


def _make_safetensors(place: Path) -> None:
    safetensors.torch.save_file(_model().state_dict(), place / "weights.safetensors")


def _use_weights(place: Path) -> None:
    for path in sorted(place.iterdir()):
        with contextlib.suppress(InfinityError):
            infinity.load_pretrained(_model(), path)


def _make_config(place: Path) -> None:
    for path in (_HERE.parent / "configs").glob("*.json"):
        shutil.copy(path, place)
    (place / "own.json").write_text(json.dumps(_config(place / "drive", durable=True, keep_last=2, run_log="log")))


def _use_config(place: Path) -> None:
    for path in place.glob("*.json"):
        with contextlib.suppress(InfinityError):
            load_config(str(path), check_storage=False, world_size=2)


def _make_log(place: Path) -> None:
    with infinity.initialize(model=_model(), config=_config(place / "drive", run_log=str(place / "log")))[0] as engine:
        for _ in range(4):
            _trained(engine)
    log = RunLog(place / "log")
    log.write("note", 4, text="half way")
    log.release()
    shutil.rmtree(place / "drive")


def _use_log(place: Path) -> None:
    run = read_run(place / "log")
    with showing(run.directory):
        judge(run)
    if main(["watch", str(place / "log"), "--once"]) not in (0, 1):
        raise AssertionError("infinity watch failed")
    if len(run.steps) % 16 == 5:  # pages take long
        main(["report", str(place / "log")])


FORMATS = {
    "checkpoint": Format(
        _make_checkpoint,
        {
            "saved/one/manifest.json": (_manifest, _sealed),
            "saved/one/training.*": (_sealed,),
            "saved/one/**/*": (_sealed,),
            "saved/latest": (_raw,),
        },
        _use_checkpoint,
    ),
    "arrays": Format(
        _make_foreign,
        {
            "saved/one/manifest.json": (_manifest, _sealed),
            "saved/one/tensors.zarr/**/zarr.json": (_sealed,),
            "saved/one/tensors.zarr/**/*": (_sealed,),
        },
        _use_checkpoint,
    ),
    "commit": Format(_make_commits, {"drive/durable/commit-*": (_commit,)}, _use_commits),
    "config": Format(_make_config, {"*.json": (_text,)}, _use_config),
    "deepspeed": Format(_make_deepspeed, {"*/checkpoint/global_step*/**/*.pt": (_deepspeed,)}, _use_deepspeed),
    "log": Format(_make_log, {"log/log.jsonl": (_lines,)}, _use_log),
    "pickle": Format(_make_pickle, {"weights.bin": (_archive, _archive, _raw), "legacy.bin": (_raw,)}, _use_weights),
    "safetensors": Format(_make_safetensors, {"weights.safetensors": (_safetensors,)}, _use_weights),
}

# ------------------------------------------------------------------------------------------------------------- the tries


def run(name: str, first: int, count: int) -> dict[int, str]:
    """Try files; a child that dies or hangs fails with its file, and another one goes on behind that.

    Returns:
        Number of a file -> what went wrong.
    """
    torch.set_num_threads(1)
    failures: dict[int, str] = {}
    # Each file is written and synced: a drive takes longer.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-", dir=memory) as directory:
        place = Path(directory)
        sample, outside = place / "sample", place / "outside"
        sample.mkdir()
        outside.mkdir()
        FORMATS[name].make(sample)  # here, so that children find kernels compiled
        (outside / "mine").write_text("mine")
        number = first
        while number < first + count:
            number = _in_child(name, place, number, first + count, failures)
        if [(each.name, each.read_text()) for each in outside.iterdir()] != [("mine", "mine")]:
            failures[first] = "files outside were touched"
    return failures


def _in_child(name: str, place: Path, first: int, end: int, failures: dict[int, str]) -> int:
    """Returns the number of the file to go on with."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        code = 1
        try:
            _try_all(name, place, range(first, min(end, first + 500)), writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    number, rest = first, b""
    try:
        while select.select([reader], [], [], SECONDS)[0]:
            data = os.read(reader, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                told = json.loads(line)
                number = told["number"] + 1
                if told["problem"]:
                    failures[told["number"]] = told["problem"]
        else:
            os.kill(child, signal.SIGUSR1)
            time.sleep(2)
            os.kill(child, signal.SIGKILL)
            failures[number] = f"it hangs: more than {SECONDS:.0f} s\n{(place / 'stacks').read_text()}"
            os.waitpid(child, 0)
            return number + 1
    finally:
        os.close(reader)
    status = os.waitpid(child, 0)[1]
    if status:
        failures[number] = f"the interpreter ended with {os.waitstatus_to_exitcode(status)}"
        return number + 1
    return number


def _try_all(name: str, place: Path, numbers: range, writer: int) -> None:
    gc.freeze()  # finalizers of earlier tests' objects delete their files, which here would look like damage
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, resource.RLIM_INFINITY))
    faulthandler.register(signal.SIGUSR1, (place / "stacks").open("w"))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    touched: list[str] = []
    sys.addaudithook(lambda event, arguments: _watch(event, arguments, place, touched))
    os.chdir(place / "outside")
    for number in numbers:
        own = place / "own"
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(place / "sample", own)
        touched.clear()
        problem = _try(FORMATS[name], random.Random(f"{name} {number}"), own)
        if touched:
            problem = f"{problem} touched {touched[:3]}"
            touched.clear()
        sys.stdout.seek(0), sys.stdout.truncate()
        sys.stderr.seek(0), sys.stderr.truncate()
        os.write(writer, json.dumps({"number": number, "problem": problem}).encode() + b"\n")


def _try(tried: Format, rng: random.Random, own: Path) -> str:
    pattern = rng.choice([*tried.changes])
    paths = sorted(path for path in own.glob(pattern) if path.is_file())
    rng.choice(tried.changes[pattern])(rng, rng.choice(paths))
    try:
        tried.use(own)
    except (InfinityError, SwapperError) as error:
        return "" if str(error) else "an error without a message"
    except BaseException:
        return traceback.format_exc()[-1500:]
    return ""


_WRITES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}
_RUNS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork"}


def _watch(event: str, arguments: tuple[Any, ...], place: Path, touched: list[str]) -> None:
    path: Any = None
    if event == "open":
        _, mode, flags = arguments
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & 3):
            path = arguments[0]
    elif event in _WRITES:
        path = arguments[0]
    elif event in _RUNS:
        touched.append(f"{event} {str(arguments)[:80]}")
    if isinstance(path, str | bytes | os.PathLike):
        at = arguments[-1] if event in _WRITES and isinstance(arguments[-1], int) else -1
        folder = os.readlink(f"/proc/self/fd/{at}") if at >= 0 else ""
        full = os.path.abspath(os.path.join(folder, os.fsdecode(path)))
        is_compiler = f"{os.sep}__pycache__" in full
        if not is_compiler and not full.startswith((str(place / "own"), str(place / "drive"), "/dev/", "/proc/self")):
            touched.append(f"{event} {full}")


if __name__ == "__main__":
    for number, problem in run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).items():
        print(f"--- file {number}\n{problem}")
