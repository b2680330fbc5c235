"""What somebody writes who trains with accelerate and DeepSpeed. Leaves what happened in files.

    accelerate_script.py OUT [--infinity CONFIG] [--bf16] [--die-after STEPS] [--resume]

Whether DeepSpeed is used is up to ``accelerate launch``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.optim.lr_scheduler import LambdaLR

from tests.stand_in import models
from tests.stand_in.reference import with_main_weights
from tests.stand_in.text import rows

NUM_STEPS, ACCUMULATION = 30, 2


def forget() -> None:
    """accelerate keeps what it was told for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--infinity")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(words)

    kind, more = Accelerator, {}
    if args.infinity:
        from infinity.integrations.accelerate import InfinityAccelerator

        kind, more = InfinityAccelerator, {"infinity_config": args.infinity}
    accelerator = kind(gradient_accumulation_steps=ACCUMULATION, **more)
    model = models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
    is_plain = not args.infinity and not str(accelerator.distributed_type).endswith("DEEPSPEED")
    if args.bf16 and is_plain:  # else the config says so
        with_main_weights(model, optimizer)
    loader = torch.utils.data.DataLoader(rows(2 * ACCUMULATION * NUM_STEPS, 32), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses: list[float] = []
    norms: list[float] = []
    if args.resume:
        accelerator.load_state(str(args.out / "state"))
        loader = accelerator.skip_first_batches(loader, ACCUMULATION * 10)
    first = 10 if args.resume else 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator.sync_gradients:
            steps = first + len(norms)
            if steps == 10 and not args.resume:
                accelerator.save_state(str(args.out / "state"))
            if steps == args.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
    args.out.mkdir(exist_ok=True)
    torch.save(
        {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}, args.out / "model.pt"
    )
    accelerator.unwrap_model(model)
    found = {"losses": losses, "norms": norms, "kind": str(accelerator.distributed_type)}
    (args.out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
