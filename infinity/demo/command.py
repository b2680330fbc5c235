"""``infinity train``: the demo trainer as a command. It was a script before, and still is: argparse reads its options."""

from __future__ import annotations

import contextlib
import io
import signal
import threading
from collections.abc import Iterator

import click

from infinity.demo.arguments import parse_arguments


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once: libraries turn a KeyboardInterrupt in their imports into an ImportError."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@click.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def train(arguments: tuple[str, ...]) -> int:
    """Train a byte-level Llama from NVMe, on your text."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            parsed = parse_arguments(arguments, "infinity train")
    except SystemExit as ended:  # becomes click's, with one line
        if ended.code:
            raise click.UsageError(told.getvalue().rpartition("error: ")[2].strip()) from None
        raise click.exceptions.Exit(0) from None
    with _ended_by_ctrl_c():
        try:
            from infinity.demo.train import main
        except ModuleNotFoundError as error:
            raise click.ClickException(f"it needs {error.name}: pip install 'infinity-offload[hf,plot]'") from error
    return main(parsed)
