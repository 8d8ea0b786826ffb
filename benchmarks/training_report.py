"""Training report: the figures of a run of train.py, as a dictionary and as tables."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import torch
from limits import limit_of
from machine_facts import machine_facts
from turns import Bench


def report_of(bench: Bench) -> dict[str, Any]:
    """Make the report of a finished run of train.py, as a dictionary that `show` prints and JSON can hold.

    It has the figures of every contender (a process that trains the model with infinity or with a peer) that
    had a turn, and its speed relative to that of the run's first peer. For a contender that trains with
    infinity it also has the least seconds of a step that the machine's measured speeds allow (limits.py),
    and the plan's prediction.
    """
    job = bench.job
    facts = machine_facts()
    if job.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    contenders = {
        spec.name: summary(bench.ready[spec.name], bench.turns[spec.name], job.batch * job.seq)
        for spec in job.specs
        if spec.name in bench.turns
    }
    for spec in job.specs:
        if spec.ours and spec.name in contenders:
            turns = bench.turns[spec.name]
            limit = limit_of(turns, bench.speeds, bench.compute, job.device)
            ours = contenders[spec.name]
            ours["limit"], ours["over_limit"] = limit, ours["median_s"] / limit["seconds"]
            ours["plan"] = beside_the_plan(turns)
    peers = [spec.name for spec in job.specs if not spec.ours and spec.name in contenders]
    return {
        "benchmark": "train",
        "machine": facts,
        "settings": asdict(job) | {"directory": "", "peer_python": "", "seconds": None},
        "parameters": job.decoder.parameters,
        "kept": bench.kept,
        "failures": bench.failures,
        "contenders": contenders,
        "first_peer": peers[0] if peers else None,
        "ratios": ratios(contenders, peers[0]) if peers else {},
        "compute_s": bench.compute,
        "bytes_per_second": bench.speeds.figures(),
    }


def summary(ready: dict[str, Any], turns: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Sum up one contender's turns: seconds of a step, tokens per second, peaks of memory, bytes of disk I/O,
    losses.

    ready: what the contender's process replied when its model was built. turns: what it replied after each
    turn; contender.py makes both. tokens: number of tokens in a step.
    """
    seconds = [turn["seconds"] for turn in turns]
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "seconds": seconds,
        "rounds": [turn["round"] for turn in turns],
        "tokens_per_s": tokens / statistics.median(seconds),
        "rss_peak": max(_peak(turn) for turn in turns),
        "rss_before": ready["rss_before"],
        "device_peak": max(turn["device_peak"] for turn in turns),
        "read_bytes": statistics.median(turn["bytes"]["read_bytes"] for turn in turns),
        "write_bytes": statistics.median(turn["bytes"]["write_bytes"] for turn in turns),
        "losses": [loss for turn in turns for loss in turn["losses"]],
        "torch": ready["torch"],
        "threads": ready["threads"],
        "facts": turns[-1]["facts"],
        "last_steps": [turn["facts"]["last_step"] for turn in turns if "last_step" in turn["facts"]],
    }


def _peak(turn: dict[str, Any]) -> int:
    """The peak bytes of RAM of the contender's process from its start to the end of this turn.

    turn: the process's reply after the turn. A process that trains with infinity reports two peaks, one
    before its plan was made and one after, because a plan bounds memory only from then on. The larger of the
    two is returned.
    """
    planning: int = turn["facts"].get("plan", {}).get("rss_planning", 0)
    return max(turn["rss_peak"], planning)


