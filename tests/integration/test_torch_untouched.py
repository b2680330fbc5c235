"""An engine puts nothing of its own into torch: what it needs it attaches to the modules and parameters that it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.children import run_python

_SCRIPT = """
import json, sys
import torch, torch._dynamo, torch.optim, torch.utils.checkpoint
from torch import nn

OWNERS = {
    "torch": torch, "Tensor": torch.Tensor, "TensorBase": torch._C.TensorBase, "Parameter": nn.Parameter,
    "UntypedStorage": torch.UntypedStorage, "TypedStorage": torch.TypedStorage, "utils": torch.utils,
    "__future__": torch.__future__, "graph": torch.autograd.graph, "hooks": torch.autograd.graph.saved_tensors_hooks,
    "on_cpu": torch.autograd.graph.save_on_cpu, "autograd": torch.autograd, "Function": torch.autograd.Function,
    "nn": nn, "Module": nn.Module, "module": nn.modules.module, "init": nn.init, "functional": nn.functional,
    "Lazy": nn.parameter.UninitializedTensorMixin, "Optimizer": torch.optim.Optimizer, "AdamW": torch.optim.AdamW,
    "scheduler": torch.optim.lr_scheduler.LRScheduler, "checkpoint": torch.utils.checkpoint, "amp": torch.amp,
    "GradScaler": torch.amp.GradScaler, "func": torch.func, "dlpack": torch.utils.dlpack, "serialization": torch.serialization,
    "distributed": torch.distributed, "clip": torch.nn.utils, "cpu": torch.cpu, "cuda": torch.cuda,
}

def attributes():
    return {(name, key): value for name, owner in OWNERS.items() for key, value in vars(owner).items()}

def kernels():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(("aten::_fused", "aten::_amp"))]
    return {name: torch._C._dispatch_dump(name) for name in names}

model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)])
torch.optim.AdamW(nn.Linear(2, 2).parameters())
before, kernels_before = attributes(), kernels()

def check(when):
    after = attributes()
    others = [key for key, value in after.items() if key in before and value is not before[key]]
    # Counters and caches of torch's own are neither functions nor classes.
    others = [key for key in others if callable(after[key]) or isinstance(after[key], property)]
    gone = [key for key in before if key not in after]
    new = [key for key in after if key not in before and "infinity" in str(getattr(after[key], "__module__", ""))]
    assert not others and not gone and not new, (when, others, gone, new)
    assert kernels() == kernels_before, when

import infinity
check("import")
config = json.loads(sys.argv[1])
if config["init"]:
    with infinity.Init(config=config["config"]):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128)) for _ in range(3)])
x = torch.ones(2, model[0][0].in_features)
engine, optimizer, *_ = infinity.initialize(model=model, config=config["config"])
check("initialize")
handles = [m.register_forward_hook(lambda *_: check("forward")) for m in model.modules()]
handles += [p.register_post_accumulate_grad_hook(lambda _: check("backward")) for p in model.parameters()]
for _ in range(2):
    engine.backward(engine(x).square().sum())
    engine.step()
with infinity.GatheredParameters(model.parameters(), modifier_rank=0):
    check("gathered")
engine.module.state_dict()
engine.close()
check("close")
"""


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("is_in_init", [False, True])
def test_torch_is_as_it_was_while_an_engine_lives(is_in_init: bool, tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }
    ran = run_python("-c", _SCRIPT, json.dumps({"config": config, "init": is_in_init}))
    assert ran.returncode == 0, ran.stderr[-3000:]
