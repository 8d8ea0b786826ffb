"""Command `infinity train`: trains a language model on real text, within budgets of device, RAM and NVMe."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape

from infinity import __version__
from infinity.build import carry_out
from infinity.checkpoint.atomic_directory import check_destination
from infinity.cli.job import Job, add_options, show_job
from infinity.cli.progress import ProgressLine, format_seconds
from infinity.config import format_size
from infinity.errors import storage_errors
from infinity.lm.sample import generate
from infinity.lm.training import HeldOut, StepReport, train
from infinity.system import machine
from infinity.telemetry.timeline import Timeline

_HELD_OUT_SECONDS = 10.0
_SAMPLE_SECONDS = 10.0
_SAMPLE_TOKENS = 200
_TEMPERATURE = 0.7
_LONGEST_PROMPT = 60
"""Greatest number of bytes in the prompt that the model continues in the sample at the end of a run."""
_WARM_UP = 2
"""Number of steps at the start of a run that the measured time of a step leaves out. They are not typical:
the order of pages is not known yet, or there are no moments to read."""


def add_parser(subparsers: Any) -> None:
    """Add `train` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a language model on real text, wherever its states fit",
        description="Train a decoder-only transformer on text, after printing the plan. Pages that do not "
        "fit the device go to RAM, and pages that do not fit there go to the directories of --budget-nvme.",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train the model that the options describe, and print the progress and the results. Returns 0."""
    started = time.monotonic()
    console = Console(stderr=options.json)
    if options.export is not None:
        check_destination(options.export)
    # Before the plan: a file that cannot be written is refused at once.
    with contextlib.nullcontext() if options.trace is None else Timeline(options.trace) as timeline:
        job = show_job(options, console)
        console.print()
        with _open_log(options.log) as log:
            outcome = _train(job, console, log, options.export, timeline)
    _print(console, job, outcome, time.monotonic() - started)
    if options.json:
        print(json.dumps(_summary(job, outcome, time.monotonic() - started)))
    return 0


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The results of a run."""

    before: float
    """Held-out loss before training, in nats per token."""
    after: float
    losses: list[float]
    step_seconds: float
    """Median seconds of a step, the first two steps left out."""
    tokens_per_second: float
    peak: int
    """Peak bytes of RAM that the process used beyond its use before the model was filled."""
    moved: dict[str, int]
    """Bytes moved, by direction between two tiers, such as "nvme->host"."""
    sample: str
    exported: str | None
    timeline: str | None
    """Text to print about the file to which the timeline was written; None if no timeline was recorded."""


def _train(
    job: Job, console: Console, log: TextIO | None, export: str | None, timeline: Timeline | None
) -> _Outcome:
    language_model = job.language_model
    machine.restart_peak()
    base = machine.process_memory().resident
    with console.status("filling the model"):
        runtime = carry_out(
            job.plan, language_model.model, job.optimizer, budget=job.budget, weights=language_model.weights
        )
    reports: list[StepReport] = []
    with runtime:
        if export is not None:  # checked again before the long run: the log or the pages may lie there now
            check_destination(export)
        held_out = HeldOut(language_model, job.batches, job.device)
        with console.status("loss on held-out text"):
            before = held_out.loss(seconds=_HELD_OUT_SECONDS)
        recording = contextlib.nullcontext() if timeline is None else runtime.timeline(timeline)
        with ProgressLine(console, job.recipe.steps) as line, recording:
            for report in train(language_model, runtime, job.batches, job.recipe):
                reports.append(report)
                line.show(report)
                _write_log(log, report)
                if timeline is not None:
                    timeline.annotate(loss=report.loss, norm=report.norm, tokens=report.tokens)
        with console.status("loss on held-out text, and a sample"):
            after = held_out.loss()
            peak = machine.process_memory().peak - base
            sample = _sample(job)
        if export is not None:
            with console.status(f"exporting to {escape(export)}"):
                runtime.export(export)
        measured = reports[_WARM_UP:] or reports[-1:]
        seconds = statistics.median(each.seconds for each in measured)
        return _Outcome(
            before=before,
            after=after,
            losses=[each.loss for each in reports],
            step_seconds=seconds,
            tokens_per_second=reports[0].tokens / seconds,
            peak=peak,
            moved={edge.value: each.bytes for edge, each in runtime.stats.edges.items()},
            sample=sample,
            exported=export,
            timeline=None if timeline is None else _fate(timeline),
        )


