"""Plain torch and an engine in lockstep, where weights are written to by others than the optimizer.

Main weights follow: those whose model weight a write changed become it, the others keep all their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.exactness.case import Case
from tests.exactness.lockstep import Lockstep, everything_on_nvme
from tests.exactness.paged import least_budget
from tests.exactness.reference import PlainTorch

_BF16 = {"bf16": {"enabled": True}}
_RESIDENT = {
    "zero_optimization": {key: {"device": "none", "nvme_path": None} for key in ("offload_param", "offload_optimizer")}
}
MODES: dict[str, dict[str, Any]] = {
    "in backward": {},
    "deferred": {"gradient_clipping": 0.5},
    "step": {"infinity": {"update": "step"}},
    "resident": _RESIDENT,
    "bf16": _BF16,
    "bf16 deferred": {**_BF16, "gradient_clipping": 0.5},
    "bf16 resident": {**_BF16, **_RESIDENT},
    "bf16 fp32 resident": {**_BF16, **_RESIDENT, "infinity": {"main_weights": "fp32"}},
    "vertical": {"gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical"}},
    "bf16 vertical resident": {
        **_BF16,
        **_RESIDENT,
        "gradient_accumulation_steps": 2,
        "infinity": {"schedule": "vertical"},
    },
}
"""What is changed in the config, by name."""


class _FollowingMode(TorchFunctionMode):
    """Main weights follow after each operation."""

    def __init__(self, following: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._following = following

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction(), self._following():
            return func(*args, **kwargs or {})


class FollowingTorch:
    """A `PlainTorch` whose main weights follow what is written into its model's weights."""

    def __init__(self, reference: PlainTorch) -> None:
        self._reference = reference
        forward, backward = reference.forward, reference.backward

        def forward_and_follow(batch: dict[str, Any]) -> torch.Tensor:
            with self.following():
                return forward(batch)

        def backward_and_follow(loss: torch.Tensor) -> None:
            with self.following():
                backward(loss)

        patched: Any = reference
        patched.forward, patched.backward = forward_and_follow, backward_and_follow

    def following_each(self) -> TorchFunctionMode:
        """A context in which each single operation counts: what is changed and then changed back has been changed."""
        return _FollowingMode(self.following)

    @contextmanager
    def following(self) -> Iterator[None]:
        """What is written inside the ``with`` block counts."""
        named = self._reference.trainable
        before = {fqn: param.detach().clone() for fqn, param in named.items()}
        yield
        with torch.no_grad():
            for fqn, main in self._reference.main.items():
                now = named[fqn].detach()
                main.copy_(torch.where(now == before[fqn], main, now.float()))


def train(
    case: Case,
    mode: str,
    directory: Path,
    *,
    num_steps: int = 3,
    between: Callable[[nn.Module, int], Any] = lambda model, step: None,
    more: dict[str, Any] | None = None,
) -> Lockstep:
    """Train both, and compare everything in the end.

    Args:
        between: called with either model and the number of steps so far, before each step and after the last.
        more: changes to the config.
    """
    changes = {**MODES[mode], **(more or {})}
    own = {"staging_buffer_bytes": "auto", **changes.get("infinity", {})}
    config = everything_on_nvme(directory, {**changes, "infinity": own})
    if "resident" not in mode:
        own = {**own, "host_memory_budget": least_budget(case.make("none"), config)}
    with Lockstep.start(directory, case=case, changes={**changes, "infinity": own}) as both:
        following = FollowingTorch(both.reference)
        for step in range(num_steps + 1):
            random_state = torch.get_rng_state()
            with following.following_each():
                expected = between(both.reference.model, step)
            torch.set_rng_state(random_state)
            found = between(both.model, step)
            if isinstance(expected, torch.Tensor):
                both.note(f"between {step}", expected, found)
            if step < num_steps:
                if "vertical" in mode:
                    both.batch_step(step)
                else:
                    both.engine_step(step)
        both.require_equal()
        return both
