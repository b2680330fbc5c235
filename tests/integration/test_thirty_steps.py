"""Each native integration gives the bits of its library alone, and resumes to them after a kill, in fp32 and in 16 bits.

Thirty steps of two micro-batches, with clipping; killed with -9 in the 17th step, and resumed from the tenth.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.killed import NEEDS_FORKS, run_killed
from tests.stand_in.accelerate_script import forget
from tests.stand_in.text import log_of
from tests.twins import on_nvme

_OPTIONS = "--accumulate 2 --clip 0.5"
_SCRIPTS = {
    "Trainer": f"trainer_script OUT llama {_OPTIONS}",
    "Trainer, one by one": f"trainer_script OUT gpt2 {_OPTIONS}",
    "Seq2SeqTrainer": f"trainer_script OUT t5 {_OPTIONS}",
    "PEFT": f"trainer_script OUT lora {_OPTIONS}",
    "TRL": f"trainer_script OUT sft {_OPTIONS}",
    "accelerate": "accelerate_script OUT",
    "Lightning": "lightning_script OUT auto --accumulate 2 --clip 0.1",
}
_NEEDS = {"TRL": "trl", "Lightning": "lightning"}
pytestmark = [NEEDS_FORKS, pytest.mark.deep, pytest.mark.filterwarnings("ignore")]  # the libraries' own


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps what it was told for the whole process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    forget()
    yield
    forget()


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """What a script has saved at its end."""
    [path] = [*directory.glob("*.pt"), *directory.glob("model/*.safetensors")]
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", _SCRIPTS)
def test_thirty_steps(name: str, precision: str, tmp_path: Path) -> None:
    if name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
        pytest.skip(f"{_NEEDS[name]} is not installed")
    there, here, nvme, config = (tmp_path / part for part in ("plain", "ours", "nvme", "config.json"))
    script, *words = _SCRIPTS[name].split() + (["--bf16"] if precision == "bf16" else [])
    by_arguments = script == "trainer_script"
    settings = on_nvme(nvme, gradient_accumulation_steps=2)
    if by_arguments:
        settings["gradient_clipping"] = "auto"
    if precision == "bf16":
        settings["bf16"] = {"enabled": "auto" if by_arguments else True}
    config.write_text(json.dumps(settings))

    main = importlib.import_module(f"tests.stand_in.{script}").main
    of_ours = ["infinity", "--config", str(config)] if script == "lightning_script" else ["--infinity", str(config)]
    ours = [str(here), *[word for word in words[1:] if word != "auto"], *of_ours]
    assert run_killed(lambda _: main([*ours, "--die-after", "17"]), None) is None
    assert not (here / "found.json").exists()
    if by_arguments:
        (here / "checkpoint-12").mkdir()  # as a kill in the midst of saving leaves it
    main([*ours, "--resume"])
    main([str(there), *words[1:]])

    expected, found = (json.loads((folder / "found.json").read_text()) for folder in (there, here))
    assert log_of(found.pop("log", [])) == log_of(expected.pop("log", []))
    for key in ("losses", "norms", "rates"):
        values, resumed = expected.pop(key, []), found.pop(key, [])
        assert len(values) in (0, 30, 60) and 3 * len(resumed) == 2 * len(values)
        assert resumed == values[-len(resumed) :]
    assert found == expected
    assert not list(here.rglob("optimizer.*"))
    weights, expected_weights = weights_of(here), weights_of(there)
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[key], value) for key, value in expected_weights.items())
