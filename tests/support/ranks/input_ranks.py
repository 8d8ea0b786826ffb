"""Programs of ranks that offload unusual models and optimizers, from files or onto one disk, or end by an
error that nothing catches; see tests/distributed/test_inputs.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import rank_processes
import torch
from torch import nn

import infinity
from infinity.api import plan_for
from infinity.checkpoint.safetensors_files import Weights
from infinity.distributed import agreed_plan
from infinity.distributed.communicator import Communicator
from infinity.errors import BudgetError
from infinity.layout.chunks import Division
from infinity.layout.shards import PageShard, Share
from infinity.ranks import SingleRank
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
    with Communicator(None, 3, torch.device("cpu")) as communicator:
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
    agreed_plan.free_bytes = lambda _: needed
    _on_nvme(directory)
    with open(os.path.join(directory, f"infinity-rank{RANK}.slab"), "wb") as file:
        file.write(bytes(8192))
    agreed_plan.free_bytes = lambda _: needed - 2 * 8192
    _on_nvme(directory)
    agreed_plan.free_bytes = lambda _: needed - 4096
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
        SingleRank("cpu", share=Share(RANK, 2, 3)),
        model,
        None,
        budget=infinity.Budget(device="64MiB", host="64MiB", nvme={directory: "64MiB"}),
        precision=precision,
        example_inputs=None,
        update="auto",
        accumulation=None,
    ).smallest
    budget = infinity.Budget(
        device=smallest[Tier.DEVICE], host=smallest[Tier.HOST], nvme={directory: "64MiB"}
    )
    with infinity.offload(model, None, budget=budget, precision=precision, device="cpu") as runtime:
        return runtime.plan.nvme_bytes


def from_a_file() -> dict[str, float]:
    """Offload with `weights=`. Pages of the file that have no row of a parameter of which this rank keeps a
    part cannot be read: a process that touches one is killed by SIGSEGV. Returns the sum of each parameter,
    and the part of the file that cannot be read.
    """
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(1024, 1024), nn.Conv2d(256, 256, 3).to(memory_format=torch.channels_last)
        )
    options: dict[str, Any] = {
        "budget": infinity.Budget(host="64MiB"),
        "precision": infinity.Precision(compute="fp32"),
    }
    share = Share(RANK, int(os.environ["WORLD_SIZE"]), 3)
    drafted = plan_for(
        SingleRank("cpu", share=share),
        model,
        None,
        example_inputs=None,
        update="auto",
        accumulation=None,
        **options,
    )
    kept = {
        parameter.names[0]: [
            (piece.page_start - unit.start(index), piece.nbytes)
            for piece in PageShard(unit, share).pieces(unit.start(index), parameter.numel * 4)
        ]
        for unit in drafted.layout.units
        for index, parameter in enumerate(unit.parameters)
    }
    read, total, hidden = Weights.read, 0, 0

    def read_own(self: Weights, name: str) -> torch.Tensor:
        nonlocal total, hidden
        values = read(self, name)
        assert _is_mapped(values, os.environ["WEIGHTS"]), "nothing has been read yet"
        total += values.nbytes
        hidden += _hide(values, kept[name])
        return values

    Weights.read = read_own  # type: ignore[method-assign]
    with infinity.offload(model, None, weights=os.environ["WEIGHTS"], device="cpu", **options) as runtime:
        assert Division.of(runtime.plan.layout) == Division.of(drafted.layout)
        found = {name: float(each.double().sum()) for name, each in model.state_dict().items()}
    return {**found, "hidden": hidden / total}


def _is_mapped(values: torch.Tensor, path: str) -> bool:
    """Whether a tensor's memory is a part of a file."""
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if line.rstrip().endswith(path)]
    return any(int(first, 16) <= values.data_ptr() < int(last, 16) for first, last in spans)


def _hide(values: torch.Tensor, kept: list[tuple[int, int]]) -> int:
    """Take the right to read from all pages of a tensor's memory that have no row of a range in `kept`, pairs
    (offset, number of bytes). Returns the number of bytes hidden.
    """
    row, start, hidden = values[0].nbytes, 0, 0
    for offset, nbytes in [*kept, (values.nbytes, 0)]:
        first = values.data_ptr() + start
        last = values.data_ptr() + offset // row * row
        first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 0) == 0
            hidden += last - first
        start = -(-(offset + nbytes) // row) * row
    return hidden


if __name__ == "__main__":
    rank_processes.serve(globals())
