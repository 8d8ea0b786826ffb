"""Helpers for tests of the NVMe tier: directories for its paths, and random bytes to write."""

from __future__ import annotations

import os
from pathlib import Path

import torch

PAGE = 4096
MIB = 1 << 20


def directories(tmp_path: Path, count: int) -> list[str]:
    made = [tmp_path / f"nvme{number}" for number in range(count)]
    for directory in made:
        directory.mkdir()
    return [os.fspath(directory) for directory in made]


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
