"""A file of comma-separated values for each name: the axis, and the value."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.config import FileMonitorSection


class CsvFiles:
    """Appends to ``DIRECTORY/Train_Samples_lr.csv`` and the like, whose first line is ``step,lr``."""

    def __init__(self, section: FileMonitorSection) -> None:
        """Raises OSError if the directory cannot be made."""
        self._directory = section.directory
        self._directory.mkdir(parents=True, exist_ok=True)

    def write_events(self, events: Sequence[tuple[str, Any, int]]) -> None:
        """Append a line for each."""
        for name, value, samples in events:
            path = self.path_of(name)
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if not file.tell():  # a run that is resumed goes on
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, value])

    def path_of(self, name: str) -> Path:
        """The file of a name, as DeepSpeed names it."""
        return self._directory / (name.replace("/", "_").replace(" ", "_") + ".csv")

    def close(self) -> None:
        """Nothing is pending."""
