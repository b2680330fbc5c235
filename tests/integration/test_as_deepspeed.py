"""Unmodified libraries with `infinity` as their DeepSpeed give the bits of the same libraries without any."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.children import run_python
from tests.stand_in import accelerate_script, models
from tests.stand_in.text import log_of
from tests.twins import on_nvme

_ROOT = Path(__file__).resolve().parents[2]


def run(words: Sequence[str], *, fails: bool = False, **environment: str) -> str:
    """What a Python process wrote to stdout and stderr; it has to succeed, or to fail."""
    done = run_python(*words, **environment)
    assert (done.returncode != 0) is fails, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def offloading(directory: Path) -> dict[str, Any]:
    """A config as guides to the Trainer have it: nearly everything is "auto", and everything lies on NVMe."""
    config = on_nvme(directory, bf16={"enabled": "auto"})
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    buckets = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config["zero_optimization"] |= {"stage3_gather_16bit_weights_on_model_save": True, **dict.fromkeys(buckets, "auto")}
    return {**dict.fromkeys(sizes, "auto"), **config}


def written(directory: Path, config: dict[str, Any]) -> str:
    path = directory / "ds_config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.deep
def test_trainers(tmp_path: Path) -> None:
    """fp32, 16 bit, accumulation with dropout; PEFT; models that transformers loads and builds by its own code for ZeRO-3, and
    the best one at the end; predictions, by generating and without a training; TRL's SFT, and DPO, which has a second engine
    for its reference model.

    Three are killed in the 17th step, and resumed from the tenth.
    """
    config, saved = written(tmp_path, offloading(tmp_path / "nvme")), tmp_path / "saved"
    models.llama().save_pretrained(saved, max_shard_size="40KB")
    assert len(list(saved.glob("*.safetensors"))) > 1
    cases = {"llama": "llama", "llama16": "llama --bf16", "gpt2": "gpt2 --accumulate 2 --clip 0.5", "lora": "lora"}
    cases |= {
        "predicting": f"{saved} --predict",
        "files": f"{saved} --best",
        "config": "from_config",
        "t5": "t5 --accumulate 2",
    }
    if importlib.util.find_spec("trl") is not None:
        cases |= {"sft": "sft --accumulate 2", "dpo": "dpo"}
    killed, script = ("gpt2", "config", "lora"), ["-m", "tests.stand_in.trainer_script"]
    plain = [f"{tmp_path}/plain/{name} {words}" for name, words in cases.items()]
    paged = {name: f"{tmp_path}/paged/{name} {words} --deepspeed {config}" for name, words in cases.items()}
    first = [f"{paged[name]} --die-after 17" for name in killed]
    again = [words + " --resume" * (name in killed) for name, words in paged.items()]
    run([*script, " then ".join(plain)])
    run(["-m", "infinity.as_deepspeed", *script, " then ".join(first + again)])
    for name in cases:
        there, here = ((tmp_path / kind / name) for kind in ("plain", "paged"))
        expected, found = (json.loads((folder / "found.json").read_text()) for folder in (there, here))
        num_losses = len(expected["losses"]) * (2 if name in killed else 3) // 3
        assert (name, found.pop("losses")) == (name, expected.pop("losses")[-num_losses:])
        assert (name, log_of(found.pop("log"))) == (name, log_of(expected.pop("log")))
        assert (name, found) == (name, expected)
        if name == "predicting":
            continue
        weights, expected_weights = (load_file(*folder.glob("model/*.safetensors")) for folder in (here, there))
        assert weights.keys() == expected_weights.keys()
        assert all(torch.equal(weights[key], value) for key, value in expected_weights.items()), name


@pytest.mark.deep
def test_a_missing_checkpoint_is_an_error_but_for_deepspeeds_scripts(tmp_path: Path) -> None:
    code = """
        import infinity.as_deepspeed
        import deepspeed, infinity, torch
        config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
        for package, keywords in ((deepspeed, {}), (deepspeed, {"missing_ok": False}), (infinity, {})):
            model = torch.nn.Linear(2, 2)
            engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config)
            try:
                print("loaded", engine.load_checkpoint("typo", **keywords))
            except ValueError as error:
                print("error", "there is no file 'latest' in it" in str(error))
    """
    told = run(["-c", "if 1:" + code])
    assert re.findall("^(?:loaded|error) .*$", told, re.MULTILINE) == [
        "loaded (None, None)",
        "error True",
        "error True",
    ]
    assert "engine.load_checkpoint: nothing was loaded" in told


def test_it_is_seen_wherever_libraries_look() -> None:
    code = """
        import sys
        try:
            import deepspeed
        except ModuleNotFoundError:
            pass
        else:
            sys.exit("infinity answers without being asked")
        import infinity.as_deepspeed
        import importlib.metadata, importlib.util
        assert importlib.util.find_spec("deepspeed") is not None
        version = importlib.metadata.version("deepspeed")
        import deepspeed, infinity
        assert deepspeed.__version__ == version
        assert deepspeed.initialize is infinity.deepspeed.initialize
        assert (deepspeed.__version_minor__, deepspeed.__git_hash__) == (19, None)
        assert deepspeed.DeepSpeedEngine is infinity.deepspeed.DeepSpeedEngine
        assert issubclass(deepspeed.DeepSpeedEngine, infinity.Engine)
        import deepspeed.comm as dist
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
        from deepspeed.zero import GatheredParameters
        assert all(getattr(deepspeed, name) is sys.modules[f"deepspeed.{name}"] for name in ("checkpointing", "comm", "zero"))
        import torch  # TRL's fused losses ask what they have saved of a weight, which is no parameter
        assert torch.ones(1).ds_status == ZeroParamStatus.AVAILABLE
        assert dist.get_world_size() == 1 and GatheredParameters is infinity.GatheredParameters
        import infinity.as_deepspeed  # again
        infinity.as_deepspeed.install()
        assert sys.path.count(str(infinity.as_deepspeed.SITE)) == 1
        import subprocess
        assert subprocess.run([sys.executable, "-c", "import deepspeed"], capture_output=True).returncode
        for statement, cure in (
            ("import deepspeed.moe.layer", "Experts in a ModuleList"),
            ("from deepspeed import PipelineModule", "engine.train_batch"),
            ("from deepspeed.zero import GatheredParams", "Use instead: "),
            ("deepspeed.tp_model_init", "mesh_param= to initialize"),
            ("from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3", "that initialize returns"),
            ("from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live", "infinity plan"),
            ("from deepspeed.zero import TiledLinear", "tile_above"),
            ("from deepspeed.comm import enable_symm_mem_for_group", "torch.distributed"),
        ):
            try:
                exec(statement)
            except (ImportError, AttributeError) as error:
                name = statement.split()[1 if isinstance(error, ModuleNotFoundError) else -1].rpartition(".")[2]
                assert cure in str(error) and name in str(error), error
            else:
                sys.exit(statement)
    """
    run(["-c", "if 1:" + code])


@pytest.mark.deep
def test_a_training_after_another_of_the_same_model(tmp_path: Path) -> None:
    """As Lightning's second ``fit`` of a model, or that after ``lr_find``: nobody closes the first engine."""
    code = """
        import json, sys
        import infinity.as_deepspeed
        import deepspeed, torch
        found = []
        for is_plain in (True, False):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            engines = []
            for _ in range(2):
                optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
                engine = model
                if not is_plain:
                    config = json.load(open(sys.argv[1]))
                    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
                    engines.append(engine)
                for number in range(2):
                    loss = engine(torch.full((2, 4), float(number))).square().mean()
                    loss.backward() if is_plain else engine.backward(loss)
                    optimizer.step() if is_plain else engine.step()
                    optimizer.zero_grad() if is_plain else None
            found.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        assert [each.is_closed for each in engines] == [True, False]
        assert deepspeed.initialize(model=model, model_parameters=[], config={**config, "optimizer": None})[0] is engine
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    """
    config = offloading(tmp_path / "nvme")
    kept = {key: config[key] for key in ("zero_optimization", "infinity")} | {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
    }
    run(["-c", "if 1:" + code, written(tmp_path, kept)])