def _fate(timeline: Timeline) -> str:
    if timeline.failure is not None:
        return f"the timeline broke off: {timeline.failure.cause}"
    return f"timeline in {timeline.path}"


def _sample(job: Job) -> str:
    """Let the model continue the beginning of a line of held-out text.

    Returns that beginning and the continuation, as one text.
    """
    text = job.text
    stretch = text.read(text.held_out.start, min(4096, len(text.held_out)))
    lines = [line for line in stretch.split(b"\n")[1:-1] if line.strip()]
    prompt = (lines or [b""])[0][:_LONGEST_PROMPT].decode("utf-8", errors="ignore")
    return generate(
        job.language_model,
        prompt,
        tokens=_SAMPLE_TOKENS,
        seconds=_SAMPLE_SECONDS,
        temperature=_TEMPERATURE,
        seed=0,
        device=job.device,
    )


@contextlib.contextmanager
def _open_log(path: str | None) -> Iterator[TextIO | None]:
    """Context that gives the log file of a run, opened and emptied, or None if `path` is None.

    Raises StorageError if the file cannot be opened.
    """
    if path is None:
        yield None
        return
    with storage_errors("open", path):
        log = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed below)
    try:
        yield log
    finally:
        with contextlib.suppress(OSError):  # a line that could not be written has raised already
            log.close()


def _write_log(log: TextIO | None, report: StepReport) -> None:
    """Write a step as one line of JSON, and flush the line, so that a reader of the file sees whole steps."""
    if log is None:
        return
    line = {
        "step": report.step,
        "loss": _finite(report.loss),
        "norm": _finite(report.norm),
        "lr": report.learning_rate,
        "tokens": report.tokens,
        "seconds": report.seconds,
        "stall_seconds": report.stats.stall_seconds,
        "bytes": {edge.value: each.bytes for edge, each in report.stats.edges.items()},
    }
    with storage_errors("write", log.name):
        log.write(json.dumps(line) + "\n")
        log.flush()


def _finite(number: float) -> float | None:
    """`number`, or None if it is NaN or infinite, which JSON cannot express. Steps in fp16 can have NaN."""
    return number if math.isfinite(number) else None


def _print(console: Console, job: Job, outcome: _Outcome, seconds: float) -> None:
    predicted = "unknown" if job.prediction is None else job.prediction.text
    parts = [
        f"done in {format_seconds(seconds)}",
        f"held-out loss {outcome.before:.2f} -> {outcome.after:.2f}",
        f"predicted {predicted}, measured {outcome.step_seconds:.2f} s/step",
        f"host peak {format_size(outcome.peak)} of {format_size(job.plan.ram_budget)}",
    ]
    if job.plan.nvme_bytes:
        parts.append("swap removed")
    if outcome.exported is not None:
        parts.append(f"exported to {outcome.exported}")
    if outcome.timeline is not None:
        parts.append(outcome.timeline)
    console.print(f"{_printable(outcome.sample)}\n", style="dim", markup=False, highlight=False)
    console.print(" · ".join(parts), markup=False, highlight=False, soft_wrap=True)


def _predicted(job: Job) -> dict[str, Any]:
    """Return the prediction of a step's seconds, for JSON, with the keys "predicted" and "range".

    "predicted" is the middle and "range" is [least, most]. Both are None if there is no prediction.
    """
    found = job.prediction
    if found is None:
        return {"predicted": None, "range": None}
    return {"predicted": found.seconds, "range": [found.least, found.most]}


def _printable(text: str) -> str:
    """`text` with control characters replaced. A terminal would obey escape sequences that a model writes."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each
        for each in text
    )


def _summary(job: Job, outcome: _Outcome, seconds: float) -> dict[str, Any]:
    plan = job.plan
    return {
        "infinity": __version__,
        "model": job.language_model.name,
        "parameters": job.language_model.parameters,
        "device": str(job.device),
        "text": {"files": job.text.files, "bytes": job.text.nbytes},
        "steps": job.recipe.steps,
        "seconds": seconds,
        "held_out_loss": {"before": _finite(outcome.before), "after": _finite(outcome.after)},
        "losses": [_finite(each) for each in outcome.losses],
        "step_seconds": {**_predicted(job), "measured": outcome.step_seconds},
        "tokens_per_second": outcome.tokens_per_second,
        "ram": {"budget": plan.ram_budget, "planned": plan.ram_bytes, "peak": outcome.peak},
        "nvme": {"planned": plan.nvme_bytes},
        "bytes_moved": outcome.moved,
        "sample": outcome.sample,
        "exported": outcome.exported,
    }
