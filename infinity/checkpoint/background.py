"""A save that goes on in a thread of its own while the model is trained.

Knows the thread and its error; must not know what is saved.
"""

from __future__ import annotations

import threading

from infinity.checkpoint.training_checkpoint import Saving


class BackgroundSave:
    """Runs one `Saving`. The interpreter does not end before it has."""

    def __init__(self, saving: Saving) -> None:
        self._error: BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(saving,), name="infinity-checkpoint").start()

    def _run(self, saving: Saving) -> None:
        try:
            saving.run()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return self._over.is_set()

    def wait(self) -> None:
        """Return when it is over."""
        self._over.wait()

    def raise_error(self) -> None:
        """Raise what went wrong, if anything has."""
        if self._error is not None:
            raise self._error
