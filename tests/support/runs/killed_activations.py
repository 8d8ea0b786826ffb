"""A program that commits while activations are away, and is killed in a backward with pages on disk; see
tests/checkpoint/test_kill_with_activations_away.py. Its arguments: the run's directory, and the policy.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import infinity
from infinity import api
from infinity.planning.machine_rates import MachineRates
from infinity.tiers import Tier
from infinity.tiers.trial_file import MODES

STEPS, KILLED_IN = 5, 3
_DIM, _ROWS, _AMPLE = 64, 512, 64 << 20
_RATES = MachineRates(
    disk=dict.fromkeys(MODES, 1e9), host_stream=1e10, flops={torch.float32: 1e11}, compute_memory=1e10
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = 4 * _DIM
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(_DIM, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, _DIM))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@contextmanager
def opened(root: Path, policy: str, *, resume: bool = False) -> Iterator[tuple[Model, Any]]:
    """Yield (model, runtime): with commits, and with half of the activations that leave RAM on disk."""
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pages = root / "pages"
    pages.mkdir(exist_ok=True)
    commits = {"resume" if resume else "checkpoint": root / "commits"}
    facts: dict[str, Any] = {"precision": infinity.Precision(compute="fp32"), "device": "cpu"}
    facts |= {"activations": policy, "example_inputs": (_rows(0),), "update": "lazy"}
    with mock.patch.object(api, "measure_rates", return_value=_RATES):
        ample = infinity.plan(model, optimizer, budget=infinity.Budget(host=_AMPLE), **facts)
        host = ample.smallest[Tier.HOST] - ample.residuals.ram // 2
        budget = infinity.Budget(host=host, nvme={str(pages): _AMPLE})
        with infinity.offload(model, optimizer, budget=budget, **facts, **commits) as runtime:
            yield model, runtime


def train(model: Model, runtime: Any, first: int, *, kill: bool = False) -> list[float]:
    """Take the steps from `first` to STEPS, with a commit after each, which the next step does not wait for.
    Returns their losses.
    """
    losses, commit = [], None
    for step in range(first, STEPS):
        if kill and step == KILLED_IN:
            commit.wait()
            model.blocks[1][3].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        loss = model(_rows(step))
        loss.backward()
        losses.append(float(loss.detach()))
        runtime.clip_grad_norm_(1.0)
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        commit = runtime.save(state=step + 1)
    commit.wait()
    return losses


def _rows(number: int) -> Tensor:
    return torch.randn(_ROWS, _DIM, generator=torch.Generator().manual_seed(number))


def main(root: Path, policy: str) -> None:
    """Train as the module's docstring says. Prints the bytes that went to disk in a step, by plan."""
    torch.set_num_threads(1)
    with opened(root, policy) as (model, runtime):
        torch.manual_seed(4)
        os.write(1, f"{runtime.plan.residuals.room.written}\n".encode())
        train(model, runtime, 0, kill=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
