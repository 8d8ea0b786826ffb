"""Command `infinity plan`: prints the plan that `infinity train` would follow with the same options."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

from infinity.api import stage_of
from infinity.cli.command import Output
from infinity.cli.job import make_job
from infinity.cli.options import STAGE, add_options, check_ranks, directories
from infinity.errors import ConfigError
from infinity.integrations.deepspeed import from_deepspeed_config
from infinity.layout.shards import Share
from infinity.planning.machine_file import Machine
from infinity.planning.machine_rates import network_rate
from infinity.planning.network import bytes_by_stage, link_rate, network, text_by_stage
from infinity.ranks import SingleRank
from infinity.system.launcher import RankLocation


def add_parser(subparsers: Any) -> None:
    """Add `plan` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="print the plan of a training run: where pages go, how fast it is, what limits it",
        description="Plan a training run: bytes in every tier, smallest budgets, seconds per step. "
        "Measures this machine for a few seconds. Allocates nothing for the model.",
    )
    add_options(parser, train=False)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Plan the training run that the options describe, and print the plan. Returns 0.

    Raises BudgetError if the run does not fit the budgets, and ConfigError for options that cannot be used.
    """
    out = Output(options)
    if options.deepspeed is not None:
        options = _from_deepspeed(options, out)
    check_ranks(options)
    ranks, nodes = options.ranks, options.nodes
    on_node = ranks // nodes if nodes > 1 else 0
    share = Share(0, ranks, STAGE if options.stage is None else options.stage, on_node)
    given = None if options.link is None else link_rate(options.link)
    link, measured = given, False
    if given is None and nodes > 1:
        machine = None if options.machine is None else Machine.read(options.machine)
        link = network_rate() if machine is None else machine.network
        measured = link is not None and (machine is None or machine.measured)
    with out.console.status("planning"):
        place = RankLocation(0, 0, ranks // nodes)
        job = make_job(options, ranks=SingleRank(options.device, share=share, place=place))
    if given is not None and job.plan.speeds is not None:
        plan = replace(job.plan, speeds=replace(job.plan.speeds, network=given))
        plan = replace(plan, prediction=plan.predict())
        job = replace(job, plan=plan, prediction=plan.predict(options.accumulate))
    out.say(job.lines(options))
    plan, guess = job.plan, job.prediction
    found = {
        **job.facts,
        "tiers": plan.rows(),
        "update": plan.update,
        "update_reason": plan.why,
        "activations": plan.residuals.as_dict(),
        "activations_unknown": plan.activations_unknown,
        "smallest_budgets": {tier.value: nbytes for tier, nbytes in plan.smallest.items()},
        "traffic": asdict(plan.traffic),
        "prediction": None if plan.prediction is None else plan.prediction.as_dict(),
        "step_seconds": None if guess is None else guess.seconds,
    }
    if plan.machine is not None:
        found["machine"] = plan.machine
    if share.ranks > 1:
        sent = network(plan, link, options.accumulate, measured=measured)
        rest = "" if guess is None else f" · compute {guess.compute:.2f} s · disk {guess.disk:.2f} s"
        rows = bytes_by_stage(plan)
        out.say(f"{sent.text}{rest}")
        out.say(f"\nbytes of one of {share.ranks} ranks by stage, beside those of ZeRO's formulas")
        out.say(text_by_stage(rows))
        by_stage = [{**asdict(each), "kind": each.kind.value} for each in rows]
        moved = {**asdict(sent), "seconds": sent.seconds}
        found["ranks"] = {**asdict(plan.share), "by_stage": by_stage, "network": moved}
    out.json(found)
    return 0


def _from_deepspeed(options: argparse.Namespace, out: Output) -> argparse.Namespace:
    """Parse the options again, with the values in the file of --deepspeed as defaults, and print how each
    field of the file is used.
    """
    given = directories(options.budget_nvme)
    found = from_deepspeed_config(options.deepspeed, nvme=given)
    out.say(f"{found}\n")
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