@pytest.mark.deep
def test_it_is_refused_where_it_comes_too_late() -> None:
    code = """
        import sys, types
        for name in ("deepspeed", "accelerate"):
            sys.modules[name] = types.ModuleType(name)
            try:
                import infinity.as_deepspeed
            except ImportError as error:
                print(error)
            del sys.modules[name]
    """
    found = run(["-c", "if 1:" + code])
    for message in ("another 'deepspeed' is loaded", "accelerate is loaded"):
        assert message in found
    assert found.count("first line") == 2


@pytest.mark.deep
def test_a_script_is_run_as_python_would(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("value = 3\n")
    script.write_text(
        "import multiprocessing, os, subprocess, sys\n"
        "import beside, deepspeed\n"
        "def where(_):\n    import deepspeed\n    return deepspeed.__name__\n"
        "if __name__ == '__main__':\n"
        "    assert os.environ['WORLD_SIZE'] == '1'\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(where, [0]))\n"
        "    subprocess.run([sys.executable, '-c', 'import deepspeed'], check=True)\n"
        "    print(sys.argv, beside.value)\n"
    )
    found = run(["-m", "infinity.as_deepspeed", str(script), "--lr", "1"])
    assert "['deepspeed']" in found
    assert f"['{script}', '--lr', '1'] 3" in found


def test_deepspeeds_command_is_infinitys_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys, deepspeed\nprint(os.environ['RANK'], deepspeed.__version__, sys.argv[1:])\n")
    start = ["-m", "infinity.as_deepspeed", "-m", "deepspeed.launcher.runner"]
    found = run([*start, "-i", "localhost:0,1", "--master_port", "0", str(script), "--lr", "1"])
    lines = sorted(line for line in found.splitlines() if "+infinity" in line)
    assert lines == [f"{rank} 0.19.8+infinity ['--lr', '1']" for rank in range(2)]
    assert "No such option '--autotuning'" in run([*start, "--autotuning", "run", str(script)], fails=True)


@pytest.mark.deep
def test_several_processes_of_srun_do_not_train_alone() -> None:
    """What is set here for a single process must not hide that there are several."""
    code = "import infinity.as_deepspeed, deepspeed; deepspeed.init_distributed()"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"PYTHONPATH": str(_ROOT), "SLURM_STEP_NUM_TASKS": "4"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "srun has started 4 processes (SLURM_STEP_NUM_TASKS)" in done.stderr


@pytest.mark.deep
def test_accelerate_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation and clipping, in fp32 and in 16 bits: killed in the 17th step and resumed from the tenth."""
    # accelerate leaves clipping to DeepSpeed's config, which has to say what the script says.
    config = written(tmp_path, offloading(tmp_path / "nvme") | {"gradient_clipping": 0.5})
    launch = ["-m", "infinity.as_deepspeed", "-m", "accelerate.commands.launch", "--use_deepspeed"]
    launch += ["--num_processes", "1", "--deepspeed_config_file", config, "--mixed_precision"]
    script = "tests/stand_in/accelerate_script.py"
    for precision, options in (("no", []), ("bf16", ["--bf16"])):
        there, here = tmp_path / "plain" / precision, tmp_path / "paged" / precision
        there.mkdir(parents=True)
        here.mkdir(parents=True)
        with monkeypatch.context() as patched:
            patched.setenv("ACCELERATE_USE_CPU", "1")
            accelerate_script.forget()
            accelerate_script.main([str(there), *options])
            accelerate_script.forget()
        run([*launch, precision, script, str(here), *options, "--die-after", "17"], fails=True)
        assert not (here / "model.pt").exists()
        run([*launch, precision, script, str(here), *options, "--resume"])
        expected, found = (json.loads((folder / "found.json").read_text()) for folder in (there, here))
        assert (len(expected["losses"]), len(found["losses"])) == (60, 40)
        assert "DEEPSPEED" in found["kind"] and "DEEPSPEED" not in expected["kind"]
        assert found["losses"] == expected["losses"][20:]
        assert found["norms"] == expected["norms"][10:]
        weights, expected_weights = (torch.load(folder / "model.pt") for folder in (here, there))
        assert weights.keys() == expected_weights.keys()
        assert all(torch.equal(weights[key], value) for key, value in expected_weights.items())


@pytest.mark.deep
def test_a_loop_with_a_model_of_files(tmp_path: Path) -> None:
    """transformers' way without a Trainer: `HfDeepSpeedConfig`, then ``from_pretrained``, then ``deepspeed.initialize``."""
    models.llama().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    config = offloading(tmp_path / "nvme") | {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    config["optimizer"]["params"]["weight_decay"] = 0.01
    config = {key: value for key, value in config.items() if value != "auto" and key != "bf16"}
    zero = config["zero_optimization"]
    config["zero_optimization"] = {key: value for key, value in zero.items() if value != "auto"}
    code = f"""
        import infinity.as_deepspeed
        import deepspeed, torch
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig
        kept = HfDeepSpeedConfig({config!r})
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r})
        torch.manual_seed(1)
        model.resize_token_embeddings(260)
        engine, *_ = deepspeed.initialize(model=model, config=kept.config)
        tokens = torch.arange(64).view(2, 32)
        for _ in range(3):
            loss = engine(input_ids=tokens, labels=tokens).loss
            print("loss", repr(loss.item()))
            engine.backward(loss)
            engine.step()
    """
    found = run(["-c", "if 1:" + code])
    model = models.llama()
    torch.manual_seed(1)
    model.resize_token_embeddings(260)
    optimizer, tokens, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.arange(64).view(2, 32), []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(f"loss {loss.item()!r}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [line for line in found.splitlines() if line.startswith("loss")] == losses


@pytest.mark.deep
def test_lightning(tmp_path: Path) -> None:
    """Its own DeepSpeedStrategy, by each of its names too: Adam, StepLR, dropout; killed in step 17, resumed from the tenth."""
    pytest.importorskip("lightning", reason="lightning is not installed: pip install -c constraints.txt lightning")
    config = offloading(tmp_path / "nvme")
    config = {key: value for key, value in config.items() if key in ("zero_optimization", "infinity")}
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        del config["zero_optimization"][key]  # "auto" is nothing to Lightning
    config["zero_allow_untested_optimizer"] = True  # Lightning looks for it
    paged = f"deepspeed_stage_3 --config {written(tmp_path, config)}"
    script = ["-m", "tests.stand_in.lightning_script"]
    twice = "--clip 0.1 --accumulate 2"  # DeepSpeed divides the loss once more than Lightning
    plain = ["plain auto --clip 0.1", f"plain-twice auto {twice} --divide 2", "plain-bf16 auto --clip 0.1 --bf16"]
    run([*script, " then ".join(f"{tmp_path}/{each}" for each in plain)])
    run(["-m", "infinity.as_deepspeed", *script, f"{tmp_path}/died {paged} --clip 0.1 --die-after 17"], fails=True)
    names = [f"deepspeed_stage_{name}" for name in ("1", "2", "2_offload", "3", "3_offload")]
    others = [f"{tmp_path}/{name} {name} --clip 0.1" for name in names] + [f"{tmp_path}/twice {paged} {twice}"]
    others.append(f"{tmp_path}/bf16 {paged} --clip 0.1 --bf16")
    run(
        [
            "-m",
            "infinity.as_deepspeed",
            *script,
            " then ".join([f"{tmp_path}/died {paged} --clip 0.1 --resume", *others]),
        ]
    )
    for name, num_losses in (("died", 20), *((name, 30) for name in names), ("twice", 60), ("bf16", 30)):
        there, here = tmp_path / (f"plain-{name}" if name in ("twice", "bf16") else "plain"), tmp_path / name
        expected, found = (json.loads((folder / "found.json").read_text()) for folder in (there, here))
        assert len(found["losses"]) == num_losses
        for key in ("losses", "rates"):
            assert found[key] == expected[key][-num_losses:]
        assert (found["metrics"], found["tested"]) == (expected["metrics"], expected["tested"])
        weights, expected_weights = (torch.load(folder / "weights.pt") for folder in (here, there))
        assert weights.keys() == expected_weights.keys()
        assert all(torch.equal(weights[key], value) for key, value in expected_weights.items())
