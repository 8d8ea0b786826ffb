"""Progress of a run: one line, which is redrawn on a terminal and printed every few seconds elsewhere."""

from __future__ import annotations

import itertools
import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from infinity.lm.loop import StepReport
from infinity.telemetry.stats import Edge

_BARS = "▁▂▃▄▅▆▇"
_LOSSES = 11
"""Greatest number of bars in the curve of losses."""
_SECONDS_BETWEEN_LINES = 5.0
_MEMORY = 0.8
"""Weight of the old value in a moving average; the newest step's value has the remaining 0.2."""
_EDGES = {
    Edge.NVME_TO_HOST: "read",
    Edge.HOST_TO_NVME: "write",
    Edge.HOST_TO_DEVICE: "up",
    Edge.DEVICE_TO_HOST: "down",
}


class ProgressLine:
    """Shows the progress of a run in one line, inside a `with` statement.

    The line has the step, the loss and its curve, tokens per second, bytes per second between tiers, the
    share of time in which training waited for transfers, and the time left. On a terminal the line is
    redrawn at every step. Elsewhere it is printed at the first and the last step, and every five seconds.
    console: where the line is shown. steps: number of steps of the whole run. done: number of those that an
    earlier process has finished.
    """

    def __init__(self, console: Console, steps: int, *, done: int = 0) -> None:
        self._console = console
        self._steps = steps
        self._first = done + 1
        self._losses: list[float] = []
        self._rates: dict[str, float] = {}
        self._seconds = 0.0
        self._printed = -_SECONDS_BETWEEN_LINES
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=20), TextColumn("{task.description}"), console=console, transient=True
            )
            self._task = self._bar.add_task("the first step", total=steps, completed=done)

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, report: StepReport) -> None:
        """Put a step that has just finished into the line.

        A terminal's line is redrawn. Elsewhere the line is printed at the first and the last step, and if
        five seconds have passed.
        """
        self._losses.append(report.loss)
        self._average(report)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=self._line(report))
            return
        now = time.monotonic()
        if report.step in (self._first, self._steps) or now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            self._console.print(self._line(report), highlight=False, soft_wrap=True)

    def _average(self, report: StepReport) -> None:
        """Update the moving averages of rates and of the seconds of a step by the figures of one step.

        The second step's figures replace those of the first step. The first step is slower because the order
        in which pages are used is not known yet.
        """
        step = report.stats  # the first step's statistics begin when the model was filled
        now = {edge.value: step.edges[edge].bytes / step.seconds for edge in Edge}
        now["tokens"] = report.tokens / report.seconds
        now["stall"] = min(1.0, step.stall_seconds / step.seconds)
        keep = _MEMORY if report.step > self._first + 1 else 0.0
        self._rates = {key: keep * self._rates.get(key, 0.0) + (1 - keep) * now[key] for key in now}
        self._seconds = keep * self._seconds + (1 - keep) * report.seconds

    def _line(self, report: StepReport) -> str:
        rates = self._rates
        parts = [f"step {report.step}/{self._steps}", f"loss {report.loss:.2f}"]
        if "utf" in (self._console.encoding or "").lower():
            parts.append(curve(self._losses))
        parts.append(f"{format_rate(rates['tokens'])} tok/s")
        parts += [
            f"{name} {rates[edge.value] / 1e9:.1f} GB/s" for edge, name in _EDGES.items() if rates[edge.value]
        ]
        parts.append(f"stall {rates['stall']:.0%}")
        parts.append(f"eta {format_seconds((self._steps - report.step) * self._seconds)}")
        return "  ".join(parts)


def curve(losses: list[float]) -> str:
    """A curve of all losses, as at most 11 bars.

    The losses are divided into equal stretches, and a bar shows the mean of a stretch. Heights are scaled
    from the lowest to the highest mean. A mean that is NaN or infinite, which fp16 can give, is drawn as high
    as the highest.
    """
    count = min(_LOSSES, len(losses))
    cuts = [len(losses) * index // count for index in range(count + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low == high:
        return _BARS[-1] * count
    heights = [(mean - low) / (high - low) if math.isfinite(mean) else 1.0 for mean in means]
    return "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)


def format_rate(rate: float) -> str:
    """A rate as short text: "5.1k" for 5100, "812" for 812."""
    return f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}"


def format_seconds(seconds: float) -> str:
    """A duration in minutes and seconds, such as "1:58", preceded by hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
