"""Training scripts as people have them: the lines that the guide names are all that changes, and the bits stay.

In each script a line that ends in ``# +`` is there with an engine only. Each saves and resumes as it did before. It calls
``ended`` after a step; ``dtype`` is that of the weights.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ModelError
from tests.exactness.lockstep import BF16, everything_on_nvme
from tests.killed import NEEDS_FORKS, run_killed
from tests.stand_in.reference import with_main_weights

_GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "your-model.md"
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
first, losses, accumulation = 0, [], 2
if resumes:
    checkpoint = torch.load(saved)
    model.load_state_dict(checkpoint["model"])
    first = checkpoint["iter_num"]
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
engine, optimizer, *_ = infinity.initialize(model=model, optimizer=optimizer, config=config)  # +
if resumes:
    optimizer.load_state_dict(checkpoint["optimizer"])
for iteration in range(first, 30):
    torch.manual_seed(iteration)
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
    if iteration % 10 == 9:
        model.eval()
        with torch.no_grad():
            losses.append(model(*get_batch(99))[1].item())
        model.train()
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iteration + 1}
        torch.save(checkpoint, saved)
    ended()
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
        if resumes:
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.iter_num = checkpoint["iter_num"]
        model.train()
        while self.iter_num < 30:
            torch.manual_seed(self.iter_num)
            logits, self.loss = model(*get_batch(self.iter_num))
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(self.loss.item())
            self.iter_num += 1
            if self.iter_num == 10:
                states = {"model": model.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save({**states, "iter_num": self.iter_num}, saved)
            ended()
losses = []
model = GPT()
if resumes:
    checkpoint = torch.load(saved)
    model.load_state_dict(checkpoint["model"])
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
images, labels = torch.randn(32, 3, 8, 8).to(dtype), torch.randint(10, (32,))
losses, first = [], 0
if resumes:
    checkpoint = torch.load(saved)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["lr_scheduler"])
    first = checkpoint["epoch"] + 1
for epoch in range(first, 8):
    model.train()
    for part in torch.arange(32).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[part]), labels[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ended()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        losses.append(model(images).argmax(1).eq(labels).sum().item())
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "lr_scheduler": scheduler.state_dict(), "epoch": epoch}, saved)
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
                ema.lerp_(value.float(), 0.1)
        losses.append(loss.item())
        ended()
model = VisionTransformer()
model_ema = copy.deepcopy(model)
no_decay = [p for p in model.parameters() if p.ndim <= 1]
decay = [p for p in model.parameters() if p.ndim > 1]
optimizer = torch.optim.AdamW([{"params": no_decay, "weight_decay": 0.0}, {"params": decay}], lr=1e-3, weight_decay=0.05)
engine, optimizer, *_ = infinity.initialize(model=model, optimizer=optimizer, config=config)  # +
loader = [(torch.randn(4, 3, 8, 8).to(dtype), torch.randint(10, (4,))) for _ in range(10)]
losses, first = [], 0
if resumes:
    checkpoint = torch.load(saved)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    model_ema.load_state_dict(checkpoint["state_dict_ema"])
    first = checkpoint["epoch"] + 1
for epoch in range(first, 3):
    train_one_epoch(model, loader, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1), model_ema)
    states = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "state_dict_ema": model_ema.state_dict(), "epoch": epoch}, saved)
losses.append(sum(value.double().sum().item() for value in model_ema.state_dict().values()))
""",
}


_NUM_LOSSES = {"nanoGPT": 63, "minGPT": 30, "CNN": 40, "timm": 31}


def ran(script: str, kind: str, config: dict[str, Any], saved: Path, **values: Any) -> dict[str, Any]:
    """The variables of a script: "plain", or with "main weights", without an engine, or "ours"."""
    if kind == "main weights":
        script = script.replace("infinity.initialize(", "main_weights(").replace("import infinity  # +", "")
    if kind == "plain":
        script = re.sub(r"^.*# \+$", "", script, flags=re.MULTILINE)

    def main_weights(model: nn.Module, optimizer: torch.optim.Optimizer, config: Any) -> Any:
        with_main_weights(model, optimizer)
        return None, optimizer

    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    module = sys.modules["script"] = ModuleType("script")  # torch.compile imports it
    vars(module).update(config=config, saved=saved, dtype=dtype, main_weights=main_weights)
    vars(module).update({"resumes": False, "ended": lambda: None, **values})
    exec(script, vars(module))
    return vars(module)


def config_for(precision: str, directory: Path) -> dict[str, Any]:
    changes = {**BF16, "infinity": {"main_weights": "fp32"}} if precision == "bf16" else {}
    return everything_on_nvme(directory, {"optimizer": None, "train_micro_batch_size_per_gpu": 4, **changes})


@pytest.mark.deep(but=2)
@NEEDS_FORKS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", _SCRIPTS)
def test_script(name: str, precision: str, tmp_path: Path) -> None:
    """Thirty steps, killed in the 17th and resumed from what the script has saved before."""
    config = config_for(precision, tmp_path)
    script, paths = _SCRIPTS[name], [tmp_path / "plain.pt", tmp_path / "ours.pt"]
    plain = ran(script, "plain" if precision == "fp32" else "main weights", config, paths[0])
    assert run_killed(lambda tick: ran(script, "ours", config, paths[1], ended=tick) and None, 17) is None
    ours = ran(script, "ours", config, paths[1], resumes=True)
    assert len(plain["losses"]) == _NUM_LOSSES[name] and len(ours["losses"]) >= 20
    assert ours["losses"] == plain["losses"][-len(ours["losses"]) :]
    values = ours["model"].state_dict()
    assert all(torch.equal(values[key], value) for key, value in plain["model"].state_dict().items())
    states = (each["optimizer"].state_dict()["state"] for each in (plain, ours))
    for expected, found in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)) for key, value in expected.items())
    ours["engine"].close() if "engine" in ours else ours["trainer"].engine.close()
    assert f"| {name} | {len(re.findall('# [+]$', script, flags=re.MULTILINE))} |" in _GUIDE.read_text()


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_nanogpt_compiles(tmp_path: Path) -> None:
    """As it does by itself, which is refused, and as the guide says."""
    config, script = config_for("fp32", tmp_path), _SCRIPTS["nanoGPT"].replace("range(first, 30)", "range(first, 3)")
    place = "if resumes:\n    optimizer.load"
    with pytest.raises(ModelError, match=r"cannot trace .*engine\.compile"):
        ran(script.replace(place, f"model = torch.compile(model, backend='eager')\n{place}"), "ours", config, tmp_path)
    script = script.replace(place, f"engine.compile(backend='eager')  # +\n{place}")
    plain, ours = (ran(script, kind, config, tmp_path) for kind in ("plain", "ours"))
    assert ours["losses"] == plain["losses"] and len(plain["losses"]) == 6
    ours["engine"].close()
    assert "`--compile=False`" in _GUIDE.read_text()
