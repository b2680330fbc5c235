"""The structure of the packages, checked on their syntax trees: nothing is imported, so a broken module cannot hide."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("infinity", "swapper")
"""A longer file is worth a look; it may be as long as its one noun needs."""
_MANY_FILES = 16
"""In one folder."""
_MOST_LAYERS = 15


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its path below the root, its syntax tree and its number of lines."""

    name: str
    path: str
    tree: ast.Module
    num_lines: int

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All of its tree, which many rules look at."""
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]

    @classmethod
    def parse(cls, path: str, source: str) -> Module:
        parts = Path(path).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        return cls(name, path, ast.parse(source), source.count("\n"))


def load_modules() -> dict[str, Module]:
    """Every module of the two packages by its dotted name."""
    paths = [path for package in _PACKAGES for path in sorted((_ROOT / package).rglob("*.py"))]
    modules = [Module.parse(str(path.relative_to(_ROOT)), path.read_text()) for path in paths]
    return {module.name: module for module in modules}


def imports(module: Module) -> Iterator[tuple[int, str, str | None]]:
    """Line, module and imported name (None for a plain `import`) of every import, wherever in the file it stands."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = module.package.split(".")
            base = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, source, alias.name


def dependencies(module: Module, modules: dict[str, Module]) -> set[str]:
    """Names of the packages' own modules that `module` imports."""
    found = set()
    for _, source, name in imports(module):
        submodule = f"{source}.{name}"
        target = submodule if submodule in modules else source
        if target in modules:
            found.add(target)
    return found


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of `graph` as the list of its nodes, empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def dotted(node: ast.AST) -> str:
    """`torch.cuda.Stream` for that attribute chain, an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


# Each rule yields the offending lines of one module, as text.
Rule = Callable[[Module], Iterator[str]]


def no_upward_import(module: Module) -> Iterator[str]:
    """`swapper` is usable alone: it never imports `infinity`."""
    if module.name.split(".")[0] == "swapper":
        for line, source, _ in imports(module):
            if source.split(".")[0] == "infinity":
                yield f"{module.path}:{line} imports {source}"


_ABOVE_THE_CORE = ("deepspeed", "as_deepspeed", "integrations", "cli", "__main__")


def core_alone(module: Module) -> Iterator[str]:
    """The engine knows no library and no command line: what answers DeepSpeed's names imports it, and not the other way."""
    words = module.name.split(".")
    if words[0] == "infinity" and words[1:2] not in ([each] for each in _ABOVE_THE_CORE):
        for line, source, name in imports(module):
            if f"{source}.{name}".startswith(tuple(f"infinity.{each}" for each in _ABOVE_THE_CORE)):
                yield f"{module.path}:{line} imports {source}"


def public_swapper_only(module: Module) -> Iterator[str]:
    """`infinity` uses what `swapper` offers, never names with a leading underscore."""
    if module.name.split(".")[0] == "infinity":
        for line, source, name in imports(module):
            private = any(part.startswith("_") for part in [*source.split("."), name or ""])
            if source.split(".")[0] == "swapper" and private:
                yield f"{module.path}:{line} imports {source}.{name}"


def named_by_noun(module: Module) -> Iterator[str]:
    """A file of leftovers collects more of them."""
    if Path(module.path).stem in {"utils", "util", "helpers", "common", "misc"}:
        yield module.path


def no_print(module: Module) -> Iterator[str]:
    """Packages log; the tools print."""
    for node in module.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) in {"print", "sys.stdout.write", "sys.stderr.write"}:
            yield f"{module.path}:{node.lineno} {dotted(node.func)}"


_LOCKS_IN_PYTHON = frozenset(
    f"threading.{name}" for name in ("Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier")
) | {"queue.Queue", "ThreadPoolExecutor", "concurrent.futures.ThreadPoolExecutor"}


