"""LoRA by PEFT: the frozen base lies on the drive in 16 bits, gradients and states are those of the adapters.

python tools/examples/lora.py
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is made from a config: nothing is downloaded
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

NUM_STEPS = 10
DRIVE = {"device": "nvme", "nvme_path": "."}  # any directory; what is written there has no name and vanishes at the end
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "offload_param": DRIVE, "offload_optimizer": DRIVE},
    "infinity": {"host_memory_budget": "8MB", "keep_in_memory": False},  # else a model this small would stay in memory
}
SHAPE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=4))
    # Before infinity.initialize: adapters that come later are an error that says so.
    return get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=8))


def main() -> None:
    model = make_model()
    engine, *_ = infinity.initialize(model=model, config=CONFIG)
    sentence = b"The quick brown fox jumps over the lazy dog. "
    tokens = torch.tensor(list(sentence)).repeat(4, 1)
    with engine:
        model.print_trainable_parameters()
        losses = []
        for _ in range(NUM_STEPS):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        report = engine.report
        print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"a step reads {report.read_bytes / 1e6:.2f} MB (base and adapters, forward and backward)")
        print(f"a step writes {report.write_bytes / 1e6:.2f} MB (adapters and their states)")
        model.save_pretrained("adapters")  # PEFT's own call, and PEFT's own files
        print("adapters saved to ./adapters")
        model.merge_and_unload().save_pretrained("merged")  # on paged weights, module by module
        print("merged model saved to ./merged")


if __name__ == "__main__":
    main()
