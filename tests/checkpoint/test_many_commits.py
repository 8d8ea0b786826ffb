"""Tests of many commits in one run: nothing of those that have ended stays."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoint import commit_files

COMMITS = 300
LOOKED_AT = (50, 150, COMMITS)
"""Commits after which objects, descriptors, threads and files are counted."""


def objects() -> Counter[str]:
    """The number of living objects that the garbage collector tracks, by type, once the commit's thread has
    ended: it tells of the commit's end before.
    """
    for thread in threading.enumerate():
        if thread.name == "infinity-commit":
            thread.join(10)
    gc.collect()
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("home", ["nvme", "ram"])
def test_what_a_run_holds_does_not_grow(home: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    slabs, commits = tmp_path / "slabs", tmp_path / "commits"
    slabs.mkdir()
    nvme = {str(slabs): 1 << 20} if home == "nvme" else None
    plan = infinity.plan(
        model, optimizer, budget=infinity.Budget(host="1MiB", nvme=nvme), device="cpu", checkpoint=commits
    )
    host = 1 << 20 if nvme is None else plan.smallest[infinity.tiers.Tier.HOST]
    budget = infinity.Budget(host=host, nvme=nvme)
    counts, held, files = [], [], []
    with infinity.offload(model, optimizer, budget=budget, device="cpu", checkpoint=commits) as runtime:
        for number in range(1, COMMITS + 1):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            commit = runtime.save(state={"step": number})
            if number in LOOKED_AT:
                commit.wait()
                del commit
                counts.append(objects())
                held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
                files.append([sorted(each.suffix for each in path.iterdir()) for path in (slabs, commits)])
    assert commit_files.generations(commits) == [COMMITS]
    assert held[1:] == held[:1] * 2
    assert files[1:] == files[:1] * 2
    ours = [
        {
            name: count
            for name, count in each.items()
            if "infinity" in name or "ndarray" in name or "Tensor" in name
        }
        for each in counts
    ]
    assert "infinity.pages.ledger.Commit" in ours[0]
    assert ours[1:] == ours[:1] * 2
    total = [each.total() for each in counts]
    assert total[2] - total[0] < 150, (counts[2] - counts[0]).most_common(5)
