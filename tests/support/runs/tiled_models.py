"""Tiled models: a small language model with tiled modules, and runtimes of it with several budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.layout import tiles

BUDGETS = {
    "ram": infinity.Budget(host="256MiB"),
    "device apart": infinity.Budget(device="6MiB", host="96MiB"),
    "device apart, small": infinity.Budget(device="5MiB", host="48MiB"),
}
"""Three budgets: one with all pages where the model computes, and two that move tiles."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tiles of 1 MiB in fp32, which small models are cut into."""
    monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", 1 << 18)


class Language(nn.Module):
    """An embedding, a layer and a head. With `small_tiles` the weight of the head, 2 MiB, has two tiles."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, 512)
        self.layer = nn.Linear(512, 512)
        self.head = nn.Linear(512, 1024, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.relu(self.layer(self.embedding(tokens))))
        return result

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(tokens).flatten(0, -2), tokens.flatten())


def language(*, tied: bool, tiled: bool = True, kind: type[Language] = Language) -> Language:
    """Make the model, with values that bf16 holds exactly."""
    torch.manual_seed(3)
    model = kind(tied=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    if tiled:
        infinity.tiled(model.embedding)
        infinity.tiled(model.head)
    return model


def inputs(seed: int = 0) -> torch.Tensor:
    """Tokens of one tile of the embedding, with those of both in other seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1024 if seed else 500, (4, 16), generator=generator)


def offloaded(
    *,
    tied: bool,
    budget: infinity.Budget,
    compute: str = "fp32",
    kind: type[Language] = Language,
    tiled: bool = True,
    **options: Any,
) -> tuple[Language, infinity.Runtime]:
    model = language(tied=tied, tiled=tiled, kind=kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    precision = infinity.Precision(compute=compute)
    return model, infinity.offload(model, optimizer, budget=budget, precision=precision, **options)


def losses_of(model: Language, runtime: infinity.Runtime, steps: int, first: int = 1) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = model.loss(inputs(step))
        loss.backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        losses.append(loss.item())
    return losses
