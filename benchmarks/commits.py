"""Commits: what they cost a training run in bytes on the disk and in seconds, beside the run without them.

Three parts, each of processes of its own (`--part` chooses some of them):

    bytes   With all pages on NVMe, the run with a commit after every step must write the same bytes to the
            slabs as the run without commits, and the files of a commit (manifest and checksums) at most 0.2%
            of the bytes of the optimizer states. With all pages in RAM, the first commit and each later one
            must write exactly the bytes that the plan says. If not, the program exits with 1. Gradients are
            not counted: one that stays in RAM until its update is not written, and how many do depends on
            the speed of the disk. Their bytes stand beside the others.
    stall   With all pages on NVMe, one run saves after every `--every` steps and does not wait. The seconds
            of a step are those from the end of the step before to its own end. So save() is in the seconds
            of the step after it, in which the updates of the step before are written and the commit lands.
            The ratio of this step to the steps from the third after the save on is taken for each commit.
            The ratios of the second step after the save, and of the last step to the others without a
            commit, stand beside it: the first shows what of the landing is late, the second the noise.
    idle    Commits on but none made, and commits off, in turns: the ratio of speeds, with the ratio of two
            equal processes without commits beside it.

    python benchmarks/commits.py --directory /mnt/nvme0 [--model 309m] [--every 5] [--pairs 40] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine_facts import machine_facts
from peers.process import ContenderFailed
from saving_tasks import add_task_options, decoder_of, running
from turns import fresh_directory

MANIFEST_SHARE = 0.002
"""The most bytes of a commit's files, as a share of the bytes of the optimizer states."""


def measure_bytes(options: argparse.Namespace, top: Path) -> dict[str, Any]:
    """Run the part "bytes", and return its figures and whether they are as they should be ("exact")."""
    found: dict[str, Any] = {}
    for name, commits in (("off", False), ("on", True)):
        with running(options, top, "all-nvme", commits=commits) as (process, task):
            found[name] = process.ask(
                "commit",
                steps=options.byte_steps,
                every=int(commits),
                checkpoint=task.checkpoint,
                count=True,
            )
    with running(options, top, "all-host", commits=True) as (process, task):
        ram = process.ask("commit", steps=options.byte_steps, every=1, checkpoint=task.checkpoint, wait=True)
    plan = found["on"]["facts"]["plan"]
    states, manifest = plan["state_bytes"], found["on"]["manifest"]
    in_ram = ram["facts"]["plan"]
    expected = [in_ram["first_commit_bytes"]] + [in_ram["commit_bytes"]] * (options.byte_steps - 1)
    report = {
        "steps": options.byte_steps,
        "on_nvme": {
            name: {count: each[count] - each["gradients"] for count in ("edge", "engine")}
            for name, each in found.items()
        },
        "gradients": {name: each["gradients"] for name, each in found.items()},
        "state_bytes": states,
        "manifest_bytes": manifest,
        "manifest_share": manifest / states,
        "in_ram": {
            "planned": expected,
            "edge": [each["edge"] for each in ram["saves"]],
            "engine": [each["engine"] for each in ram["saves"]],
            "apart_from_commits": ram["engine"] - sum(each["engine"] for each in ram["saves"]),
        },
        "equal_losses": found["on"]["losses"] == found["off"]["losses"] == ram["losses"],
    }
    # A model of --quick is too small for the share: a commit's files have some bytes for each parameter.
    report["exact"] = (
        report["on_nvme"]["on"] == report["on_nvme"]["off"]
        and (options.quick or report["manifest_share"] <= MANIFEST_SHARE)
        and report["in_ram"]["edge"] == report["in_ram"]["engine"] == expected
        and report["in_ram"]["apart_from_commits"] == 0
        and report["equal_losses"]
    )
    return report


def measure_stall(options: argparse.Namespace, top: Path) -> dict[str, Any]:
    """Run the part "stall", and return its figures."""
    with running(options, top, "all-nvme", commits=True) as (process, task):
        reply = process.ask(
            "commit",
            steps=options.every * (options.pairs + 1),
            every=options.every,
            checkpoint=task.checkpoint,
        )
    return stall_of(reply["seconds"], reply["saves"], options.every) | {"facts": reply["facts"]}


def stall_of(seconds: list[float], saves: list[dict[str, Any]], every: int) -> dict[str, Any]:
    """The figures of the part "stall". seconds, saves: of the reply of `saving.commit_turn`.

    "first", "second", "noise": ratios, one a commit, with their medians: the first and second step after a
    save, and the last step before the next save, each over the median of the steps without a commit beside
    it. "lost_steps": by how much the steps from a save to the next take longer than as many without a
    commit, in steps. "save_ms": of the calls.
    """
    ratios: dict[str, list[float]] = {"first": [], "second": [], "noise": [], "lost_steps": []}
    first, without = [], []
    for save in saves:
        steps = seconds[save["after"] : save["after"] + every]
        if len(steps) < every:
            continue
        rest = statistics.median(steps[2:])
        ratios["first"].append(steps[0] / rest)
        ratios["second"].append(steps[1] / rest)
        ratios["noise"].append(steps[-1] / statistics.median(steps[2:-1]))
        ratios["lost_steps"].append(sum(steps) / rest - every)
        first.append(steps[0])
        without += steps[2:]
    calls = sorted(1e3 * save["seconds"] for save in saves)
    return {
        "pairs": len(first),
        **{name: spread(each) for name, each in ratios.items()},
        "median_first_s": statistics.median(first),
        "median_without_s": statistics.median(without),
        "ratio_of_medians": statistics.median(first) / statistics.median(without),
        "late": sum(save["pending_steps"] > 0 for save in saves) / len(saves),
        "save_ms": {"p50": quantile(calls, 0.5), "p95": quantile(calls, 0.95), "max": calls[-1]},
        "seconds": seconds,
        "saves": saves,
    }


