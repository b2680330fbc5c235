"""What the pages of docs/ and the README files say: code runs; commands, links and names exist; tables are complete."""

from __future__ import annotations

import ast
import atexit
import builtins
import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import api_reference
import bars
import commands_reference
import config_reference
import deepspeed_names
import pages
import pytest

import infinity.errors
import swapper
from tests.children import run_python
from tests.internals import main
from tests.unit.test_architecture import folder_graph, load_modules
from tests.warm_process import run_script

_ROOT = Path(__file__).resolve().parents[2]
_DOCS = _ROOT / "docs"
_FOLDERS = ("infinity", "swapper", "configs", "tools", "tests")
_READMES = [_ROOT / "README.md", *(page for folder in _FOLDERS for page in sorted((_ROOT / folder).rglob("README.md")))]
_ERRORS = _DOCS / "reference" / "errors.md"
_FROM_DEEPSPEED = _DOCS / "guides" / "from-deepspeed.md"
_SITE = sorted(_DOCS.rglob("*.md"))
_NOTEBOOKS = sorted((_ROOT / "tools" / "examples").glob("*.ipynb"))
_PAGES = [*_READMES, *_SITE, *(_ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))]


def _id(page: Path) -> str:
    return page.relative_to(_ROOT).as_posix()


_EACH_PAGE = pytest.mark.parametrize("page", _PAGES, ids=_id)


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def _code(page: Path) -> str:
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text())["cells"]
        return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return "\n".join(_blocks(page, "python"))


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_first_page_is_short() -> None:
    lines = (_ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 150
    assert [line for line in lines if len(line) > 120] == []


# ------------------------------------------------------------------------------------------------------ code and commands


@pytest.mark.deep
@pytest.mark.parametrize("page", [page for page in [*_PAGES, *_NOTEBOOKS] if _code(page)], ids=_id)
def test_the_code_runs(page: Path, tmp_path: Path) -> None:
    """All blocks of a page, or cells of a notebook, one after the other, as one script."""
    code = _code(page)
    for library in ("peft", "transformers", "lightning", "accelerate", "trl"):
        is_imported = re.search(rf"^(import|from) {library}\b", code, re.MULTILINE)
        if is_imported and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    (tmp_path / "script.py").write_text(code)
    status, printed = run_script(tmp_path / "script.py", tmp_path, {"TMPDIR": str(tmp_path)})
    assert status == 0, printed


def _commands(page: Path) -> list[list[str]]:
    lines = [line for block in _blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    starts = r"(?:\.venv/bin/)?(?:python|bash)\s(?:tools/|-m\s)"
    lines += [" ".join(found.split()) for found in re.findall(rf"`({starts}[^`]*)`", _prose(page))]
    lines += re.findall(r"`(pip install -e [^`]*)`", _prose(page))
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


_ANSWERING = """
import contextlib, io, json, os, runpy, sys
sys.path.insert(0, "tools")
def start(program, words):  # the tools that are fronts of a command become that
    sys.argv = words[3:]
    runpy.run_module(sys.argv[0], run_name="__main__")
os.execv = start
for line in sys.stdin:
    kind, name, *rest = json.loads(line)
    sys.argv, printed = [name, *rest, "--help"], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        (runpy.run_module if kind == "-m" else runpy.run_path)(name, run_name="__main__")
    print(json.dumps(printed.getvalue()), flush=True)
"""
"""Says what programs print with ``--help``, one after the other: for each by itself, torch would be loaded anew."""


@functools.cache
def _answering() -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _ANSWERING], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(child.communicate)
    return child


@functools.cache
def _help(tool: str) -> str:
    words = ["-m", "pytest"] if tool == "pytest" else tool.split() if tool.startswith("-m ") else ["", tool]
    if words[0] and not words[1].startswith("infinity"):
        # These cannot follow others: pytest warns of what it finds imported, some put infinity in DeepSpeed's place.
        return run_python(*words, "--help").stdout
    child = _answering()
    child.stdin.write(json.dumps(words) + "\n")
    child.stdin.flush()
    found: str = json.loads(child.stdout.readline())
    assert "--help" in found, tool
    return found


_ELSEWHERE = ("axolotl", "llamafactory", "swift")
"""Programs whose pages are about them: each needs an environment of its own."""


def _problem(command: list[str]) -> str:
    """What is wrong with a command; nothing if it can be run as it stands."""
    known_options = ""
    match command:
        case ["bash", script, *rest]:
            demo = "kill_and_resume.py" if rest[:1] == ["--larger-than-ram"] else "train.py"
            tools = {
                "tools/demo.sh": f"tools/{demo}",
                "tools/test.sh": "pytest",
                "tools/gpu_day.sh": "tools/gpu_day.py",
            }
            tool = tools.get(script, "")
            known_options = _help(tool) if rest and tool else ""
            exists = (_ROOT / script).is_file()
        case [_, "-m", "pytest", *rest]:
            known_options = _help("pytest")
            exists = all((_ROOT / word).exists() for word in rest if word.startswith("tests/"))
        case ["torchrun", "--nproc-per-node", _, script, *rest]:
            return _problem(["python", script, *rest])
        case ["infinity", ("config" | "checkpoint") as group, command, *rest]:
            exists, known_options = True, _help(f"-m infinity {group} {command}")
        case ["infinity", command, *rest] | [_, "-m", "infinity", command, *rest]:
            exists, known_options = True, _help(f"-m infinity {command}")
        case [_, "-m", "infinity.as_deepspeed", "-m", module, *_] if module.partition(".")[0] in _ELSEWHERE:
            return ""  # each has an environment of its own: not run here
        case [_, "-m", "infinity.as_deepspeed", script, *rest]:
            return _problem(["python", script, *rest])
        case [_, "-m", module, *rest]:
            place = _ROOT / module.replace(".", "/")
            exists = place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()
            if not (_ROOT / module.partition(".")[0]).is_dir():  # another library's
                exists = importlib.util.find_spec(module) is not None
            rest = [word for word in rest if word.startswith("--")]
            known_options = _help(f"-m {module}") if exists and rest else ""
        case ["python", script, *rest]:
            exists = (_ROOT / script).is_file()
            known_options = _help(script) if exists and rest else ""
        case ["pip", "install", "-e", target, *rest]:
            extras = set(target.removeprefix(".[").removesuffix("]").split(","))
            known = re.findall(r"^(\w+) = \[", (_ROOT / "pyproject.toml").read_text(), re.MULTILINE)
            exists = all((_ROOT / word).is_file() for word in rest[1:])
            return "" if exists and extras <= set(known) else "no such extra"
        case [program, *rest]:
            return "" if (_ROOT / program).name == "pre-commit" else "no such program"
        case _:
            return "it is empty"
    if not exists:
        return "a file is missing"
    options = [word.split("=")[0] for word in rest if word.startswith("--")]
    unknown = [option for option in options if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", known_options)]
    return f"unknown: {unknown}" if unknown else ""


@pytest.mark.deep
@_EACH_PAGE
def test_commands_can_be_run(page: Path) -> None:
    problems = {" ".join(command): problem for command in _commands(page) if (problem := _problem(command))}
    assert problems == {}


_QWEN3_30B = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32}
_QWEN3_30B |= {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
_QWEN3_30B |= {"vocab_size": 151936, "tie_word_embeddings": False}


@pytest.mark.deep
@pytest.mark.parametrize("name", ["index", "guides/lora-70b", "guides/full-8b-24gb", "guides/mixtures-of-experts"])
def test_predictions_on_pages_are_those_of_their_commands(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = _DOCS / f"{name}.md"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **_QWEN3_30B}))
    text = page.read_text()
    commands = [words for words in _commands(page) if words[:2] == ["infinity", "plan"]]
    assert commands
    for words in commands:
        places = {"path/to/config.json": str(tmp_path / "config.json")}
        assert main([*(places.get(word, word) for word in words[1:]), "--json"]) == 0
        step = json.loads(capsys.readouterr().out)["chosen"]
        seconds = step["step_seconds"]
        told = [
            f"{seconds:.1f} s" if 1 < seconds < 100 else f"{seconds:.3g} s",
            f"{step['tokens_per_second']:,.0f} tokens/s",
        ]
        if written := step["write_bytes_per_step"]:
            told.append(f"{written / 1e9:.1f} GB" if written > 1e9 else f"{written / 1e6:.0f} MB")
        assert [figure for figure in told if figure not in text] == [], " ".join(words)


