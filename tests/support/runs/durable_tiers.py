"""Helpers for tests of durable NVMe tiers: a tier committed with known pages, and checks of its pages."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from nvme_tiers import MIB, PAGE, random_bytes

from infinity.tiers import NvmeTier, VolumeRecord

STRIPE = 2 * PAGE
SIZE = 3 * MIB
CONTENT = random_bytes(SIZE, 5)


def budgets(paths: Sequence[str], each: int = 8 * MIB) -> dict[str, int]:
    return dict.fromkeys(paths, each)


def files_in(paths: Sequence[str]) -> list[str]:
    return sorted(os.path.join(path, name) for path in paths for name in os.listdir(path))


def commit(paths: Sequence[str], *, rank: int = 0, nbytes: int = SIZE) -> VolumeRecord:
    """Make a tier with slabs in all of `paths`, commit CONTENT in its first bytes, and close it."""
    speeds = [2.0, 1.0, 1.0, 1.0][: len(paths)]
    with NvmeTier(budgets(paths), nbytes, rank=rank, speeds=speeds, stripe_bytes=STRIPE) as tier:
        lease = tier.lease(nbytes)
        assert lease.offset == 0
        tier.write(lease, CONTENT[:nbytes]).result()
        tier.sync().result()
        tier.commit()
        return tier.record


def check_content(tier: NvmeTier, nbytes: int = SIZE) -> None:
    lease = tier.lease(nbytes)
    assert lease.offset == 0
    back = torch.empty(nbytes, dtype=torch.uint8)
    tier.read(lease, back).result()
    assert torch.equal(back, CONTENT[:nbytes])
    lease.release()


def check_adoptable(paths: Sequence[str], record: VolumeRecord) -> None:
    with NvmeTier(budgets(paths), SIZE, adopt=record) as tier:
        check_content(tier)
