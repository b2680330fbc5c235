"""The log of a run: one line for each step and for each thing that happened to it, written and read.

Knows records and files; must not know engines, nor what is shown of a run.
"""

from infinity.run_log.notes import RunNotes
from infinity.run_log.reader import Mark, Run, RunReader, read_run, showing
from infinity.run_log.writer import RunLog

__all__ = ["Mark", "Run", "RunLog", "RunNotes", "RunReader", "read_run", "showing"]