def no_locks_in_python(module: Module) -> Iterator[str]:
    """An interrupt inside of them leaves their lock taken: see [Note: bells] in swapper.sync.bell."""
    conditions = {
        ast.unparse(node.targets[0])
        for node in module.nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("threading.Condition(")
    }
    for node in module.nodes:
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        if (
            isinstance(node, ast.Call)
            and name in _LOCKS_IN_PYTHON
            and not (name == "threading.Condition" and node.args)
        ):
            yield f"{module.path}:{node.lineno} uses {name}"
        if isinstance(node, ast.With) and any(ast.unparse(item.context_expr) in conditions for item in node.items):
            yield f"{module.path}:{node.lineno} enters a condition, and not its lock"


def distributed_in_process_groups(module: Module) -> Iterator[str]:
    """`torch.distributed` appears in one file only."""
    if Path(module.path).name == "process_groups.py":
        return
    for line, source, name in imports(module):
        if f"{source}.{name}".startswith("torch.distributed"):
            yield f"{module.path}:{line} imports {source}"
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed":
            yield f"{module.path}:{node.lineno} uses torch.distributed"


_CALLS_BETWEEN_STREAMS = {"wait_stream", "record_stream", "wait_event", "record_event"}
_STREAM_NAMES = {"Stream", "Event", "current_stream", "stream", *_CALLS_BETWEEN_STREAMS}
_STREAM_FILES = {"infinity/device/compute.py"}


def streams_in_device(module: Module) -> Iterator[str]:
    """Streams and events are handled where copies are made, nowhere else."""
    if module.path in _STREAM_FILES:
        return
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in _STREAM_NAMES:
            chain = dotted(node)
            if chain.startswith(("torch.cuda.", "torch.accelerator.", "torch.xpu.", "torch.Stream", "torch.Event")):
                yield f"{module.path}:{node.lineno} uses {chain}"
            elif node.attr in _CALLS_BETWEEN_STREAMS:
                yield f"{module.path}:{node.lineno} calls {node.attr}"


_NOT_FOR_THE_DEVICE = (
    "infinity/vertical/microbatch.py",
    *(f"infinity/distributed/{name}.py" for name in ("agreement", "bounded", "causes", "pulls", "process_groups")),
)
"""Threads that run the user's code, in what is set in the user's own thread: see `ThreadState`; and those that only talk."""


def threads_enter_the_device(module: Module) -> Iterator[str]:
    """What a thread of the engine begins with has ``with ... .background_thread():`` in it."""
    functions = {node.name: node for node in module.nodes if isinstance(node, ast.FunctionDef)}
    for node in module.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) in {"threading.Thread", "Thread"}:
            targets = [ast.unparse(each.value).rpartition(".")[2] for each in node.keywords if each.arg == "target"]
            begins = functions.get(targets[0]) if targets else None
            has_entered = begins is not None and ".background_thread()" in ast.unparse(begins)
            if module.path.startswith("infinity/") and module.path not in _NOT_FOR_THE_DEVICE and not has_entered:
                yield f"{module.path}:{node.lineno} starts a thread that does not enter the device"


_FILES_OF_OS = ("open", "read", "write", "pread", "pwrite", "preadv", "pwritev", "posix_fallocate", "fallocate")
_FILE_CALLS = {"io.open", *(f"os.{name}" for name in _FILES_OF_OS)}
_FILE_ROOMS = ("swapper/backends/", "swapper/volumes/")


def files_in_backends(module: Module) -> Iterator[str]:
    """Bytes meet files in swapper's backends and volumes only. `infinity` may open small texts (a config, an index)."""
    if module.path.startswith(_FILE_ROOMS):
        return
    forbidden = _FILE_CALLS | ({"open"} if module.name.split(".")[0] == "swapper" else set())
    for node in module.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) in forbidden:
            yield f"{module.path}:{node.lineno} calls {dotted(node.func)}"


def no_assert(module: Module) -> Iterator[str]:
    """`python -O` removes assertions together with whatever they would have done: packages raise."""
    for node in module.nodes:
        if isinstance(node, ast.Assert):
            yield f"{module.path}:{node.lineno} asserts"


_FACTORIES = (
    *("torch.arange", "torch.empty", "torch.empty_strided", "torch.full", "torch.linspace", "torch.ones", "torch.rand"),
    *("torch.randint", "torch.randn", "torch.tensor", "torch.zeros"),
)