def beside_the_plan(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare what a contender's plans predicted with what was measured: seconds of a step, and bytes of RAM.

    turns: the replies of a contender that trains with infinity. Each turn is compared with the plan that its
    own process made. Returns a dictionary with, among others: "predicted_s", the median of the predicted
    seconds; "predicted_over_measured", the median of predicted divided by measured seconds; "ram_bytes",
    the bytes of RAM in the last turn's plan; "rss_growth", the most bytes by which a process grew. The
    first two are None if no plan has a prediction.
    """
    plans = [turn["facts"]["plan"] for turn in turns]
    predictions = [plan["prediction"]["seconds"] for plan in plans if plan["prediction"] is not None]
    predicted = statistics.median(predictions) if predictions else None
    over = [
        plan["prediction"]["seconds"] / turn["seconds"]
        for turn, plan in zip(turns, plans, strict=True)
        if plan["prediction"] is not None
    ]
    growth = max(turn["rss_peak"] - plan["rss_base"] for turn, plan in zip(turns, plans, strict=True))
    return {
        "predicted_s": predicted,
        "predicted_limit": plans[-1]["prediction"]["limited_by"] if predictions else None,
        "predicted_over_measured": statistics.median(over) if over else None,
        "predicted_over_measured_of_turns": over,
        "ram_bytes": plans[-1]["ram_bytes"],
        "rss_growth": growth,
        "growth_over_plan": growth / plans[-1]["ram_bytes"],
    }


def ratios(contenders: dict[str, dict[str, Any]], peer: str) -> dict[str, dict[str, Any]]:
    """Divide the speed of every contender except `peer` by the speed of `peer` in the same round.

    contenders: the figures of each contender, as `summary` returns them, by name. Returns, by name, the
    ratios of all rounds in which both had a turn ("rounds") and their median ("median").
    """
    theirs = dict(zip(contenders[peer]["rounds"], contenders[peer]["seconds"], strict=True))
    found = {}
    for name, each in contenders.items():
        pairs = zip(each["rounds"], each["seconds"], strict=True)
        rounds = [theirs[number] / seconds for number, seconds in pairs if number in theirs]
        if name != peer and rounds:
            found[name] = {"median": statistics.median(rounds), "rounds": rounds}
    return found


def show(report: dict[str, Any]) -> None:
    """Print a report, made by `report_of`, as tables in Markdown."""
    machine, settings = report["machine"], report["settings"]
    print(f"\n{machine.get('gpu', machine['cpu'])}, {machine['cpus']} CPUs, {settings['device']}")
    name = "quick" if settings["quick"] else settings["model"]
    print(
        f"{name}: {report['parameters'] / 1e6:.0f} M parameters, "
        f"{settings['batch']} x {settings['seq']} tokens, {settings['rounds']} rounds, processes "
        f"{'kept alive together' if report['kept'] else 'started for each turn'}\n"
    )
    _show_contenders(report)
    _show_ours(report)
    _show_rounds(report)
    _show_machine(report)
    for name in report["failures"]:
        print(f"{name} failed: see above")


def _show_contenders(report: dict[str, Any]) -> None:
    on_gpu = report["settings"]["device"] == "cuda"
    print(
        f"| contender | s/step (min-max) | tokens/s | speed / {report['first_peer'] or 'no peer'} "
        f"| peak RSS |{' peak device |' if on_gpu else ''} disk read + written / step |"
    )
    print(f"|---|---|---|---|---|---|{'---|' if on_gpu else ''}")
    for name, each in report["contenders"].items():
        ratio = report["ratios"].get(name)
        device = f" {each['device_peak'] / 1e9:.2f} GB |" if on_gpu else ""
        print(
            f"| {name} | {each['median_s']:.3f} ({each['min_s']:.3f}-{each['max_s']:.3f}) "
            f"| {each['tokens_per_s']:.0f} | {'' if ratio is None else format(ratio['median'], '.2f')} "
            f"| {each['rss_peak'] / 1e9:.2f} GB |{device} "
            f"{each['read_bytes'] / 1e9:.2f} + {each['write_bytes'] / 1e9:.2f} GB |"
        )


def _show_ours(report: dict[str, Any]) -> None:
    """Print a table with a row for each contender that trains with infinity, if there is any.

    A row compares the measured seconds of a step with the least seconds that the machine's measured speeds
    allow (limits.py), and with the seconds that the plan predicted. It also compares the bytes by which the
    process grew with the bytes of RAM in the plan.
    """
    ours = {name: each for name, each in report["contenders"].items() if "limit" in each}
    if not ours:
        return
    link = any("link" in each["limit"] for each in ours.values())
    print(
        f"\n| contender | limit s | of compute, update, disk{', link' if link else ''} | measured / limit "
        "| predicted s | predicted / measured | RAM planned | RAM grown / planned |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, each in ours.items():
        limit, plan = each["limit"], each["plan"]
        parts = ", ".join(
            f"{limit[part]:.3f}" for part in ("compute", "update", "disk", "link") if part in limit
        )
        predicted, ratio = "unknown", ""
        if plan["predicted_s"] is not None:
            predicted = f"{plan['predicted_s']:.3f} ({plan['predicted_limit']})"
            ratio = f"{plan['predicted_over_measured']:.2f}"
        print(
            f"| {name} | {limit['seconds']:.3f} | {parts} | {each['over_limit']:.2f} | {predicted} "
            f"| {ratio} | {plan['ram_bytes'] / 1e9:.3f} GB | {plan['growth_over_plan']:.3f} |"
        )


def _show_rounds(report: dict[str, Any]) -> None:
    print()
    for name, ratio in report["ratios"].items():
        rounds = ", ".join(f"{each:.2f}" for each in ratio["rounds"])
        print(f"{name}: {ratio['median']:.2f} x the speed of {report['first_peer']} (rounds: {rounds})")
    for name, each in report["contenders"].items():
        for step in each["last_steps"]:
            stalls = ", ".join(
                f"{edge} {seconds:.2f}" for edge, seconds in step["stalls"].items() if seconds >= 0.005
            )
            print(
                f"{name}: step {step['seconds']:.2f} s: compute {step['compute']:.2f}, "
                f"update {step['update']:.2f}, stalls {stalls or 'none'}; limited by {step['limited_by']}"
            )


def _show_machine(report: dict[str, Any]) -> None:
    names = {"mixed": "disk, mixed", "stream": "update", "link": "link"}
    for key, name in names.items():
        rates = report["bytes_per_second"][key]
        if rates:
            low, high = min(rates) / 1e9, max(rates) / 1e9
            print(f"{name}: {statistics.median(rates) / 1e9:.2f} GB/s ({low:.2f} to {high:.2f})")
    print(f"compute: {', '.join(f'{seconds:.3f}' for seconds in report['compute_s'])} s")
