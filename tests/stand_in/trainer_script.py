"""What somebody writes who trains with transformers' Trainer and DeepSpeed. Leaves what happened in files.

    trainer_script.py OUT MODEL [--deepspeed CONFIG | --infinity CONFIG] [--bf16] [--accumulate N] [--clip X]
                      [--die-after STEPS] [--resume]

Several trainings in one process are separated by the word ``then``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.stand_in import models
from tests.stand_in.reference import MainWeightAdamW
from tests.stand_in.text import rows

NUM_STEPS = 30


class Recording:
    """Stands before a Trainer, and writes down what `training_step` gives back."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.losses.append(float(loss))
        return loss


class Dying(TrainerCallback):
    """Kills the process after a number of steps, as a machine that goes down does."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._after:
            os.kill(os.getpid(), signal.SIGKILL)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("model", choices=["llama", "gpt2"])
    parser.add_argument("--deepspeed")
    parser.add_argument("--infinity")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(words)

    model = getattr(models, args.model)()
    is_reference = args.bf16 and not (args.deepspeed or args.infinity)
    arguments = TrainingArguments(
        output_dir=str(args.out),
        deepspeed=args.deepspeed,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-3,
        weight_decay=0.01,
        warmup_steps=5,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0 if is_reference else args.clip,
        bf16=args.bf16 and not is_reference,
        logging_steps=1,
        save_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    more: dict[str, Any] = {}
    if is_reference:  # what DeepSpeed means by bf16: 16-bit weights, fp32 main weights in the optimizer
        decayed = Trainer(model, arguments).get_decay_parameter_names(model)
        more["optimizers"] = (MainWeightAdamW(model, decayed, arguments, clip=args.clip), None)
    base: Any = Trainer
    if args.infinity:
        from infinity.integrations.transformers import InfinityTrainer

        base, more["infinity_config"] = InfinityTrainer, args.infinity
    trainer = type("RecordingTrainer", (Recording, base), {})(
        model=model,
        args=arguments,
        train_dataset=rows(80, 32),
        eval_dataset=rows(4, 32, first=80),
        callbacks=[Dying(args.die_after)] if args.die_after else [],
        **more,
    )
    trainer.losses = []
    trainer.train(resume_from_checkpoint=args.resume)
    found = {"losses": trainer.losses, "log": trainer.state.log_history, "eval": trainer.evaluate()["eval_loss"]}
    (args.out / "found.json").write_text(json.dumps(found))
    trainer.save_model(str(args.out / "model"))


if __name__ == "__main__":
    for words in " ".join(sys.argv[1:]).split(" then "):
        main(words.split())
