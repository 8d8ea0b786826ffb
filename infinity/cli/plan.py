"""Command `infinity plan`: prints the plan that `infinity train` would follow with the same options."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console

from infinity import __version__
from infinity.cli.job import Job, add_options, show_job


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command `plan`. subparsers: what argparse's add_subparsers has returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="print the plan of a training run: where pages go, how fast it is, what limits it",
        description="Plan a training run: bytes in every tier, smallest budgets, seconds per step. "
        "Measures this machine for a few seconds. Allocates nothing for the model.",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan the training run that the options describe, and print the plan. Returns 0.

    Raises BudgetError if the run does not fit the budgets.
    """
    console = Console(stderr=options.json)
    job = show_job(options, console)
    if options.json:
        print(json.dumps(_summary(job)))
    return 0


def _summary(job: Job) -> dict[str, Any]:
    plan = job.plan
    return {
        "infinity": __version__,
        "model": job.language_model.name,
        "parameters": job.language_model.parameters,
        "device": str(job.device),
        "tiers": plan.rows(),
        "smallest_budgets": {tier.value: nbytes for tier, nbytes in plan.smallest.items()},
        "traffic": asdict(plan.traffic),
        "prediction": None if plan.prediction is None else plan.prediction.as_dict(),
        "step_seconds": None if job.prediction is None else job.prediction.seconds,
    }
