"""Small stand-ins for the optimizers of lion-pytorch and bitsandbytes, under the names of the real classes.

They have the options and param groups of lion-pytorch 0.2 and bitsandbytes 0.50. Those of bitsandbytes take
no steps: the real ones need its library.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, arXiv:2302.06675, algorithm 2), step by step as lion-pytorch computes it."""

    __module__ = "lion_pytorch.lion_pytorch"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
    ) -> None:
        self.decoupled_wd = decoupled_weight_decay
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
                direction = (mean * first).add(parameter.grad, alpha=1 - first).sign()
                parameter.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
                mean.mul_(second).add_(parameter.grad, alpha=1 - second)
        return loss


class _Bitsandbytes(torch.optim.Optimizer):
    _bits = 32
    _defaults: dict[str, Any]

    def __init__(self, params: Any, *, optim_bits: int = 32, args: Any = None, **options: Any) -> None:
        super().__init__(params, {**self._defaults, **options})
        bits = self._bits if self._bits == 8 else optim_bits
        usual = {"optim_bits": bits, "min_8bit_size": 4096, "max_unorm": 0.0, "skip_zeros": False}
        self.args = SimpleNamespace(**usual) if args is None else args
        self.mng = SimpleNamespace(pid2config={}, index2config={}, module_weight_config_triple=[])


_OPTIONS = {
    "AdamW": {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "alpha": 0.0,
        "t_alpha": None,
        "t_beta3": None,
    },
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.0},
}


def bitsandbytes(name: str) -> Any:
    """The stand-in for a class of bitsandbytes.optim. name: such as "PagedAdamW8bit"."""
    family = "AdamW" if "AdamW" in name else "Lion"
    bits = 8 if name.endswith("8bit") else 32
    module = f"bitsandbytes.optim.{family.lower()}"
    return type(name, (_Bitsandbytes,), {"__module__": module, "_bits": bits, "_defaults": _OPTIONS[family]})
