"""Contention: how much longer the operations of a step take while a disk is at work.

benchmarks/train.py compares a step with the least time that it could take on the machine. This least time
assumes that I/O overlaps with operations at no cost. But I/O and operations both need memory bandwidth and
the kernel, and a virtual disk may need a part of the CPU. Here a model with everything in memory runs forward
and backward in two kinds of turns: without other work on the machine ("alone"), and while fio reads and
writes at a given rate ("beside"). A round has one turn of each kind, in an order that changes each round.
Ratios are taken within a round.

    python benchmarks/contention.py --model 309m --directory /mnt/nvme0 --rate 1.8

`--json`: the last line of stdout is one JSON object. `--quick`: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from typing import Any

from machine_facts import machine_facts
from peers.fio import Fio, FioFailed
from peers.process import ContenderFailed, Process
from train import add_run_options, job_of
from turns import Bench, Job, fresh_directory

from infinity.lm.decoder import PRESETS

GB = 1e9


def parse(argv: list[str] | None) -> tuple[Job, float, bool]:
    """Read the command line: the job, the rate of fio in bytes per second, and whether to print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="309m")
    parser.add_argument("--rate", type=float, default=1.8, help="GB/s that fio moves, half of them written")
    add_run_options(parser)
    parser.set_defaults(steps=4)
    found = vars(parser.parse_args(argv))
    rate, as_json = found.pop("rate") * GB, found.pop("json")
    if not rate > 0:
        parser.error("--rate is not positive")
    return job_of(found, specs=()), rate, as_json


def measure(job: Job, process: Process, fio: Fio, rate: float) -> list[dict[str, Any]]:
    """Run all rounds, print a line for each, and return a dictionary for each.

    A dictionary has the mean seconds of a step while fio is idle ("alone") and while fio runs ("beside"), the
    bytes per second that fio moved ("speed") and the CPUs that fio kept busy ("cpu"). process: the process in
    which the model runs. rate: bytes per second that fio shall move. Raises ContenderFailed if that process
    fails, and FioFailed if fio does.
    """
    rounds = []
    for number in range(job.rounds):
        found: dict[str, Any] = {}
        for which in ("alone", "beside") if number % 2 == 0 else ("beside", "alone"):
            if which == "alone":
                found[which] = process.turn(1, job.steps)["seconds"]
                continue
            with fio.beside(rate) as background:
                found[which] = process.turn(1, job.steps)["seconds"]
            found |= asdict(background)
        rounds.append(found)
        times = found["beside"] / found["alone"]
        print(
            f"alone {found['alone']:.3f} s, beside {found['beside']:.3f} s: {times:.2f} times "
            f"(fio {found['speed'] / GB:.2f} GB/s, {found['cpu']:.2f} CPUs)",
            flush=True,
        )
    return rounds


def main(argv: list[str] | None = None) -> int:
    job, rate, as_json = parse(argv)
    small = {"nbytes": 64 << 20} if job.quick else {}
    try:
        with fresh_directory(job.directory) as directory:
            fio = Fio(directory, **small)
            with Bench(job, directory).computing(job.decoder) as process:
                rounds = measure(job, process, fio, rate)
    except (ContenderFailed, FioFailed) as error:
        print(error, file=sys.stderr)
        return 1
    ratio = statistics.median(each["beside"] / each["alone"] for each in rounds)
    print(f"beside a disk that moves {rate / GB:.2f} GB/s a step takes {ratio:.2f} times as long as alone")
    if as_json:
        report = {
            "benchmark": "contention",
            "machine": machine_facts(),
            "model": job.model,
            "batch": job.batch,
            "seq": job.seq,
            "rate": rate,
            "rounds": rounds,
            "ratio": ratio,
        }
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
