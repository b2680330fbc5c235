"""What a user may do between two lines of his training loop. Each action is done on both sides and its results compared."""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from infinity.errors import InfinityError
from swapper import SwapperError
from tests.exactness.record import Difference, describe_difference
from tests.fuzz.models import PlannedFailure, RandomModel
from tests.fuzz.sides import PagedSide, PlainSide, Setting, Side


class Refused(Exception):
    """The engine has said, by an error of its own, that it will not do what plain torch does."""


class TorchFails(Exception):
    """Plain torch cannot go on either."""


_PLANNED = (PlannedFailure, KeyboardInterrupt)


class World:
    """A sequence under way.

    Attributes:
        log: what has been done, for messages.
        refusal: the error that ended it; None if nothing was refused.
    """

    def __init__(self, draw: random.Random, setting: Setting, plain: PlainSide, paged: PagedSide) -> None:
        self.draw = draw
        self.setting = setting
        self.plain = plain
        self.paged = paged
        self.trainable = list(plain.trainable)
        self.log: list[str] = []

    @property
    def model(self) -> RandomModel:
        model = self.plain.model
        if not isinstance(model, RandomModel):
            raise TypeError(type(model))
        return model

    def name(self) -> str:
        """A parameter that is in the optimizer."""
        return self.draw.choice(self.trainable)

    def batches(self) -> list[dict[str, Any]]:
        """Those of one step."""
        return [self.model.batch(self.draw) for _ in range(self.setting.accumulation)]

    def both(self, what: str, do: Callable[[Any], Any], *, draws_alike: bool = True) -> Any:
        """Do the same on both sides, with the same random numbers, and compare what it gives and how it fails.

        Returns:
            What plain torch gave.

        Raises:
            Refused: the engine gave an error of its own where torch gave none.
            Difference: anything else that is not equal.
        """
        if self.log and self.log[-1]:
            self.log[-1] += f" ({what})"
        state = torch.get_rng_state()
        expected, failure = _attempt(do, self.plain)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        found, paged_failure = _attempt(do, self.paged)
        if failure is None and isinstance(paged_failure, InfinityError | SwapperError):
            torch.set_rng_state(after)
            raise Refused(f"{what}: {type(paged_failure).__name__}: {paged_failure}") from paged_failure
        if failure is not None and not isinstance(failure, _PLANNED):
            raise TorchFails(f"{what}: {failure!r}") from failure
        if type(failure) is not type(paged_failure) and not isinstance(paged_failure, InfinityError):
            raise Difference(f"{what}: {paged_failure!r}, expected {failure!r}") from paged_failure
        if difference := compare(expected, found):
            raise Difference(f"{what}{difference}")
        if draws_alike and not torch.equal(torch.get_rng_state(), after):
            raise Difference(f"{what}: the global random generator was used otherwise")
        return expected

    def compare_all(self) -> None:
        """Weights, main weights, states, buffers."""
        self.log.append("")
        for fqn in self.plain.params:
            self.both(f"weight of {fqn}", lambda side, fqn=fqn: side.weight(fqn))
        for fqn in self.trainable:
            self.both(f"main weight of {fqn}", lambda side, fqn=fqn: side.main_weight(fqn))
            self.both(f"state of {fqn}", lambda side, fqn=fqn: side.state(fqn))
        self.both("buffers", lambda side: dict(side.model.named_buffers()))


def _attempt(do: Callable[[Any], Any], side: Side) -> tuple[Any, BaseException | None]:
    try:
        return do(side), None
    except (Exception, KeyboardInterrupt) as error:
        return None, error


