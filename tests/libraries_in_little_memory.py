"""Has libraries save a model that is larger than what their control group allows. A process of its own."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.internals import MemoryGroup
from tests.little_memory import config_on, settled_bytes

LIBRARIES = ("transformers", "accelerate", "lightning")
_BUDGET_BYTES = 40 << 20
_SLACK_BYTES = 48 << 20
"""Beyond what the process has when a step has ended: half of the weights, in 16 bits."""


class Saves:
    """Each builds a model, trains one step, and has it saved within the limit."""

    def __init__(self, group: str, directory: str, is_deepspeed: bool) -> None:
        self._memory = MemoryGroup(Path(group))
        self._is_deepspeed = is_deepspeed
        self._config = config_on(directory, host_memory_budget=_BUDGET_BYTES, keep_in_memory=False)
        self._config |= {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
        self._config["zero_allow_untested_optimizer"] = True
        del self._config["optimizer"]

    @contextmanager
    def _limited(self, engine: Any) -> Iterator[None]:
        """Within, the process gets little more than it has."""
        engine.flush()
        self._memory.limit(settled_bytes() + _SLACK_BYTES)
        yield
        gc.collect()
        self._memory.limit(None)

    def _model(self) -> Any:
        import infinity
        from tests.stand_in import models

        sizes = {"hidden_size": 768, "intermediate_size": 768, "num_hidden_layers": 12}
        with infinity.Init(config=self._config, dtype=torch.bfloat16):
            return models.llama(**sizes, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True)

    def transformers(self, out: Path) -> None:
        """`save_model`, and the checkpoint of a Trainer."""
        from transformers import Trainer, TrainingArguments

        from tests.stand_in.text import rows

        base: Any = Trainer
        more: dict[str, Any] = {"deepspeed": self._config} if self._is_deepspeed else {}
        arguments = TrainingArguments(
            output_dir=str(out),
            max_steps=1,
            per_device_train_batch_size=1,
            max_grad_norm=0.0,
            bf16=True,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **more,
        )
        more = {}
        if not self._is_deepspeed:
            from infinity.integrations.transformers import InfinityTrainer

            base, more = InfinityTrainer, {"infinity_config": self._config}
        trainer = base(self._model(), arguments, train_dataset=rows(1, 4), **more)
        trainer.train()
        engine = trainer.deepspeed if self._is_deepspeed else trainer.engine
        with self._limited(engine):
            trainer.save_model(str(out / "model"))
            trainer._save_checkpoint(trainer.model, None)
        engine.close()

    def accelerate(self, out: Path) -> None:
        """`save_model`, `save_state`, and weights as a script saves them."""
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.state import AcceleratorState

        from tests.stand_in.text import rows

        AcceleratorState._reset_state(True)
        if self._is_deepspeed:
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=self._config))
        else:
            from infinity.integrations.accelerate import InfinityAccelerator

            accelerator = InfinityAccelerator(infinity_config=self._config)
        model = self._model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        loader = torch.utils.data.DataLoader(rows(1, 4), batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
        engine = model if self._is_deepspeed else accelerator.engine
        with self._limited(engine):
            accelerator.save_model(model, str(out / "model"))
            accelerator.save_state(str(out / "state"))
            torch.save(accelerator.get_state_dict(model), out / "weights.pt")
        engine.close()

    def lightning(self, out: Path) -> None:
        """A checkpoint of Lightning's."""
        import lightning

        from tests.stand_in.text import rows

        build = self._model

        class Module(lightning.LightningModule):
            def configure_model(self) -> None:
                if not hasattr(self, "model"):
                    self.model = build()

            def training_step(self, batch: Any, _: int) -> Any:
                return self.model(**batch).loss

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

        if self._is_deepspeed:
            from tests.stand_in.lightning_script import OnCPU

            config = {
                key: value
                for key, value in self._config.items()
                if key in ("zero_optimization", "infinity", "zero_allow_untested_optimizer", "bf16")
            }
            strategy: Any = OnCPU(config=config)
        else:
            from infinity.integrations.lightning import InfinityStrategy

            config = {key: value for key, value in self._config.items() if key != "gradient_clipping"}
            strategy = InfinityStrategy(config=config)
        case = self

        class Saving(lightning.Callback):
            def on_train_end(self, trainer: Any, module: Any) -> None:
                engine = trainer.strategy.deepspeed_engine if case._is_deepspeed else trainer.strategy.engine
                with case._limited(engine):
                    trainer.save_checkpoint(out)

        trainer = lightning.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            max_steps=1,
            precision="bf16-true" if self._is_deepspeed else "bf16-mixed",
            callbacks=[Saving()],
            default_root_dir=out.parent,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(rows(1, 4), batch_size=1))


def run(group: str, directory: str, *, is_deepspeed: bool) -> None:
    """Print a line of JSON for each library that the kernel has let come that far.

    Args:
        group: directory of the memory control group that this process is in.
        directory: on a drive.
        is_deepspeed: whether they go by their way for DeepSpeed, or by our integration.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if is_deepspeed:
        import infinity.as_deepspeed  # noqa: F401
    torch.set_num_threads(1)
    for library in LIBRARIES:
        out = Path(directory) / library
        getattr(Saves(group, directory, is_deepspeed), library)(out)
        num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        print(json.dumps({"library": library, "saved_bytes": num_bytes, "allowed_bytes": _SLACK_BYTES}), flush=True)
