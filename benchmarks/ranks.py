"""Ranks: several processes train one model together on this machine, with infinity and with its peers.

Each case is a group of `--ranks` processes. Those of infinity share memory, unless INFINITY_WINDOWS is 0, and
those of its peers speak over TCP. In every round each case takes a turn, in rotating order: its processes are
started, train `--lead` untimed steps and then `--steps` timed ones.

    ours:3:ram       ZeRO-3, what a rank keeps is in RAM; a host budget with room for that and for the pages
                     that come from the other ranks and go
    ours:3:nvme      ZeRO-3, a host budget with ample room to work in; pages that do not fit there are on NVMe
    deepspeed:cpu3   DeepSpeed's ZeRO-3 with offload to RAM
    deepspeed:nvme   DeepSpeed's ZeRO-3 with offload to NVMe
    fsdp2            PyTorch's fully_shard with CPUOffloadPolicy

The cases ours:0, ours:1 and ours:2, each with :ram and :nvme, and deepspeed:cpu (ZeRO-2) run when `--case`
names them. So do alone:ram and alone:nvme: infinity in one process with all CPUs, which trains the batches of
all ranks as one. A rank has a CPU's share of threads, and a batch of its own in each step.

The table has, of a rank: the seconds of a step, the median of all timed steps of the slowest rank; the bytes
sent to other ranks in a step, which are the payload of the process's TCP sockets as the kernel counts it; and
the peak RSS above that of the process when it has joined the others, has imported what the first optimizer of
torch imports (76 MB), and has no model yet: in the timed steps, and before them, when the model is built and
trains its first steps. The loss is the mean over ranks, of the last step. The seconds of peers are divided by
ours of the same round. The RSS of infinity is also divided by what its plan says.

All train on the same batches. Initial values are each library's own draws, so that losses are alike, but
equal only among the cases of one library. Gradients of ranks are summed in fp32 by infinity and by FSDP2,
which sends them so, too; DeepSpeed sums them in bf16. Gloo's reduce_scatter, which FSDP2 calls, sends as much
as an all-reduce.

With `--link 1gbit` the ranks run on two nodes, half of them on each: network namespaces, with a link of that
rate between them, which needs root. Then the bytes that a node's interface has sent are printed, too, with
headers and acknowledgements, and the seconds that they take at the link's rate. In the cases ours:3:ram:flat
and ours:3:nvme:flat each rank asks the owners of parameters itself, whatever node they run on.

With `--device cuda` the ranks share one GPU, as no collective of NCCL can, but pages that lie in each other's
device memory can (CUDA IPC); peers are for CPUs alone.

    python benchmarks/ranks.py --directory /mnt/nvme0 --peer-python VENV/bin/python [--model 309m] [--json]

A case that cannot run is named with the reason, and the program exits with 1. DeepSpeed compiles its CPU
update and its I/O engine at the first use, which needs ninja and a C++ compiler beside the peers' interpreter
or in the PATH, and the headers of libaio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine_facts import machine_facts
from peers.group import Group
from peers.nodes import Node, bytes_per_second, two_nodes
from peers.process import ContenderFailed
from saving_tasks import add_task_options, decoder_of, task_of
from training_report import ratios
from turns import fresh_directory

from infinity.system import machine

CASES = {
    "ours:3:ram": ("ours_ranked", "3:ram"),
    "ours:3:nvme": ("ours_ranked", "3:nvme"),
    "deepspeed:cpu3": ("deepspeed", "cpu3"),
    "deepspeed:nvme": ("deepspeed", "nvme"),
    "fsdp2": ("fsdp2", "cpu"),
    **{
        f"ours:{stage}:{place}": ("ours_ranked", f"{stage}:{place}")
        for stage in (2, 1, 0)
        for place in ("ram", "nvme")
    },
    "ours:3:ram:flat": ("ours_ranked", "3:ram:flat"),
    "ours:3:nvme:flat": ("ours_ranked", "3:nvme:flat"),
    "deepspeed:cpu": ("deepspeed", "cpu"),
    "alone:ram": ("ours_ranked", "3:ram"),
    "alone:nvme": ("ours_ranked", "3:nvme"),
}
"""Name -> file in peers/ without its suffix, and mode of that contender."""
USUAL = ("ours:3:ram", "ours:3:nvme", "deepspeed:cpu3", "deepspeed:nvme", "fsdp2")
FIGURES = {
    "step_s": ("s/step", 1.0, 3),
    "sent_bytes": ("sent a step GB", 1e-9, 3),
    "rss_steps": ("RSS in steps GB", 1e-9, 3),
    "rss_built": ("RSS before GB", 1e-9, 3),
}
"""Figures of a turn -> (heading of the table, factor, number of decimals)."""


def ours(name: str) -> bool:
    """Whether a case is infinity's on several ranks."""
    return name.startswith("ours:")


