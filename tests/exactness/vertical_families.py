"""Small models of many of transformers' families: which of them `train_batch` takes through the vertical schedule.

``vertical_families.tsv`` has the answer for each, with dropout (if it has any), LoRA and both kinds of activation checkpointing:
why its first step goes in the ordinary order, and its second. Nothing means that it goes vertically. What the shapes of
`tests.exactness.shapes` do is written in `tests.exactness.vertical_training`.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import infinity
from tests.exactness.case import Draw
from tests.exactness.lockstep import everything_on_nvme

VARIANTS = ("plain", "dropout", "lora", "reentrant", "non_reentrant")
"""``plain`` for those that have no dropout."""
NUM_STEPS = 2
_NUM_MICRO_BATCHES = 3
_LIST = Path(__file__).with_suffix(".tsv")
_VERTICAL: dict[str, Any] = {"gradient_accumulation_steps": _NUM_MICRO_BATCHES, "infinity": {"schedule": "vertical"}}

_WORDS = 96
_LENGTH = 6
_TEXT: dict[str, Any] = {
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_HEAD = {**_GROUPED, "head_dim": 8}
_SEQUENCES = {
    "vocab_size": _WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5 = {
    "vocab_size": _WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 56,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_PATCHES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
_SPEECH = {
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "pad_token_id": 0,
    "num_labels": 5,
}


@dataclass(frozen=True)
class Family:
    """A model of transformers, by its class and what its config gets, and the batches it is trained on."""

    model: str
    config: dict[str, Any]
    batch: Callable[[Draw], dict[str, Any]]


def _causal(draw: Draw) -> dict[str, Any]:
    tokens = draw.integers(_WORDS - 3, 2, _LENGTH) + 3
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _causal_growing(draw: Draw) -> dict[str, Any]:
    """Longer than any before in the second step's last micro-batch."""
    longest = (draw.step, draw.micro_batch) == (1, 2)
    tokens = draw.integers(_WORDS - 3, 2, 40 if longest else _LENGTH) + 3
    return {"input_ids": tokens, "labels": tokens}


def _full(draw: Draw) -> dict[str, Any]:
    tokens = draw.integers(_WORDS - 3, 2, _LENGTH) + 3
    return {"input_ids": tokens, "labels": tokens}


def _encoder_decoder(draw: Draw) -> dict[str, Any]:
    return {"input_ids": draw.integers(_WORDS - 3, 2, _LENGTH) + 3, "labels": draw.integers(_WORDS - 3, 2, 4) + 3}


def _images(draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.floats(2, 3, 16, 16), "labels": draw.integers(5, 2)}


def _large_images(draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.floats(2, 3, 64, 64), "labels": draw.integers(5, 2)}


def _sounds(draw: Draw) -> dict[str, Any]:
    return {"input_values": draw.floats(2, 800), "labels": draw.integers(5, 2)}


def _spectra(draw: Draw) -> dict[str, Any]:
    return {"input_features": draw.floats(2, 8, 16), "labels": draw.integers(_WORDS - 3, 2, 4) + 3}


def _pairs(draw: Draw) -> dict[str, Any]:
    tokens = draw.integers(_WORDS - 3, 2, _LENGTH) + 3
    return {"input_ids": tokens, "pixel_values": draw.floats(2, 3, 16, 16), "return_loss": True}


def _captions(draw: Draw) -> dict[str, Any]:
    tokens = draw.integers(_WORDS - 4, 2, 24) + 3
    tokens[:, :16] = _WORDS - 1
    return {"input_ids": tokens, "pixel_values": draw.floats(2, 3, 16, 16), "labels": tokens}


_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}

