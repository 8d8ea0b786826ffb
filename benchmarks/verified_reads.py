"""Compares steps whose reads from NVMe are verified with steps whose reads are not: `Budget(verify=...)`.

Three runtimes train the same model in one process, with all pages on NVMe and the smallest host budget: "on"
and "again" verify, "off" does not. Every round has a step of each, in an order that changes each round.
Ratios of "on" and of "again" to "off", and of "again" to "on" (the noise), are taken within a round.
Reported are their medians with the quartiles, for the seconds of a step and for those of all CPUs in it. The
rest depends little on noise: the CPU seconds of the I/O thread, which computes the checksums, and the bytes
that a step moves, at the speed at which one CPU computes checksums of memory.

    python benchmarks/verified_reads.py --directory /mnt/nvme0 [--model 30m] [--rounds 20] [--json]

`--json`: the last line of stdout is one JSON object. `--quick`: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine_facts import machine_facts
from turns import QUICK

import infinity
from infinity.checksum import crc32c_blocks
from infinity.lm.decoder import PRESETS, Decoder
from infinity.tiers import Tier

NAMES = ("on", "off", "again")
PAIRS = (("on", "off"), ("again", "off"), ("again", "on"))


class Contender:
    """A runtime with all its pages on NVMe."""

    def __init__(self, options: argparse.Namespace, directory: Path, *, verify: bool) -> None:
        torch.manual_seed(0)
        self.model = Decoder(QUICK if options.quick else PRESETS[options.model].decoder)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(0, 256, (options.batch, options.seq))
        directory.mkdir()
        before = io_threads()
        roomy = infinity.Budget(host="16GiB", nvme={directory: "64GiB"}, verify=verify)
        examples = {"example_inputs": (self.batch, self.batch)}
        smallest = infinity.plan(self.model, optimizer, budget=roomy, **examples).smallest[Tier.HOST]
        budget = infinity.Budget(host=smallest, nvme={directory: "64GiB"}, verify=verify)
        self.runtime = infinity.offload(self.model, optimizer, budget=budget, device="cpu", **examples)
        (self._io,) = io_threads() - before

    def io_seconds(self) -> float:
        """CPU seconds of the I/O thread so far."""
        nanoseconds, *_ = Path(f"/proc/self/task/{self._io}/schedstat").read_text().split()
        return int(nanoseconds) / 1e9

    def step(self) -> tuple[float, float]:
        """Train a step; returns its seconds, and the seconds of all CPUs in it."""
        wall, cpus = time.perf_counter(), time.process_time()
        self.model(self.batch, self.batch).backward()
        self.runtime.optimizer.step()
        self.runtime.optimizer.zero_grad()
        return time.perf_counter() - wall, time.process_time() - cpus

    def moved(self) -> int:
        """Bytes read from NVMe and written to it so far."""
        return sum(each.read_bytes + each.write_bytes for each in self.runtime._components.store.nvme.stats)


def io_threads() -> set[int]:
    """The numbers of this process's threads that submit I/O."""
    found = Path("/proc/self/task").iterdir()
    return {int(each.name) for each in found if (each / "comm").read_text() == "infinity-aio\n"}


def checksum_speed() -> float:
    """Bytes per second for which one CPU computes checksums of memory that is in no cache."""
    memory = torch.ones(256 << 20, dtype=torch.uint8)
    rows = np.array([(0, memory.nbytes, 4096)], dtype=np.int64)
    seconds = []
    for _ in range(5):
        started = time.thread_time()
        crc32c_blocks(memory, rows)
        seconds.append(time.thread_time() - started)
    return memory.nbytes / statistics.median(seconds)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds; returns the report."""
    with tempfile.TemporaryDirectory(dir=options.directory) as root, contextlib.ExitStack() as ends:
        contenders = {}
        for name in NAMES:
            contenders[name] = Contender(options, Path(root) / name, verify=name != "off")
            ends.callback(contenders[name].runtime.close)
            for _ in range(2):
                contenders[name].step()
        before = contenders["on"].moved()
        io = {name: each.io_seconds() for name, each in contenders.items()}
        rounds = []
        for number in range(options.rounds):
            turn = NAMES[number % 3 :] + NAMES[: number % 3]
            rounds.append({name: contenders[name].step() for name in turn})
        moved = (contenders["on"].moved() - before) / options.rounds
        io = {name: (each.io_seconds() - io[name]) / options.rounds for name, each in contenders.items()}
    speed = checksum_speed()
    seconds, cpus = (statistics.median(each["off"][index] for each in rounds) for index in (0, 1))
    ratios = {
        f"{first}/{second}": {
            what: quartiles([each[first][index] / each[second][index] for each in rounds])
            for index, what in enumerate(("seconds", "cpu"))
        }
        for first, second in PAIRS
    }
    bound = moved / speed
    return {
        "benchmark": "verified_reads",
        "model": options.model,
        "rounds": options.rounds,
        "step_seconds": seconds,
        "step_cpu_seconds": cpus,
        "step_bytes": moved,
        "io_cpu_seconds": io,
        "checksum_gb_per_s": speed / 1e9,
        "checksum_seconds": bound,
        "of_step": bound / seconds,
        "of_cpu": bound / cpus,
        "ratios": ratios,
        "machine": machine_facts(),
    }


def quartiles(found: list[float]) -> list[float]:
    """The first quartile, the median and the third quartile."""
    return statistics.quantiles(found, n=4) if len(found) > 1 else found * 3


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="30m")
    parser.add_argument("--directory", type=Path, required=True, help="a directory on the disk")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.seq = 2, 16
    report = measure(options)
    print(
        "{model}: {step_seconds:.3f} s a step, {step_cpu_seconds:.3f} s of CPUs, {step_bytes:.3g} bytes; "
        "their checksums take {checksum_seconds:.3f} s of one CPU ({of_step:.1%} of the step, {of_cpu:.1%} "
        "of its CPUs) at {checksum_gb_per_s:.1f} GB/s".format_map(report)
    )
    print(
        "CPU seconds of I/O threads:", ", ".join(f"{k} {v:.3f}" for k, v in report["io_cpu_seconds"].items())
    )
    for name, found in report["ratios"].items():
        for what, (low, middle, high) in found.items():
            print(f"{name} {what}: {middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})")
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
