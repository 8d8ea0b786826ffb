"""Tile sums: contributions to the gradient of a tile are added up as autograd adds them, one backward apart
from another.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from infinity.gradients.tile_sums import add_up, contribution, sums_of


class Away:
    """RAM with room for all."""

    def __init__(self) -> None:
        self.put_away = 0

    def put(self, gradient: torch.Tensor) -> torch.Tensor:
        self.put_away += 1
        return gradient.clone()

    def get(self, there: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        assert like.shape == there.shape
        return there.clone()


class Use(torch.autograd.Function):
    """Multiplies by a tile, and gives its gradient to the tile's sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, tile)
        return x * tile

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, tile = ctx.saved_tensors
        return gradient * tile, contribution(sums_of(tile), gradient * x)


def test_backwards_in_two_threads_do_not_mix() -> None:
    torch.manual_seed(0)
    tile, away, both = torch.randn(64, requires_grad=True), Away(), threading.Barrier(2, timeout=60)
    x = torch.randn(64)
    plain = tile.detach().requires_grad_()
    right = [torch.autograd.grad((x * plain * plain).sum() * scale, [plain])[0] for scale in (1.0, 3.0)]
    add_up(away, [tile], 2)
    middle = Use.apply(x, tile)
    middle.register_hook(lambda _: both.wait() * 0 or None)  # one contribution of each backward has been made
    result = Use.apply(middle, tile).sum()

    def gradient(scale: float) -> torch.Tensor:
        return torch.autograd.grad(result * scale, [tile], retain_graph=True)[0]

    for _ in range(2):
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(gradient, (1.0, 3.0)))
        assert all(map(torch.equal, found, right))
    assert away.put_away == 4
    assert len(sums_of(tile)._placeholders) == 0
