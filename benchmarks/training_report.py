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
    """The report of a run: figures of every contender that had a turn, and ratios to the first peer's speed.

    Contenders of infinity also have the limit of a step, and the predictions of their plans.
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
    """The figures of one contender over all its turns.

    ready: what the contender replied when its model was built. turns: its replies after each turn; see
    contender.py. tokens: number of tokens in a step.
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
    """Peak bytes of RAM in the whole life of the contender's process, until the end of this turn.

    infinity reports the peak of planning apart, because a plan bounds memory only after planning.
    """
    planning: int = turn["facts"].get("plan", {}).get("rss_planning", 0)
    return max(turn["rss_peak"], planning)


def beside_the_plan(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the predictions of plans with measurements: seconds of a step, and bytes of RAM.

    Every process has made a plan of its own. The turns of a process are compared with this plan, and the
    ratio of seconds is the median over turns.
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
    """The speed of every other contender divided by the speed of `peer`: by round, and the median.

    Only rounds count in which both had a turn.
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
    """Print the report as tables in Markdown."""
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
    """Print the table that compares the contenders of infinity with their limits and plans."""
    ours = {name: each for name, each in report["contenders"].items() if "limit" in each}
    if not ours:
        return
    fio = bool(report["bytes_per_second"]["fio_mixed"])
    print(
        f"\n| contender | limit s | of compute, update, disk{', link' if _any_link(ours) else ''} "
        f"|{' disk by fio s |' if fio else ''} measured / limit | predicted s | predicted / measured "
        "| RAM planned | RAM grown / planned |"
    )
    print(f"|---|---|---|{'---|' if fio else ''}---|---|---|---|---|")
    for name, each in ours.items():
        limit, plan = each["limit"], each["plan"]
        parts = ", ".join(
            f"{limit[part]:.3f}" for part in ("compute", "update", "disk", "link") if part in limit
        )
        by_fio = f" {limit['fio_disk']:.3f} |" if fio else ""
        predicted, ratio = prediction_cells(plan)
        print(
            f"| {name} | {limit['seconds']:.3f} | {parts} |{by_fio} {each['over_limit']:.2f} | {predicted} "
            f"| {ratio} | {plan['ram_bytes'] / 1e9:.3f} GB | {plan['growth_over_plan']:.3f} |"
        )


def prediction_cells(plan: dict[str, Any]) -> tuple[str, str]:
    """Two cells of a table: the predicted seconds with what limits them, and predicted over measured seconds.

    plan: the result of `beside_the_plan`.
    """
    if plan["predicted_s"] is None:
        return "unknown", ""
    return f"{plan['predicted_s']:.3f} ({plan['predicted_limit']})", f"{plan['predicted_over_measured']:.2f}"


def _any_link(ours: dict[str, dict[str, Any]]) -> bool:
    return any("link" in each["limit"] for each in ours.values())


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
    names = {"mixed": "disk, mixed", "fio_mixed": "disk, mixed, by fio", "stream": "update", "link": "link"}
    for key, name in names.items():
        rates = report["bytes_per_second"][key]
        if rates:
            low, high = min(rates) / 1e9, max(rates) / 1e9
            print(f"{name}: {statistics.median(rates) / 1e9:.2f} GB/s ({low:.2f} to {high:.2f})")
    print(f"compute: {', '.join(f'{seconds:.3f}' for seconds in report['compute_s'])} s")
