"""Compares the speed of page checksums (infinity.checksum.crc32c_blocks) with that of reading the memory.

A case is a memory size (8 MiB, which fits in the cache of most CPUs, or 512 MiB), a block size and a number
of threads. Every round runs each case once: first torch's sum of the same bytes as int64 by as many threads,
which is the limit, and then the checksums. Ratios are taken within a round and their medians reported,
because the bandwidth of a shared machine drifts.

    python benchmarks/checksum.py [--implementation NAME] [--repeats R] [--json] [--quick]

`--json`: the last line of stdout is one JSON object. `--quick`: a smoke test, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from machine_facts import machine_facts

from infinity import checksum
from infinity.system import machine

SIZES = (8 << 20, 512 << 20)
"""Bytes of memory."""
BLOCKS = (4096, 65536, 1 << 20)
"""Bytes of a block."""
MEASURED_BYTES = 256 << 20
"""A small memory is read so often in one measurement that at least this many bytes are read."""


@dataclass(frozen=True)
class Case:
    """Checksums of the blocks of a memory, computed by a number of threads."""

    nbytes: int
    block: int
    threads: int


def speed(work: Callable[[], object], nbytes: int, times: int) -> float:
    """Run `work`, which reads `nbytes` bytes, once to warm up and then `times` times.

    Returns bytes per second.
    """
    work()
    start = time.perf_counter()
    for _ in range(times):
        work()
    return nbytes * times / (time.perf_counter() - start)


def measure_case(case: Case, memory: torch.Tensor, implementation: str, quick: bool) -> tuple[float, float]:
    """Return the speeds of the checksums and of the sum, in bytes per second."""
    words = memory.view(torch.int64)
    segments = np.array([[0, case.nbytes, case.block]], dtype=np.int64)
    times = 1 if quick else max(1, MEASURED_BYTES // case.nbytes)
    torch.set_num_threads(case.threads)
    limit = speed(words.sum, case.nbytes, times)

    def checksums() -> object:
        return checksum.crc32c_blocks(memory, segments, threads=case.threads, implementation=implementation)

    return speed(checksums, case.nbytes, times), limit


def measure(implementation: str, repeats: int, quick: bool) -> list[dict[str, float]]:
    """Return a row for each case, with medians over `repeats` rounds."""
    sizes = (1 << 20,) if quick else SIZES
    threads = sorted({1, min(machine.cpu().allowed, checksum.MOST_THREADS)})
    cases = [Case(*each) for each in itertools.product(sizes, BLOCKS, threads)]
    memories = {size: torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes}
    found: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    before = torch.get_num_threads()
    try:
        for _ in range(repeats):
            for case in cases:
                found[case].append(measure_case(case, memories[case.nbytes], implementation, quick))
    finally:
        torch.set_num_threads(before)
    return [
        {
            "nbytes": case.nbytes,
            "block": case.block,
            "threads": case.threads,
            "gb_per_s": statistics.median(ours for ours, _ in pairs) / 1e9,
            "sum_gb_per_s": statistics.median(limit for _, limit in pairs) / 1e9,
            "of_sum": statistics.median(ours / limit for ours, limit in pairs),
        }
        for case, pairs in found.items()
    ]


def show(report: dict[str, Any]) -> None:
    print(f"{report['machine']['cpu']}, {report['implementation']}, median of {report['repeats']} rounds\n")
    for row in report["results"]:
        print(
            f"{row['nbytes'] >> 20:4} MiB, blocks of {row['block'] >> 10:4} KiB, threads {row['threads']}: "
            f"{row['gb_per_s']:6.1f} GB/s, {row['of_sum']:.1%} of the sum's {row['sum_gb_per_s']:.1f} GB/s"
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--implementation", choices=checksum.implementations(), default=checksum.implementation()
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    if options.quick:
        options.repeats = 2
    report = {
        "benchmark": "checksum",
        "machine": machine_facts(),
        "implementation": options.implementation,
        "repeats": options.repeats,
        "results": measure(options.implementation, options.repeats, options.quick),
    }
    show(report)
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