def measure(options: argparse.Namespace, top: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run all rounds. Returns (name -> its turns, as `turn_of` returns them, name -> why the case failed)."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in options.case}
    failures: dict[str, str] = {}
    for number in range(options.rounds):
        first = number % len(options.case)
        for name in options.case[first:] + options.case[:first]:
            if name in failures:
                continue
            try:
                turns[name].append(turn_of(one_turn(options, top, name)) | {"round": number})
            except ContenderFailed as error:
                failures[name] = str(error)
                print(error, file=sys.stderr)
            else:
                last = turns[name][-1]
                print(f"{name:16} {last['step_s']:8.2f} s/step   loss {last['losses'][-1]:.4f}", flush=True)
    return {name: each for name, each in turns.items() if each}, failures


def one_turn(options: argparse.Namespace, top: Path, name: str) -> list[dict[str, Any]]:
    """Run the processes of a case for one turn; returns the reply of each rank (`peers.ranked.ranked_turn`).

    Raises ContenderFailed.
    """
    contender, mode = CASES[name]
    alone = name.startswith("alone:")
    ranks, batch = (1, options.batch * options.ranks) if alone else (options.ranks, options.batch)
    tasks = []
    for rank in range(ranks):
        task = replace(task_of(options, top, contender, mode), rank=rank, ranks=ranks, batch=batch)
        budgets = task.budgets | {"host": options.host, "device": options.device_budget}
        tasks.append(replace(task, device=options.device, budgets=budgets))
    python = sys.executable if contender == "ours_ranked" else options.peer_python
    threads = max(1, machine.cpu().allowed // ranks)
    with ExitStack() as stack:
        there: Sequence[Node] = ()
        if options.link and not alone:
            there = stack.enter_context(two_nodes(options.link, on_each=options.ranks // 2))
        group = stack.enter_context(Group(name, tasks, python, options.timeout, threads, nodes=there))
        group.ready()
        replies = group.ask("ranked", lead=options.lead, steps=options.steps)
        group.finish()
    return replies


def turn_of(replies: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a turn, from the replies of its ranks.

    "seconds": of each timed step, those of its slowest rank; "step_s": their median. "losses": of all steps,
    means over ranks. "sent_bytes", "link_bytes": mean over ranks. "crossed_bytes": payload that a node
    received from the other one, mean over nodes, as infinity has counted it; 0 for peers. "rss_steps",
    "rss_built": of the rank with the most. "facts": those of rank 0.
    """
    seconds = [max(each) for each in zip(*(reply["seconds"] for reply in replies), strict=True)]
    return {
        "seconds": seconds,
        "step_s": statistics.median(seconds),
        "losses": [statistics.mean(each) for each in zip(*(one["losses"] for one in replies), strict=True)],
        "sent_bytes": round(statistics.mean(reply["sent_bytes"] for reply in replies)),
        "link_bytes": round(statistics.mean(reply["link_bytes"] for reply in replies)),
        "crossed_bytes": sum(reply["facts"].get("crossed", 0) for reply in replies) // 2,
        "rss_steps": max(reply["rss_steps"] for reply in replies),
        "rss_built": max(reply["rss_built"] for reply in replies),
        "facts": replies[0]["facts"],
    }


def medians(turns: list[dict[str, Any]]) -> dict[str, float]:
    """The medians of all figures, those of seconds over all timed steps, and the last loss ("loss"). Of a
    case of infinity's also "plan_ratio", the RSS in steps divided by the RAM of the plan.
    """
    names = (*FIGURES, "link_bytes", "crossed_bytes")
    found = {name: statistics.median(turn[name] for turn in turns) for name in names}
    found["step_s"] = statistics.median(each for turn in turns for each in turn["seconds"])
    found["loss"] = turns[-1]["losses"][-1]
    if "plan" in turns[0]["facts"]:
        planned = [turn["facts"]["plan"]["ram_bytes"] for turn in turns]
        found["plan_ratio"] = statistics.median(
            turn["rss_steps"] / nbytes for turn, nbytes in zip(turns, planned, strict=True)
        )
    return found


def ratios_to_peers(turns: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Peer -> our case -> seconds of the peer divided by ours, of all rounds, and their median."""
    speeds = {
        name: {
            "rounds": [turn["round"] for turn in each],
            "seconds": [turn["step_s"] for turn in each],
        }
        for name, each in turns.items()
    }
    return {
        peer: {name: each for name, each in ratios(speeds, peer).items() if ours(name)}
        for peer in speeds
        if not ours(peer)
    }


def show(
    results: dict[str, dict[str, float]],
    compared: dict[str, dict[str, dict[str, Any]]],
    link: str | None = None,
) -> None:
    """Print the table in Markdown, the bytes on the link between nodes, and the ratios to each peer."""
    print("\n| case | " + " | ".join(title for title, _, _ in FIGURES.values()) + " | loss |")
    print("|---" * (len(FIGURES) + 2) + "|")
    for name, each in results.items():
        cells = [f"{each[key] * factor:.{digits}f}" for key, (_, factor, digits) in FIGURES.items()]
        print(f"| {name} | " + " | ".join(cells) + f" | {each['loss']:.4f} |")
    for name, each in results.items():
        if link:
            alone = each["link_bytes"] / bytes_per_second(link)
            counted = ""
            if each.get("crossed_bytes"):
                counted = f"{each['link_bytes'] / each['crossed_bytes']:.3f} x what infinity has counted, "
            print(
                f"{name}: a node sends {each['link_bytes'] / 1e9:.3f} GB a step, {counted}which take "
                f"{alone:.2f} s at {link}; the step is {each['step_s'] / alone:.2f} x that"
            )
        if "plan_ratio" in each:
            print(f"{name}: RSS in steps is {each['plan_ratio']:.3f} x the plan's RAM")
    for peer, found in compared.items():
        for name, ratio in found.items():
            words = f"{min(ratio['rounds']):.2f} to {max(ratio['rounds']):.2f}"
            print(f"{name} is {ratio['median']:.2f} x as fast as {peer} ({words})")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_task_options(parser)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(USUAL))
    parser.add_argument("--ranks", type=int, default=2, help="processes of a case")
    parser.add_argument("--host", help="host budget of each of infinity's ranks, in place of the cases' own")
    parser.add_argument("--device", default="cpu", help="where infinity's ranks compute: all on this device")
    parser.add_argument("--device-budget", help="device budget of each of infinity's ranks")
    parser.add_argument("--link", help="rate of a link between two nodes, such as 1gbit")
    parser.add_argument("--peer-python", default=sys.executable, help="the peers' interpreter")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each case")
    parser.add_argument("--lead", type=int, default=2, help="untimed steps before the timed ones")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    options = parser.parse_args(argv)
    if min(options.rounds, options.steps, options.lead) < 1 or options.ranks < 2:
        parser.error("--rounds, --steps and --lead are at least 1, --ranks at least 2")
    if options.device != "cpu" and (options.host is None or options.device_budget is None):
        parser.error("--device is for a run with --host and --device-budget")
    if options.link is not None:
        try:
            bytes_per_second(options.link)
        except ValueError as error:
            parser.error(f"--link: {error}")
        if options.ranks % 2:
            parser.error("--link is for an even number of ranks")
    if options.quick:
        options.seq, options.rounds, options.lead, options.steps = 32, 1, 1, 2
    options.directory = options.directory.resolve()
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    settings = vars(options) | {"directory": "", "peer_python": ""}
    with fresh_directory(options.directory) as top:
        turns, failures = measure(options, top)
    results = {name: medians(each) for name, each in turns.items()}
    compared = ratios_to_peers(turns)
    report = {
        "benchmark": "ranks",
        "machine": machine_facts(),
        "settings": settings,
        "parameters": decoder_of(options).parameters,
        "medians": results,
        "ratios": compared,
        "turns": turns,
        "failures": failures,
    }
    show(results, compared, options.link)
    if options.json:
        print(json.dumps(report, default=str))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
