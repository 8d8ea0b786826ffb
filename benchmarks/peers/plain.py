"""Plain PyTorch with everything in memory: bf16 model, fp32 masters, AdamW over the masters.

Mode "train" is mixed precision as people write it by hand. Mode "compute" is its forward and backward alone,
without masters and update: what a step costs if paging and updating cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from peers.task import BETAS, CLIP, WEIGHT_DECAY, Task


class Compute:
    """Forward and backward in bf16; gradients are dropped as they come, as ours take them away."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        with torch.device(task.device):
            dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                self.model = task.model()
            finally:
                torch.set_default_dtype(dtype)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self.backward(tokens, targets)
        self.model.zero_grad()
        return loss.item()

    def backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, targets)
        loss.backward()
        return loss.detach()

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Train(Compute):
    """The whole step, with the fused AdamW: some four times as fast as the foreach one on a CPU."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.parameters = list(self.model.parameters())
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=task.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self.backward(tokens, targets)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
        return loss.item()


def open_contender(task: Task) -> Compute:
    """See peers. `task.mode`: "train" or "compute"."""
    return {"train": Train, "compute": Compute}[task.mode](task)
