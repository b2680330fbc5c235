"""Real text for the scripts: Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch

SENTENCES = ("def self return class print", "for self in import", "if self else return print")


def rows(num: int, length: int, *, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """``num`` samples for a causal model of bytes: ``input_ids`` and ``labels``, each (length,) int64."""
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    found = []
    for index in range(first, first + num):
        ids = torch.tensor(list(text[index * length : (index + 1) * length]))
        found.append({"input_ids": ids, "labels": ids.clone()})
    return found


def tokenizer() -> Any:
    """Of the words in `SENTENCES`, divided by blanks."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *sorted({word for sentence in SENTENCES for word in sentence.split()})]
    found = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=found, **special)


def sentences(num: int, *, has_pairs: bool = False) -> Any:
    """A data set of datasets with ``num`` texts, or with prompts and a chosen and a rejected text for each."""
    import datasets

    texts = [SENTENCES[index % len(SENTENCES)] for index in range(num)]
    pairs = {"prompt": [text[:4] for text in texts], "chosen": texts, "rejected": [text[4:] for text in texts]}
    return datasets.Dataset.from_dict(pairs if has_pairs else {"text": texts})


def log_of(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without times, and without what the libraries begin anew: the mean loss, and TRL's count of tokens."""
    dropped = ("runtime", "per_second", "preparation_time", "train_loss", "num_tokens")
    return [{key: value for key, value in entry.items() if not key.endswith(dropped)} for entry in entries]
