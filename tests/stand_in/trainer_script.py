"""What somebody writes who trains with transformers' Trainer and DeepSpeed. Leaves what happened in files.

    trainer_script.py OUT WHAT [--deepspeed CONFIG | --infinity CONFIG] [--bf16] [--accumulate N] [--clip X] [--best]
                      [--predict] [--die-after STEPS] [--resume]

WHAT is a model, a trainer for it, or the directory of a saved one. Several trainings in one process are separated by the
word ``then``; one that is to die does so in a child.
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
from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

from tests.killed import run_killed
from tests.stand_in import models
from tests.stand_in.reference import with_main_weights
from tests.stand_in.text import rows, sentences, tokenizer

NUM_STEPS = 30
MODELS = {"llama": models.llama, "gpt2": models.gpt2, "lora": models.lora, "t5": models.t5}


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


def kinds_for(what: str) -> tuple[Any, Any, dict[str, Any]]:
    """Trainer, arguments of it, and values of those that are not for all."""
    if what == "t5":
        return Seq2SeqTrainer, Seq2SeqTrainingArguments, {"predict_with_generate": True, "generation_max_length": 6}
    if what in ("sft", "dpo"):
        import trl

        name = what.upper()
        values = {"max_length": 16, "gradient_checkpointing": False, "average_tokens_across_devices": True}
        return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"), values
    return Trainer, Arguments, {}


def model_for(what: str) -> Any:
    """Drawn, built from its configuration alone, or loaded. Made after the arguments, of which it may have to know."""
    if Path(what).is_dir():
        return AutoModelForCausalLM.from_pretrained(what)
    if what == "from_config":
        model = AutoModelForCausalLM.from_config(models.llama_config())
        model.load_state_dict(models.llama().state_dict())  # for ZeRO-3 transformers draws in another order
        model.resize_token_embeddings(260)
        return model
    return MODELS.get(what, models.llama)()


def data_for(what: str) -> dict[str, Any]:
    """What a Trainer gets beside model and arguments."""
    if what in ("sft", "dpo"):
        num, has_pairs = 80, what == "dpo"
        more = {"ref_model": models.llama()} if has_pairs else {}
        data = {"train_dataset": sentences(num, has_pairs=has_pairs), "eval_dataset": sentences(4, has_pairs=has_pairs)}
        return {**data, **more, "processing_class": tokenizer()}
    return {"train_dataset": rows(80, 32), "eval_dataset": rows(4, 32, first=80)}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("what")
    parser.add_argument("--deepspeed")
    parser.add_argument("--infinity")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--predict", action="store_true", help="without a training before")
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(words)

    is_reference = args.bf16 and not (args.deepspeed or args.infinity)
    base, kind_of_arguments, values = kinds_for(args.what)
    if args.best:  # the first one is the best
        values |= {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 10}
        values |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    arguments = kind_of_arguments(
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
        max_grad_norm=args.clip,
        bf16=args.bf16 and not is_reference,
        logging_steps=1,
        save_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **values,
    )
    more: dict[str, Any] = {}
    if args.infinity:
        from infinity.integrations.transformers import InfinityTrainerMixin

        base, more = type("OwnTrainer", (InfinityTrainerMixin, base), {}), {"infinity_config": args.infinity}
    trainer = type("RecordingTrainer", (Recording, base), {})(
        model=model_for(args.what),
        args=arguments,
        callbacks=[Dying(args.die_after)] if args.die_after else [],
        **data_for(args.what),
        **more,
    )
    trainer.losses = []
    if is_reference:  # what DeepSpeed means by bf16: 16-bit weights, fp32 main weights in the optimizer
        with_main_weights(trainer.model, trainer.create_optimizer())
    if not args.predict:
        trainer.train(resume_from_checkpoint=args.resume)
    found = {"losses": trainer.losses, "log": trainer.state.log_history, "eval": trainer.evaluate()["eval_loss"]}
    if args.what == "t5" or args.predict:
        found["predicted"] = trainer.predict(rows(4, 16, first=80)).predictions.tolist()
    (args.out / "found.json").write_text(json.dumps(found))
    if not args.predict:
        trainer.save_model(str(args.out / "model"))
    if args.infinity:
        trainer.engine.close()


if __name__ == "__main__":
    for words in " ".join(sys.argv[1:]).split(" then "):
        if "--die-after" not in words:
            main(words.split())
        elif run_killed(lambda _, words=words: main(words.split()), None) is not None:  # type: ignore[misc]
            sys.exit(f"{words}: nobody has died")
