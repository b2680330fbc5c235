"""Learning rate schedules of a DeepSpeed config, as true torch schedulers.

Every schedule gives the rate of training step `e` (counted from 0) as a closed form of `e`, which torch calls
`last_epoch`: call `step()` once after each optimizer step. They give the rates that DeepSpeed gives, with two
peculiarities that a migrating user would otherwise see as a difference:

- the warmup schedules use their starting rate in the first training step *and* begin the formula at 0 in the second, so
  they run one step behind (`e - 1` below);
- `OneCycle` with momentum sets `betas` to `(momentum, 0.99)`, whatever second beta the optimizer had, and starts from
  `cycle_min_mom` in the first step.

`base_lrs`, `get_last_lr()`, `state_dict()` are torch's. `load_state_dict` also takes DeepSpeed's
`{"last_batch_iteration": n}`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from infinity.errors import ConfigError, nearest
from infinity.optim.registry import Section

logger = logging.getLogger(__name__)

PerGroup = float | Sequence[float]
"""One value for all parameter groups, or one per group."""

_ONE_CYCLE_SECOND_BETA = 0.99  # DeepSpeed's constant; see the module docstring.


class _Schedule(LRScheduler):
    """A closed form of the number of finished steps. Subclasses set their fields before they call this constructor."""

    total_num_steps = 0
    """Steps at which a rate that falls is at its end; 0: it does not fall."""

    @property
    def last_batch_iteration(self) -> int:
        """DeepSpeed's count: the index of the last batch whose step has ended, -1 before the first."""
        return int(self.last_epoch) - 1

    @last_batch_iteration.setter
    def last_batch_iteration(self, index: int) -> None:
        # DeepSpeed counts batches that have ended, from 0; torch counts steps, and begins with 0 before the first.
        self.last_epoch = int(index) + 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take torch's state of this schedule, or DeepSpeed's, which is only the index of the last batch."""
        if set(state_dict) == {"last_batch_iteration"}:
            # Example: index 9, ten batches have ended: torch's last_epoch is 10, and its step count 11, as its
            # constructor makes a step, too.
            num_steps = int(state_dict["last_batch_iteration"]) + 1
            state_dict = {"last_epoch": num_steps, "_step_count": num_steps + 1}
        super().load_state_dict(state_dict)

    def step(
        self, epoch: int | None = None, *, last_batch_iteration: int | None = None, batch_iteration: int | None = None
    ) -> None:
        """Go on to the next step, or to the one after batch `epoch`, counted from 0, as DeepSpeed's schedules do.

        `last_batch_iteration` and `batch_iteration` are its names for `epoch`.
        """
        given = [index for index in (epoch, last_batch_iteration, batch_iteration) if index is not None]
        if given:
            self.last_epoch = int(given[0])  # and torch's own counts one on
        super().step()

    def get_lr(self) -> list[float | Tensor]:
        """The rates of step `last_epoch`, one per parameter group; groups that came later keep theirs, as in DeepSpeed."""
        rates, groups = self._rates(), self.optimizer.param_groups
        return [*rates[: len(groups)], *(group["lr"] for group in groups[len(rates) :])]

    def _rates(self) -> list[float]:
        raise NotImplementedError

    def _set_warmup(self, num_steps: int, kind: str, total_num_steps: int | None = None) -> None:
        # log(1) is 0 and would be divided by: two steps are the shortest warmup, as in DeepSpeed.
        self.warmup_num_steps = max(2, _whole("warmup_num_steps", num_steps))
        self.warmup_type = kind
        if kind not in ("log", "linear"):
            raise ConfigError.value("scheduler.params.warmup_type", kind, "unknown", cure='Take "log" or "linear"')
        if total_num_steps is not None:
            self.total_num_steps = _whole("total_num_steps", total_num_steps, at_least=1)
            if total_num_steps < self.warmup_num_steps:
                message = "total_num_steps %d is less than warmup_num_steps %d: the rate will not reach its maximum"
                logger.warning(message, total_num_steps, self.warmup_num_steps)

    def _warmed_up(self, index: int) -> float:
        if index >= self.warmup_num_steps:
            return 1.0
        if self.warmup_type == "log":
            # log(1) = 0 for the first index, log(n) / log(n) = 1 for the last.
            return math.log(index + 1) * (1.0 / math.log(self.warmup_num_steps))
        return index / self.warmup_num_steps


class WarmupLR(_Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, constant from there on.

    Args:
        optimizer: its parameter groups get the rates.
        warmup_min_lr: rate before the warmup.
        warmup_max_lr: rate after the warmup; None takes each group's own rate.
        warmup_num_steps: length of the warmup; less than 2 counts as 2.
        warmup_type: `"log"`: min + (max - min) * log(e) / log(n) or `"linear"`: min + (max - min) * (e - 1) / n.
        last_epoch: index of the last finished step, -1 at the start.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        # "initial_lr" is torch's: the rate before a schedule changed it, when a training goes on.
        own_rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = own_rates if warmup_max_lr is None else _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        self._set_warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_epoch)

    def _rates(self) -> list[float]:
        # Example, linear, 4 warm-up steps, 0 to 1: steps 0 1 2 3 4 5 have the rates 0 0 0.25 0.5 0.75 1.
        fraction = 0.0 if self.last_epoch == 0 else self._fraction(self.last_epoch - 1)
        return [low + (high - low) * fraction for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _fraction(self, index: int) -> float:
        if index < self.warmup_num_steps or not self.total_num_steps:
            return self._warmed_up(index)
        # From 1 at the end of the warm-up to 0 at `total_num_steps`; never below, if training goes on.
        return max(0.0, (self.total_num_steps - index) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`; after the warmup the rate falls on a line to `warmup_min_lr`, reached after `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        # Before the base class: its constructor computes the first rates, which need the total.
        self._set_warmup(warmup_num_steps, warmup_type, total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_epoch)


class WarmupCosineLR(_Schedule):
    """Each group's own rate times a ratio: warmup from `warmup_min_ratio` to 1, then a half cosine to `cos_min_ratio`.

    The first training step has rate 0. From step `total_num_steps` on the ratio stays at `cos_min_ratio`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        self._set_warmup(warmup_num_steps, warmup_type, total_num_steps)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, last_epoch)

    def _rates(self) -> list[float]:
        index, ratio = self.last_epoch - 1, 0.0
        if 0 <= index < self.warmup_num_steps:
            ratio = self.warmup_min_ratio + self._warmed_up(index) * (1.0 - self.warmup_min_ratio)
        elif index >= 0:
            # + 1, as in DeepSpeed: the first step after the warm-up decays already.
            num_decay_steps = max(1, self.total_num_steps - self.warmup_num_steps)
            progress = min(1.0, (index - self.warmup_num_steps + 1) / num_decay_steps)
            cosine = (1 + math.cos(math.pi * progress)) / 2
            ratio = max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)
        return [float(rate) * ratio for rate in self.base_lrs]


