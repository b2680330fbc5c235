"""Saving a PEFT model: its adapters are what was trained, and what its own library reads.

Under the wrapper's names, beside the base model's config, weights would load as none at all: every name is unknown to the
base model, which then starts from random numbers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch import nn

from infinity.errors import UnsupportedModelError
from swapper.volumes.publish import Staging, locked, sync_directory

_CONFIG = "adapter_config.json"


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT wraps the model, or transformers has added adapters to it (``model.add_adapter``)."""
    peft: Any = sys.modules.get("peft")  # who has such a model has imported it
    is_wrapped = peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))
    return is_wrapped or bool(getattr(model, "_hf_peft_config_loaded", False))


def save_adapters(model: Any, directory: Path) -> None:
    """Write the adapters with the model's own ``save_pretrained``, all at once.

    Raises:
        UnsupportedModelError: parameters outside the adapters are trained, or the adapters are gone, or of several kinds;
            nothing has been written.
    """
    if isinstance(model, sys.modules["peft"].PeftMixedModel):
        raise UnsupportedModelError(
            "it has adapters of several kinds (mixed=True), for which PEFT has no files",
            cure="Save engine.module.state_dict() with torch.save",
        )
    adapters = set(model.peft_config)
    if not any(adapters.intersection(fqn.split(".")) for fqn, _ in model.named_parameters()):
        raise UnsupportedModelError(
            "the adapters have been merged into the model and unloaded: PEFT would write none of the weights",
            cure="Save what merge_and_unload() returned, with its own save_pretrained(directory)",
        )
    trains_biases = any(getattr(config, "bias", "none") != "none" for config in model.peft_config.values())
    for fqn, parameter in model.named_parameters():
        is_saved = not adapters.isdisjoint(fqn.split(".")) or (trains_biases and fqn.endswith("bias"))
        if parameter.requires_grad and not is_saved:
            raise UnsupportedModelError(
                f"'{fqn}' is trained, but belongs to no adapter, and PEFT saves adapters only",
                cure="Name its module in the adapter config's modules_to_save, or save engine.module.state_dict()",
                fqn=fqn,
            )
    with Staging(directory, "adapter") as staging:
        model.save_pretrained(staging.path / "files")
        names: list[str] = []
        for folder, _, files in os.walk(staging.path / "files"):
            sync_directory(Path(folder))
            names += [str((Path(folder) / file).relative_to(staging.path)) for file in files]
        for name in names:
            staging.sync(name)
        moves = [(name, str(Path(name).relative_to("files"))) for name in sorted(names)]
        head = next(move for move in moves if Path(move[1]).name == _CONFIG)
        with locked(directory):
            staging.publish([], moves, head, lambda name: False)
