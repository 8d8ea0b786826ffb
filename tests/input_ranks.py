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
from infinity.api import plan_for
from infinity.distributed import claims
from infinity.distributed.communicator import Communicator
from infinity.errors import BudgetError
from infinity.layout.shards import Share
from infinity.runtime import Runtime
from infinity.tiers import Tier

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


def options_without_values() -> list[float]:
    """An option that is a function, and one that is an object. Returns the parameter after a step."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.param_groups[0] |= {"schedule": lambda step: step, "owner": object()}
    with torch.no_grad():
        model.weight.fill_(3.0)
    with offloaded(model, optimizer) as runtime:
        model(torch.ones(1, 1)).sum().backward()
        runtime.optimizer.step()
        return model.weight.flatten().tolist()


def other_options() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99 + 0.001 * RANK), eps=1e-8 * (1 + RANK))
    offloaded(model, optimizer)


def uncaught() -> None:
    """Rank 1 ends by an error that nothing catches; rank 0 raises RankFailure, which the script catches."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(os.environ["ERRORS"], str(RANK))
    model = nn.Linear(4, 4)
    with offloaded(model, torch.optim.SGD(model.parameters())) as runtime:
        if RANK == 1:
            raise ZeroDivisionError("planted")
        runtime.optimizer.step()


def place() -> list[Any]:
    """Where this rank runs, its part of four CPUs, and its host budget if none is given."""
    with Communicator(None, 3, cuda=False) as communicator:
        communicator.find_place()
        found = [list(communicator.place), list(communicator.node_share([10, 11, 12, 13]))]
    model = nn.Linear(64, 64)
    with offloaded(model, None) as runtime:
        return [*found, runtime.plan.budgets[Tier.HOST]]


def on_one_disk() -> str:
    """Offload with all pages on NVMe, in a directory of this rank's, on a disk with just enough free bytes
    for both ranks; then with fewer, but a slab that a dead process has left; then with too few. Returns the
    error's text.
    """
    directory = os.path.join(os.environ["DISK"], str(RANK))
    os.mkdir(directory)
    needed = 2 * _on_nvme(directory)
    claims.free_bytes = lambda _: needed
    _on_nvme(directory)
    with open(os.path.join(directory, f"infinity-rank{RANK}.slab"), "wb") as file:
        file.write(bytes(8192))
    claims.free_bytes = lambda _: needed - 2 * 8192
    _on_nvme(directory)
    claims.free_bytes = lambda _: needed - 4096
    try:
        _on_nvme(directory)
    except BudgetError as error:
        return f"{error.tier}: {error}".replace(os.environ["DISK"], "DISK")
    return ""


def _on_nvme(directory: str) -> int:
    """Offload a model whose pages rest in this directory. Returns the bytes of the slab."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    precision = infinity.Precision(compute="fp32")
    smallest = plan_for(
        model,
        None,
        budget=infinity.Budget(device="64MiB", host="64MiB", nvme={directory: "64MiB"}),
        precision=precision,
        example_inputs=None,
        device="cpu",
        update="auto",
        accumulation=None,
        slab_directory=None,
        share=Share(RANK, 2, 3),
    ).smallest
    budget = infinity.Budget(
        device=smallest[Tier.DEVICE], host=smallest[Tier.HOST], nvme={directory: "64MiB"}
    )
    with infinity.offload(model, None, budget=budget, precision=precision, device="cpu") as runtime:
        return runtime.plan.nvme_bytes


if __name__ == "__main__":
    rank_processes.serve(globals())