def names_dtype_and_device(module: Module) -> Iterator[str]:
    """Users set default dtypes and devices; what the packages make for themselves must not follow them."""
    for node in module.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) in _FACTORIES:
            missing = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
            if missing:
                yield f"{module.path}:{node.lineno} {dotted(node.func)} without {' and '.join(sorted(missing))}"


_PRIVATE = re.compile(r"^torch\..*\b_[^_]\w*$|^torch\._[^_]\w*$")


def torch_privates_in_their_room(module: Module) -> Iterator[str]:
    """What torch does not document is used in infinity/torch_internals only: with another torch, that is where to look."""
    if module.path.startswith("infinity/torch_internals/") or module.name.split(".")[0] != "infinity":
        return
    for line, source, name in imports(module):
        if _PRIVATE.search(f"{source}.{name}"):
            yield f"{module.path}:{line} imports {source}.{name}"
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and _PRIVATE.search(dotted(node)):
            yield f"{module.path}:{node.lineno} uses {dotted(node)}"


_OF_OTHERS = {
    *("grad", "data", "training", "gradient_checkpointing"),  # of tensors and modules
    *("param_groups", "state", "defaults"),  # of torch's optimizers
    *("atexit", "restype", "argtypes", "value", "writeable"),  # of weakref, ctypes and numpy
    "excepthook",  # of Python
}
"""Attributes that torch and others want to be assigned."""
_ASSIGNED = {
    "unit.is_persistent",  # the plan's word, once it is made
    # What `initialize` makes on top of the engine; a user may put others there.
    *("engine.lr_scheduler", "engine.training_dataloader"),
    # What `IOScheduler` changes by hand for the usual request, under the lock that guards its queues and ledgers.
    *("queue.inflight_bytes", "queue.num_taken", "queue.num_transfers"),
    *("ledger.is_plain", "ledger.longest_bytes", "ledger.num_admitted"),
}


def is_record(definition: ast.ClassDef) -> bool:
    """Whether a class only holds values, which its whole room may change: a dataclass that is not frozen, or slots."""
    decorators = [ast.unparse(each) for each in definition.decorator_list]
    return any(each.startswith("dataclass") and "frozen=True" not in each for each in decorators) or any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__" for node in definition.body
    )


def attributes(definition: ast.ClassDef) -> Iterator[str]:
    """What a class gives to its objects."""
    for node in ast.walk(definition):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            yield node.attr


def classes(module: Module) -> list[ast.ClassDef]:
    return [node for node in module.nodes if isinstance(node, ast.ClassDef)]


@functools.cache
def of_records(room: Path) -> frozenset[str]:
    """What the records of a folder give to their objects."""
    records = [each for other in _MODULES.values() if Path(other.path).parent == room for each in classes(other)]
    return frozenset(name for each in records if is_record(each) for name in attributes(each))


def nothing_hung_onto_others(module: Module) -> Iterator[str]:
    """Objects change themselves: what happens to them is a method, and whom they tell they learn in their constructor."""
    own = {name for each in classes(module) for name in attributes(each)} | of_records(Path(module.path).parent)
    globals_ = {each.name for each in classes(module)} | {
        ast.unparse(target) for node in module.tree.body if isinstance(node, ast.Assign) for target in node.targets
    }
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            is_own = dotted(node.value) in {"self", "cls", "ctx", *globals_} or node.attr in own
            is_meant = node.attr.startswith("_") or node.attr in _OF_OTHERS or ast.unparse(node) in _ASSIGNED
            if not is_own and not is_meant:
                yield f"{module.path}:{node.lineno} assigns {ast.unparse(node)}"