@pytest.mark.deep
def test_the_predictions_of_the_first_page_are_those_of_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    page = _ROOT / "README.md"
    told = [line.strip("| ").split(" | ")[4:] for line in page.read_text().splitlines() if ", predicted |" in line]
    commands = [words[1:] for words in _commands(page) if words[:2] == ["infinity", "plan"]]
    found = []
    for words in commands:
        assert main([*words, "--json"]) == 0
        step = json.loads(capsys.readouterr().out)["chosen"]
        figures = f"{step['step_seconds']:.1f} s", f"{step['tokens_per_second']:,.0f}"
        written = "nothing"
        if step["write_bytes_per_step"]:
            life = f"{step['drive_life_steps']:,} steps to {words[words.index('--tbw') + 1]} TB"
            written = f"{step['write_bytes_per_step'] / 1e9:.1f} GB: {life}"
        found.append([f"{int(words[words.index('--tokens') + 1]):,}", *figures, written])
    assert found == told


# -------------------------------------------------------------------------------------------------------- links and names


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.deep(but=8)
@_EACH_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        linked = linked / "README.md" if linked.is_dir() else linked
        if not linked.exists() or (anchor and anchor not in _anchors(linked)):
            broken.append(target)
    assert broken == []


def _places(page: Path) -> tuple[Path, ...]:
    return page.parent, _ROOT, _ROOT / "infinity"


