"""Models without values, as large ones are built."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


class Tied(nn.Module):
    """A head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embedding.weight
