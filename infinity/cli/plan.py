"""Command `infinity plan`: prints the plan that `infinity train` would follow with the same options."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console

from infinity import __version__
from infinity.api import stage_of
from infinity.cli.job import Job, add_options, directories, show_job
from infinity.errors import ConfigError
from infinity.integrations.deepspeed import from_deepspeed_config
from infinity.layout.shards import Share
from infinity.planning.machine_file import Machine
from infinity.planning.machine_rates import network_rate
from infinity.planning.ranks import Network, bytes_by_stage, link_rate, network, text_by_stage

_MOST_RANKS = 1 << 16
_STAGE = 3
"""The stage of ZeRO where --stage does not name one: the stage at which a rank needs the least memory."""


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command `plan`. subparsers: what argparse's add_subparsers has returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="print the plan of a training run: where pages go, how fast it is, what limits it",
        description="Plan a training run: bytes in every tier, smallest budgets, seconds per step. "
        "Measures this machine for a few seconds. Allocates nothing for the model.",
    )
    add_options(parser)
    parser.add_argument(
        "--deepspeed",
        metavar="FILE",
        help="a configuration of DeepSpeed, whose values are the defaults of the other options; what becomes "
        "of its fields is printed",
    )
    parser.add_argument(
        "--machine",
        metavar="FILE",
        help="plan for another machine: a file that `infinity tune --machine FILE` has written there, or the "
        "name of one with published figures: h100-sxm-8, rtx4090-desktop, cloud-l4",
    )
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="processes that train the model together; the plan is that of one of them, and budgets are "
        "those of one (default: %(default)s)",
    )
    ranks.add_argument(
        "--stage",
        type=int,
        choices=range(4),
        help="what the ranks divide among them, as in ZeRO: 0 nothing, 1 optimizer states, 2 also gradients, "
        f"3 also parameters (default: {_STAGE})",
    )
    ranks.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="M",
        help="nodes on which the ranks run, equally many on each (default: %(default)s)",
    )
    ranks.add_argument(
        "--link",
        metavar="RATE",
        help="rate of the link between two nodes in each direction, such as 25Gbit (default: what "
        "`infinity tune` has measured, started by torchrun on several nodes)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Plan the training run that the options describe, and print the plan. Returns 0.

    Raises BudgetError if the run does not fit the budgets, and ConfigError for options that cannot be used.
    """
    if options.deepspeed is not None:
        options = _from_deepspeed(options)
    share = _share(options)
    given = None if options.link is None else link_rate(options.link)
    link, measured = given, False
    if given is None and options.nodes > 1:
        machine = None if options.machine is None else Machine.read(options.machine)
        link = network_rate() if machine is None else machine.network
        measured = link is not None and (machine is None or machine.measured)
    console = Console(stderr=options.json)
    job = show_job(options, console, share=share, on_node=share.ranks // options.nodes)
    found = None
    if share.ranks > 1:
        found = network(job.plan, link, options.accumulate, measured=measured)
        console.print(f"{found.text}{_others(job)}", highlight=False, soft_wrap=True)
        title = f"\nbytes of one of {share.ranks} ranks by stage, beside those of ZeRO's formulas"
        console.print(f"{title}\n{text_by_stage(bytes_by_stage(job.plan))}", highlight=False, soft_wrap=True)
    if options.json:
        print(json.dumps(_summary(job, found)))
    return 0


def _from_deepspeed(options: argparse.Namespace) -> argparse.Namespace:
    """The options again, with defaults from the file of --deepspeed. Prints what becomes of its fields."""
    given = directories(options.budget_nvme)
    found = from_deepspeed_config(options.deepspeed, nvme=given)
    Console(stderr=options.json).print(f"{found}\n", markup=False, highlight=False, soft_wrap=True)
    name, params = found.optimizer or ("AdamW", {})
    if name != "AdamW":
        raise ConfigError(
            f"The configuration trains with {name}, and this command plans for AdamW.",
            "Plan your own model: infinity.plan(model, optimizer, ...).",
        )
    values = {each.field: each.value for each in found.decisions}
    batch = values.get("train_micro_batch_size_per_gpu")
    budget = found.offload["budget"].nvme_bytes
    defaults = {
        "accumulate": found.offload.get("accumulation"),
        "batch": batch if batch != "auto" else None,
        "lr": params.get("lr"),
        "budget_nvme": [f"{path}:{size}" for path, size in budget.items()] if given is None else None,
    }
    if "gradient_clipping" not in found.open:
        defaults["clip"] = found.clip or 0.0
    if "precision" in found.offload:
        defaults["precision"] = found.offload["precision"]
        defaults["compute"] = found.offload["precision"].compute
    if options.ranks > 1:
        defaults["stage"] = stage_of(found.offload["partition"])
    options.parser.set_defaults(**{name: value for name, value in defaults.items() if value is not None})
    again: argparse.Namespace = options.again()
    return again


def _others(job: Job) -> str:
    """The seconds that computation and disk take by themselves, beside those of the network."""
    found = job.prediction
    return "" if found is None else f" · compute {found.compute:.2f} s · disk {found.disk:.2f} s"


def _share(options: argparse.Namespace) -> Share:
    """The share of the first rank. Raises ConfigError for values that no ranks can have."""
    if not 1 <= options.ranks <= _MOST_RANKS:
        raise ConfigError(f"--ranks is {options.ranks}.", f"Give a number from 1 to {_MOST_RANKS}.")
    if options.ranks == 1 and options.stage is not None:
        raise ConfigError("--stage was given for one rank.", "Add --ranks N, with at least 2 ranks.")
    if options.nodes < 1 or options.ranks % options.nodes:
        raise ConfigError(
            f"--nodes is {options.nodes}, and --ranks is {options.ranks}.",
            "Give a number of ranks that the number of nodes divides.",
        )
    if options.link is not None and options.nodes == 1:
        raise ConfigError("--link was given for one node.", "Add --nodes M, with at least 2 nodes.")
    on_node = options.ranks // options.nodes if options.nodes > 1 else 0
    return Share(0, options.ranks, _STAGE if options.stage is None else options.stage, on_node)


def _summary(job: Job, travels: Network | None) -> dict[str, Any]:
    plan = job.plan
    found = {
        "infinity": __version__,
        "model": job.language_model.name,
        "parameters": job.language_model.parameters,
        "device": str(job.device),
        "tiers": plan.rows(),
        "activations_unknown": plan.activations_unknown,
        "smallest_budgets": {tier.value: nbytes for tier, nbytes in plan.smallest.items()},
        "traffic": asdict(plan.traffic),
        "prediction": None if plan.prediction is None else plan.prediction.as_dict(),
        "step_seconds": None if job.prediction is None else job.prediction.seconds,
    }
    if plan.machine is not None:
        found["machine"] = plan.machine
    if plan.share.ranks > 1:
        by_stage = [{**asdict(each), "kind": each.kind.value} for each in bytes_by_stage(plan)]
        assert travels is not None
        sent = {**asdict(travels), "seconds": travels.seconds}
        found["ranks"] = {**asdict(plan.share), "by_stage": by_stage, "network": sent}
    return found
