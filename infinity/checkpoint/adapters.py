"""Saving a PEFT model: its adapters are what was trained, and what its own library reads.

Under the wrapper's names, beside the base model's config, weights would load as none at all: every name is unknown to the
base model, which then starts from random numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.units.buffers import persistent_buffers
from swapper.volumes.publish import Staging, locked, sync_tree

_CONFIG = "adapter_config.json"


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT wraps the model, or transformers has added adapters to it (``model.add_adapter``)."""
    peft: Any = sys.modules.get("peft")  # who has such a model has imported it
    is_wrapped = peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))
    return is_wrapped or bool(getattr(model, "_hf_peft_config_loaded", False))


def is_base(model: nn.Module) -> Callable[[nn.Parameter], bool]:
    """What tells whether a parameter is of the model under the adapters: frozen, adapted, and of no adapter, active or not.

    With ``AdamW(model.parameters())`` these all are in a group, and nobody thaws them.
    """
    if not is_adapted(model):
        return lambda parameter: False
    of_adapters = {id(parameter) for parameter in _of_adapters(model)}
    return lambda parameter: not parameter.requires_grad and id(parameter) not in of_adapters


def _of_adapters(model: Any) -> Iterator[nn.Parameter]:
    """PEFT keeps what an adapter has in each layer in containers, under the adapter's name."""
    for module in model.modules():
        for name in model.peft_config:
            if isinstance(module, nn.ModuleDict) and name in module:
                yield from module[name].parameters()
            elif isinstance(module, nn.ParameterDict) and isinstance(module.get(name), nn.Parameter):
                yield module[name]


def save_adapters(model: Any, directory: Path) -> None:
    """Write the adapters with the model's own ``save_pretrained``, all at once. Of the base model nothing is copied.

    Raises:
        ModelError: parameters outside the adapters are trained, or the adapters are gone, or of several kinds;
            nothing has been written.
    """
    if isinstance(model, sys.modules["peft"].PeftMixedModel):
        raise ModelError(
            "it has adapters of several kinds (mixed=True), for which PEFT has no files",
            cure="Save engine.module.state_dict() with torch.save",
        )
    adapters = set(model.peft_config)
    tensors = dict(
        [*model.named_parameters(remove_duplicate=False), *persistent_buffers(model, remove_duplicate=False)]
    )
    own = {fqn for fqn in tensors if not adapters.isdisjoint(fqn.split("."))}
    saved = own | _saved_by_peft(model, tensors)
    # Adaption prompts are not named after their adapter.
    if not own and not any(tensors[fqn].requires_grad and "bias" not in fqn for fqn in saved):
        raise ModelError(
            "the adapters have been merged into the model and unloaded: PEFT would write none of the weights",
            cure="Save what merge_and_unload() returned, with its own save_pretrained(directory)",
        )
    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad and fqn not in saved:
            raise ModelError(
                f"'{fqn}' is trained, but belongs to no adapter, and PEFT saves adapters only",
                cure="Name its module in the adapter config's modules_to_save, or save engine.module.state_dict()",
                fqn=fqn,
            )
    with Staging(directory, "adapter") as staging:
        values = {fqn: tensors[fqn].detach().to("cpu", copy=True) for fqn in tensors if fqn in saved}
        model.save_pretrained(staging.path / "files", state_dict=values)
        folder = staging.path / "files"
        sync_tree(folder)
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        moves = [(f"files/{name}", name) for name in names]
        head = next(move for move in moves if Path(move[1]).name == _CONFIG)
        with locked(directory):
            staging.publish([], moves, head, lambda name: False)


def _saved_by_peft(model: Any, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of what PEFT takes as it is out of a state dict; each kind of adapter has rules of its own."""
    empty = {fqn: torch.empty(each.shape, dtype=each.dtype, device="meta") for fqn, each in tensors.items()}
    names = {id(each): fqn for fqn, each in empty.items()}
    take = sys.modules["peft"].get_peft_model_state_dict
    taken = [each for name in model.peft_config for each in take(model, empty, adapter_name=name).values()]
    return {names[id(each)] for each in taken if id(each) in names}