class OneCycle(_Schedule):
    """One rise and fall between two rates, then decay; momentum (the first beta) moves the other way.

    Args:
        optimizer: its parameter groups get the rates, and `betas` when `cycle_momentum`.
        cycle_min_lr: rate at both ends of the cycle.
        cycle_max_lr: rate at its peak.
        decay_lr_rate: after the cycle the rate is `cycle_min_lr / (1 + decay_lr_rate * k / decay_step_size)` in the
            k-th step.
        cycle_first_step_size: steps of the rise.
        cycle_second_step_size: steps of the fall; None takes as many as the rise has.
        cycle_first_stair_count: stairs of the rise; 0 rises in every step.
        cycle_second_stair_count: stairs of the fall; None takes as many as the rise has.
        decay_step_size: 0 means no decay.
        cycle_momentum: ignored (with a log message) by optimizers without `betas`.
        cycle_min_mom: first beta at the peak.
        cycle_max_mom: first beta at the ends.
        decay_mom_rate: after the cycle the first beta is `cycle_max_mom * (1 + decay_mom_rate * k / decay_step_size)`.
        last_epoch: index of the last finished step, -1 at the start.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        fall = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        fall_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.num_rise_steps = _whole("cycle_first_step_size", cycle_first_step_size, at_least=1)
        self.num_fall_steps = _whole("cycle_second_step_size", fall)
        self.num_rise_stairs = _whole("cycle_first_stair_count", cycle_first_stair_count)
        self.num_fall_stairs = _whole("cycle_second_stair_count", fall_stairs)
        self.decay_step_size = _whole("decay_step_size", decay_step_size)
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        # torch's SGD has "momentum" and no "betas": as in DeepSpeed, it is left alone.
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self.cycle_momentum:
            logger.warning("OneCycle leaves momentum alone: optimizer %s has no betas", type(optimizer).__name__)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of step `last_epoch`. Sets the momentum of that step too, as torch's own cyclic schedules do."""
        if self.cycle_momentum:
            # strict=False: groups that were added later have no bounds.
            ends = [momentum * self._decay(self.decay_mom_rate) for momentum in self.max_moms]
            momenta = self.min_moms if self.last_epoch == 0 else self._cycled(ends, self.min_moms)
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=False):
                group["betas"] = (momentum, _ONE_CYCLE_SECOND_BETA)
        return super().get_lr()

    def _rates(self) -> list[float]:
        ends = [rate / self._decay(self.decay_lr_rate) for rate in self.min_lrs]
        return self._cycled(ends, self.max_lrs)

    def _cycled(self, ends: Sequence[float], peaks: Sequence[float]) -> list[float]:
        height = 0.0 if self._num_decay_steps else self._height()
        return [end + (peak - end) * height for end, peak in zip(ends, peaks, strict=True)]

    def _height(self) -> float:
        """Where in the cycle the step is: 0 at the ends, 1 at the peak."""
        # Example, rise 3, fall 2: steps 0 1 2 3 4 5 have the heights 0 1/3 2/3 1 1/2 0.
        left = self.num_rise_steps + self.num_fall_steps - self.last_epoch
        if left == 0:
            return 0.0  # also of a cycle without a fall, whose peak is thus never reached
        if self.last_epoch <= self.num_rise_steps:
            return _staircase(self.last_epoch, self.num_rise_steps, self.num_rise_stairs)
        return _staircase(left, self.num_fall_steps, self.num_fall_stairs)

    @property
    def _num_decay_steps(self) -> int:
        return max(0, self.last_epoch - self.num_rise_steps - self.num_fall_steps)

    def _decay(self, rate: float) -> float:
        # A step size of 0 is DeepSpeed's way to say "no decay".
        return 1 + rate * self._num_decay_steps / self.decay_step_size if self.decay_step_size else 1.0


