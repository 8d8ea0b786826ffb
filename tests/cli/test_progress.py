"""Tests of the progress that `infinity train` shows to a person: what its lines say, and when they appear on
a terminal and where there is no terminal.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from rich.console import Console

from infinity.cli import training_run
from infinity.cli.command import Output
from infinity.cli.training_run import _progress, progress_line
from infinity.lm.loop import StepReport
from infinity.telemetry.stats import Edge, EdgeStats, Stats


def report(
    step: int,
    loss: float = 2.0,
    *,
    seconds: float = 0.5,
    tokens: int = 1000,
    moved: dict[Edge, int] | None = None,
    stall: float = 0.0,
) -> StepReport:
    """Make the report of a step of `seconds` seconds, of which `stall` seconds were waits for the disk.

    tokens: the number of tokens in the step. moved: edge, a way between two tiers in one direction -> bytes
    that were moved on it in the step.
    """
    edges = {edge: EdgeStats(bytes=(moved or {}).get(edge, 0)) for edge in Edge}
    edges[Edge.NVME_TO_HOST] = EdgeStats(
        bytes=edges[Edge.NVME_TO_HOST].bytes, transfers=1, stall_seconds=stall
    )
    stats = Stats(
        edges=edges,
        accesses=0,
        misses=0,
        steps=1,
        skipped_steps=0,
        confirmed_updates=0,
        undone_updates=0,
        seconds=seconds,
        update_seconds=0.0,
        compute_seconds=seconds,
        step_seconds=seconds,
        loss_scale=None,
        peaks={},
    )
    return StepReport(
        step=step, loss=loss, norm=1.0, learning_rate=1e-3, tokens=tokens, seconds=seconds, stats=stats
    )


class Elsewhere:
    """An output that writes to memory; `text` and `lines` have what was written.

    terminal: whether its console claims to be a terminal.
    """

    def __init__(self, *, terminal: bool = False) -> None:
        self._bytes = io.BytesIO()
        self._file = io.TextIOWrapper(self._bytes, encoding="utf-8", write_through=True)
        self.output = Output(argparse.Namespace(json=False))
        self.output.console = Console(file=self._file, force_terminal=terminal, width=200, color_system=None)

    @property
    def text(self) -> str:
        return self._bytes.getvalue().decode(self._file.encoding)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def shown(where: Elsewhere, numbers: Iterable[int], steps: int, done: int = 0) -> None:
    with _progress(where.output, steps, done) as show:
        for number in numbers:
            show(report(number))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock of the progress display: each reading is one second later than the one before."""
    ticks = itertools.count()
    monkeypatch.setattr(training_run, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))


def test_elsewhere_there_is_a_line_every_five_seconds(clock: None) -> None:
    where = Elsewhere()
    shown(where, range(1, 13), 12)
    assert [each.split("  ")[0] for each in where.lines] == [
        "step 1/12",
        "step 6/12",
        "step 11/12",
        "step 12/12",
    ]


def test_a_run_that_is_continued_begins_behind_the_steps_that_are_done(clock: None) -> None:
    where = Elsewhere()
    shown(where, range(7, 13), 12, done=6)
    assert [each.split("  ")[0] for each in where.lines] == ["step 7/12", "step 12/12"]


def test_what_a_line_says() -> None:
    moved = {Edge.NVME_TO_HOST: 10**9, Edge.HOST_TO_NVME: 2 * 10**8}
    assert progress_line(report(1, 3.25, tokens=2600, moved=moved, stall=0.125), 300) == (
        "step 1/300  loss 3.25  5.2k tok/s  read 2.0 GB/s  write 0.4 GB/s  stall 25%  eta 0:02:30"
    )
    assert "loss nan  " in progress_line(report(1, math.nan), 2)


def test_a_stall_is_never_more_than_all_of_the_time() -> None:
    assert "stall 100%" in progress_line(report(1, seconds=1.0, stall=7.0), 1)


def test_a_terminal_has_one_line_that_goes_away() -> None:
    where = Elsewhere(terminal=True)
    shown(where, [1, 2], 2)
    assert "step 2/2" in where.text
    assert where.text.count("\x1b[?25l") == where.text.count("\x1b[?25h") == 1
    assert where.text.endswith("\x1b[2K")  # the line is erased


def test_a_terminal_has_its_cursor_back_after_an_interrupt() -> None:
    where = Elsewhere(terminal=True)
    with pytest.raises(KeyboardInterrupt), _progress(where.output, 2, 0) as show:
        show(report(1))
        raise KeyboardInterrupt
    assert where.text.count("\x1b[?25h") == 1
