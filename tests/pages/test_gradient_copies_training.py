"""Tests of gradients that are copied from a device with its own memory: no bit differs from training where
the CPU can use the device's memory.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from cover import covered
from emulated_device import EmulatedDevice, planned_apart
from homes import budget_for
from torch import nn

import infinity


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def inputs(batch: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(100 + batch)
    return torch.randn(4, 64).to(dtype)


def budget_of(home: str, model: nn.Module, directory: Path, precision: Any, update: str = "lazy") -> Any:
    accumulation = 3 if update == "speculative" else None
    with planned_apart():
        return budget_for(
            home, model, adamw(model), directory, precision, accumulation=accumulation, update=update
        )


class Mixed(nn.Module):
    """A model with gradients of two dtypes and of odd sizes, and with a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(64, 301)
        self.norm = nn.LayerNorm(301)
        self.second = nn.Linear(301, 64)
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(batch)).float())
        out = self.second(hidden.to(self.second.weight.dtype))
        out = out + self.second(torch.tanh(hidden).to(out.dtype))
        return (out.float().square().mean() * self.scale.float().exp()).sum()


def trained(
    home: str, directory: Path, device: EmulatedDevice | None, *, compute: str, update: str, how: str
) -> dict[str, Any]:
    """Train three steps of three micro-batches. Returns the dict of "losses", "parameters" and "optimizer",
    the optimizer's state_dict.

    home: where the pages rest, as for `budget_for`. device: a device with memory of its own, or None for a
    device whose memory the CPU can read. compute: argument of Precision. update:
    argument of `offload`. how: "plain" for a plain loop, "accumulate" for runtime.accumulate.
    """
    model = Mixed()
    precision = infinity.Precision(compute=compute, keep=("norm.*",))
    budget = budget_of(home, model, directory, precision, update)
    losses = []
    with (
        contextlib.nullcontext() if device is None else device.in_use(),
        infinity.offload(
            model,
            adamw(model),
            budget=budget,
            precision=precision,
            device="cpu",
            update=update,
            accumulation=3 if update in ("eager", "speculative") else None,
        ) as runtime,
    ):
        assert bool(runtime.plan.landing_bytes) == (device is not None)
        dtype = precision.compute_dtype

        def loss_of(number: int) -> torch.Tensor:
            return model(inputs(number, dtype)) / 3

        for step in range(3):
            numbers = range(3 * step, 3 * step + 3)
            if how == "accumulate":
                losses += [each.item() for each in runtime.accumulate(numbers, loss_of, together=3)]
            else:
                for number in numbers:
                    loss = loss_of(number)
                    loss.backward()
                    losses.append(loss.item())
            if update in ("lazy", "speculative"):
                runtime.clip_grad_norm_((1e9, 1e-3, 0.2)[step])
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        return {
            "losses": losses,
            "parameters": parity.copied(model.state_dict()),
            "optimizer": parity.tensors_copied(runtime.optimizer.state_dict()),
        }


@pytest.mark.sweep(most=4)
@covered(
    {
        "home": ("host", "nvme", "mixed"),
        "threads": (False, True),
        "compute": ("fp32", "bf16", "fp16"),
        "update": ("lazy", "eager", "speculative", "sync"),
        "how": ("plain", "accumulate"),
    },
    allowed=lambda case: (case["compute"], case["update"]) != ("fp16", "eager"),  # which is refused
)
def test_every_bit_is_that_of_gradients_that_stay(
    *, home: str, threads: bool, compute: str, update: str, how: str, tmp_path: Path
) -> None:
    expected = trained(home, tmp_path, None, compute=compute, update=update, how=how)
    device = EmulatedDevice(len(home), threads=threads)
    found = trained(home, tmp_path, device, compute=compute, update=update, how=how)
    assert parity.differences(found, expected) == []
