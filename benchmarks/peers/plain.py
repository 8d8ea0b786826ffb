"""Plain PyTorch with everything in memory: three programs that the training benchmark runs beside infinity.

Mode "fused" is mixed precision as people write it by hand: a bf16 model, an fp32 copy (master) of every
parameter, and torch's fused AdamW, which updates the masters. Mode "plain" is a beginner's program: fp32
throughout, and AdamW with default options. Mode "compute" has only forward and backward of the bf16 model:
its time is that of a step if paging and updates cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from peers.task import BETAS, WEIGHT_DECAY, Task


class Compute:
    """Mode "compute" of the benchmark: runs forward and backward only, and then drops the gradients."""

    def __init__(self, task: Task, dtype: torch.dtype = torch.bfloat16) -> None:
        self.clip = task.clip
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(task.device):
                self.model = task.model()
        finally:
            torch.set_default_dtype(default)

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


class Fused(Compute):
    """Mode "fused" of the benchmark: trains in mixed precision by hand, with torch's fused AdamW. On a CPU
    the fused AdamW is some four times as fast as torch's foreach AdamW.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.parameters = list(self.model.parameters())
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.optimizer = _adamw(self.masters, task, fused=True)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self.backward(tokens, targets)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return loss.item()


class Plain(Compute):
    """Mode "plain" of the benchmark: trains in fp32, with the AdamW that torch chooses by default."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, torch.float32)
        self.optimizer = _adamw(list(self.model.parameters()), task)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self.backward(tokens, targets)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _adamw(parameters: list[torch.Tensor], task: Task, *, fused: bool | None = None) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters, lr=task.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=fused
    )


def open_contender(task: Task) -> Compute:
    """Build the model of `task`, and return an object whose method `step` runs one step of it.

    `task.mode` says what a step is: "fused", "plain" or "compute".
    """
    return {"fused": Fused, "plain": Plain, "compute": Compute}[task.mode](task)