FAMILIES: dict[str, Family] = {
    "albert": Family("AlbertForMaskedLM", {**_TEXT, "embedding_size": 16}, _full),
    "bart": Family("BartForConditionalGeneration", _SEQUENCES, _encoder_decoder),
    "bert": Family("BertForMaskedLM", _TEXT, _full),
    "bloom": Family("BloomForCausalLM", {"vocab_size": _WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, _causal),
    "clip": Family(
        "CLIPModel",
        {
            "text_config": {**_TEXT, "projection_dim": 16},
            "vision_config": {**_PATCHES, "projection_dim": 16},
            "projection_dim": 16,
        },
        _pairs,
    ),
    "convnext": Family(
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "num_labels": 5},
        _images,
    ),
    "deberta-v2": Family(
        "DebertaV2ForMaskedLM",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        _full,
    ),
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        {
            **_TEXT,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        _causal,
    ),
    "dinov2": Family("Dinov2ForImageClassification", {**_PATCHES, "mlp_ratio": 2}, _images),
    "distilbert": Family(
        "DistilBertForMaskedLM",
        {"vocab_size": _WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 56},
        _full,
    ),
    "falcon": Family(
        "FalconForCausalLM",
        {"vocab_size": _WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        _causal,
    ),
    "gemma2": Family("Gemma2ForCausalLM", {**_HEAD, "sliding_window": 4}, _causal),
    "gemma3": Family("Gemma3ForCausalLM", {**_HEAD, "sliding_window": 4, "layer_types": None}, _causal),
    "gpt-neox": Family("GPTNeoXForCausalLM", _TEXT, _causal),
    "gpt-oss": Family("GptOssForCausalLM", {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2}, _causal),
    "gpt2": Family("GPT2LMHeadModel", {"vocab_size": _WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4}, _causal),
    "gptj": Family(
        "GPTJForCausalLM",
        {"vocab_size": _WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 32},
        _causal,
    ),
    "granite": Family("GraniteForCausalLM", _GROUPED, _causal),
    "llama": Family("LlamaForCausalLM", _GROUPED, _causal),
    "llama-cached": Family("LlamaForCausalLM", {**_GROUPED, "use_cache": True}, _causal),
    "llama-dynamic": Family(
        "LlamaForCausalLM", {**_GROUPED, "max_position_embeddings": 8, "rope_parameters": _DYNAMIC}, _causal_growing
    ),
    "llama-tied": Family("LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": True}, _causal),
    "llava": Family(
        "LlavaForConditionalGeneration",
        {
            "text_config": {**_GROUPED, "model_type": "llama"},
            "vision_config": {**_PATCHES, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_token_id": _WORDS - 1,
            "vision_feature_layer": -1,
        },
        _captions,
    ),
    "mamba": Family(
        "MambaForCausalLM",
        {"vocab_size": _WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
        _full,
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        {
            "vocab_size": _WORDS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
        _full,
    ),
    "mistral": Family("MistralForCausalLM", {**_GROUPED, "sliding_window": 4}, _causal),
    "mixtral": Family("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}, _causal),
    "mixtral-router": Family(
        "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "output_router_logits": True}, _causal
    ),
    "mobilevit": Family(
        "MobileViTForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [4, 8, 8, 8, 16, 16, 16],
            "num_attention_heads": 2,
            "num_labels": 5,
        },
        _large_images,
    ),
    "modernbert": Family("ModernBertForMaskedLM", {**_TEXT, "num_hidden_layers": 3, "cls_token_id": 3}, _full),
    "mpt": Family(
        "MptForCausalLM",
        {"vocab_size": _WORDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
        _causal,
    ),
    "olmo2": Family("Olmo2ForCausalLM", _GROUPED, _causal),
    "opt": Family(
        "OPTForCausalLM",
        {**_TEXT, "ffn_dim": 56, "word_embed_proj_dim": 32},
        _causal,
    ),
    "opt-layerdrop": Family(
        "OPTForCausalLM",
        {**_TEXT, "num_hidden_layers": 4, "ffn_dim": 56, "word_embed_proj_dim": 32, "layerdrop": 0.5},
        _causal,
    ),
    "phi": Family("PhiForCausalLM", _GROUPED, _causal),
    "phi3": Family("Phi3ForCausalLM", _GROUPED, _causal),
    "qwen2": Family("Qwen2ForCausalLM", {**_GROUPED, "tie_word_embeddings": True}, _causal),
    "qwen2-moe": Family("Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 24}, _causal),
    "qwen3": Family("Qwen3ForCausalLM", _HEAD, _causal),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", {**_EXPERTS, "head_dim": 8}, _causal),
    "qwen3-next": Family(
        "Qwen3NextForCausalLM",
        {
            **_EXPERTS,
            "head_dim": 8,
            "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        _full,
    ),
    "resnet": Family(
        "ResNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [2, 2],
            "layer_type": "basic",
            "num_labels": 5,
        },
        _large_images,
    ),
    "roberta": Family("RobertaForMaskedLM", _TEXT, _full),
    "segformer": Family(
        "SegformerForImageClassification",
        {
            "num_encoder_blocks": 2,
            "depths": [2, 2],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "num_labels": 5,
        },
        _images,
    ),
    "siglip": Family("SiglipForImageClassification", {"vision_config": _PATCHES, "num_labels": 5}, _images),
    "starcoder2": Family("Starcoder2ForCausalLM", _GROUPED, _causal),
    "swin": Family(
        "SwinForImageClassification",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 5,
        },
        _images,
    ),
    "t5": Family("T5ForConditionalGeneration", _T5, _encoder_decoder),
    "vit": Family("ViTForImageClassification", _PATCHES, _images),
    "vit-mae": Family(
        "ViTMAEForPreTraining",
        {
            **_PATCHES,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        },
        lambda draw: {"pixel_values": draw.floats(2, 3, 16, 16)},
    ),
    "wav2vec2": Family("Wav2Vec2ForSequenceClassification", {**_SPEECH, "layerdrop": 0.0}, _sounds),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        {
            **{key: value for key, value in _SEQUENCES.items() if key != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 16,
        },
        _spectra,
    ),
}


def _options(model: str, config: dict[str, Any], probability: float) -> Any:
    """The config of a model, in which all kinds of dropout have this probability."""
    import transformers

    kind = getattr(transformers, model).config_class
    made = kind(**config)
    waiting = [made]
    while waiting:
        each = waiting.pop()
        for name, value in list(vars(each).items()):
            if isinstance(value, transformers.PreTrainedConfig):
                waiting.append(value)
            elif isinstance(value, float) and any(part in name for part in ("dropout", "pdrop", "drop_path_rate")):
                setattr(each, name, probability)
    return made


def make(family: Family, variant: str) -> nn.Module | None:
    """The model; None if it has no such variant."""
    import transformers

    if variant in ("plain", "dropout") and _has_dropout(family) != (variant == "dropout"):
        return None
    torch.manual_seed(20)
    config = _options(family.model, family.config, 0.1 if variant == "dropout" else 0.0)
    model: Any = getattr(transformers, family.model)(config)
    if variant in ("reentrant", "non_reentrant"):
        if not model.supports_gradient_checkpointing:
            return None
        model.gradient_checkpointing_enable({"use_reentrant": variant == "reentrant"})
        if variant == "reentrant":
            if family.model.startswith("Swin"):  # its embeddings give a tuple
                return None
            model.enable_input_require_grads()
    if variant == "lora":
        import peft

        torch.manual_seed(21)
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        targets = [name for name in linear if not name.endswith("out_proj") or "mamba" not in config.model_type]
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2))
    return model.train()


def _has_dropout(family: Family) -> bool:
    return repr(_options(family.model, family.config, 0.0)) != repr(_options(family.model, family.config, 0.1))


def schedules(
    model: nn.Module, batch: Callable[[Draw], Any], directory: Path, num_steps: int = NUM_STEPS
) -> Iterator[tuple[Any, str]]:
    """Train; gives the engine and, after each step, why it went in the ordinary order (empty: it went vertically)."""
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(directory, _VERTICAL))
    with engine:
        for step in range(num_steps):
            torch.manual_seed(100 + step)
            np.random.seed(100 + step)  # what is masked, and left out
            random.seed(100 + step)
            draws = [Draw(step, index, torch.float32, torch.device("cpu")) for index in range(_NUM_MICRO_BATCHES)]
            engine.train_batch(iter([batch(draw) for draw in draws]))
            yield engine, engine.report.schedule_reason


def listed() -> list[tuple[str, str, list[str]]]:
    """The list: name, variant, and the reason of each step."""
    with _LIST.open(newline="") as file:
        return [(name, variant, reasons) for name, variant, *reasons in csv.reader(file, delimiter="\t")]
