"""Writes curves for TensorBoard, Weights & Biases and CSV files. Names and axes are DeepSpeed's."""

from __future__ import annotations

import csv
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from infinity.config.schema.blocks import WandbBlock
from infinity.distributed.world import world
from infinity.errors import ConfigError
from infinity.metrics.report import StepReport
from swapper.volumes.publish import make_directory, opener

logger = logging.getLogger(__name__)

Event = tuple[str, Any, int]
"""Name, value, and place on the axis: the number of samples so far."""


class Monitor(Protocol):
    """Writes events somewhere."""

    def write_events(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class Monitors:
    """The monitors that the config names, as DeepSpeed's ``MonitorMaster``. Other ranks than the first have none."""

    def __init__(self, wanted: Mapping[str, Path | WandbBlock]) -> None:
        """Open the monitors of the config. ``wanted``: for each one's block where it writes.

        Raises:
            ConfigError: one cannot be opened. Those that were opened are closed again.
        """
        self._monitors: dict[str, Monitor] = {}
        self._has_warned = False
        # Every rank has the same losses: one of them writes.
        if world().index:
            return
        try:
            for key, section in wanted.items():
                self._open(key, *_MONITORS[key], section)
        # Also at Ctrl-C: a monitor may have threads and files open.
        except BaseException:
            self.close()
            raise

    @property
    def enabled(self) -> bool:
        """Whether anything is written."""
        return bool(self._monitors)

    def _open(self, key: str, package: str, kind: Callable[[Any], Monitor], section: Any) -> None:
        try:
            if package:
                importlib.import_module(package)
            self._monitors[key] = kind(section)
        except ImportError as error:
            cure = f"pip install {package}, or set it to false"
            problem = f"it needs the package {package}: {error}"
            raise ConfigError.value(f"{key}.enabled", True, problem, cure=cure) from error
        # Libraries raise errors of their own (wandb without a login, for example). All of it is the config's matter
        # here.
        except Exception as error:
            cure = "Correct the cause, or set it to false"
            if key == "wandb":
                cure = "Log in (wandb login), set the environment variable WANDB_MODE=offline, or set it to false"
            problem = f"it cannot be written: {type(error).__name__}: {error}"
            raise ConfigError.value(f"{key}.enabled", True, problem, cure=cure) from error

    def write_events(self, events: Sequence[Event]) -> None:
        """Write values under names of your own.

        If a monitor fails (a full disk), one warning is logged and the monitor is dropped. Training continues.

        Args:
            events: name, value, and place on the axis of each. DeepSpeed's axis is the number of samples.
        """
        for key, monitor in list(self._monitors.items()):
            try:
                monitor.write_events(events)
            # A curve is not worth a training: see the docstring.
            except Exception as error:
                del self._monitors[key]
                logger.warning("%s gets no more values: %s: %s. Training continues", key, type(error).__name__, error)

    def write_step(
        self, report: StepReport, lr: float | None, samples_before: int, samples: int, *, with_seconds: bool
    ) -> None:
        """Write the values that DeepSpeed writes for a step, under its names.

        Args:
            report: of the step.
            lr: learning rate of the first group, for the next step; None without groups.
            samples_before, samples: without and with this step. If they are equal, the axis is in steps.
            with_seconds: whether to write the seconds of its phases as well.
        """
        if not self._monitors:
            return
        # Example with 8 samples a step: the loss of step 1 is at 0, its learning rate at 8. Without samples: at 0 and
        # at 1.
        before, now = (samples_before, samples) if samples > samples_before else (report.step - 1, report.step)
        scale = report.loss_scale if report.loss_scale != 1 else None
        # DeepSpeed writes the loss in backward, when the step does not count yet.
        events: list[Event] = [("train_loss", report.loss, before), ("lr", lr, now), ("loss_scale", scale, now)]
        if with_seconds:
            phases = {"forward": report.forward_seconds, "backward": report.backward_seconds}
            phases["step"] = report.update_seconds
            events += [(f"elapsed_time_ms_{name}", 1e3 * seconds, now) for name, seconds in phases.items()]
        self.write_events([(f"Train/Samples/{name}", value, at) for name, value, at in events if value is not None])

    def close(self) -> None:
        """Write what is pending. May be called again."""
        while self._monitors:
            key, monitor = self._monitors.popitem()
            try:
                monitor.close()
            except Exception as error:
                logger.warning("%s could not be closed: %s: %s", key, type(error).__name__, error)


class _CsvFiles:
    """Appends to ``DIRECTORY/Train_Samples_lr.csv`` and the like, whose first line is ``step,lr``."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError if the directory cannot be made."""
        self._directory = directory
        make_directory(self._directory)

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            path = self._directory / (name.replace("/", "_").replace(" ", "_") + ".csv")  # as DeepSpeed names it
            with open(path, "a", newline="", encoding="utf-8", opener=opener) as file:
                writer = csv.writer(file)
                if not file.tell():  # a run that is resumed goes on
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, value])

    def close(self) -> None:
        """Nothing is pending."""


class _TensorBoard:
    """Events that ``tensorboard --logdir`` shows."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(directory))

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        # TensorBoard shows a step as soon as it has ended, and a killed run loses none.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases: the one that the script has begun, or one of its own."""

    def __init__(self, section: WandbBlock) -> None:
        import wandb

        # The script's own run is not finished by us: it may log on after training.
        self._is_own = wandb.run is None
        self._run = wandb.init(project=section.project, group=section.group, entity=section.team)

    def write_events(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._run.log({name: value}, step=samples)

    def close(self) -> None:
        if self._is_own:
            self._run.finish()


_MONITORS: dict[str, tuple[str, Callable[[Any], Monitor]]] = {
    "csv_monitor": ("", _CsvFiles),
    "tensorboard": ("tensorboard", _TensorBoard),
    "wandb": ("wandb", _Wandb),
}
"""For each block of the config, the package that its monitor needs, and the monitor."""
