"""Checkpoints beside peers: what a save costs a training run in RAM, beside DeepSpeed's save_checkpoint.

All model states rest in RAM in every contender. Each contender is a process of its own, which trains
`--steps` steps without a save and `--steps` steps after a save, in turns, `--saves` times a round:

    ours             commits on: save() returns, and the commit is written while the steps go on
    ours:copy        commits off: save(path) writes a copy of the run and waits for it
    deepspeed:cpu    ZeRO-2 with offload to RAM: save_checkpoint, then fsync of its files
    deepspeed:cpu3   ZeRO-3 with offload to RAM: the same

Of each save, the table has the medians of: the seconds of the call; the seconds that training stood still,
which are those of the call, of the steps after it and of the landing, less those of as many steps without a
save; the bytes that the process wrote to storage (/proc/self/io), and the room of the save on the disk (as du
counts it); and by how much the peak RSS was above that of the steps without a save.

    python benchmarks/checkpoint_peers.py --directory /mnt/nvme0 --peer-python VENV/bin/python [--json]

A contender that cannot run is named with the reason, and the program exits with 1. DeepSpeed compiles its CPU
update at the first use, which needs ninja and a C++ compiler beside the peers' interpreter or in the PATH.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from machine_facts import machine_facts
from peers.process import ContenderFailed
from saving_tasks import add_task_options, decoder_of, running
from turns import fresh_directory

CONTENDERS: dict[str, dict[str, Any]] = {
    "ours": {"mode": "all-host", "commits": True},
    "ours:copy": {"mode": "all-host"},
    "deepspeed:cpu": {"contender": "deepspeed", "mode": "cpu"},
    "deepspeed:cpu3": {"contender": "deepspeed", "mode": "cpu3"},
}
"""Name -> arguments of `saving_tasks.running`."""
FIGURES = {
    "blocked_s": ("call s", 1.0, 3),
    "lost_s": ("training stands still s", 1.0, 3),
    "written_bytes": ("written GB", 1e-9, 3),
    "disk_bytes": ("on disk GB", 1e-9, 3),
    "extra_rss": ("extra RSS MB", 1e-6, 0),
    "step_s": ("step without a save s", 1.0, 3),
}
"""Figures of a save -> (heading of the table, factor, number of decimals)."""
COMPARED = ("lost_s", "written_bytes", "extra_rss")


def measure(options: argparse.Namespace, top: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run all rounds. Returns (name -> figures of its saves, name -> why the contender failed)."""
    saves: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contender}
    failures: dict[str, str] = {}
    for number in range(options.rounds):
        order = options.contender if number % 2 == 0 else options.contender[::-1]
        for name in order:
            if name in failures:
                continue
            try:
                saves[name] += one_turn(options, top, name)
            except ContenderFailed as error:
                failures[name] = str(error)
                print(error, file=sys.stderr)
    return {name: each for name, each in saves.items() if each}, failures


def one_turn(options: argparse.Namespace, top: Path, name: str) -> list[dict[str, Any]]:
    """Run one process of a contender, and return the figures of its saves (`saving.save_turn`).

    The figures of the first save of a process are left out, for it makes files that later saves reuse, unless
    it is the only one. Raises ContenderFailed.
    """
    settings = CONTENDERS[name]
    python = options.peer_python if settings.get("contender") else sys.executable
    with running(options, top, python=python, **settings) as (process, task):
        reply = process.ask(
            "save", steps=options.steps, saves=options.saves, directory=task.directory, kept=task.checkpoint
        )
    found: list[dict[str, Any]] = reply["saves"]
    last = found[-1]
    print(
        f"{name:16} call {last['blocked_s']:.3f} s, stands still {last['lost_s']:.3f} s, "
        f"written {last['written_bytes'] / 1e9:.3f} GB",
        flush=True,
    )
    return found[1:] or found


def medians(saves: list[dict[str, Any]]) -> dict[str, float]:
    """The medians of all figures."""
    return {name: statistics.median(each[name] for each in saves) for name in FIGURES}


def show(results: dict[str, dict[str, float]]) -> None:
    """Print the table in Markdown, and in which figures infinity's commits are lower than each peer."""
    print("\n| contender | " + " | ".join(title for title, _, _ in FIGURES.values()) + " |")
    print("|---" * (len(FIGURES) + 1) + "|")
    for name, each in results.items():
        cells = (f"{each[key] * factor:.{digits}f}" for key, (_, factor, digits) in FIGURES.items())
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name, each in lower(results).items():
        words = ", ".join(f"{FIGURES[key][0]}: {'yes' if found else 'NO'}" for key, found in each.items())
        print(f"ours lower than {name}: {words}")


def lower(results: dict[str, dict[str, float]]) -> dict[str, dict[str, bool]]:
    """For each other contender: whether infinity's commits are lower, in each of the figures COMPARED."""
    ours = results.get("ours")
    if ours is None:
        return {}
    return {
        name: {key: ours[key] < each[key] for key in COMPARED}
        for name, each in results.items()
        if name != "ours"
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_task_options(parser)
    parser.add_argument("--contender", choices=CONTENDERS, nargs="+", default=tuple(CONTENDERS))
    parser.add_argument("--peer-python", default=sys.executable, help="the peers' interpreter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=5, help="saves of a process; the first is not counted")
    parser.add_argument("--steps", type=int, default=4, help="steps without a save, and steps after one")
    options = parser.parse_args(argv)
    if min(options.rounds, options.saves, options.steps) < 1:
        parser.error("--rounds, --saves and --steps are at least 1")
    if options.quick:
        options.seq, options.rounds, options.saves, options.steps = 32, 1, 2, 2
    options.directory = options.directory.resolve()
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    settings = vars(options) | {"directory": "", "peer_python": "", "contender": list(options.contender)}
    with fresh_directory(options.directory) as top:
        saves, failures = measure(options, top)
    results = {name: medians(each) for name, each in saves.items()}
    report = {
        "benchmark": "checkpoint_peers",
        "machine": machine_facts(),
        "settings": settings,
        "parameters": decoder_of(options).parameters,
        "medians": results,
        "lower": lower(results),
        "saves": saves,
        "failures": failures,
    }
    show(results)
    if options.json:
        print(json.dumps(report, default=str))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
