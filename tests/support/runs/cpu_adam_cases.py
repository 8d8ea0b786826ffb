"""Inputs and exact references shared by the tests of infinity.cpu_adam."""

from __future__ import annotations

import numpy as np
import torch

from infinity.cpu_adam import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
)

RULES = {
    "adamw": AdamW(lr=1e-2, step=3, weight_decay=0.1),
    "adamw_small_betas": AdamW(lr=1e-2, step=3, betas=(0.0, 0.3)),
    "adam": Adam(lr=1e-2, step=3, weight_decay=0.1),
    "sgd": SGD(lr=0.1, first_step=False, weight_decay=1e-3),
    "momentum": SGD(lr=0.1, momentum=0.9, dampening=0.2, first_step=False),
    "nesterov": SGD(lr=0.1, momentum=0.9, nesterov=True, first_step=False),
    "first": SGD(lr=0.1, momentum=0.9, dampening=0.2, first_step=True),
    "adagrad": Adagrad(step=3, lr_decay=0.1, weight_decay=1e-3),
    "lion": Lion(lr=1e-2, weight_decay=0.1),
}
NAN = 0x7FC00000


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def floats(seed: int, n: int, *, finite: bool = False) -> torch.Tensor:
    """Return `n` random float32 values: most are standard normal, about a fifth are random bit patterns,
    and about one in twenty is 0.

    finite: replace infinities, NaNs and all magnitudes from 1e30 on by 1.5.
    """
    random = np.random.default_rng(seed)
    x = random.standard_normal(n).astype(np.float32)
    wild = random.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    x = np.where(random.random(n) < 0.2, wild, x)
    x = np.where(random.random(n) < 0.05, np.float32(0.0), x)
    if finite:
        x = np.where(np.abs(x) < 1e30, x, np.float32(1.5))
    return torch.from_numpy(x)


def round_half_up(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16: the result has the bits (u + 0x8000) >> 16, where u are the bits of `x`.
    So a value halfway between two bfloat16 values goes to the one of greater magnitude. Every NaN becomes
    the same quiet NaN.
    """
    u = bits(x).to(torch.int64) & 0xFFFFFFFF
    u = torch.where(x.isnan(), NAN, u)
    return (((u + 0x8000) >> 16) & 0xFFFF).to(torch.uint16).view(torch.bfloat16)


def quiet(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.tensor(NAN, dtype=torch.int32).view(torch.float32), x)


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low = (bits(x) & 0xFFFF).to(torch.int32)
    return round_half_up(x), low.to(torch.uint16).view(torch.int16)


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return ((bits(high).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def states(n: int, seed: int = 1, *, finite: bool = False) -> dict[str, torch.Tensor]:
    return {
        "parameter": quiet(floats(seed, n, finite=finite)),
        "first_moment": floats(seed + 1, n, finite=finite),
        "second_moment": floats(seed + 2, n, finite=finite).abs(),
    }


def clones(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in tensors.items()}


def padded(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a copy of the 1-D `tensor`, `offset` elements after the start of an allocation of torch.

    So the copy need not be aligned as torch aligns memory.
    """
    room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
    view = room[offset:]
    view.copy_(tensor)
    return view


def log_uniform(n: int, low: float, high: float, random: torch.Generator) -> torch.Tensor:
    exponent = torch.empty(n, dtype=torch.float64).uniform_(low, high, generator=random)
    return (10.0**exponent).float()


def sign(n: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (n,), generator=random) * 2.0 - 1.0


def adversarial(n: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Make float32 inputs of an Adam update, `n` elements each. Returns (states, gradient).

    states: the tensors "parameter", "first_moment" and "second_moment". In each tensor the first third of
    the elements has values as in training, the second third has magnitudes from 1e-45 to at most 1e38, and
    the last third has random combinations of edge cases, such as 0, denormals and very large values.
    """
    random = torch.Generator().manual_seed(0)
    third = n // 3
    p, g, m = (torch.randn(n, generator=random) for _ in range(3))
    p[:third] *= 0.02
    g[:third] *= 1e-3
    m[:third] *= 1e-3
    v = (g * g) * torch.rand(n, generator=random)
    wide = slice(third, 2 * third)
    for x in (p, g, m):
        x[wide] = log_uniform(third, -45, 37, random) * sign(third, random)
    v[wide] = log_uniform(third, -45, 38, random)
    edge = torch.tensor([0.0, 1e-45, 3e-42, 1.17e-38, 1.18e-38, 1e-20, 1.0, 1 + 2**-23, 1e18, 2e19, 1e37])
    rest = n - 2 * third
    for x in (p, g, m):
        x[2 * third :] = edge[torch.randint(0, len(edge), (rest,), generator=random)] * sign(rest, random)
    v[2 * third :] = edge[torch.randint(0, len(edge), (rest,), generator=random)]
    # Moments that almost cancel the gradient in the new mean.
    m[2 * third : 2 * third + rest // 4] = -g[2 * third : 2 * third + rest // 4] / 9
    return {"parameter": p, "first_moment": m, "second_moment": v}, g