class LRRangeTest(_Schedule):
    """A rate that grows without end, to see where training diverges: min_lr * (1 + step_rate * e / step_size).

    With `lr_range_test_staircase` it grows only every `lr_range_test_step_size` steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _whole("lr_range_test_step_size", lr_range_test_step_size, at_least=1)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_epoch)

    def _rates(self) -> list[float]:
        interval = float(self.last_epoch // self.step_size) if self.staircase else self.last_epoch / self.step_size
        return [low * (1 + self.step_rate * interval) for low in self.min_lrs]


SCHEDULES: Mapping[str, type[LRScheduler]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}

# These take Python objects or a metric, which JSON cannot hold and `engine.step()` does not have.
_NOT_FROM_JSON = {"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"}


def find_schedule(name: str) -> type[LRScheduler]:
    """The schedule called `name` (case does not matter): one of `SCHEDULES`, or one of torch's.

    Raises:
        ConfigError: nobody knows the name, or JSON cannot describe the schedule's arguments.
    """
    # Without the base classes LRScheduler and _LRScheduler.
    torch_schedules = {
        cls_name: cls
        for cls_name, cls in vars(torch.optim.lr_scheduler).items()
        if isinstance(cls, type) and issubclass(cls, LRScheduler) and not cls_name.endswith("LRScheduler")
    }
    known = {**torch_schedules, **SCHEDULES}
    exact = next((each for each in known if each.lower() == name.lower()), None)
    if exact is None:
        near = nearest(name, list(known))
        hint = f"Did you mean '{near}'? " if near else ""
        cure = f"{hint}The schedules are {', '.join(SCHEDULES)}, and the classes of torch.optim.lr_scheduler"
        raise ConfigError.value("scheduler.type", name, "no such schedule", cure=cure)
    if exact in _NOT_FROM_JSON:
        cure = f"Build it in Python and pass lr_scheduler=lambda optimizer: {exact}(optimizer, ...) to initialize"
        raise ConfigError.value("scheduler.type", name, "JSON cannot describe this schedule", cure=cure)
    return known[exact]


def schedule_parameters(name: str) -> dict[str, bool]:
    """The parameters of the schedule called `name`, and whether it cannot do without them.

    `last_batch_iteration`, DeepSpeed's name for `last_epoch`, is one of them.
    """
    # [1:]: without the optimizer.
    parameters = list(inspect.signature(find_schedule(name)).parameters.values())[1:]
    return {item.name: item.default is item.empty for item in parameters} | {"last_batch_iteration": False}


def build_scheduler(section: Section, optimizer: Optimizer) -> LRScheduler:
    """The schedule that the config asks for, attached to `optimizer`.

    Raises:
        ConfigError: unknown type, or arguments that the schedule does not take.
    """
    cls = find_schedule(section.type)
    params = dict(section.params)
    known = schedule_parameters(section.type)
    for name, is_required in known.items():
        if is_required and name not in params:
            cure = f"{cls.__name__} requires it: give a number, or pass lr_scheduler to initialize"
            raise ConfigError.value(f"scheduler.params.{name}", None, 'it is missing or "auto"', cure=cure)
    try:
        if "last_batch_iteration" in params:
            params["last_epoch"] = int(params.pop("last_batch_iteration"))
        # torch's constructors demand "initial_lr" from groups when they continue; DeepSpeed's do not.
        if params.get("last_epoch", -1) >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        return cls(optimizer, **params)
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        cure = f"{cls.__name__} takes {', '.join(known)}"
        raise ConfigError.value("scheduler.params", params, str(error), cure=cure) from error


def _per_group(optimizer: Optimizer, name: str, value: PerGroup) -> list[float]:
    num_groups = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [float(value)] * num_groups
    if len(value) != num_groups:
        problem = f"{len(value)} values for {num_groups} parameter groups"
        raise ConfigError.value(f"scheduler.params.{name}", value, problem, cure="Give one number, or one per group")
    return [float(item) for item in value]


def _whole(name: str, value: object, *, at_least: int = 0) -> int:
    if not isinstance(value, int | float) or value % 1 or value < at_least:  # also inf % 1, which is NaN
        cure = f"Give a whole number of at least {at_least}"
        raise ConfigError.value(f"scheduler.params.{name}", value, "not a possible number of steps", cure=cure)
    return int(value)


def _staircase(position: float, length: int, num_stairs: int) -> float:
    if num_stairs == 0:
        return position / length
    # Example: 10 steps in 2 stairs: 0 for positions 0 to 4, 0.5 for 5 to 9, 1 for 10.
    return math.floor(position * num_stairs / length) / num_stairs
