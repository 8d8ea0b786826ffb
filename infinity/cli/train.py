"""Command `infinity train`: trains a language model on real text, within budgets of device, RAM and NVMe."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import unicodedata
from typing import Any

from rich.console import Console

from infinity import __version__
from infinity.checkpoint.atomic_directory import check_destination
from infinity.cli.job import Job, add_options, check_options, show_job
from infinity.cli.progress import format_seconds
from infinity.cli.ranks import PARTITIONS, leads, met, open_timeline
from infinity.cli.resumption import open_checkpoint
from infinity.cli.step_log import finite, open_log
from infinity.cli.training_run import Outcome, carry_out_job
from infinity.config import format_size


def add_parser(subparsers: Any) -> None:
    """Add `train` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a language model on real text, wherever its states fit",
        description="Train a decoder-only transformer on text, after printing the plan. Pages that do not "
        "fit the device go to RAM, and pages that do not fit there go to the directories of --budget-nvme.",
    )
    add_options(parser)
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--partition",
        choices=PARTITIONS,
        help="what the processes that torchrun has started divide among them: parameters, gradients and "
        "optimizer states; gradients and optimizer states; optimizer states; or nothing (default: "
        f"{PARTITIONS[0]})",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train the model that the options describe, and print the progress and the results.

    Returns 0. With --checkpoint, returns 130 (SIGINT) or 143 (SIGTERM) if a signal has stopped the training.
    A signal before the training, or a second one, raises KeyboardInterrupt at once. With several ranks, only
    rank 0 prints, and writes the files of --log and --export; a signal to one rank stops all of them after
    the step that is under way.
    """
    started = time.monotonic()
    console = Console(stderr=options.json, quiet=not leads())
    if not leads():
        options = argparse.Namespace(**{**vars(options), "log": None, "export": None})
    with contextlib.ExitStack() as stack:
        communicator = stack.enter_context(met(options))
        if options.export is not None:
            check_destination(options.export)
        # Before the plan: a file that cannot be written is refused at once.
        timeline = None
        if options.trace is not None:
            timeline = stack.enter_context(open_timeline(options.trace, communicator))
        check_options(options)
        checkpoint = open_checkpoint(options, communicator)
        if checkpoint is not None:
            stack.enter_context(checkpoint)
        job = show_job(options, console, checkpoint, communicator=communicator)
        console.print()
        after = None if job.resumed is None else job.resumed["step"]
        log = stack.enter_context(open_log(options.log, after=after))
        outcome = carry_out_job(job, options, console, log, timeline)
    _print(console, job, outcome, time.monotonic() - started)
    if options.json and leads():
        print(json.dumps(_summary(job, outcome, time.monotonic() - started)))
    return 0 if outcome.stopped is None else 128 + outcome.stopped


def _print(console: Console, job: Job, outcome: Outcome, seconds: float) -> None:
    predicted = "unknown" if job.prediction is None else job.prediction.text
    measured = "nothing" if outcome.step_seconds is None else f"{outcome.step_seconds:.2f} s/step"
    parts = [
        f"done in {format_seconds(seconds)}",
        f"held-out loss {_loss(outcome.before)} -> {_loss(outcome.after)}",
        f"predicted {predicted}, measured {measured}",
        f"host peak {format_size(outcome.peak)} of {format_size(job.plan.ram_budget)}",
    ]
    if outcome.stopped is not None:
        step = outcome.reports[-1].step if outcome.reports else _continued(job)
        parts[0] = f"stopped by {outcome.stopped.name} after {format_seconds(seconds)}"
        parts.insert(1, f"step {step}/{job.recipe.steps}")
    parts += _what_stays(job, outcome)
    if outcome.exported is not None:
        parts.append(f"exported to {outcome.exported}")
    if outcome.timeline is not None:
        parts.append(outcome.timeline)
    if outcome.sample is not None:
        console.print(f"{_printable(outcome.sample)}\n", style="dim", markup=False, highlight=False)
    console.print(" · ".join(parts), markup=False, highlight=False, soft_wrap=True)


def _what_stays(job: Job, outcome: Outcome) -> list[str]:
    """What the last line says of the files of pages: at most one phrase."""
    if outcome.kept is not None:
        return [outcome.kept.text]
    if job.checkpoint is not None:
        return ["no step was finished, so there is no commit"]
    return ["swap removed"] if job.plan.nvme_bytes else []


def _continued(job: Job) -> int:
    """The step after which the run continued; 0 for a new run."""
    return 0 if job.resumed is None else int(job.resumed["step"])


def _loss(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.2f}"


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


def _summary(job: Job, outcome: Outcome, seconds: float) -> dict[str, Any]:
    plan = job.plan
    found = {
        "infinity": __version__,
        "model": job.language_model.name,
        "parameters": job.language_model.parameters,
        "device": str(job.device),
        "text": {"files": job.text.files, "bytes": job.text.nbytes},
        "steps": job.recipe.steps,
        "seconds": seconds,
        "held_out_loss": {"before": finite(outcome.before), "after": finite(outcome.after)},
        "losses": [finite(each.loss) for each in outcome.reports],
        "step_seconds": {**_predicted(job), "measured": outcome.step_seconds},
        "tokens_per_second": outcome.tokens_per_second,
        "ram": {"budget": plan.ram_budget, "planned": plan.ram_bytes, "peak": outcome.peak},
        "nvme": {"planned": plan.nvme_bytes},
        "bytes_moved": outcome.moved,
        "sample": outcome.sample,
        "exported": outcome.exported,
        "resumed": None if job.resumed is None else job.resumed["step"],
        "stopped": None if outcome.stopped is None else outcome.stopped.name,
        "commit": None if outcome.kept is None else outcome.kept.as_dict(),
    }
    if plan.share.ranks > 1:
        found["ranks"] = {"ranks": plan.share.ranks, "stage": plan.share.stage}
    return found
