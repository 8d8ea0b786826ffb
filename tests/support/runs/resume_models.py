"""Models of the resume matrix: those of the zoo, and one whose state lies in unusual places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from zoo import DIM, VOCABULARY, Block, Entry, entry, words


class Counting(nn.Module):
    """A layer whose factor depends on how often it was called, which is its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 1 / (1 + self.calls))

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Odd(nn.Module):
    """Parameters without elements and without dimensions, and buffers that training changes.

    Of the buffers one is not persistent. All can be made on the meta device, where `reset_parameters` fills
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, DIM))
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("seen", torch.empty((), dtype=torch.int64))
        self.register_buffer("mean", torch.empty(DIM), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.none.fill_(0)
            self.scale.fill_(1.5)
            self.seen.fill_(0)
            self.mean.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += 1
            self.mean.lerp_(x.float().mean((0, 1)), 0.1)
        rows = torch.cat((x.flatten(0, 1), self.none.to(x.dtype)))
        return rows.view_as(x) * self.scale - self.mean.to(x.dtype)


class Unusual(nn.Module):
    """A model with extra state, and with the parameters and buffers of `Odd`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.odd = Odd()
        self.counting = Counting()
        self.block = Block(0.1)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.counting(self.odd(self.embedding(ids)))))


class Late(Unusual):
    """A model with a layer that no forward before the fifth uses, so that it has no moments until then."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.counting(self.odd(self.embedding(ids)))
        return self.head(self.block(self.late(x) if self.counting.calls > 4 else x))


UNUSUAL = Entry("unusual", Unusual, words)
LATE = Entry("late", Late, words)

NAMES = (
    "transformer",
    "convnet",
    "channels_last",
    "tied",
    "frozen",
    "mixture",
    "custom",
    "recurrent",
    "unusual",
    "late",
)
"""Names of the models. They have dropout, batch norm, strides, ties, frozen and unused parameters."""

UNINITIALISED = ("frozen", "mixture", "custom")
"""The models with tensors that no initialiser fills, so that a first run cannot begin on the meta device."""


def model_entry(name: str) -> Entry:
    own = {each.name: each for each in (UNUSUAL, LATE)}
    return own[name] if name in own else entry(name)


def scrambled(model: nn.Module) -> nn.Module:
    """Change all parameters, buffers and extra states of a model; only a commit can put them right then."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    for module in model.modules():
        if isinstance(module, Counting):
            module.calls += 100
    return model
