"""Stream speed: the rate at which the threads of a `ThreadPool` read and write memory without arithmetic,
which no update can exceed.
"""

from __future__ import annotations

import statistics
import time

import torch

from infinity.cpu_adam.pool import ThreadPool
from infinity.cpu_adam.work import Stream

_ELEMENTS = 16 << 20


def stream_speed(*, repeats: int = 5) -> float:
    """Measure the bytes per second, reads plus writes, that a default `ThreadPool` moves in place: the median
    of `repeats` passes over two fp32 arrays of 0.13 GB in total. It is below the bandwidth in the memory's
    data sheet.
    """
    arrays = [torch.zeros(_ELEMENTS, dtype=torch.float32, device="cpu") for _ in range(2)]
    with ThreadPool() as pool:
        work = Stream(read_write=arrays)
        pool.run(work)
        return statistics.median(_rate(pool, work) for _ in range(repeats))


def _rate(pool: ThreadPool, work: Stream) -> float:
    start = time.perf_counter()
    pool.run(work)
    return work.bytes_moved / (time.perf_counter() - start)