# Every rule with a file it must object to: a rule that objects to nothing protects nothing.
_RULES: dict[Rule, tuple[str, str]] = {
    no_upward_import: ("swapper/extents/extent.py", "def f():\n    from infinity.engine.engine import Engine\n"),
    core_alone: ("infinity/engine/engine.py", "def f():\n    from infinity.deepspeed import comm\n"),
    public_swapper_only: ("infinity/engine/engine.py", "from swapper.scheduling.scheduler import _Queue\n"),
    named_by_noun: ("infinity/utils.py", ""),
    no_print: ("infinity/engine/engine.py", "print('hello')\n"),
    no_locks_in_python: ("swapper/swapper.py", "import threading\nx = threading.Event()\n"),
    distributed_in_process_groups: ("infinity/engine/engine.py", "import torch\nx = torch.distributed.get_rank()\n"),
    streams_in_device: ("infinity/engine/engine.py", "import torch\ns = torch.cuda.Stream()\n"),
    threads_enter_the_device: ("infinity/engine/engine.py", "t = threading.Thread(target=run)\ndef run(): pass\n"),
    files_in_backends: ("infinity/engine/engine.py", "import os\nf = os.open('x', 0)\n"),
    names_dtype_and_device: ("infinity/engine/engine.py", "import torch\nx = torch.zeros(3, dtype=torch.int8)\n"),
    torch_privates_in_their_room: ("infinity/engine/engine.py", "import torch\nx = torch._C._is_tracing()\n"),
    no_assert: ("swapper/swapper.py", "assert handle is None\n"),
    nothing_hung_onto_others: (
        "infinity/engine/engine.py",
        "def f(coordinator):\n    coordinator.on_forward = print\n",
    ),
}
_MODULES = load_modules()


def test_packages_are_found() -> None:
    assert {"infinity", "swapper"} <= set(_MODULES)


@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_and_objects(rule: Rule) -> None:
    offences = [offence for module in _MODULES.values() for offence in rule(module)]
    assert not offences, f"{rule.__doc__}\n" + "\n".join(offences)
    path, source = _RULES[rule]
    assert list(rule(Module.parse(path, source)))


def test_no_import_cycle() -> None:
    graph = {name: dependencies(module, _MODULES) - {name} for name, module in _MODULES.items()}
    cycle = find_cycle(graph)
    assert not cycle, "imports go down only, but: " + " -> ".join(cycle)


# ------------------------------------------------------------------------------------------------------------ folders


def folder(module: Module) -> str:
    """The folder of a module; a module at the top of a package stands for itself."""
    directory = str(Path(module.path).parent)
    return module.path if directory in _PACKAGES else directory


def handed_on(module: Module, modules: dict[str, Module]) -> dict[str, str]:
    """Name -> where it comes from, of what an `__init__` only hands on."""
    found = {}
    for _, source, name in imports(module):
        if name is not None and source in modules:
            submodule = f"{source}.{name}"
            found[name] = submodule if submodule in modules else source
    return found


def folder_graph(modules: dict[str, Module]) -> dict[str, set[str]]:
    """Which folders each folder imports. A face, an `__init__` that hands names on, stands for where they come from."""
    faces = {
        name: handed_on(module, modules)
        for name, module in modules.items()
        if module.path.endswith("__init__.py") and name not in _PACKAGES
    }
    graph: dict[str, set[str]] = {folder(module): set() for module in modules.values()}
    for name, module in modules.items():
        if name in faces:
            continue
        for _, source, imported in imports(module):
            submodule = f"{source}.{imported}"
            target = submodule if submodule in modules else source
            while target in faces and imported in faces[target]:
                target = faces[target][imported]
            if target in modules and folder(modules[target]) != folder(module):
                graph[folder(module)].add(folder(modules[target]))
    return graph


def layers(graph: dict[str, set[str]]) -> dict[str, int]:
    """The layer of each node of a graph without a circle: one above the highest that it imports."""
    found: dict[str, int] = {}
    for node in TopologicalSorter(graph).static_order():
        found[node] = 1 + max((found[below] for below in graph[node]), default=0)
    return found


def test_no_circle_of_folders() -> None:
    cycle = find_cycle(folder_graph(_MODULES))
    assert not cycle, "imports between folders go down only, but: " + " -> ".join(cycle)


def test_few_floors() -> None:
    def house(path: str) -> str:  # a folder with all that is in it
        return "swapper" if path.startswith("swapper") else "/".join(path.split("/")[:2])

    graph: dict[str, set[str]] = {}
    for path, below in folder_graph(_MODULES).items():
        graph.setdefault(house(path), set()).update({house(other) for other in below} - {house(path)})
    assert max(layers(graph).values()) <= _MOST_LAYERS


