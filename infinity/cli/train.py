"""Command `infinity train`: trains a language model on real text, within budgets of device, RAM and NVMe."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import unicodedata
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from infinity.api import meet, several_ranks, stage_of
from infinity.checkpoint.atomic_directory import check_destination
from infinity.cli.command import Output, ending_together, leads
from infinity.cli.job import TrainJob, make_job, open_checkpoint
from infinity.cli.options import PARTITIONS, add_options, check_options
from infinity.cli.training_run import TrainingRun, carry_out_job, finite, open_log
from infinity.config import format_size
from infinity.errors import ConfigError
from infinity.ranks import SingleRank
from infinity.telemetry.timeline import Timeline


def add_parser(subparsers: Any) -> None:
    """Add `train` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a language model on real text, wherever its states fit",
        description="Train a decoder-only transformer on text, after printing the plan. Pages that do not "
        "fit the device go to RAM, and pages that do not fit there go to the directories of --budget-nvme.",
    )
    add_options(parser, train=True)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train the model that the options describe, and print the progress and the results.

    Returns 0. With --checkpoint, returns 130 (SIGINT) or 143 (SIGTERM) if a signal has stopped the training.
    A signal before the training, or a second one, raises KeyboardInterrupt at once. With several ranks, only
    rank 0 prints, and writes the files of --log and --export; a signal to one rank stops all of them after
    the step that is under way.
    """
    started = time.monotonic()
    out = Output(options, quiet=not leads())
    if not leads():
        options = argparse.Namespace(**{**vars(options), "log": None, "export": None})
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(_met(options))
        # What cannot be written, or is no job at all, is refused before the plan.
        if options.export is not None:
            check_destination(options.export)
        timeline = None
        if options.trace is not None:
            timeline = stack.enter_context(_open_timeline(options.trace, ranks))
        check_options(options)
        checkpoint = open_checkpoint(options, ranks)
        if checkpoint is not None:
            stack.enter_context(checkpoint)
        with out.console.status("planning"):
            job = make_job(options, checkpoint, ranks=ranks)
        out.say(job.lines(options) + "\n")
        after = None if job.resumed is None else job.resumed["step"]
        log = stack.enter_context(open_log(options.log, after=after))
        done = carry_out_job(job, options, out, log, timeline)
    seconds = time.monotonic() - started
    if done.sample is not None:
        out.console.print(f"{_printable(done.sample)}\n", style="dim", markup=False, highlight=False)
    out.say(" · ".join(_results(job, done, seconds, timeline)))
    out.json(_summary(job, done, seconds))
    return 0 if done.stopped is None else 128 + done.stopped


@contextlib.contextmanager
def _met(options: argparse.Namespace) -> Iterator[SingleRank]:
    """Context in which this process is connected with the other ranks, if there are any.

    An error in the context ends the run on all ranks. Raises ConfigError if --partition was given for one
    process, and the errors of `meet`.
    """
    if options.partition is not None and not several_ranks(None):
        raise ConfigError(
            "--partition was given for one process.",
            "Leave it out, or start several: torchrun --nproc-per-node 2 -m infinity train ...",
        )
    partition = options.partition or PARTITIONS[0]
    stage = stage_of(None if partition == "none" else partition)
    with meet(None, stage, options.device) as ranks, ending_together(ranks, options):
        yield ranks


def _open_timeline(path: str, ranks: SingleRank) -> Timeline:
    """Open the file of --trace. Each rank other than 0 writes its own file, such as out.rank-1.json.

    Raises StorageError or StorageFull.
    """
    if ranks.share.rank:
        stem, suffix = os.path.splitext(path)
        path = f"{stem}.rank-{ranks.share.rank}{suffix}"
    return ranks.timeline(path)


def _results(job: TrainJob, run: TrainingRun, seconds: float, timeline: Timeline | None) -> Iterator[str]:
    """Yield the phrases of the last printed line."""
    took = timedelta(seconds=round(seconds))
    if run.stopped is None:
        yield f"done in {took}"
    else:
        yield f"stopped by {run.stopped.name} after {took}"
        yield f"step {run.step}/{job.recipe.steps}"
    yield f"held-out loss {_loss(run.before)} -> {_loss(run.after)}"
    predicted = "unknown" if job.prediction is None else job.prediction.text
    measured = "nothing" if run.step_seconds is None else f"{run.step_seconds:.2f} s/step"
    yield f"predicted {predicted}, measured {measured}"
    yield f"host peak {format_size(run.peak)} of {format_size(job.plan.ram_budget)}"
    if run.kept is not None:
        directory, size = run.kept["directory"], format_size(run.kept["bytes"])
        places = list(dict.fromkeys(os.path.dirname(each) for each in run.kept["slabs"]))
        where = "" if places == [directory] else f" in {', '.join(places)}"
        commit = f"commit-{run.kept['generation']} (step {run.kept['step']})"
        yield f"{commit} stays in {directory} ({size}{where})"
    elif job.checkpoint is not None:
        yield "no step was finished, so there is no commit"
    elif job.plan.nvme_bytes:
        yield "swap removed"
    if run.exported is not None:
        yield f"exported to {run.exported}"
    if timeline is not None:
        failure = timeline.failure
        yield (
            f"timeline in {timeline.path}" if failure is None else f"the timeline broke off: {failure.cause}"
        )


def _loss(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.2f}"


def _printable(text: str) -> str:
    """`text` with control characters replaced. A terminal would obey escape sequences that a model writes."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each
        for each in text
    )


def _summary(job: TrainJob, run: TrainingRun, seconds: float) -> dict[str, Any]:
    """Return the results for --json.

    In "step_seconds", "range" is the prediction [least, most], and "predicted" is its middle.
    """
    plan, guess = job.plan, job.prediction
    found = {
        **job.facts,
        "text": {"files": job.text.files, "bytes": job.text.nbytes},
        "steps": job.recipe.steps,
        "seconds": seconds,
        "held_out_loss": {"before": finite(run.before), "after": finite(run.after)},
        "losses": [finite(each.loss) for each in run.reports],
        "step_seconds": {
            "predicted": None if guess is None else guess.seconds,
            "range": None if guess is None else [guess.least, guess.most],
            "measured": run.step_seconds,
        },
        "tokens_per_second": run.tokens_per_second,
        "ram": {"budget": plan.ram_budget, "planned": plan.ram_bytes, "peak": run.peak},
        "nvme": {"planned": plan.nvme_bytes},
        "bytes_moved": run.moved,
        "sample": run.sample,
        "exported": run.exported,
        "resumed": None if job.resumed is None else job.resumed["step"],
        "stopped": None if run.stopped is None else run.stopped.name,
        "commit": run.kept,
    }
    if plan.share.ranks > 1:
        found["ranks"] = {"ranks": plan.share.ranks, "stage": plan.share.stage}
    return found
