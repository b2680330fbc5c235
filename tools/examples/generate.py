"""Text from a model whose weights lie on a drive: Hugging Face's `generate`, the same tokens as from memory.

    python tools/examples/generate.py

Without an optimizer in the config the engine evaluates only: it stores weights, and nothing else.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is made from a config: nothing is downloaded
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "."}},  # any directory
    "infinity": {"host_memory_budget": "4MB", "keep_in_memory": False},  # else a model this small would stay in memory
}
SHAPE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=4)
    LlamaForCausalLM(config).save_pretrained("weights")  # in place of what you downloaded

    prompt = torch.tensor([list(b"Once upon a time")])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": True, "eos_token_id": None}
    torch.manual_seed(1)
    expected = LlamaForCausalLM.from_pretrained("weights").generate(prompt, **options)

    # The parameters of from_pretrained, bit for bit, but over the files themselves: never in memory as a whole.
    model = infinity.load_pretrained(LlamaForCausalLM, "weights", config=CONFIG)
    engine, *_ = infinity.initialize(model=model, config=CONFIG)
    with engine:
        print(engine.plan, end="\n\n")
        torch.manual_seed(1)
        tokens = engine.generate(prompt, **options)
    print(f"tokens from the drive: {tokens[0, prompt.shape[1] :].tolist()}")
    print(f"tokens from memory:    {expected[0, prompt.shape[1] :].tolist()}")
    print("tokens equal:", torch.equal(tokens, expected))


if __name__ == "__main__":
    main()
