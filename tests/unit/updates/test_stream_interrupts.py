"""KeyboardInterrupts in the training thread while it deals with updates and units: nothing is left half done."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from types import CodeType

import torch

from infinity.device.compute import ComputeDevice
from infinity.threads import interrupts
from infinity.units import parameter, unit
from infinity.units.parameter import PagedParameter, ResidentParameter
from infinity.units.unit import Unit
from infinity.updates import job as update_job
from infinity.updates import stream as update
from swapper.sync import bell
from tests.interrupts import Interrupt, is_cut_off
from tests.unit.stage import trainable_unit
from tests.unit.updates.slow_stream import WAIT_SECONDS, SlowStream, slow_stream

_UPDATES = {Path(str(module.__file__)) for module in (update, update_job, bell, threading)}
_UNITS = {Path(str(module.__file__)) for module in (unit, parameter, interrupts)}


def _has_to_do_with_updates(code: CodeType) -> bool:
    return Path(code.co_filename) in _UPDATES


def _has_to_do_with_units(code: CodeType) -> bool:
    return Path(code.co_filename) in _UNITS


def _update(bench: SlowStream, interrupt: Interrupt) -> None:
    with interrupt:
        job = bench.job(bench.units[0], {0: 1.0})
        job.is_held = True
        bench.stream.submit(job)
        job.promote()
        job.wait()
        bench.stream.drain()


def test_an_interrupt_anywhere_leaves_the_stream_at_work() -> None:
    """It takes no lock with it that the stream's thread needs to tell what is done."""
    with slow_stream(torch.float32, num_pages=4) as bench:
        counted = Interrupt(_has_to_do_with_updates)
        _update(bench, counted)
        num_interrupts = 0
        for point in counted.points:
            interrupt = Interrupt(_has_to_do_with_updates, point)
            num_interrupts += is_cut_off(functools.partial(_update, bench, interrupt), interrupt)
            rest = threading.Thread(target=bench.stream.drain, daemon=True)
            rest.start()
            rest.join(WAIT_SECONDS)
            assert not rest.is_alive(), f"after an interrupt in {interrupt.where}"
            assert not bench.stream.pending()
        assert num_interrupts > 20


def _bind_and_unbind(opened: Unit, interrupt: Interrupt) -> None:
    with interrupt:
        opened.bind()
        opened.unbind()


def test_an_interrupt_anywhere_leaves_a_unit_bound_or_not() -> None:
    """Not bound in part: some parameters would look at memory that is no longer theirs, or have none."""
    opened = trainable_unit(0, [(3, 5), (7,), (2,)])
    opened.adopt(ComputeDevice().allocate_flat(opened.num_bytes))
    counted = Interrupt(_has_to_do_with_units)
    _bind_and_unbind(opened, counted)
    num_interrupts = 0
    for point in counted.points:
        interrupt = Interrupt(_has_to_do_with_units, point)
        num_interrupts += is_cut_off(functools.partial(_bind_and_unbind, opened, interrupt), interrupt)
        expected = ResidentParameter if opened.is_bound else PagedParameter
        assert {type(parameter) for parameter in opened.parameters} == {expected}, interrupt.where
        opened.unbind()
        assert opened.flat is not None and not opened.flat.has_views, interrupt.where
    assert num_interrupts > 10
