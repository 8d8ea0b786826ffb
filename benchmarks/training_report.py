"""What train.py says: figures from turns, as a dictionary and as tables for people."""

from __future__ import annotations

import statistics
from typing import Any


def report_of(
    ready: dict[str, dict[str, Any]], turns: dict[str, list[dict[str, Any]]], limit: dict[str, Any]
) -> dict[str, Any]:
    """Figures of every contender that had a turn, ratios within rounds, ours beside limit and plan."""
    contenders = {name: summary(ready[name], each) for name, each in turns.items() if each}
    ours = contenders["infinity"]
    found: dict[str, Any] = {"contenders": contenders, "limit": limit, "ratios": {}}
    for name, theirs in contenders.items():
        if name != "infinity":
            pairs = list(
                zip(theirs["seconds"], ours["seconds"], strict=False)
            )  # one may have died in its last
            ratios = [peer / mine for peer, mine in pairs]
            found["ratios"][name] = {"median": statistics.median(ratios), "rounds": ratios}
    found["of_limit"] = limit["seconds"] / ours["median_s"]
    found["plan"] = beside_the_plan(ours)
    return found


def summary(ready: dict[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [turn["seconds"] for turn in turns]
    losses = [loss for turn in turns for loss in turn["losses"]]
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "seconds": seconds,
        "rss_peak": turns[-1]["rss_peak"],
        "rss_before": ready["rss_before"],
        "device_peak": turns[-1]["device_peak"],
        "read_bytes": statistics.median(turn["bytes"]["read_bytes"] for turn in turns),
        "write_bytes": statistics.median(turn["bytes"]["write_bytes"] for turn in turns),
        "losses": losses,
        "torch": ready["torch"],
        "threads": ready["threads"],
        "facts": turns[-1]["facts"],
        "last_steps": [turn["facts"]["last_step"] for turn in turns if "last_step" in turn["facts"]],
    }


def beside_the_plan(ours: dict[str, Any]) -> dict[str, Any]:
    """What was planned against what was: seconds, and memory."""
    plan = ours["facts"]["plan"]
    predicted = plan["prediction"]
    growth = ours["rss_peak"] - plan["rss_base"]
    return {
        "predicted_s": None if predicted is None else predicted["seconds"],
        "predicted_limit": None if predicted is None else predicted["limited_by"],
        "predicted_over_measured": None if predicted is None else predicted["seconds"] / ours["median_s"],
        "ram_bytes": plan["ram_bytes"],
        "rss_growth": growth,
        "growth_over_plan": growth / plan["ram_bytes"],
    }


def show(report: dict[str, Any]) -> None:
    machine, settings = report["machine"], report["settings"]
    print(f"\n{machine.get('gpu', machine['cpu'])}, {machine['cpus']} CPUs, {settings['device']}")
    name = "quick" if settings["quick"] else settings["model"]
    print(
        f"{name}: {report['parameters'] / 1e6:.0f} M parameters, "
        f"{settings['batch']} x {settings['seq']} tokens, {settings['rounds']} rounds\n"
    )
    print("| contender | s/step | min | max | peak RSS | disk read / step | written / step |")
    print("|---|---|---|---|---|---|---|")
    for name, each in report["contenders"].items():
        print(
            f"| {name} | {each['median_s']:.2f} | {each['min_s']:.2f} | {each['max_s']:.2f} "
            f"| {each['rss_peak'] / 1e9:.2f} GB | {each['read_bytes'] / 1e9:.2f} GB "
            f"| {each['write_bytes'] / 1e9:.2f} GB |"
        )
    print()
    for name, ratio in report["ratios"].items():
        rounds = ", ".join(f"{each:.2f}" for each in ratio["rounds"])
        print(f"{ratio['median']:.2f} x the speed of {name} (rounds: {rounds})")
    for name in report["failures"]:
        print(f"{name} failed: see above")
    _show_limit(report)


def _show_limit(report: dict[str, Any]) -> None:
    limit, plan = report["limit"], report["plan"]
    parts = ", ".join(
        f"{name} {limit[name]:.3f}" for name in ("compute", "update", "disk", "link") if name in limit
    )
    mixed = limit["mixed_bytes_per_second"]
    print(f"limit {limit['seconds']:.3f} s ({parts}): ours reaches {report['of_limit']:.1%} of it")
    print(
        f"disk, mixed: {statistics.median(mixed) / 1e9:.2f} GB/s "
        f"({min(mixed) / 1e9:.2f} to {max(mixed) / 1e9:.2f}), {limit['disk_bytes'] / 1e9:.2f} GB a step"
    )
    if plan["predicted_s"] is not None:
        print(
            f"predicted {plan['predicted_s']:.3f} s (by {plan['predicted_limit']}), "
            f"predicted / measured {plan['predicted_over_measured']:.2f}"
        )
    print(
        f"RAM: planned {plan['ram_bytes'] / 1e9:.3f} GB, grew by {plan['rss_growth'] / 1e9:.3f} GB "
        f"({plan['growth_over_plan']:.2f})"
    )
    for step in report["contenders"]["infinity"]["last_steps"]:
        stalls = ", ".join(
            f"{edge} {seconds:.2f}" for edge, seconds in step["stalls"].items() if seconds >= 0.005
        )
        print(
            f"step {step['seconds']:.2f} s: compute {step['compute']:.2f}, update {step['update']:.2f}, "
            f"stalls {stalls or 'none'}; limited by {step['limited_by']}"
        )
