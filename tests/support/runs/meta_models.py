"""Models on torch's meta device: parameters have shapes and no values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


class Tied(nn.Module):
    """A model whose head and embedding share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embedding.weight
