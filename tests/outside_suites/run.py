"""Runs other projects' own tests against this engine, and compares with the table of what passes.

    python -m tests.outside_suites.run deepspeed                           # fetches the pinned revision
    python -m tests.outside_suites.run accelerate --copy DIR [FILE ...]    # of a local clone, or its unpacked files
    python -m tests.outside_suites.run lightning --copy DIR --update       # writes the table anew

Nothing of their repositories is kept here: the tests are unpacked into a temporary directory. Ends with 1 if a case is worse
than the suite's ``results.tsv`` says.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.outside_suites import table
from tests.outside_suites.suite import RESULTS_VARIABLE, Outcome, Suite

SUITES = {name: Suite.of(name) for name in ("accelerate", "deepspeed", "lightning")}
_ROOT = Path(__file__).parents[2]


def unpack(suite: Suite, copy: Path | None, target: Path) -> None:
    """Bring the folder ``tests`` of the pinned revision to ``target``.

    ``copy``: a clone that has the revision, or a directory with its files; None: from the network.

    Raises:
        SystemExit: there is no such revision, or the files are of another one.
    """
    if copy is None:
        copy = target / "clone"
        _git("clone", "--quiet", "--filter=blob:none", "--no-checkout", suite.source, str(copy))
    is_clone = (copy / ".git").exists() or (copy / "HEAD").exists()
    if is_clone:
        archive = target / "tests.tar"
        with archive.open("wb") as file:
            _git("-C", str(copy), "archive", suite.revision, "tests", into=file)
        shutil.unpack_archive(archive, target, filter="data")
        archive.unlink()
    else:
        shutil.copytree(copy / "tests", target / "tests")
        print(f"{copy} is no clone: its files are taken for those of {suite.revision[:12]}")


def _git(*words: str, into: object = None) -> None:
    done = subprocess.run(["git", *words], stdout=into or sys.stderr, check=False)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"git {words[0]} failed: pass --copy with a clone that has the pinned revision")


def run(suite: Suite, folder: Path, files: Sequence[str], num_processes: int) -> dict[str, Outcome]:
    """The outcome of each case of these files of ``folder``/tests, so many files at a time."""
    found: dict[str, Outcome] = {}
    started = [
        _start(suite, folder, files[index::num_processes], index) for index in range(min(num_processes, len(files)))
    ]
    for process, log in started:
        process.wait()
        lines = log.read_text().splitlines() if log.exists() else []
        for test, outcome, message, asked, used in map(json.loads, lines):
            if test in found and message.startswith("its process died"):  # another rank failed first, and said why
                continue
            found[test] = suite.judge(test, outcome, message)._replace(asked=asked, run=used)
    seen = {test.partition("::")[0] for test in found}
    found |= {file: Outcome("failed", "No case of this file was run.", "0", "0") for file in files if file not in seen}
    return found


def _start(suite: Suite, folder: Path, files: Sequence[str], index: int) -> tuple[subprocess.Popen[bytes], Path]:
    log = folder / f"results-{index}.jsonl"
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
        RESULTS_VARIABLE: str(log),
    }
    plugin = f"tests.outside_suites.{suite.name}.harness"
    words = ["-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-q", "--tb=short"]
    words += ["--continue-on-collection-errors", f"--basetemp={folder}/temporary-{index}", *files]
    return subprocess.Popen([sys.executable, *words], cwd=folder / "tests", env=environment), log


def _is_installed(package: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=package))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="other projects' own tests against this engine")
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("files", nargs="*", help="below the repository's folder tests; default: all of the table")
    parser.add_argument("--copy", type=Path, help="a clone that has the pinned revision, or its files")
    parser.add_argument("--processes", type=int, default=2, help="how many files at a time")
    parser.add_argument("--update", action="store_true", help="write results.tsv anew")
    options = parser.parse_intermixed_args(arguments)
    suite = SUITES[options.suite]
    files = options.files or suite.files
    absent = [] if options.files else [name for name in suite.needs if not _is_installed(name)]
    if absent:
        raise SystemExit(f"first, pip install -c constraints.txt {' '.join(absent)}")  # mup may bring another torch
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{suite.name}-suite-")))
        unpack(suite, options.copy, folder)
        if suite.left_out and (forgotten := suite.forgotten(folder / "tests")):
            raise SystemExit("neither in results.tsv nor left out in suite.toml: " + ", ".join(forgotten))
        outcomes = run(suite, folder, files, options.processes)
    print(table.summary(outcomes.values()))
    text = suite.results.read_text()
    if options.update:
        suite.results.write_text(table.merge(text, table.write(outcomes), files))
        return 0
    worse = table.regressions(table.read(text), outcomes)
    print("\n".join(worse) or "nothing is worse than results.tsv says")
    return 1 if worse or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
