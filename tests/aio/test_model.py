"""Tests of random reads and writes on every backend, on two files and a striped volume over two engines.

After each batch the content must equal that of a bytearray to which the same writes were applied.
"""

from __future__ import annotations

import errno
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from aio_backends import BLOCK, PAGE, each_backend, engine, file_bytes, make_file, memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity import aio

EXAMPLES = 20
OPERATIONS = 1000  # in each example, so 2 * 10^4 in all; 10^6 in the slow test
SIZE = (1 << 18) + 1357
"""Bytes of each file and of the volume. They are no multiple of the blocks into which engines cut requests.

Blocks are small too, so that there are many borders between blocks, where errors are most likely.
"""


@dataclass
class Target:
    """A file or volume (`store`) to test, and the bytes that it must hold (`model`).

    source: memory to write from. target: memory to read into.
    """

    store: aio.File | aio.Volume
    model: bytearray
    source: memoryview
    target: memoryview


def ranges(rng: random.Random) -> Iterator[tuple[int, int]]:
    """Yield disjoint ranges (begin, end) of byte offsets below SIZE, in random order.

    Operations on these ranges can be in flight at the same time.
    """
    unit = rng.choice((1, 1, 512, PAGE))
    span = rng.choice((200, 2000, 10000, SIZE // 4))
    cuts, at = [], rng.randrange(SIZE // 2) // unit * unit
    while at < SIZE and len(cuts) < rng.randint(2, 48):
        cuts.append(at)
        at += max(unit, rng.randrange(1, span) // unit * unit)
    pairs = list(pairwise(cuts))
    rng.shuffle(pairs)
    yield from pairs


def batch(rng: random.Random, target: Target) -> int:
    """Start random reads and writes, wait for all, and compare what was read with `target.model`.

    Returns the number of operations.
    """
    shift = rng.choice((0, 0, 0, 1, 64, 512))
    reads: list[tuple[int, int]] = []
    futures: list[aio.Future] = []
    for begin, end in ranges(rng):
        action = rng.random()
        place = slice(shift + begin, shift + end)
        if action < 0.45:
            target.model[begin:end] = rng.randbytes(end - begin)
            target.source[place] = target.model[begin:end]
            futures.append(target.store.write(target.source[place], begin))
        elif action < 0.99:
            target.target[place] = bytes(end - begin)
            futures.append(target.store.read(target.target[place], begin))
            reads.append((begin, end))
        else:
            futures.append(target.store.sync())
    aio.wait_all(futures)
    for begin, end in reads:
        # Compared as bytes, because a memoryview compares element by element.
        assert bytes(target.target[shift + begin : shift + end]) == target.model[begin:end], (begin, shift)
    return len(futures)


def add_faults(rng: random.Random, faults: aio.Faults) -> None:
    """Remove all faults. In half of the calls, then inject errors, short transfers and delays.

    In spite of them, no bytes may be lost and no operation may fail.
    """
    faults.clear()
    if rng.random() < 0.5:
        faults.fail("any", rng.randint(1, 300), rng.choice((errno.EAGAIN, errno.EINTR)), times=2)
        faults.shorten(rng.choice(("read", "write")), rng.randint(1, 100), rng.randint(1, BLOCK), times=3)
        faults.delay("any", rng.randint(1, 300), 0.001)


def drive(backend: str, seed: int, directory: Path, operations: int) -> None:
    rng = random.Random(seed)
    with ExitStack() as stack:
        faults = [aio.Faults(), aio.Faults()]
        engines = [
            stack.enter_context(engine(directory, backend, faults=fault, depth=16)) for fault in faults
        ]

        def opened(name: str, size: int, which: int) -> aio.File:
            return engines[which].open(str(make_file(directory / name, size)))

        weights = (rng.randint(1, 3), rng.randint(1, 3))
        stripe = rng.choice((PAGE, 4 * PAGE, 1000))
        sizes = file_bytes(aio.StripeMap(weights, stripe), SIZE)
        halves = [opened(name, sizes[i], i) for i, name in enumerate(("half0", "half1"))]
        stores: list[aio.File | aio.Volume] = [
            opened("file0", SIZE, 0),
            opened("file1", SIZE, 1),
            aio.Volume(list(zip(halves, weights, strict=True)), stripe),
        ]
        targets = [
            Target(store, bytearray(SIZE), memory(SIZE + PAGE), memory(SIZE + PAGE)) for store in stores
        ]
        done = 0
        while done < operations:
            for fault in faults:
                add_faults(rng, fault)
            done += batch(rng, rng.choice(targets))
        # Compare what is in the files now, without the engine.
        for name, target in zip(("file0", "file1"), targets, strict=False):
            assert (directory / name).read_bytes() == target.model
        whole = bytearray()
        content = [(directory / name).read_bytes() for name in ("half0", "half1")]
        for which, offset, nbytes in aio.StripeMap(weights, stripe).extents(0, SIZE):
            whole += content[which][offset : offset + nbytes]
        assert whole == targets[2].model


@each_backend
def test_random_operations(backend: str) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(seed=st.integers(0, 2**32 - 1))
    def run(seed: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            drive(backend, seed, Path(directory), OPERATIONS)

    run()


@pytest.mark.slow
@each_backend
def test_many_more_random_operations(backend: str, tmp_path: Path) -> None:
    drive(backend, random.randrange(2**32), tmp_path, 10**6)
