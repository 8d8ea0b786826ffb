"""Tests of StripeMap, which says where each byte of a striped volume lies, and of volumes.

The map must never change, or data written by an earlier version could not be read. A volume over several
files acts like one file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from aio_backends import BLOCK, PAGE, each_backend, engine, file_bytes, make_file, memory
from hypothesis import given
from hypothesis import strategies as st

from infinity import aio
from infinity.errors import ConfigError, StorageError

WEIGHTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def test_the_map_is_a_format() -> None:
    """For given weights and stripe size, StripeMap places bytes exactly as listed here, in every version.

    To find the data in a volume again, it must suffice to have stored the weights and the stripe size.
    """
    stripes = aio.StripeMap([5, 2, 1], 100)
    assert stripes.period == (0, 1, 0, 0, 2, 0, 1, 0)
    assert stripes.weights == (5, 2, 1)
    assert stripes.stripe_bytes == 100
    assert stripes.extents(50, 300) == [(0, 50, 50), (1, 0, 100), (0, 100, 150)]
    assert stripes.extents(780, 120) == [(0, 480, 120)], "neighbours in one file are one extent"
    assert file_bytes(stripes, 801) == [501, 200, 100]
    assert stripes.extents(7, 0) == []
    assert stripes.base == 0


def test_a_base_moves_every_place_behind_a_header() -> None:
    stripes = aio.StripeMap([5, 2, 1], 100)
    behind = aio.StripeMap([5, 2, 1], 100, base=4096)
    assert behind.base == 4096
    assert behind.period == stripes.period
    for offset, nbytes in ((50, 300), (780, 120), (0, 2000)):
        moved = [(file, at - 4096, length) for file, at, length in behind.extents(offset, nbytes)]
        assert moved == stripes.extents(offset, nbytes)
    for base in ((1 << 40) + 1, -1):
        with pytest.raises((ConfigError, TypeError)):
            aio.StripeMap([1], 1, base)
    with pytest.raises(ConfigError, match="2\\^63"):
        aio.StripeMap([1], 1 << 20, base=4096).extents(2**63 - 4097, 2)


@given(weights=WEIGHTS, stripe=st.integers(1, 50), offset=st.integers(0, 3000), nbytes=st.integers(0, 1500))
def test_extents_cover_a_range_once(weights: list[int], stripe: int, offset: int, nbytes: int) -> None:
    stripes = aio.StripeMap(weights, stripe)
    extents = stripes.extents(offset, nbytes)
    assert sum(length for _, _, length in extents) == nbytes
    assert extents == aio.StripeMap(weights, stripe).extents(offset, nbytes)
    split = [
        (file, at)
        for cut in (
            stripes.extents(offset, nbytes // 3),
            stripes.extents(offset + nbytes // 3, nbytes - nbytes // 3),
        )
        for file, first, length in cut
        for at in range(first, first + length)
    ]
    whole = [(file, at) for file, first, length in extents for at in range(first, first + length)]
    assert whole == split
    assert len(set(whole)) == nbytes


@given(weights=WEIGHTS, stripe=st.integers(1, 50), nbytes=st.integers(0, 3000))
def test_files_fill_without_gaps_in_proportion(weights: list[int], stripe: int, nbytes: int) -> None:
    stripes = aio.StripeMap(weights, stripe)
    used: list[set[int]] = [set() for _ in weights]
    for file, first, length in stripes.extents(0, nbytes):
        used[file].update(range(first, first + length))
    assert all(places == set(range(len(places))) for places in used)
    for weight, places in zip(weights, used, strict=True):
        assert abs(len(places) - nbytes * weight / sum(weights)) <= 2 * stripe * len(weights)


def test_bad_maps() -> None:
    for weights, stripe in (([], 1), ([0], 1), ([1, 0], 1), ([65536, 1], 1), ([1], 0), ([1], (1 << 40) + 1)):
        with pytest.raises(ConfigError):
            aio.StripeMap(weights, stripe)
    stripes = aio.StripeMap([1], 1 << 20)
    for offset, nbytes in ((-1, 1), (0, -1), (2**63 - 1, 2)):
        with pytest.raises(ConfigError):
            stripes.extents(offset, nbytes)


@each_backend
def test_volume_round_trip(backend: str, tmp_path: Path) -> None:
    size = 40 * BLOCK + 99
    with engine(tmp_path, backend) as one, engine(tmp_path, backend) as two:
        parts = []
        for name, weight, e in (("a", 3, one), ("b", 1, two), ("c", 1, two)):
            parts.append((e.open(str(make_file(tmp_path / name, size))), weight))
        volume = aio.Volume(parts, stripe_bytes=2 * PAGE)
        assert volume.map.weights == (3, 1, 1)
        assert [file.path for file in volume.files] == [str(tmp_path / name) for name in "abc"]
        content = os.urandom(size)
        assert volume.write(content, 5).result() == size
        volume.sync().wait()
        assert one.stats.sync_requests == 1
        assert two.stats.sync_requests == 2
        back = memory(size)
        assert volume.read(back, 5).result() == size
        assert back == content
        files = [(tmp_path / name).read_bytes() for name in "abc"]
        gathered = b"".join(files[i][at : at + n] for i, at, n in volume.map.extents(5, size))
        assert gathered == content
        assert volume.write(b"", 0).result() == 0
        with pytest.raises(StorageError, match="shorter than expected"):
            volume.read(memory(PAGE), 10 * size).wait()
        for bad in (lambda: volume.read(b"x", 0), lambda: volume.write(b"x", -1)):
            with pytest.raises(ConfigError):
                bad()
        parts[1][0].close()
        with pytest.raises(ConfigError, match="is closed"):
            volume.read(back, 0)


def test_bad_volumes(tmp_path: Path) -> None:
    with engine(tmp_path, "threads") as e:
        file = e.open(str(make_file(tmp_path / "file", PAGE)))
        for parts, stripe in (([], PAGE), ([(file, 0)], PAGE), ([(file, 1.5)], PAGE), ([(file, 1)], 0)):
            with pytest.raises(ConfigError):
                aio.Volume(parts, stripe)
        assert aio.Volume([(file, 7)], PAGE).map.weights == (7,)