def measure_idle(options: argparse.Namespace, top: Path) -> dict[str, Any]:
    """Run the part "idle", and return its figures. Speeds of a round are compared."""
    seconds: dict[str, list[float]] = {"off": [], "off again": [], "on": []}
    losses: dict[str, list[float]] = {name: [] for name in seconds}
    with contextlib.ExitStack() as inside:
        processes = {
            name: inside.enter_context(running(options, top, "all-nvme", commits=name == "on"))[0]
            for name in seconds
        }
        names = list(seconds)
        for number in range(options.rounds):
            for name in names[number % 3 :] + names[: number % 3]:
                turn = processes[name].turn(1, options.steps)
                seconds[name].append(turn["seconds"])
                losses[name] += turn["losses"]
            print(number + 1, {name: round(each[-1], 3) for name, each in seconds.items()}, flush=True)
    pairs = list(zip(seconds["off"], seconds["off again"], seconds["on"], strict=True))
    return {
        "seconds": seconds,
        "on_over_off": spread([off / on for off, _, on in pairs]),
        "on_over_both": spread([(off + again) / 2 / on for off, again, on in pairs]),
        "off_over_off": spread([off / again for off, again, _ in pairs]),
        "equal_losses": losses["on"] == losses["off"] == losses["off again"],
    }


def spread(values: list[float]) -> dict[str, float]:
    """The median, the least and the most of some values."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def quantile(ordered: list[float], share: float) -> float:
    """The least of the values, in ascending order, that at least this share of them does not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "bytes": measure_bytes,
    "stall": measure_stall,
    "idle": measure_idle,
}


def show(report: dict[str, Any]) -> None:
    """Print the figures of the parts that ran."""
    if "bytes" in report:
        found = report["bytes"]
        on, off, ram = found["on_nvme"]["on"], found["on_nvme"]["off"], found["in_ram"]
        print(
            f"bytes, all on NVMe, {found['steps']} steps: {on['engine']} with commits, {off['engine']} "
            f"without (beside gradients: {found['gradients']}); manifest and checksums "
            f"{found['manifest_bytes']} ({found['manifest_share']:.4%} of states)"
        )
        print(f"bytes, all in RAM, each commit: {ram['engine']}, planned {ram['planned']}")
        print("bytes are as they should be" if found["exact"] else "BYTES DIFFER, or losses")
    if "stall" in report:
        found = report["stall"]
        print(
            f"stall, {found['pairs']} commits: step after save {found['median_first_s']:.3f} s, without "
            f"{found['median_without_s']:.3f} s; ratio {_shown(found['first'])}, of medians "
            f"{found['ratio_of_medians']:.3f}; second step {_shown(found['second'])}, noise "
            f"{_shown(found['noise'])}; a commit costs {_shown(found['lost_steps'])} steps; "
            f"{found['late']:.0%} of commits land after that step"
        )
        print("save(): " + ", ".join(f"{name} {each:.1f} ms" for name, each in found["save_ms"].items()))
    if "idle" in report:
        found = report["idle"]
        print(
            f"idle: speed on / off {_shown(found['on_over_off'])}, on / mean of both off "
            f"{_shown(found['on_over_both'])}, off / off {_shown(found['off_over_off'])}; losses "
            + ("have the same bits" if found["equal_losses"] else "DIFFER")
        )


def _shown(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['least']:.3f} to {found['most']:.3f})"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_task_options(parser)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=tuple(PARTS))
    parser.add_argument("--every", type=int, default=5, help="steps from a save to the next (stall)")
    parser.add_argument("--pairs", type=int, default=40, help="number of commits that are compared (stall)")
    parser.add_argument("--byte-steps", type=int, default=5, help="steps with a commit after each (bytes)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of turns (idle)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps in a turn (idle)")
    options = parser.parse_args(argv)
    if options.quick:
        options.seq, options.rounds, options.steps, options.pairs, options.byte_steps = 32, 2, 1, 1, 2
    if options.every < 4:
        parser.error("--every is less than 4: no step without a commit has another beside it")
    if min(options.pairs, options.byte_steps, options.rounds, options.steps) < 1:
        parser.error("--pairs, --byte-steps, --rounds and --steps are at least 1")
    options.directory = options.directory.resolve()
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    settings = vars(options) | {"directory": "", "part": list(options.part)}
    report: dict[str, Any] = {"benchmark": "commits", "machine": machine_facts(), "settings": settings}
    report["parameters"] = decoder_of(options).parameters
    try:
        with fresh_directory(options.directory) as top:
            for part in options.part:
                report[part] = PARTS[part](options, top)
    except ContenderFailed as error:
        print(error, file=sys.stderr)
        return 1
    show(report)
    if options.json:
        print(json.dumps(report, default=str))
    return 0 if report.get("bytes", {"exact": True})["exact"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
