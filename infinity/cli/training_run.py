"""Training run: the work of `infinity train` after planning: training, progress, log, commits and signals."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import stat
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TextIO

import torch
from rich.progress import BarColumn, Progress, TextColumn

from infinity.build import carry_out
from infinity.checkpoint.export import check_export
from infinity.cli.command import Output, StopFlag, Stopped, ending_together
from infinity.cli.job import TrainJob
from infinity.errors import StorageFull, storage_errors
from infinity.lm.decoder import Decoder, DecoderConfig
from infinity.lm.loop import (
    HeldOut,
    StepReport,
    Training,
    evaluation_batches,
    generate,
    sample_tokens,
)
from infinity.pages.ledger import Commit
from infinity.planning.budgets import format_count
from infinity.runtime import Runtime
from infinity.system import machine
from infinity.telemetry.stats import Edge
from infinity.telemetry.timeline import Timeline

_TEMPERATURE = 0.7
_LONGEST_PROMPT = 60
"""Bytes of the text that the model continues at the end of a run."""
_WARM_UP = 2
"""Number of first steps that are not timed: the order of pages is not known yet, or there are no moments."""
_SECONDS_BETWEEN_LINES = 5.0
_EDGES = {
    Edge.NVME_TO_HOST: "read",
    Edge.HOST_TO_NVME: "write",
    Edge.HOST_TO_DEVICE: "up",
    Edge.DEVICE_TO_HOST: "down",
}


def carry_out_job(
    job: TrainJob, options: argparse.Namespace, out: Output, log: TextIO | None, timeline: Timeline | None
) -> TrainingRun:
    """Fill the model, train it, evaluate and export it. Returns the run with its results.

    With commits the first SIGTERM or SIGINT during the training or the evaluation ends the run, after a
    commit of the last finished step. `TrainingRun.stopped` is then that signal.
    """
    _load_operators(job)
    machine.restart_peak()
    base = machine.process_memory().resident
    started = time.perf_counter()
    with out.console.status("filling the model"):
        runtime = carry_out(
            job.plan,
            job.language_model.model,
            job.optimizer,
            budget=job.budget,
            weights=None if job.resumed is not None else job.language_model.weights,
            checkpoint=job.checkpoint,
            ranks=job.ranks,
        )
    with runtime, ending_together(job.ranks, options):
        filled = f"the model was filled in {time.perf_counter() - started:.1f} s"
        out.say(" · ".join(each for each in (filled, runtime.plan.pinned) if each))
        if options.export is not None:  # before the long run, and when the pages have taken their room
            check_export(runtime._source(), options.export)
        run = TrainingRun(job, runtime, out, log, timeline)
        run.work()
        run.peak = machine.process_memory().peak - base
        if options.export is not None and run.stopped is None:
            with out.console.status("exporting"):
                runtime.export(options.export)
                job.language_model.vocabulary.save(options.export)
            run.exported = options.export
        run.moved = {edge.value: each.bytes for edge, each in runtime.stats.edges.items()}
    return run


def _load_operators(job: TrainJob) -> None:
    """Run a step of a tiny decoder, so that torch loads some 20 MiB of code and buffers before the memory
    that the model takes is measured.
    """
    with torch.random.fork_rng(devices=[]):
        tiny = Decoder(DecoderConfig(width=32, layers=1, heads=2, hidden=64))
        tiny.to(device=job.device, dtype=job.plan.precision.compute_dtype)
        tokens = torch.zeros(1, 32, dtype=torch.int64, device=job.device)
        tiny(tokens, tokens).backward()


class TrainingRun:
    """Trains and evaluates the model of a job with its runtime, and holds the results so far."""

    def __init__(
        self, job: TrainJob, runtime: Runtime, out: Output, log: TextIO | None, timeline: Timeline | None
    ) -> None:
        self._job, self._runtime = job, runtime
        self._out, self._log, self._timeline = out, log, timeline
        self._flag = StopFlag()
        self._commits = job.checkpoint is not None
        self._commit: Commit | None = None
        self._committed: int | None = None if job.resumed is None else job.resumed["step"]
        """The step of the last commit, pending or durable; None if there is none."""
        self._ranks = job.ranks
        model, batches = job.language_model, job.batches
        self._training = Training(model, runtime, batches, job.recipe, job.ranks)
        count = evaluation_batches(model.parameters, batches.tokens)
        if job.resumed is not None:
            runtime.load()
            self._training.continue_from(job.resumed)
            count = job.resumed["held_out"]["batches"]
        self._held_out = HeldOut(model, batches, job.device, count=count, ranks=job.ranks)
        self.before: float | None = None
        self.after: float | None = None
        """Held-out loss before and after training, in nats per token; None if the run was stopped earlier."""
        self.reports: list[StepReport] = []
        self.peak = 0
        """Peak bytes of RAM that the process used, less those in use before the model was filled."""
        self.moved: dict[str, int] = {}
        """Bytes moved, by direction between two tiers, such as "nvme->host"."""
        self.sample: str | None = None
        self.exported: str | None = None
        self.stopped: signal.Signals | None = None
        """The signal that has stopped the run; None if it was not stopped."""
        self.kept: dict[str, Any] | None = None
        """The last commit, which stays on disk, as a dict for --json; None without commits."""

    @property
    def step(self) -> int:
        """Number of finished steps, including those of an earlier process."""
        return self._training.step

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step, without the first two steps; None if there was no step."""
        measured = self.reports[_WARM_UP:] or self.reports[-1:]
        return statistics.median(each.seconds for each in measured) if measured else None

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens of one step divided by the median seconds of a step; None if there was no step."""
        return self.reports[0].tokens / self.step_seconds if self.step_seconds else None

    def work(self) -> None:
        """Train and evaluate. With commits, a signal ends this early."""
        if not self._commits:
            self._work()
            return
        with self._flag.installed():
            try:
                try:
                    self._work()
                except Stopped:
                    self.stopped = self._flag.signal
                with self._out.console.status(f"committing step {self.step}"):
                    self._finish_commits()
            except KeyboardInterrupt:  # the second signal
                self._runtime._abandon()
                raise

    def _work(self) -> None:
        status, resumed = self._out.console.status, self._job.resumed
        if resumed is None:
            with status("loss on held-out text"):
                self.before = self._held_out.loss(between=self._check_stopped)
        else:
            self.before = resumed["held_out"]["loss"]
        self._train()
        with status("loss on held-out text, and a sample"):
            self.after = self._held_out.loss(between=self._check_stopped)
            if self._ranks.share.rank == 0:  # the others serve pages until this one closes its runtime
                self.sample = self._sample()

    def _train(self) -> None:
        timeline, steps = self._timeline, self._job.recipe.steps
        recording = contextlib.nullcontext() if timeline is None else self._runtime.timeline(timeline)
        with _progress(self._out, steps, self.step) as show, recording:
            for report in self._training.steps():
                self.reports.append(report)
                show(report)
                write_step(self._log, report)
                if timeline is not None:
                    timeline.annotate(loss=report.loss, norm=report.norm, tokens=report.tokens)
                if self._commits and (report.step == steps or report.step % self._job.every == 0):
                    self._save()
                self._check_stopped()

    def _check_stopped(self) -> None:
        """Raise Stopped on all ranks if a signal has arrived on one of them. All ranks call this."""
        if not self._commits:
            return
        heard = self._ranks.gather("whether to stop", int(self._flag.signal or 0))
        arrived = [each for each in heard.values() if each]
        if arrived:  # a signal that has come since the call is told at the next one
            self._flag.signal = self._flag.signal or signal.Signals(arrived[0])
            self._flag.check()

    def _save(self) -> None:
        """Begin a commit of the last finished step, with the state from which a later process continues."""
        held_out = {"loss": self.before, "batches": self._held_out.count}
        state = {**self._training.state(), "held_out": held_out}
        try:
            self._commit = self._runtime._commit(state, identity=self._job.identity)
        except StorageFull as error:  # of the commit before, which has left this run as it was
            self._out.say(f"A commit failed, and training goes on: {error}")
            self._commit = self._runtime._commit(state, identity=self._job.identity)
        self._committed = self.step

    def _finish_commits(self) -> None:
        """Make the commit of the last finished step durable, and describe it in `kept`. Raises StorageError
        if that fails; the previous commit then stays.
        """
        if self.step not in (0, self._committed):
            self._save()
        if self._commit is not None:
            self._commit.wait()
        if self._committed is None:
            return
        parts = self._runtime._components
        assert parts.checkpoint is not None and parts.committer is not None and parts.store.nvme is not None
        tier = parts.checkpoint.streamed_from or parts.store.nvme
        slabs = {str(slab.path): slab.nbytes for slab in tier.slabs}
        self.kept = {
            "generation": parts.committer.generation,
            "step": self._committed,
            "directory": str(parts.checkpoint.directory),
            "bytes": sum(slabs.values()),
            "slabs": slabs,
        }

    def _sample(self) -> str:
        """The beginning of a line of held-out text and the model's continuation, as one text."""
        job, text = self._job, self._job.text
        stretch = text.read(text.held_out.start, min(4096, len(text.held_out)))
        lines = [line for line in stretch.split(b"\n")[1:-1] if line.strip()]
        return generate(
            job.language_model,
            (lines or [b""])[0][:_LONGEST_PROMPT].decode("utf-8", errors="ignore"),
            tokens=sample_tokens(job.language_model.parameters),
            temperature=_TEMPERATURE,
            seed=0,
            device=job.device,
            between=self._flag.check,
        )