@_EACH_PAGE
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w./]+/[\w.]*\.(?:py|sh|json|md))`", _prose(page)))
    assert {name for name in named if not any((place / name).exists() for place in _places(page))} == set()


@pytest.mark.deep(but=14)
@_EACH_PAGE
def test_no_page_names_a_place_in_a_file(page: Path) -> None:
    """Names of folders, commands and public classes stay; `file.py::Class.method` is out of date with the next change."""
    assert re.findall(r"[\w/]+\.py::\w+", page.read_text()) == []


def test_errors_that_are_named_exist() -> None:
    for page in [*_READMES, *_SITE]:
        for name in re.findall(r"`(?:swapper\.)?([A-Z]\w+(?:Error|Warning))`", page.read_text()):
            known = any(
                hasattr(module, name) for module in (infinity.errors, infinity, infinity.deepspeed, swapper, builtins)
            )
            assert known, f"{page}: {name}"


# ------------------------------------------------------------------------------------------------------- complete tables


@pytest.mark.deep
@pytest.mark.parametrize("package", ["infinity", "swapper"])
def test_rooms_are_all_there_and_import_only_what_stands_below(package: str) -> None:
    page = _ROOT / package / "README.md"
    section = re.split(r"^## The (?:packages|folders)$", page.read_text(), flags=re.MULTILINE)[1].split("\n## ")[0]
    named = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    packages = [os.path.normpath(f"{package}/{name}") for name in named]
    graph = folder_graph(load_modules())
    folders = {path for path in graph if path.startswith(f"{package}/") and not path.endswith(".py")}
    assert folders <= set(packages)
    for place, package in enumerate(packages):
        assert graph.get(package, set()) & set(packages[:place]) == set(), package


def test_the_tree_of_errors_is_that_of_the_code() -> None:
    tree = (_ROOT / "swapper" / "errors.py").read_text().split("\n\n")[1]
    told = "\n".join(
        f"    {line}" if line else line for line in _blocks(_DOCS / "reference" / "swapper.md", "text")[0].splitlines()
    )
    assert told == tree


def test_every_tool_is_described() -> None:
    text = (_ROOT / "tools" / "README.md").read_text()
    tools = {path.name for path in (_ROOT / "tools").iterdir() if path.suffix in (".py", ".sh")}
    assert {name for name in tools if f"| `{name}` |" not in text} == set()


def test_every_folder_of_tests_is_described() -> None:
    text = (_ROOT / "tests" / "README.md").read_text()
    folders = {path.parent.relative_to(_ROOT / "tests").parts[0] for path in (_ROOT / "tests").glob("*/*.py")}
    assert {folder for folder in folders if f"| `{folder}/` |" not in text} == set()


def _check_printed(page: Path, printed: str) -> None:
    text = page.read_text()
    assert printed and printed in text
    assert pages.with_printed(page, printed) == text, "run the tool that the page names, with --write"


def test_the_reference_of_the_config_is_what_its_tool_prints() -> None:
    _check_printed(config_reference.PAGE, config_reference.reference())


def test_the_reference_of_the_commands_is_what_its_tool_prints() -> None:
    _check_printed(commands_reference.PAGE, commands_reference.reference())


def test_the_table_of_deepspeeds_names_is_what_its_tool_prints() -> None:
    _check_printed(deepspeed_names.PAGE, deepspeed_names.reference())


def test_each_error_is_explained() -> None:
    """By the first words of its docstring, and with something to do."""
    items = re.split(r"^- (?=`\w+(?:Error|Warning)`: )", _prose(_ERRORS), flags=re.MULTILINE)[1:]
    told = {}
    for item in items:
        name, text = " ".join(re.split(r"\n\n|\n#", item)[0].split()).split(": ", 1)
        told[name.strip("`")] = text.split(" **Do:** ")
    modules = (infinity.errors, swapper.errors)
    classes = [
        each
        for module in modules
        for each in vars(module).values()
        if getattr(each, "__module__", "") == module.__name__
    ]
    expected = {each.__name__: api_reference.text_of(each) for each in classes if isinstance(each, type)}
    assert {name: parts[0] for name, parts in told.items()} == expected
    assert {name for name, parts in told.items() if len(parts) != 2 or len(parts[1]) < 10} == set()


