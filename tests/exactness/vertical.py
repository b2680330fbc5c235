"""Plain torch that trains in the order of the vertical schedule. Nothing here knows of the packages under test.

The forwards of all micro-batches run in threads of their own that take turns: each goes on to its next block, then each
runs that block, then each goes on. So draws from the global generator come in that order. Gradients are taken apart by
parameter, by the place of its use (which block call, or between which two) and by micro-batch, and added to the main
gradient from the last place to the first, at each place by micro-batches.

Where every parameter is used at one place and nothing is drawn, all of that is the ordinary order's result.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.exactness.case import loss_of
from tests.exactness.reference import PlainTorch


class VerticalTorch(PlainTorch):
    """`PlainTorch` with steps of several micro-batches at once."""

    def __init__(self, model: nn.Module, make_optimizer: Any, blocks: Iterable[str], **settings: Any) -> None:
        """``blocks``: names of the modules that are computed as a whole."""
        super().__init__(model, make_optimizer, **settings)
        self._present = threading.local()
        for name in blocks:
            block = self.model.get_submodule(name)
            block.forward = self._stopping(block, block.forward)  # type: ignore[method-assign]

    def _stopping(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            run: _Run | None = getattr(self._present, "run", None)
            if run is None or run.is_inside:
                return forward(*args, **kwargs)
            return run.call(block, forward, args, kwargs)

        return call

    def accumulate(self, batches: list[dict[str, Any]]) -> list[Tensor]:
        """Forward and backward of a step's micro-batches; returns their losses."""
        turns = _Turns(len(batches))
        runs = [_Run(index, turns) for index in range(len(batches))]
        settings = torch.get_num_threads()
        threads = [
            threading.Thread(target=self._run, args=(*pair, settings)) for pair in zip(runs, batches, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for run in runs:
            if run.error is not None:
                raise run.error
        for run in runs:
            (run.losses[0] / self.num_micro_batches).backward()
        for place in range(max(run.place for run in runs), -1, -1):
            for run in runs:
                self._add({fqn: run.aliases.get((id(p), place)) for fqn, p in self.trainable.items()})
        return [run.losses[0].detach() for run in runs]

    def _add(self, aliases: dict[str, Tensor | None]) -> None:
        for fqn, alias in aliases.items():
            if alias is not None and alias.grad is not None:
                main, gradient = self.main[fqn], alias.grad.float()
                main.grad = gradient if main.grad is None else main.grad + gradient
                if self._rounds_gradients:
                    main.grad = main.grad.bfloat16().float()

    def _run(self, run: _Run, batch: dict[str, Any], num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # is kept per thread, and decides how sums are split
        self._present.run = run
        try:
            with run.turns.taken(run.index), _Aliases(run):
                run.losses.append(loss_of(self.model(**batch)))
        except BaseException as error:
            run.error = error


class _Turns:
    """One thread at a time, in the order of their numbers."""

    def __init__(self, num_threads: int) -> None:
        self._alive = list(range(num_threads))
        self._turn = 0
        self._changed = threading.Condition()

    def wait(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._alive[self._turn] == index)

    def pass_on(self, index: int, *, ends: bool = False) -> None:
        with self._changed:
            if ends:
                self._alive.remove(index)
            else:
                self._turn += 1
            self._turn = self._turn % max(len(self._alive), 1)
            self._changed.notify_all()

    def taken(self, index: int) -> Any:
        turns = self

        class Taken:
            def __enter__(self) -> None:
                turns.wait(index)

            def __exit__(self, *_: object) -> None:
                turns.pass_on(index, ends=True)

        return Taken()


class _Aliases(TorchFunctionMode):
    """Gives every operation copies of its parameters that belong to the micro-batch and to the present place."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = tree_map(self._run.alias, (args, kwargs or {}))
        return func(*args, **kwargs or {})


class _Run:
    """One micro-batch."""

    def __init__(self, index: int, turns: _Turns) -> None:
        self.index = index
        self.turns = turns
        self.place = 0
        self.is_inside = False
        self.aliases: dict[tuple[int, int], Tensor] = {}
        self.losses: list[Tensor] = []
        self.error: BaseException | None = None

    def alias(self, value: Any) -> Any:
        if not isinstance(value, nn.Parameter) or not value.requires_grad:
            return value
        key = id(value), self.place
        if key not in self.aliases:
            self.aliases[key] = value.detach().requires_grad_()
        return self.aliases[key]

    def _stop(self) -> None:
        self.turns.pass_on(self.index)
        self.turns.wait(self.index)
        self.place += 1

    def call(self, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(self.alias, (args, kwargs))
        self._stop()
        self.is_inside = True
        with _Aliases(self):
            result = forward(*args, **kwargs)
        self.is_inside = False
        self._stop()
        return result
