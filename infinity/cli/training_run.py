"""Training run: what happens between the plan and the results that `infinity train` prints."""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape

from infinity.build import carry_out
from infinity.checkpoint.export import check_export
from infinity.cli.commits import EVERY, Commits, Kept
from infinity.cli.job import Job
from infinity.cli.progress import ProgressLine
from infinity.cli.ranks import ending_together, leads, run_ranks
from infinity.cli.signals import StopFlag, Stopped
from infinity.cli.step_log import write_step
from infinity.lm.loop import (
    HeldOut,
    StepReport,
    Training,
    do_nothing,
    evaluation_batches,
    generate,
    sample_tokens,
)
from infinity.runtime import Runtime
from infinity.system import machine
from infinity.telemetry.timeline import Timeline

_TEMPERATURE = 0.7
_LONGEST_PROMPT = 60
"""Greatest number of bytes in the prompt that the model continues in the sample at the end of a run."""
_WARM_UP = 2
"""Number of steps at the start of a run that the measured time of a step leaves out. They are not typical:
the order of pages is not known yet, or there are no moments to read."""


@dataclass
class Outcome:
    """The results of a run, as far as it has come."""

    before: float | None = None
    """Held-out loss before training, in nats per token; None if the run was stopped before."""
    after: float | None = None
    """Held-out loss after training; None if the run was stopped."""
    reports: list[StepReport] = field(default_factory=list)
    """The reports of this process's steps."""
    peak: int = 0
    """Peak bytes of RAM that the process used beyond its use before the model was filled."""
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes moved, by direction between two tiers, such as "nvme->host"."""
    sample: str | None = None
    exported: str | None = None
    timeline: str | None = None
    """Text to print about the file to which the timeline was written; None if no timeline was recorded."""
    stopped: signal.Signals | None = None
    """The signal that has stopped the run; None if it has come to its end."""
    kept: Kept | None = None
    """The commit that stays; None if there is none."""

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step, the first two steps left out; None if there was no step."""
        measured = self.reports[_WARM_UP:] or self.reports[-1:]
        return statistics.median(each.seconds for each in measured) if measured else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of a step by its median seconds; None if there was no step."""
        return self.reports[0].tokens / self.step_seconds if self.step_seconds else None


def carry_out_job(
    job: Job, options: argparse.Namespace, console: Console, log: TextIO | None, timeline: Timeline | None
) -> Outcome:
    """Fill the model, train it, evaluate and export it. Returns the results.

    With commits the first SIGTERM or SIGINT during the training or the evaluation ends the run after a commit
    of the last finished step; `Outcome.stopped` is the signal then. log, timeline: of --log and --trace.
    """
    machine.restart_peak()
    base = machine.process_memory().resident
    with console.status("filling the model"):
        runtime = carry_out(
            job.plan,
            job.language_model.model,
            job.optimizer,
            budget=job.budget,
            weights=None if job.resumed is not None else job.language_model.weights,
            checkpoint=job.checkpoint,
            communicator=job.communicator,
        )
    with runtime, ending_together(job.communicator, options):
        if options.export is not None:  # before the long run, and when the pages have taken their room
            check_export(runtime._source(), options.export)
        commits = None
        if job.checkpoint is not None:
            step = None if job.resumed is None else job.resumed["step"]
            every = options.every or EVERY
            commits = Commits(runtime, console, every=every, identity=job.identity, step=step)
        run = _Run(job, runtime, commits=commits, console=console, log=log, timeline=timeline)
        outcome = run.work()
        outcome.peak = machine.process_memory().peak - base
        if options.export is not None and outcome.stopped is None:
            with console.status(f"exporting to {escape(options.export)}"):
                runtime.export(options.export)
                job.language_model.vocabulary.save(options.export)
            outcome.exported = options.export
        outcome.moved = {edge.value: each.bytes for edge, each in runtime.stats.edges.items()}
        outcome.timeline = None if timeline is None else _fate(timeline)
    return outcome


class _Run:
    """A run of a job by its runtime, and what is known of it so far."""

    def __init__(
        self,
        job: Job,
        runtime: Runtime,
        *,
        commits: Commits | None,
        console: Console,
        log: TextIO | None,
        timeline: Timeline | None,
    ) -> None:
        self._job = job
        self._runtime = runtime
        self._commits = commits
        self._console = console
        self._log = log
        self._timeline = timeline
        self._flag = StopFlag()
        self._ranks = ranks = run_ranks(job.communicator)
        # Several ranks stop together, after a step.
        between = None if commits is None or ranks.ranks > 1 else self._flag.check
        self._training = Training(
            job.language_model, runtime, job.batches, job.recipe, between=between, ranks=ranks
        )
        count = self._begin() or evaluation_batches(job.language_model.parameters, job.batches.tokens)
        self._held_out = HeldOut(job.language_model, job.batches, job.device, count=count, ranks=ranks)
        self.outcome = Outcome()

    def work(self) -> Outcome:
        """Do everything, or as much as is possible before a signal; returns the results so far."""
        if self._commits is None:
            self._work()
            return self.outcome
        with self._flag.installed():
            try:
                try:
                    self._work()
                except Stopped:
                    self._training.undo()
                    self.outcome.stopped = self._flag.signal
                with self._console.status(f"committing step {self._training.step}"):
                    self._commits.finish(self._state())
                self.outcome.kept = self._commits.kept()
            except KeyboardInterrupt:  # the second signal
                self._runtime._abandon()
                raise
        return self.outcome

    def _work(self) -> None:
        between, job = do_nothing if self._commits is None else self._check_stopped, self._job
        if job.resumed is None:
            with self._console.status("loss on held-out text"):
                self.outcome.before = self._held_out.loss(between=between)
        else:
            self.outcome.before = job.resumed["held_out"]["loss"]
        self._train()
        with self._console.status("loss on held-out text, and a sample"):
            self.outcome.after = self._held_out.loss(between=between)
            if leads():  # the other ranks serve pages until this one closes its runtime
                self.outcome.sample = self._sample()

    def _train(self) -> None:
        timeline, training, steps = self._timeline, self._training, self._job.recipe.steps
        recording = contextlib.nullcontext() if timeline is None else self._runtime.timeline(timeline)
        with ProgressLine(self._console, steps, done=training.step) as line, recording:
            for report in training.steps():
                self.outcome.reports.append(report)
                line.show(report)
                write_step(self._log, report)
                if timeline is not None:
                    timeline.annotate(loss=report.loss, norm=report.norm, tokens=report.tokens)
                if self._commits is not None:
                    self._commits.after_step(self._state(), last=report.step == steps)
                    if self._ranks.ranks > 1:
                        self._check_stopped()

    def _check_stopped(self) -> None:
        """Raise Stopped on all ranks if a signal has arrived on one of them. All ranks call this."""
        if self._ranks.ranks > 1:
            heard = self._ranks.gather("whether to stop", int(self._flag.signal or 0))
            arrived = [each for each in heard if each]
            if not arrived:
                return  # one that has come meanwhile is still to be told to the others
            if self._flag.signal is None:
                self._flag.signal = signal.Signals(arrived[0])
        self._flag.check()

    def _begin(self) -> int | None:
        """Go on where the commit that is continued was made. Returns the number of its held-out batches."""
        resumed = self._job.resumed
        if resumed is None:
            return None
        self._runtime.load()
        self._training.continue_from(resumed)
        batches: int = resumed["held_out"]["batches"]
        return batches

    def _state(self) -> Mapping[str, Any]:
        """What is saved with a commit: a later process goes on with it."""
        held_out = {"loss": self.outcome.before, "batches": self._held_out.count}
        return {**self._training.state(), "held_out": held_out}

    def _sample(self) -> str:
        """Let the model continue the beginning of a line of held-out text.

        Returns that beginning and the continuation, as one text.
        """
        job, text = self._job, self._job.text
        stretch = text.read(text.held_out.start, min(4096, len(text.held_out)))
        lines = [line for line in stretch.split(b"\n")[1:-1] if line.strip()]
        prompt = (lines or [b""])[0][:_LONGEST_PROMPT].decode("utf-8", errors="ignore")
        return generate(
            job.language_model,
            prompt,
            tokens=sample_tokens(job.language_model.parameters),
            temperature=_TEMPERATURE,
            seed=0,
            device=job.device,
            between=self._flag.check,
        )


def _fate(timeline: Timeline) -> str:
    if timeline.failure is not None:
        return f"the timeline broke off: {timeline.failure.cause}"
    return f"timeline in {timeline.path}"