def test_settings_on_pages_are_taken() -> None:
    found = {text for page in _SITE for text in re.findall(r'`"infinity": (\{[^`.]*\})`', page.read_text())}
    assert len(found) > 10
    drive = {"device": "nvme", "nvme_path": "/nowhere"}
    for text in found:
        zero = {"stage": 3, "offload_param": drive, "offload_optimizer": drive}
        config = {
            "train_batch_size": 1,
            "gradient_clipping": 0,
            "zero_optimization": zero,
            "infinity": json.loads(text),
        }
        infinity.load_config(config, check_storage=False)


@pytest.mark.deep
def test_the_keys_of_a_deepspeed_config_are_explained() -> None:
    """Each key of the config in the guide, and whether it has an effect."""
    section = _FROM_DEEPSPEED.read_text().split("\n## One changed line")[1].split("\n## ")[0]
    source = re.search(r"ds_config = (\{.*?\n\})", section, re.DOTALL)
    assert source is not None
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", section, re.MULTILINE)
    told = {key: here != "no effect" for keys, here in rows for key in re.findall(r"`([\w.]+)`", keys)}
    known = {
        path + name: not any(config_reference.rules_of(field))
        for path, block in config_reference.blocks()
        for name, field in block.model_fields.items()
    }
    assert told == {key: known[key] for key in _keys_of(ast.literal_eval(source[1]))}


def _keys_of(block: dict[str, object], path: str = "") -> Iterator[str]:
    for name, value in block.items():
        if isinstance(value, dict) and name != "params":
            yield from _keys_of(value, f"{path}{name}.")
        else:
            yield path + name


@pytest.mark.deep
def test_answers_of_commands_are_what_they_print(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line that is shown, in its order; "..." stands for lines that are left out."""
    monkeypatch.setenv("COLUMNS", "112")
    page = _DOCS / "guides" / "choosing-offload.md"
    shown = [block.split("\n", 1) for block in _blocks(page, "text") if block.startswith("$ infinity ")]
    assert len(shown) == 4
    for command, answer in shown:
        main(shlex.split(command)[2:])
        printed = iter([line.rstrip() for line in capsys.readouterr().out.splitlines()])
        for line in answer.splitlines():
            assert line == "..." or line in printed, f"{command}: {line}"


@pytest.mark.deep
def test_the_site_can_be_built(tmp_path: Path) -> None:
    """Strictly: mkdocs ends with an error where a link or an anchor leads nowhere."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: the extra dev has it")
    words = ["build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    done = run_python("-m", "mkdocs", *words, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stderr
    assert "Tiles" in (tmp_path / "site" / "guides" / "larger-than-ram" / "index.html").read_text()
    assert "The packages" in (tmp_path / "site" / "how-it-works" / "code" / "index.html").read_text()


def test_the_page_of_public_names_is_what_its_tool_prints() -> None:
    """In a process of its own, which imports the libraries of the integrations. It ends with an error without a docstring."""
    for library in ("transformers", "accelerate", "lightning"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    status, printed = run_script(_ROOT / "tools" / "api_reference.py", _ROOT)
    assert status == 0, printed
    _check_printed(api_reference.PAGE, printed)


def test_the_chart_shows_the_figures_that_are_recorded() -> None:
    table = bars.rows(bars.PAGE.read_text())
    shown = bars.PICTURE.read_text()
    assert len(table) == 7
    for cells in table:
        for cell in cells[1:]:
            assert cell.replace(" / ", " + ") in shown, f"{cell}: run python tools/bars.py"
