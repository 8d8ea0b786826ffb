"""A program of ranks that train a model whose pages rest on NVMe, and tell how much memory that takes; see
tests/distributed/test_bytes.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import rank_processes
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.activations.heap import malloc_trim
from infinity.system import machine

LAYERS, WIDTH = 48, 1152
HOST = 56 << 20
"""The host budget. The model's parameters alone have twice as many bytes in bf16."""


def growth() -> dict[str, int]:
    """Train a model that is made under torch.device("meta"), after a small one for which all code is loaded.

    Returns "grown": bytes by which the peak of resident memory lies above that before the second model.
    "plan": the bytes of RAM of its plan. "parameters": the bytes of its parameters in bf16.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _train(2)
    trim = malloc_trim()
    if trim is not None:
        trim(0)
    machine.restart_peak()
    before = machine.process_memory().resident
    plan = _train(LAYERS)
    return {
        "grown": machine.process_memory().peak - before,
        "plan": plan.ram_bytes,
        "parameters": 2 * LAYERS * WIDTH * WIDTH,
    }


def _train(layers: int) -> infinity.Plan:
    """Train a model of this many layers for three steps. Returns its plan."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    directory = Path(os.environ["DIRECTORY"]) / f"{layers} layers of rank {dist.get_rank()}"
    directory.mkdir()
    with infinity.offload(
        model,
        torch.optim.AdamW(model.parameters()),
        budget=infinity.Budget(host=HOST, nvme={directory: "2GiB"}),
        device="cpu",
    ) as runtime:
        for step in range(3):
            inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(inputs).float().square().mean().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        return runtime.plan


if __name__ == "__main__":
    rank_processes.serve(globals())