# --- progress ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(out: Output, steps: int, done: int) -> Iterator[Callable[[StepReport], None]]:
    """Context with a function that shows a finished step. On a terminal it redraws one line; elsewhere it
    prints a line at the first and the last step, and at most every five seconds between them. done: steps of
    an earlier process.
    """
    console, printed = out.console, -math.inf
    columns = BarColumn(bar_width=20), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("the first step", total=steps, completed=done)

        def show(report: StepReport) -> None:
            nonlocal printed
            line, now = progress_line(report, steps), time.monotonic()
            bar.update(task, completed=report.step, description=line)
            due = report.step in (done + 1, steps) or now - printed >= _SECONDS_BETWEEN_LINES
            if due and not console.is_terminal:
                printed = now
                out.say(line)

        yield show


def progress_line(report: StepReport, steps: int) -> str:
    """The progress as one line: the step, the loss, tokens and bytes between tiers per second, the fraction
    of the step in which training waited for transfers, and the time left if all further steps take as long.
    """
    stats = report.stats
    rates = {name: stats.edges[edge].bytes / stats.seconds / 1e9 for edge, name in _EDGES.items()}
    return "  ".join(
        [
            f"step {report.step}/{steps}",
            f"loss {report.loss:.2f}",
            f"{format_count(round(report.tokens / report.seconds))} tok/s",
            *(f"{name} {rate:.1f} GB/s" for name, rate in rates.items() if rate),
            f"stall {min(1.0, stats.stall_seconds / stats.seconds):.0%}",
            f"eta {timedelta(seconds=round((steps - report.step) * report.seconds))}",
        ]
    )


