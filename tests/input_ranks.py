"""Programs of ranks that offload unusual models and optimizers, or end by an error that nothing catches; see
tests/distributed/test_inputs.py.
"""

from __future__ import annotations

import os
from typing import Any

import rank_processes
import torch
from torch import nn

import infinity
from infinity.runtime import Runtime

RANK = int(os.environ.get("RANK", "0"))


def offloaded(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Runtime:
    return infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(host="32MiB"),
        precision=infinity.Precision(compute="fp32"),
        device="cpu",
    )


def overlapping_buffers() -> dict[str, Any]:
    """Buffers with elements that share memory, with other values on each rank. Returns what they become."""
    model = nn.Linear(4, 4)
    model.register_buffer("one", torch.full((1,), RANK + 1.0).expand(4))
    model.register_buffer("rows", (10.0 * RANK + torch.arange(3.0)).expand(2, 3).t())
    model.register_buffer("windows", (10.0 * RANK + torch.arange(4.0)).as_strided((3, 2), (1, 1)))
    with offloaded(model, None):
        return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def uncaught() -> None:
    """Rank 1 ends by an error that nothing catches; rank 0 raises RankFailure, which the script catches."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(os.environ["ERRORS"], str(RANK))
    model = nn.Linear(4, 4)
    with offloaded(model, torch.optim.SGD(model.parameters())) as runtime:
        if RANK == 1:
            raise ZeroDivisionError("planted")
        runtime.optimizer.step()


if __name__ == "__main__":
    rank_processes.serve(globals())
