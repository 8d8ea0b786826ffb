"""Small models drawn at random: stacks of parts whose parameters have all kinds of sizes and ties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 12
"""Features of the tensors that go from part to part, which are float32 (2, 5, WIDTH)."""

MOST_PARTS = 6


@dataclass(frozen=True)
class Part:
    """The description from which `Stack` makes one of its modules.

    kind: a name in KINDS, or "tied". size: the module's argument; for "tied", the number of the earlier
    weight to share. frozen: whether the module's parameters are frozen.
    """

    kind: str
    size: int
    frozen: bool = False


class Wide(nn.Module):
    """Two linear layers with `size` features between them.

    With 700 features, the weight of either layer does not fit in one chunk of the smallest size that plans
    use.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, size)
        self.down = nn.Linear(size, WIDTH, bias=False)

    def forward(self, x: Tensor, ids: Tensor, branch: int) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, ids: Tensor, branch: int) -> Tensor:
        return self.norm(x)


class Table(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, WIDTH)

    def forward(self, x: Tensor, ids: Tensor, branch: int) -> Tensor:
        return x + self.table(ids % self.table.num_embeddings)


class Mix(nn.Module):
    """A convolution along the positions of the sequence."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1 + 2 * (size % 3), padding=size % 3)

    def forward(self, x: Tensor, ids: Tensor, branch: int) -> Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


class Scale(nn.Module):
    """A scale and a shift: a parameter without dimensions, and a parameter of shape (1,)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0 + 1.0 / size))
        self.shift = nn.Parameter(torch.full((1,), 1.0 / size))

    def forward(self, x: Tensor, ids: Tensor, branch: int) -> Tensor:
        return x * self.factor + self.shift


class Choice(nn.Module):
    """Several experts. A forward uses one, with the index `branch` modulo the number of experts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 + size % 3))

    def forward(self, x: Tensor, ids: Tensor, branch: int) -> Tensor:
        return x + self.experts[branch % len(self.experts)](x)


class Tied(nn.Module):
    """A part that uses the weight of an earlier part, of shape (any, WIDTH), as its own.

    The part's bias is not shared, and may lie in another unit than the weight.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))

    def forward(self, x: Tensor, ids: Tensor, branch: int) -> Tensor:
        hidden = torch.tanh(functional.linear(x, self.weight, self.bias))
        return x + 0.1 * functional.linear(hidden, self.weight.t())


KINDS = {"wide": Wide, "norm": Norm, "table": Table, "mix": Mix, "scale": Scale, "choice": Choice}


class Stack(nn.Module):
    """A model of parts. A forward uses the parts whose numbers are in `order`, one after the other."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__()
        torch.manual_seed(len(parts))
        self.parts = nn.ModuleList()
        weights: list[nn.Parameter] = []
        for part in parts:
            if part.kind == "tied" and weights:
                made: nn.Module = Tied(weights[part.size % len(weights)])
            else:
                made = KINDS.get(part.kind, Norm)(part.size)
                if part.frozen and self.parts:
                    made.requires_grad_(False)
            if isinstance(made, Wide):
                weights.append(made.up.weight)
            if isinstance(made, Table):
                weights.append(made.table.weight)
            self.parts.append(made)

    def forward(self, x: Tensor, ids: Tensor, order: tuple[int, ...], branch: int) -> Tensor:
        for number in order:
            x = self.parts[number % len(self.parts)](x, ids, branch)
        return x


@dataclass(frozen=True)
class Forward:
    """The arguments of one forward of a Stack. seed: seed from which the forward's inputs are drawn."""

    order: tuple[int, ...]
    branch: int
    seed: int

    def of(self, model: nn.Module) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(2, 5, WIDTH, generator=generator)
        ids = torch.randint(0, 1000, (2, 5), generator=generator)
        out: Tensor = model(x, ids, self.order, self.branch)
        return out


def forwards() -> st.SearchStrategy[Forward]:
    order = st.lists(st.integers(0, MOST_PARTS - 1), min_size=1, max_size=5).map(tuple)
    return st.builds(Forward, order=order, branch=st.integers(0, 3), seed=st.integers(0, 9))


def models() -> st.SearchStrategy[tuple[Part, ...]]:
    """A Hypothesis strategy for the argument of `Stack`. The first part of a model is never frozen."""
    part: Any = st.builds(
        Part,
        kind=st.sampled_from([*KINDS, "tied", "tied"]),
        size=st.sampled_from([1, 7, 40, 700]),
        frozen=st.sampled_from([False, False, False, True]),
    )
    return st.lists(part, min_size=1, max_size=MOST_PARTS).map(tuple)
