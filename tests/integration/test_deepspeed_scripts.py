"""DeepSpeed's own examples, shortened, with one changed import: they run as they are, and train as plain torch does."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
import infinity.deepspeed as deepspeed
from infinity.deepspeed import get_accelerator
from infinity.errors import ConfigError


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # so that it is put back
        monkeypatch.delenv(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class _Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Drawn ones in place of CIFAR10."""

    def __init__(self, num: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self._images = torch.rand(num, 3, 32, 32, generator=draw) * 2 - 1
        self._labels = torch.randint(0, 10, (num,), generator=draw).tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index], self._labels[index]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def _arguments(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", "--epochs", default=2, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--dtype", default="fp16", type=str)
    parser.add_argument("--stage", default=0, type=int)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args(list(words))


def _cifar_config(args: Any, directory: Path) -> dict[str, Any]:
    adam = {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}
    zero = {"stage": args.stage, "allgather_partitions": True, "allgather_bucket_size": 50000000, "overlap_comm": True}
    if args.stage == 3:
        nvme = {"device": "nvme", "nvme_path": str(directory)}
        zero |= {"offload_param": nvme, "offload_optimizer": nvme}
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": adam},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "loss_scale": 0, "hysteresis": 2, "initial_scale_power": 15},
        "wall_clock_breakdown": False,
        "zero_optimization": zero,
    }


def _cifar(args: Any, directory: Path) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    """The example from its ``main`` on."""
    deepspeed.init_distributed()
    _local_rank = int(os.environ.get("LOCAL_RANK"))  # type: ignore[arg-type]
    get_accelerator().set_device(_local_rank)
    assert torch.distributed.get_rank() == 0
    torch.distributed.barrier()
    trainset, testset = _Images(64), _Images(16)
    torch.manual_seed(0)
    net = _Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, __ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=parameters,
        training_data=trainset,
        config=_cifar_config(args, directory),
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    local_rank = model_engine.local_rank
    assert (local_rank, optimizer is model_engine.optimizer) == (0, True)
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _epoch in range(args.epochs):
        for data in trainloader:
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    model_engine.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in torch.utils.data.DataLoader(testset, batch_size=4):
            if target_dtype is not None:
                images = images.to(target_dtype)
            outputs = model_engine(images.to(local_device))
            _, predicted = torch.max(outputs.data, 1)
            correct += (predicted == labels.to(local_device)).sum().item()
    weights = {name: value.clone() for name, value in model_engine.state_dict().items()}
    model_engine.destroy()
    return losses, correct, weights


def _plain_cifar(epochs: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = _Net()
    # DeepSpeed's "Adam" is AdamW, and its WarmupLR begins at 0 with a logarithm.
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, betas=(0.8, 0.999), weight_decay=3e-7, fused=True)
    schedule = infinity.schedules.WarmupLR(optimizer, 0, 0.001, 1000)
    losses = []
    for _ in range(epochs):
        images_drawn = _Images(64)
        shuffled = torch.utils.data.DistributedSampler(images_drawn, num_replicas=1, rank=0)  # as DeepSpeed does
        for images, labels in torch.utils.data.DataLoader(images_drawn, batch_size=16, sampler=shuffled):
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, net.state_dict()


@pytest.mark.parametrize("stage", ["0", "3"])
def test_cifar_in_fp32_is_plain_torch(stage: str, launched: None, tmp_path: Path) -> None:
    losses, _, weights = _cifar(_arguments("--dtype", "fp32", "--stage", stage), tmp_path)
    expected, expected_weights = _plain_cifar(epochs=2)
    assert losses == expected
    assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed.comm.destroy_process_group()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        deepspeed.init_distributed()
    assert not deepspeed.comm.is_initialized()
