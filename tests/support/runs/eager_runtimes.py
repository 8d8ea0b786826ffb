"""Helpers that open runtimes with eager updates: a unit's update begins during the backward pass, as soon as
the unit's gradients are complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from homes import budget_for
from small_runtime import TIED, files
from torch import nn

import infinity
from infinity.aio import Faults
from infinity.system.disk_files import injected


@contextlib.contextmanager
def opened(
    directory: Path,
    *,
    accumulation: int = 1,
    update: str = "eager",
    more: int = 64 << 20,
    faults: Faults | None = None,
) -> Iterator[tuple[nn.Module, Any]]:
    """Offload a small model in bf16 with AdamW, and yield (model, runtime). Afterwards, close the runtime and
    assert that no file is left in `directory`.

    directory: the folder on a disk that the NVMe tier uses. update, accumulation: arguments of `offload`;
    accumulation is passed on only if `update` is "eager". more: bytes by which the host budget exceeds the
    smallest host budget with which the model can train. With the default all pages rest in RAM, with 0 all
    rest on NVMe. faults: injects faults into the runtime's I/O.
    """
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute="bf16", accumulate="compute")
    smallest = budget_for("unified-nvme", model, optimizer, directory, precision)
    assert smallest.host_bytes is not None
    budget = infinity.Budget(host=smallest.host_bytes + more, nvme=smallest.nvme)
    with (
        injected(faults or Faults()),
        infinity.offload(
            model,
            optimizer,
            budget=budget,
            precision=precision,
            device="cpu",
            update=update,
            accumulation=accumulation if update == "eager" else None,
        ) as runtime,
    ):
        yield model, runtime
    assert files(directory) == []


def spent(runtime: Any) -> list[int]:
    """Return the indices of the units whose eager updates have already taken the gradients of this step."""
    return [unit for unit, page in runtime._components.gradients.pages.items() if page.consumed]