def compare(expected: Any, found: Any) -> str:
    """Where two results differ; empty if nowhere."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.is_floating_point() and expected.isnan().any():
            expected, found = expected.nan_to_num(nan=-1e30), found.nan_to_num(nan=-1e30)
        difference = describe_difference(expected, found)
        return f": {difference}" if difference else ""
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            return f": {sorted(map(str, found))}, expected {sorted(map(str, expected))}"
        return next((f"[{key}]{text}" for key in expected if (text := compare(expected[key], found[key]))), "")
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(expected) != len(found):
            return f": {len(found)} values, expected {len(expected)}"
        pairs = enumerate(zip(expected, found, strict=True))
        return next((f"[{index}]{text}" for index, (a, b) in pairs if (text := compare(a, b))), "")
    return "" if type(expected) is type(found) and expected == found else f": {found!r}, expected {expected!r}"


# ------------------------------------------------------------------------------------------------------------ training


def step(world: World) -> None:
    batches = world.batches()
    world.both("step", lambda side: side.whole_step(batches))


def drop_gradients(world: World) -> None:
    batch = world.model.batch(world.draw)
    if world.setting.loop != "plain" and world.setting.accumulation == 1:
        evaluate(world)  # there the backward would be that of a whole step
    else:
        world.both("backward and zero_grad", lambda side: (side.micro_batch(batch), side.drop())[0])


def evaluate(world: World) -> None:
    batch = world.model.batch(world.draw)

    def run(side: Side) -> Tensor:
        side.model.eval()
        with torch.no_grad():
            loss = side.forward(batch)
        side.model.train()
        return loss

    world.both("evaluation", run)


def fail(world: World) -> None:
    """An exception in forward or backward; the gradients of the step are dropped."""
    where = world.draw.choice(["forward", "backward", "interrupt"])
    batch = world.model.batch(world.draw, fails=where)

    def run(side: Side) -> str:
        try:
            side.whole_step([batch] * world.setting.accumulation)
        except (PlannedFailure, KeyboardInterrupt) as error:
            side.recover()
            return type(error).__name__
        return "nothing"

    world.both(f"failure in {where}", run)


def interrupt(world: World) -> None:
    """Ctrl-C at a random function call of the engine; the step is dropped on both sides."""
    batch = world.model.batch(world.draw)
    countdown = world.draw.randint(1, 400)
    if world.setting.loop != "plain" and world.setting.accumulation == 1:
        evaluate(world)
        return

    def run(side: Side) -> None:
        if isinstance(side, PagedSide):
            with contextlib.suppress(KeyboardInterrupt), _Interrupting(countdown):
                side.micro_batch(batch)
        else:
            side.micro_batch(batch)
        side.recover()

    # How far it came decides how many random numbers were drawn, and whether buffers were written to.
    buffers = {name: buffer.clone() for name, buffer in world.plain.model.named_buffers()}
    random_state = torch.get_rng_state()
    world.both(f"interrupt at call {countdown}", run, draws_alike=False)
    torch.set_rng_state(random_state)
    for side in (world.plain, world.paged):
        for name, buffer in side.model.named_buffers():
            buffer.copy_(buffers[name])


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != weakref.__file__:
        frame = frame.f_back
    return frame is not None


class _Interrupting:
    """A KeyboardInterrupt at the n-th call of a function of the packages, in this thread."""

    def __init__(self, countdown: int) -> None:
        self._left = countdown

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and ("/infinity/" in path or "/swapper/" in path) and "__del__" not in frame.f_code.co_name:
            self._left -= 1
            if self._left <= 0 and not _is_in_finalizer(frame):  # there Python prints errors, and goes on
                sys.setprofile(None)
                raise KeyboardInterrupt

    def __enter__(self) -> None:
        sys.setprofile(self._profile)

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)


def read_in_thread(world: World) -> None:
    """Another thread reads weights between two steps."""
    fqn = world.draw.choice(list(world.plain.params))
    how = world.draw.choice(["clone", "state_dict", "forward", "gather"])
    batch = world.model.batch(world.draw)

    def read(side: Side) -> Tensor:
        if how == "clone":
            return side.params[fqn].detach().clone()
        if how == "state_dict":
            return next(iter(side.model.state_dict().values())).clone()
        if how == "gather":
            return side.weight(fqn)
        with torch.no_grad():
            return side.forward(batch)

    def run(side: Side) -> Tensor:
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return pool.submit(read, side).result()

    world.both(f"another thread reads ({how})", run)


# ------------------------------------------------------------------------------------------------- weights and gradients


def write(world: World) -> None:
    fqn = world.draw.choice(list(world.plain.params))
    kind = world.draw.choice(["mul", "fill", "first", "clamp"])

    def change(weight: Tensor) -> None:
        if kind == "mul":
            weight.mul_(0.5)
        elif kind == "fill":
            weight.fill_(0.25)
        elif kind == "first":
            weight.view(-1)[0] = 0.125
        else:
            weight.clamp_(-0.05, 0.05)

    world.both(f"{kind} on {fqn}", lambda side: side.write(fqn, change))


def look(world: World) -> None:
    fqn = world.name()
    world.both(f"weight of {fqn}", lambda side: side.weight(fqn))
    world.both(f"state of {fqn}", lambda side: side.state(fqn))


def read_plainly(world: World) -> None:
    """Read a parameter as if nothing held it."""
    fqn = world.draw.choice(list(world.plain.params))
    how = world.draw.choice(["clone", "cpu", "norm", "data", "tolist"])

    def read(side: Side) -> Any:
        param = side.params[fqn]
        with torch.no_grad():
            if how == "clone":
                return param.detach().clone()
            if how == "cpu":
                return param.detach().cpu().clone()
            if how == "norm":
                return param.norm()
            return param.data.clone() if how == "data" else param.tolist()

    world.both(f"{how} of {fqn}", read)


def use_gradients(world: World) -> None:
    """Look at gradients, change them, clip them by hand."""
    if world.setting.loop == "batch" or (world.setting.loop == "engine" and world.setting.own["update"] != "step"):
        step(world)
        return
    batches = world.batches()
    fqns = [world.name() for _ in range(2)]
    kind = world.draw.choice(["read", "none", "mul", "set", "clip"])

    def run(side: Side) -> Any:
        losses = [side.micro_batch(batch) for batch in batches]
        if kind == "clip":
            whole = [side.of(fqn) for fqn in world.plain.params]
            return losses, torch.nn.utils.clip_grad_norm_(whole, 0.01), side.step()
        seen: list[Any] = []
        for fqn in fqns:
            gradient = side.gradient(fqn)
            seen.append(None if gradient is None else gradient.detach().clone())
            if gradient is None or kind == "read":
                continue
            if kind == "mul":
                gradient.mul_(0.5)
            else:
                side.set_gradient(fqn, None if kind == "none" else torch.ones_like(gradient))
        return losses, seen, side.step()

    world.both(f"gradients: {kind} of {fqns}", run)


def hook(world: World) -> None:
    """A step with hooks of the user."""
    batches = world.batches()
    fqn = world.name()
    kinds = ["forward", "pre", "tensor"]
    if not world.setting.is_bf16 and world.setting.accumulation == 1 and world.setting.loop != "batch":
        kinds.append("accumulated")
    kind = world.draw.choice(kinds)
    index = world.draw.randrange(len(world.model.blocks))

    def run(side: Side) -> Any:
        seen: list[Any] = []
        model: Any = side.model
        block = model.blocks[index]
        if kind == "forward":
            handle = block.register_forward_hook(lambda module, args, output: output * 0.5)
        elif kind == "pre":
            handle = block.register_forward_pre_hook(lambda module, args: (args[0] + 0.25,))
        elif kind == "tensor":
            handle = side.params[fqn].register_hook(lambda gradient: gradient * 0.5)
        else:
            handle = side.params[fqn].register_post_accumulate_grad_hook(
                lambda param: seen.append(None if param.grad is None else param.grad.detach().clone())
            )
        try:
            return side.whole_step(batches), seen
        finally:
            handle.remove()

    world.both(f"step with a hook ({kind}) on {fqn} / block {index}", run)


def freeze(world: World) -> None:
    """Freeze a parameter, or let it train again."""
    fqn = world.name()

    def run(side: Side) -> bool:
        params = {id(p): p for p in (side.params[fqn], side.of(fqn))}
        for param in params.values():
            param.requires_grad_(not param.requires_grad)
        return side.params[fqn].requires_grad

    is_trainable = world.both(f"requires_grad of {fqn} toggled", run)
    if not is_trainable and not any(p.requires_grad for p in world.plain.params.values()):
        world.both("and back", run)


def thaw(world: World) -> None:
    """Some of what was frozen and in no group until now comes into a group."""
    frozen = [fqn for fqn in world.plain.params if fqn not in world.trainable]
    if not frozen:
        step(world)
        return
    fqns = world.draw.sample(frozen, k=world.draw.randint(1, len(frozen)))
    world.both(f"thaw {fqns}", lambda side: side.thaw(fqns))
    world.trainable += fqns


# ----------------------------------------------------------------------------------------------------------- optimizer


def change_hyperparameters(world: World) -> None:
    index = world.draw.randrange(len(world.plain.optimizer.param_groups))
    lr = world.draw.choice([0.0, 1e-4, 3e-3, 0.05])
    decay = world.draw.choice([0.0, 0.1])

    def run(side: Side) -> None:
        if index < len(side.optimizer.param_groups):
            side.optimizer.param_groups[index].update(lr=lr, weight_decay=decay)

    world.both(f"group {index}: lr {lr}, weight_decay {decay}", run)


def regroup(world: World) -> None:
    """Members of the groups are moved, taken out, put in another order."""
    kind = world.draw.choice(["move", "remove", "reorder", "split"])
    fqn = world.name()

    def run(side: Side) -> Any:
        groups = side.optimizer.param_groups
        param = side.of(fqn)
        own = next((group for group in groups if any(member is param for member in group["params"])), None)
        if kind == "reorder":
            groups[0]["params"].reverse()
        elif own is not None and len(own["params"]) > 1:
            own["params"] = [member for member in own["params"] if member is not param]
            if kind == "move":
                groups[-1]["params"].append(param)
            elif kind == "split":
                side.optimizer.add_param_group({"params": [param], "lr": 0.01})
        elif own is None:
            groups[-1]["params"].append(param)
        return [len(group["params"]) for group in groups]

    world.both(f"groups: {kind} {fqn}", run)


def edit_state(world: World) -> None:
    fqn = world.name()
    kind = world.draw.choice(["zero", "assign", "forget", "clear", "same"])

    def run(side: Side) -> None:
        state = side.optimizer.state
        param = side.of(fqn)
        if kind == "clear":
            state.clear()
        elif side.state(fqn):
            name = _first_large(state[param], param)
            if kind == "forget":
                del state[param]
            elif name is not None and kind == "zero":
                state[param][name] = torch.zeros_like(state[param][name])
            elif name is not None and kind == "assign":
                state[param][name] = torch.full(param.shape, 0.5)
            elif name is not None:
                state[param][name] = state[param][name]

    world.both(f"state: {kind} {fqn}", run)


def _first_large(state: dict[str, Any], param: Tensor) -> str | None:
    return next((n for n, v in state.items() if n != "step" and torch.is_tensor(v) and v.shape == param.shape), None)


def reload_optimizer(world: World) -> None:
    world.both("optimizer.load_state_dict", lambda side: side.optimizer.load_state_dict(side.optimizer.state_dict()))


# -------------------------------------------------------------------------------------------------------------- saving


def take_state_dict(world: World) -> None:
    world.both("state_dict", lambda side: {name: value.clone() for name, value in side.model.state_dict().items()})


def reload_weights(world: World) -> None:
    if world.setting.is_bf16:
        take_state_dict(world)
    else:
        world.both("load_state_dict", lambda side: str(side.model.load_state_dict(side.model.state_dict())))


def save(world: World, directory: Path) -> None:
    """Weights and buffers as they are saved."""
    target = directory / "saved"

    def run(side: Side) -> dict[str, Tensor]:
        if isinstance(side, PagedSide):
            side.engine.save_16bit_model(target)
            return {name: value for path in target.glob("*.safetensors") for name, value in load_file(path).items()}
        return {name: value.clone() for name, value in side.model.state_dict().items()}

    world.both("save_16bit_model", run)


ACTIONS: dict[Callable[[World], None], float] = {
    step: 8,
    drop_gradients: 1,
    evaluate: 1,
    fail: 1,
    interrupt: 1,
    read_in_thread: 0.3,
    write: 1.5,
    look: 1,
    read_plainly: 0.5,
    use_gradients: 2,
    hook: 1.5,
    freeze: 1.5,
    thaw: 1,
    change_hyperparameters: 1.5,
    regroup: 1,
    edit_state: 1,
    reload_optimizer: 0.5,
    take_state_dict: 0.5,
    reload_weights: 0.5,
}
"""How often each is drawn, relative to the others."""
