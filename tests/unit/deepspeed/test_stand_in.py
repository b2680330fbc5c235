"""What `infinity.as_deepspeed` leaves in the environment."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from infinity.deepspeed import stand_in


def test_a_launcher_that_is_started_from_here_can_listen_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """LlamaFactory and ms-swift start torchrun with MASTER_PORT, if it is set. At port 0, no process finds the others."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # or it would not be restored
        monkeypatch.delenv(name)
    stand_in.install()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, is_master=True, wait_for_workers=False)
    assert store.port == port
    other = torch.distributed.TCPStore(address, port, is_master=False)
    store.set("key", "value")
    assert other.get("key") == b"value"
