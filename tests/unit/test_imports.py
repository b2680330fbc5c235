"""What an import and the command line load, and when: `import infinity` and `import swapper` load and install nothing."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import infinity
import swapper

_ROOT = Path(infinity.__file__).parents[1]

_ASKING = """
import atexit, contextlib, io, json, logging, os, signal, sys, threading, warnings

def hooks():
    loggers = [logging.root, *(each for each in logging.root.manager.loggerDict.values() if hasattr(each, "handlers"))]
    return {
        "finders": [*map(repr, sys.meta_path), *map(repr, sys.path_hooks)],
        "log handlers": [repr(handler) for each in loggers for handler in each.handlers],
        "signal handlers": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "exception hooks": [repr(each) for each in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
        "exit hooks": atexit._ncallbacks(),
        "threads": threading.active_count(),
        "warning filters": len(warnings.filters),
        "environment": dict(os.environ),
    }

def complete(*words):
    os.environ.update(_INFINITY_COMPLETE="bash_complete", COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1))
    return command()

def command(*words):
    from infinity.cli.main import main
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())) as told:
        status = main(words)
        told.flush()
    return {"status": status, "told": told.buffer.getvalue().decode()}

def help_of_all():
    from infinity.cli.main import COMMANDS
    return {name: command(name, "--help")["status"] for name in COMMANDS if name != "train"}

def imported(name):
    before = hooks()
    __import__(name)
    after = hooks()
    return {"installed": [kind for kind in before if before[kind] != after[kind]]}

QUESTIONS = {
    "import swapper": lambda: imported("swapper"),
    "import infinity": lambda: imported("infinity"),
    "--version": lambda: command("--version"),
    "--help": lambda: command("--help"),
    "COMMAND --help": help_of_all,
    "completion of commands": lambda: complete("infinity", "pl"),
    "completion of options": lambda: complete("infinity", "plan", "--tok"),
}
answers = {}
for name, ask in QUESTIONS.items():
    reader, writer = os.pipe()
    if os.fork() == 0:
        with os.fdopen(writer, "w") as file:
            json.dump({"answer": ask(), "modules": sorted({each.partition(".")[0] for each in sys.modules})}, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answers[name] = json.load(file)
    os.wait()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers() -> Any:
    """By question: the answer, and which libraries were loaded for it."""
    done = subprocess.run([sys.executable, "-c", _ASKING], capture_output=True, text=True, cwd=_ROOT)
    assert not done.stderr and not done.returncode
    return json.loads(done.stdout)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("package", ["swapper", "infinity"])
def test_an_import_loads_and_installs_nothing(answers: Any, package: str) -> None:
    found = answers[f"import {package}"]
    assert found["answer"]["installed"] == []
    assert not {"torch", "numpy", "rich", "pydantic", "psutil", "click"} & {*found["modules"]}


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("--version", f"infinity, version {infinity.__version__}\n"),
        ("--help", "import-deepspeed"),
        ("completion of commands", "plain,plan"),
        ("completion of options", "plain,--tokens"),
    ],
)
def test_the_command_line_answers_without_torch(answers: Any, question: str, told: str) -> None:
    found = answers[question]
    assert found["answer"]["status"] == 0 and told in found["answer"]["told"]
    assert not {"torch", "numpy", "rich", "pydantic"} & {*found["modules"]}


def test_each_commands_help_comes_without_torch(answers: Any) -> None:
    found = answers["COMMAND --help"]
    assert len(found["answer"]) > 10 and set(found["answer"].values()) == {0}
    assert not {"torch", "numpy", "rich", "pydantic"} & {*found["modules"]}


# ---------------------------------------------------------------------------------------------------------- lazy names


@pytest.mark.parametrize("package", [infinity, swapper])
def test_names_are_what_type_checkers_take_them_for(package: Any) -> None:
    tree = ast.parse(Path(package.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = set()
    for node in guarded.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = importlib.import_module(node.module or "")
                seen.add(alias.asname or alias.name)
                assert getattr(package, alias.asname or alias.name) is getattr(module, alias.name)
    assert seen <= {*package.__all__} <= {*dir(package)}
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


@pytest.mark.deep
def test_modules_by_deepspeeds_names_come_first() -> None:
    """Each in a process that has imported nothing of the package before."""
    names = ["runtime.zero.partition_parameters", "comm.comm", "zero.partition_parameters", "checkpoint.utils"]
    names += ["accelerator.real_accelerator"]
    code = (
        "import importlib, os, sys\n"
        "import torch\n"
        "for name in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        found = importlib.import_module(f'infinity.deepspeed.{name}')\n"
        "        os._exit(0 if found.__name__ == f'infinity.deepspeed.{name}' and sys.modules[found.__name__] is found else 1)\n"
        "    _, status = os.wait()\n"
        "    print(name, status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True, cwd=_ROOT)
    assert done.stdout.splitlines() == [f"{name} 0" for name in names], done.stderr


_PACKAGE = """
from typing import TYPE_CHECKING
from swapper.lazy_names import lazy_names
if TYPE_CHECKING:
    from lazy.absent import absent
    from lazy.broken import broken
    from lazy.slow import Name as slow
__all__ = ["absent", "broken", "slow"]
__getattr__, __dir__ = lazy_names(__name__)
"""


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with lazy names; its modules are in `tmp_path / "lazy"`."""
    (tmp_path / "lazy").mkdir()
    (tmp_path / "lazy" / "__init__.py").write_text(_PACKAGE)
    (tmp_path / "lazy" / "absent.py").write_text("import a_library_that_is_not_there")
    (tmp_path / "lazy" / "broken.py").write_text("import sys\nsys.nothing_of_that_name")
    (tmp_path / "lazy" / "slow.py").write_text("import lazy\nlazy.enter()\nclass Name: pass")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("lazy")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy"]:
        del sys.modules[name]


def test_an_error_inside_is_not_hidden(lazy: Any) -> None:
    """`hasattr` and `from lazy import ...` take an AttributeError for a name that does not exist."""
    for name, words in (("absent", "a_library_that_is_not_there"), ("broken", "nothing_of_that_name")):
        with pytest.raises(ImportError, match=words):
            hasattr(lazy, name)
        with pytest.raises(ImportError, match=words):
            exec(f"from lazy import {name}")
    with pytest.raises(AttributeError, match="module 'lazy' has no attribute 'typo'"):
        _ = lazy.typo


# ---------------------------------------------------------------------------------------------------------- interrupts


def test_another_system_is_told() -> None:
    code = "import sys; sys.platform = 'win32'; import infinity"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_ROOT)
    assert result.stderr.splitlines()[-1].startswith("ImportError: infinity needs Linux, and this is win32. Use")
