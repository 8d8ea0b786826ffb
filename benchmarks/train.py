"""Training steps of a decoder: compares infinity with peers, in turns, and with the limit of this machine.

Each contender, infinity or a peer, is a process of its own. While one contender trains a turn, the others
wait or are not running, so that all contenders meet the same state of a noisy disk. In a round each
contender has one turn, and the next round has the reverse order. Ratios of speeds are taken within a round.
The disk is measured by infinity's I/O engine before each turn of infinity.

The limit is the least time of a step: on the CPU max(compute + update, disk), and on a GPU max(compute,
update, disk, link). "compute" is the time of forward and backward of the same model with everything in
memory. It is measured before every round and after the last round, on a GPU only before and after all
turns. "update", "disk" and "link" are the bytes that a step moves, divided by the speeds measured in the
same run.

    python benchmarks/train.py --model 309m --directory /mnt/nvme0 --peer-python VENV/bin/python \\
        --peer deepspeed:nvme --ours host=6GiB --ours host=1GiB,states=bf16
    python benchmarks/train.py --model 926m --capacity --directory /mnt/nvme0 --json

`--json`: the last line of stdout is one JSON object. `--quick`: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import specs
import torch
from peers.process import ContenderFailed
from training_report import report_of, show
from turns import Bench, Job, fresh_directory

from infinity.lm.decoder import PRESETS

BUDGETS = {
    "309m": "host=1GiB",
    "926m": "host=2GiB,device=1GiB",
    "4b": "host=4GiB,device=2GiB",
    "7b": "host=6GiB,device=3GiB",
    "14b": "host=8GiB,device=5GiB",
}
"""Budgets of infinity, by model, if `--ours` is not given. They leave most of the model to the disk."""
OTHERS = "host=256MiB"
PEER = "deepspeed:nvme"


def parse(argv: list[str] | None) -> tuple[Job, bool]:
    """Parse the command line, and return (the job, whether to print its report as JSON).

    argv: arguments without the program's name; None means those of this process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="309m")
    parser.add_argument("--ours", type=specs.ours, action="append", metavar="SPEC", help=specs.OURS_HELP)
    parser.add_argument("--peer", type=specs.peer, action="append", metavar="PEER", help=specs.PEER_HELP)
    parser.add_argument("--capacity", action="store_true", help="train with infinity alone")
    add_run_options(parser)
    found = vars(parser.parse_args(argv))
    as_json, alone = found.pop("json"), found.pop("capacity")
    text = "host=4MiB" if found["quick"] else BUDGETS.get(found["model"], OTHERS)
    ours = found.pop("ours") or [specs.ours(text)]
    peers = found.pop("peer") or ([] if alone else [specs.peer(PEER)])
    names = [spec.name for spec in [*ours, *peers]]
    if len(set(names)) < len(names):
        parser.error("a contender is named twice")
    if alone and peers:
        parser.error("--capacity and --peer exclude each other")
    if found["clip"] and any(spec.update == "eager" for spec in ours):
        parser.error("eager updates cannot clip: give --clip 0, for all contenders")
    return job_of(found, specs=(*ours, *peers)), as_json


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks of training have."""
    parser.add_argument("--directory", type=Path, required=True, help="a directory on the disk to use")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--steps", type=int, default=2, help="timed steps in a turn, after one untimed step")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of a process before its first turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument(
        "--clip", type=float, default=1.0, help="norm to which gradients are clipped; 0: not clipped"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="the peers' interpreter")
    parser.add_argument(
        "--processes",
        choices=("auto", "kept", "fresh"),
        default=None,
        help="how long processes live. kept: through all rounds; fresh: for one turn;\n"
        "auto (default): fresh in the first round, then kept if they fit in memory together",
    )
    parser.add_argument("--timeout", type=float, default=1200, help="seconds that one start or turn may take")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="after so many seconds begin no turn, and report what was measured",
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")


def job_of(options: dict[str, object], **more: object) -> Job:
    """Make a Job from parsed command-line options, with defaults filled in.

    options: name -> value of the options that `add_run_options` adds. more: further fields of Job.
    """
    found = options | more
    found["device"] = found["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    if found["quick"]:
        found |= {"steps": 1, "warm_up": 2, "rounds": 2, "seq": 32}
    found["processes"] = found["processes"] or ("kept" if found["quick"] else "auto")
    found["directory"] = Path(str(found["directory"])).resolve()
    return Job(**found)  # type: ignore[arg-type]


def run(job: Job) -> Bench | None:
    """Run the job in a temporary directory, and return the Bench, which has all measurements.

    If the job cannot run, print the reason and return None.
    """
    with fresh_directory(job.directory) as directory:
        try:
            bench = Bench(job, directory)
            bench.run()
        except ContenderFailed as error:
            print(error, file=sys.stderr)
            return None
    return bench


def main(argv: list[str] | None = None) -> int:
    job, as_json = parse(argv)
    bench = run(job)
    if bench is None:
        return 1
    report = report_of(bench)
    show(report)
    if as_json:
        print(json.dumps(report, default=str))
    return 0 if bench.complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