@pytest.mark.deep(but=39)
@pytest.mark.parametrize("path", sorted({str(Path(module.path).parent) for module in _MODULES.values()}))
def test_a_folder_says_what_it_is_and_is_small(path: str) -> None:
    assert ast.get_docstring(_MODULES[path.replace("/", ".")].tree)
    files = [module for module in _MODULES.values() if str(Path(module.path).parent) == path]
    assert len(files) <= _MANY_FILES + 1


def test_cycles_are_found_through_relative_and_late_imports() -> None:
    sources = {
        "infinity/__init__.py": "from .engine.engine import Engine\n",
        "infinity/engine/engine.py": "from ..units import unit\n",
        "infinity/units/unit.py": "def f():\n    from infinity.engine.engine import Engine\n",
    }
    modules = {module.name: module for module in (Module.parse(path, source) for path, source in sources.items())}
    graph = {name: dependencies(module, modules) for name, module in modules.items()}
    assert graph["infinity"] == {"infinity.engine.engine"}
    first, *others = find_cycle(graph)
    assert others[-1] == first and {*others} == {"infinity.engine.engine", "infinity.units.unit"}


# --------------------------------------------------------------------------------------------- what tests know of files

_PUBLIC = frozenset(
    {
        *("infinity", "infinity.errors", "infinity.as_deepspeed", "infinity.deepspeed"),
        *("infinity.integrations.accelerate", "infinity.integrations.lightning", "infinity.integrations.transformers"),
        *("infinity.checkpoint.saved", "infinity.metrics"),  # documented in docs/reference
        *("swapper", "swapper.backend", "swapper.backends", "swapper.errors"),
    }
)
"""Modules that users import. DeepSpeed's names, such as `infinity.deepspeed.utils`, are no files and need no entry."""
_MOST_INTERNALS = 60
_IMPORTS_IN_TEXT = re.compile(
    r"^\s*(from (?:infinity|swapper)[\w.]* import \w+(?:, \w+)*|import (?:infinity|swapper)[\w.]*)", re.MULTILINE
)
_REPLACED_BY_NAME = re.compile(r"(?:infinity|swapper)(?:\.\w+)+")


def internals(test: Module, modules: dict[str, Module]) -> set[str]:
    """Modules that users do not import, but a test does: by imports, in code for other processes, in names it replaces."""
    texts = [node.value for node in test.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    code = "\n".join(line for text in texts for line in _IMPORTS_IN_TEXT.findall(text))
    found = dependencies(test, modules) | (dependencies(Module.parse(test.path, code), modules) if code else set())
    for node in test.nodes:
        if isinstance(node, ast.Call) and dotted(node.func).endswith(("setattr", "patch")) and node.args:
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            if isinstance(name, str) and _REPLACED_BY_NAME.fullmatch(name):
                words = name.split(".")
                prefixes = [".".join(words[:length]) for length in range(len(words), 0, -1)]
                found.add(next(prefix for prefix in prefixes if prefix in modules))
    return found - _PUBLIC


def test_public_modules_exist() -> None:
    assert set(_MODULES) >= _PUBLIC


def test_tests_of_behaviour_know_few_files() -> None:
    """A file that moves breaks the unit tests of its folder, and a line of tests/internals.py."""
    found: dict[str, list[str]] = {}
    for path in sorted((_ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(_ROOT))
        if not name.startswith("tests/unit/"):
            for internal in internals(Module.parse(name, path.read_text()), _MODULES):
                found.setdefault(internal, []).append(name)
    table = "\n".join(f"{name}: {', '.join(users)}" for name, users in sorted(found.items()))
    assert len(found) <= _MOST_INTERNALS, f"use public names, or move unit tests to tests/unit:\n{table}"


def test_internals_are_found_wherever_a_test_names_them() -> None:
    source = """
import infinity
from infinity.engine import engine
from infinity.deepspeed.utils import logger
_CODE = '''
    from infinity.cli.main import main
    import swapper
'''
monkeypatch.setattr("infinity.units.unit.Unit.bind", print)
"""
    expected = {"infinity.engine.engine", "infinity.cli.main", "infinity.units.unit"}
    assert internals(Module.parse("tests/integration/test_x.py", source), _MODULES) == expected
