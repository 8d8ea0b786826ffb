"""Tests of the progress that `infinity train` shows to a person: what its lines say, and when they appear on
a terminal and where there is no terminal.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable

import pytest
from rich.console import Console

from infinity.cli import progress
from infinity.cli.progress import ProgressLine, curve, format_rate, format_seconds
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
    """A console that writes to memory; `text` and `lines` have what was written.

    terminal: whether the console claims to be a terminal.
    """

    def __init__(self, encoding: str = "utf-8", *, terminal: bool = False) -> None:
        self._bytes = io.BytesIO()
        self._file = io.TextIOWrapper(self._bytes, encoding=encoding, write_through=True)
        self.console = Console(file=self._file, force_terminal=terminal, width=200, color_system=None)

    @property
    def text(self) -> str:
        return self._bytes.getvalue().decode(self._file.encoding)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def shown(reports: Iterable[StepReport], steps: int, encoding: str = "utf-8") -> list[str]:
    where = Elsewhere(encoding)
    with ProgressLine(where.console, steps) as line:
        for each in reports:
            line.show(each)
    return where.lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock of the progress display: each reading is one second later than the one before."""
    ticks = itertools.count()
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(ticks)))


def test_elsewhere_there_is_a_line_every_five_seconds(clock: None) -> None:
    lines = shown([report(step) for step in range(1, 13)], 12)
    assert [line.split("  ")[0] for line in lines] == ["step 1/12", "step 6/12", "step 11/12", "step 12/12"]


def test_what_a_line_says() -> None:
    moved = {Edge.NVME_TO_HOST: 10**9, Edge.HOST_TO_NVME: 2 * 10**8}
    assert shown([report(1, 3.25, tokens=2600, moved=moved, stall=0.125)], 3) == [
        "step 1/3  loss 3.25  ▇  5.2k tok/s  read 2.0 GB/s  write 0.4 GB/s  stall 25%  eta 0:01"
    ]


def test_a_run_that_is_continued_begins_behind_the_steps_that_are_done(clock: None) -> None:
    where = Elsewhere()
    with ProgressLine(where.console, 12, done=6) as line:
        for step in range(7, 13):
            line.show(report(step, seconds=100.0 if step == 7 else 1.0))
    assert [each.split("  ")[0] for each in where.lines] == ["step 7/12", "step 12/12"]
    assert "1.0k tok/s" in where.lines[-1]  # the first step of the process is in no average


def test_without_unicode_there_is_no_curve() -> None:
    line = shown([report(1)], 3, "ascii")[0]
    assert line == "step 1/3  loss 2.00  2.0k tok/s  stall 0%  eta 0:01"


def test_the_first_step_is_in_no_average_once_there_is_a_second() -> None:
    lines = shown([report(1, seconds=100.0), report(2, seconds=1.0)], 2)
    assert "10 tok/s" in lines[0]
    assert "1.0k tok/s" in lines[1]


def test_the_time_left_follows_what_steps_take_now(clock: None) -> None:
    reports = [report(1, seconds=9.0), report(2, seconds=1.0)]
    reports += [report(step, seconds=2.0) for step in range(3, 12)]
    # Step 11: nine steps of 2 s after one of 1 s, and 100 to go.
    expected = 2 - 0.8**9
    assert shown(reports, 111)[-1].endswith(f"eta {format_seconds(100 * expected)}")


def test_a_stall_is_never_more_than_all_of_the_time() -> None:
    assert "stall 100%" in shown([report(1, seconds=1.0, stall=7.0)], 1)[0]


def test_a_loss_that_is_no_number_is_shown() -> None:
    lines = shown([report(1, 2.0), report(2, math.nan)], 2)
    assert "loss nan  ▇▇" in lines[1]


def test_a_terminal_has_one_line_that_goes_away() -> None:
    where = Elsewhere(terminal=True)
    with ProgressLine(where.console, 2) as line:
        line.show(report(1))
        line.show(report(2))
    assert "step 2/2" in where.text
    assert where.text.count("\x1b[?25l") == where.text.count("\x1b[?25h") == 1
    assert where.text.endswith("\x1b[2K")  # the line is erased


def test_a_terminal_has_its_cursor_back_after_an_interrupt() -> None:
    where = Elsewhere(terminal=True)
    with pytest.raises(KeyboardInterrupt), ProgressLine(where.console, 2) as line:
        line.show(report(1))
        raise KeyboardInterrupt
    assert where.text.count("\x1b[?25h") == 1


@pytest.mark.parametrize(
    ("losses", "bars"),
    [
        ([2.0], "▇"),
        ([2.0, 2.0], "▇▇"),
        ([4.0, 1.0], "▇▁"),
        ([4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0], "▇▆▅▄▃▂▁"),
        ([float(each) for each in range(11)], "▁▂▂▃▃▄▅▅▆▆▇"),
        ([1.0, math.nan], "▇▇"),
        ([3.0, 1.0, math.nan], "▇▁▇"),
        ([math.nan, 1.0, 3.0, math.inf], "▇▁▇▇"),
        ([1.0, math.inf], "▇▇"),
        ([math.nan], "▇"),
    ],
)
def test_a_curve(losses: list[float], bars: str) -> None:
    assert curve(losses) == bars


@pytest.mark.parametrize("count", [12, 22, 23, 1000])
def test_a_long_curve_has_eleven_bars_of_all_losses(count: int) -> None:
    bars = curve([float(-each) for each in range(count)])
    assert len(bars) == 11
    assert bars[0] == "▇"
    assert bars[-1] == "▁"
    assert list(bars) == sorted(bars, reverse=True)


def test_numbers_for_people() -> None:
    assert [format_rate(each) for each in (0.4, 812.3, 999.0, 1000.0, 5149.0, 1.2e6)] == [
        "0",
        "812",
        "999",
        "1.0k",
        "5.1k",
        "1200.0k",
    ]
    assert [format_seconds(each) for each in (0.0, 0.4, 59.6, 118.0, 3599.4, 3600.0, 90061.0)] == [
        "0:00",
        "0:00",
        "1:00",
        "1:58",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]
