"""A pytest plugin: accelerate's tests of DeepSpeed in front of this engine, without a GPU.

What it does with them: decorators that ask for a GPU, or for several, let a test run; small models that are drawn stand in for
those of the Hub, which transformers then finds in the current directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

import infinity.as_deepspeed
from tests.outside_suites.children import LAUNCHED, Children

_Case = TypeVar("_Case", bound=Callable[..., Any])


def _several(case: _Case) -> _Case:
    case.num_asked = "2"  # type: ignore[attr-defined]
    return case


class Suite(Children):
    """With processes that the tests start."""

    def asked(self, item: pytest.Item) -> str:
        """For how many processes a test asks."""
        places = (getattr(item, "function", None), getattr(item, "cls", None))
        return next((place.num_asked for place in places if hasattr(place, "num_asked")), "1")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """A test that asks for several processes starts them."""
        item.user_properties.append((LAUNCHED, self.asked(item)))


def _draw_models() -> None:
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MobileViTConfig, Qwen2MoeConfig
    from transformers import PreTrainedTokenizerFast as AnyTokenizer

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 1000}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    of_gpt2 = ("gpt2", "sshleifer/tiny-gpt2", "hf-internal-testing/tiny-random-gpt2")
    configs = {name: GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=1000) for name in of_gpt2}
    configs |= {"hf-internal-testing/tiny-random-LlamaForCausalLM": LlamaConfig(**sizes)}
    configs |= {"peft-internal-testing/tiny-random-qwen-1.5-MoE": Qwen2MoeConfig(**sizes, **experts)}
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(name)
        AnyTokenizer(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(name)
    MobileViTConfig(hidden_sizes=[8, 16, 24]).save_pretrained("apple/mobilevit-xx-small")


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest for ``-p``."""
    os.environ["RUN_SLOW"] = "yes"
    infinity.as_deepspeed.install()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(infinity.as_deepspeed.SITE), os.environ["PYTHONPATH"]])
    from accelerate.test_utils import testing

    testing.require_non_cpu = lambda case: case
    testing.require_multi_device = _several
    if not os.path.isdir("gpt2"):
        _draw_models()
    config.pluginmanager.register(Suite(), "accelerate-suite")
