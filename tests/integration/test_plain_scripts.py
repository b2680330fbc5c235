"""Training scripts as people have them: the lines that the guide names are all that changes, and the bits stay.

In each script a line that ends in ``# -`` is there without an engine only, one that ends in ``# +`` with one only.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

_GUIDE = Path(__file__).resolve().parents[2] / "infinity" / "integrations" / "README.md"
_MODEL = """
import io, math, sysconfig
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
text = torch.tensor(list((Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[:4000]))
def get_batch(step):
    starts = torch.randint(3000, (4,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + 17] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
    def forward(self, x):
        q, k, v = (part.view(*part.shape[:2], 2, -1).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(y)
        return x + self.mlp(self.ln_2(x))
class GPT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(16, width)
        self.h, self.ln_f = nn.ModuleList([Block(width) for _ in range(3)]), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)
        self.wte.weight = self.lm_head.weight
    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, 256), targets.reshape(-1))
"""
_SCRIPTS = {
    "nanoGPT": _MODEL
    + """
import infinity  # +
model = GPT()
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
engine, optimizer, *_ = infinity.initialize(model=model, optimizer=optimizer, config=config)  # +
losses, accumulation = [], 2
for iteration in range(12):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1, (iteration + 1) / 4)
    for micro_step in range(accumulation):
        logits, loss = model(*get_batch(2 * iteration + micro_step))
        loss = loss / accumulation
        losses.append(loss.item())
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iteration == 5:
        model.eval()
        with torch.no_grad():
            losses.append(model(*get_batch(99))[1].item())
        model.train()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
""",
    "minGPT": _MODEL
    + """
import infinity  # +
class Trainer:
    def __init__(self, model):
        self.model, self.iter_num = model, 0
    def run(self):
        model = self.model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
        self.engine, self.optimizer, *_ = infinity.initialize(model=model, optimizer=self.optimizer, config=config)  # +
        model.train()
        while self.iter_num < 10:
            logits, self.loss = model(*get_batch(self.iter_num))
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(self.loss.item())
            self.iter_num += 1
losses = []
model = GPT()
trainer = Trainer(model)
trainer.run()
optimizer = trainer.optimizer
""",
    "CNN": """
import torch
from torch import nn
from torch.nn import functional as F
import infinity  # +
torch.manual_seed(0)
def block(width, out):
    return nn.Sequential(nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2))
model = nn.Sequential(block(3, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
engine, optimizer, *_ = infinity.initialize(model=model, optimizer=optimizer, config=config)  # +
images, labels = torch.randn(32, 3, 8, 8), torch.randint(10, (32,))
losses = []
for epoch in range(8):
    model.train()
    for part in torch.arange(32).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[part]), labels[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    scheduler.step()
    model.eval()
    with torch.no_grad():
        losses.append(model(images).argmax(1).eq(labels).sum().item())
""",
    "timm": """
import copy
import torch
from torch import nn
import infinity  # +
torch.manual_seed(0)
class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))
    def forward(self, x):
        return x + self.gamma * self.mlp(self.norm(x))
class VisionTransformer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.patch_embed, self.pos_embed = nn.Conv2d(3, dim, 4, 4), nn.Parameter(0.02 * torch.randn(1, 5, dim))
        self.cls_token, self.blocks = nn.Parameter(torch.zeros(1, 1, dim)), nn.Sequential(*[Layer(dim) for _ in range(3)])
        self.head = nn.Linear(dim, 10)
    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.blocks(x)[:, 0])
def train_one_epoch(model, loader, optimizer, loss_fn, model_ema):
    model.train()
    for input, target in loader:
        loss = loss_fn(model(input), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for ema, value in zip(model_ema.state_dict().values(), model.state_dict().values()):
                ema.lerp_(value, 0.1)
        losses.append(loss.item())
model = VisionTransformer()
model_ema = copy.deepcopy(model)
no_decay = [p for p in model.parameters() if p.ndim <= 1]
decay = [p for p in model.parameters() if p.ndim > 1]
optimizer = torch.optim.AdamW([{"params": no_decay, "weight_decay": 0.0}, {"params": decay}], lr=1e-3, weight_decay=0.05)
engine, optimizer, *_ = infinity.initialize(model=model, optimizer=optimizer, config=config)  # +
loader = [(torch.randn(4, 3, 8, 8), torch.randint(10, (4,))) for _ in range(4)]
losses = []
for epoch in range(2):
    train_one_epoch(model, loader, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1), model_ema)
losses.append(sum(value.double().sum().item() for value in model_ema.state_dict().values()))
""",
}


def ran(script: str, mark: str, config: dict[str, Any]) -> dict[str, Any]:
    """The variables of a script without the lines of the other kind."""
    lines = [line for line in script.splitlines() if not line.endswith(mark)]
    found: dict[str, Any] = {"config": config, "saved": io.BytesIO(), "__name__": "script"}
    exec("\n".join(lines), found)
    return found


@pytest.mark.parametrize("name", _SCRIPTS)
def test_script(name: str, tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config: dict[str, Any] = {"train_batch_size": 4, "gradient_clipping": 0.0}  # the script clips
    config["zero_optimization"] = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    config["infinity"] = {"host_memory_budget": "64MiB", "page_bytes": 49152, "keep_in_memory": False}
    script = _SCRIPTS[name]
    plain, ours = ran(script, "# +", config), ran(script, "# -", config)
    assert ours["losses"] == plain["losses"]
    values = ours["model"].state_dict()
    assert all(torch.equal(values[key], value) for key, value in plain["model"].state_dict().items())
    states = (each["optimizer"].state_dict()["state"] for each in (plain, ours))
    for expected, found in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)) for key, value in expected.items())
    if plain["saved"].tell():
        first, second = (torch.load(io.BytesIO(each["saved"].getvalue()))["model"] for each in (plain, ours))
        assert all(torch.equal(second[key], value) for key, value in first.items())
    changed = len(re.findall(r"# [+-]$", script, flags=re.MULTILINE))
    assert f"| {name} | {changed} |" in _GUIDE.read_text()