# --- the log of steps -------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_log(path: str | None, *, after: int | None = None) -> Iterator[TextIO | None]:
    """Context with the log file of a run; None if `path` is None.

    after: the step after which the run continues; lines of later steps are cut off. None: a new run, for
    which the file is emptied. Raises StorageError if the file cannot be opened or cut.
    """
    if path is None:
        yield None
        return
    with storage_errors("open", path):
        log = open(path, "w" if after is None else "a", encoding="utf-8")  # noqa: SIM115 (closed below)
    try:
        if after is not None and stat.S_ISREG(os.fstat(log.fileno()).st_mode):
            with storage_errors("cut", path), open(path, "rb") as lines:
                kept = itertools.takewhile(lambda line: _is_kept(line, after), lines)
                log.truncate(sum(map(len, kept)))
        yield log
    finally:
        with contextlib.suppress(OSError):  # a line that could not be written has raised already
            log.close()


def _is_kept(line: bytes, last: int) -> bool:
    """Whether a line of a log is complete, and describes a step up to `last`."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # such as a line that a crash tore
        return False
    step = found.get("step") if isinstance(found, dict) else None
    return isinstance(step, int) and step <= last and line.endswith(b"\n")


def write_step(log: TextIO | None, report: StepReport) -> None:
    """Write a step as one line of JSON, and flush it, so that a reader of the file sees whole steps."""
    if log is None:
        return
    line = {
        "step": report.step,
        "loss": finite(report.loss),
        "norm": finite(report.norm),
        "lr": report.learning_rate,
        "tokens": report.tokens,
        "seconds": report.seconds,
        "stall_seconds": report.stats.stall_seconds,
        "bytes": {edge.value: each.bytes for edge, each in report.stats.edges.items()},
    }
    with storage_errors("write", log.name):
        log.write(json.dumps(line) + "\n")
        log.flush()


def finite(number: float | None) -> float | None:
    """Return `number`, or None if it is NaN or infinite, which JSON cannot express."""
    return number if number is not None and math.isfinite(number) else None
