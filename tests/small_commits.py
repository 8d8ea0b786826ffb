"""Small runs with commits: a run in a directory, and the same run resumed with other homes of pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homes import budget_for
from parity import OPTIMIZERS
from torch import nn

import infinity

ROOM = 64 << 20
"""Bytes of NVMe that a run with commits may take, enough for each model of the tests twice."""


@contextlib.contextmanager
def committed(
    model: nn.Module,
    base: Path,
    *,
    home: str = "nvme",
    resume: bool = False,
    compute: str = "bf16",
    states: str = "fp32",
    optimizer: str = "adamw",
    **options: Any,
) -> Iterator[Any]:
    """Offload a model with commits that go to base/"commits", and slabs to base/"swap"; yield the runtime.

    home: where pages rest (see homes.py). resume: whether the run continues the last commit. options: of
    infinity.offload.
    """
    swap = base / "swap"
    swap.mkdir(exist_ok=True)
    made = OPTIMIZERS[optimizer](model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute=compute, states=states)
    plain = budget_for(home, model, made, swap, precision, accumulation=options.get("accumulation"))
    budget = infinity.Budget(device=plain.device, host=plain.host, nvme={swap: ROOM})
    where = {"resume" if resume else "checkpoint": base / "commits"}
    with infinity.offload(
        model, made, budget=budget, precision=precision, device="cpu", **where, **options
    ) as runtime:
        yield runtime


def names(directory: Path) -> list[str]:
    """The names of the files of commits in a directory."""
    return sorted(each.name for each in directory.iterdir() if each.name.startswith(("commit", ".commit")))
