"""Hyper-parameters of the optimizers, named as in torch.optim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from infinity import _cpu_adam


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with L2 weight decay (arXiv:1412.6980, algorithm 1), as torch.optim.Adam computes it."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int
    """The number of the update, counted from 1 at the first update of the parameter."""
    maximize: bool = False

    _decoupled = False

    def native(self) -> _cpu_adam.AdamHyper:
        return _cpu_adam.AdamHyper(
            self._decoupled, self.lr, *self.betas, self.eps, self.weight_decay, self.step, self.maximize
        )


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (arXiv:1711.05101, algorithm 2), as in torch.optim.AdamW."""

    weight_decay: float = 1e-2

    _decoupled = True


@dataclass(frozen=True, kw_only=True)
class SGD:
    """SGD as in torch.optim.SGD, with its momentum buffer in `cpu_adam.Update.first_moment`."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first_step: bool
    """Whether the momentum buffer is empty. The update then stores the gradient in it, without dampening."""
    maximize: bool = False

    def native(self) -> _cpu_adam.SgdHyper:
        return _cpu_adam.SgdHyper(
            self.lr,
            self.momentum,
            self.dampening,
            self.weight_decay,
            self.nesterov,
            self.first_step,
            self.maximize,
        )


@dataclass(frozen=True, kw_only=True)
class Adagrad:
    """Adagrad as in torch.optim.Adagrad, with the sum of squared gradients in
    `cpu_adam.Update.second_moment`.

    Before the first update the caller fills this array with the initial accumulator value.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    step: int
    maximize: bool = False

    def native(self) -> _cpu_adam.AdagradHyper:
        return _cpu_adam.AdagradHyper(
            self.lr, self.lr_decay, self.eps, self.weight_decay, self.step, self.maximize
        )


@dataclass(frozen=True, kw_only=True)
class Lion:
    """Lion (arXiv:2302.06675, algorithm 2), with decoupled weight decay. A gradient or mean that is not
    finite makes the parameter NaN. `cpu_adam.Update.first_moment` is the mean of gradients.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False

    def native(self) -> _cpu_adam.LionHyper:
        return _cpu_adam.LionHyper(self.lr, *self.betas, self.weight_decay, self.maximize)


Hyper: TypeAlias = Adam | SGD | Adagrad | Lion

NativeHyper: TypeAlias = (
    _cpu_adam.AdamHyper | _cpu_adam.SgdHyper | _cpu_adam.AdagradHyper | _cpu_adam.LionHyper
)
"""Hyper-parameters as an object of the native core, made by `Hyper.native`."""
