"""Small models for several ranks, with their losses, batches and optimizers.

A micro-batch follows from the step and from its number among the micro-batches of all ranks, so that one rank
can train with the same ones. Forwards depend on parameters and on the micro-batch alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.lm.decoder import Decoder, DecoderConfig

WIDTH, CLASSES = 20, 5
EXPERTS = 4
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A model to be trained. `inputs` and `loss` are by default those of a classifier of vectors."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Tensor, ...]] | None = None
    """Makes a micro-batch, from the number of the step and that of the micro-batch."""
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor] | None = None
    """Returns the mean loss of a micro-batch, a scalar."""
    arguments: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda batch: batch[:1]
    """Returns the arguments of the model's forward for a micro-batch."""
    groups: Callable[[nn.Module], Groups] | None = None
    """Makes the optimizer's param groups; None: one group has all parameters."""
    keep: tuple[str, ...] = ()
    """Patterns of parameters that stay float32."""
    meta: bool = False
    """Whether the model is made under torch.device("meta")."""
    schedule: bool = False
    """Whether the learning rates shrink after every step."""

    def batch(self, step: int, number: int) -> tuple[Tensor, ...]:
        """The micro-batch of a number, counted over all ranks."""
        return (self.inputs or vectors)(step, number)

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of a micro-batch, a scalar."""
        return (self.loss or classes)(model, batch)


def _random(step: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + number)


def vectors(step: int, number: int) -> tuple[Tensor, Tensor]:
    """Vectors (6, WIDTH), float32, and their classes (6,), int64."""
    random = _random(step, number)
    return torch.randn(6, WIDTH, generator=random), torch.randint(0, CLASSES, (6,), generator=random)


def classes(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    dtype = next(each.dtype for each in model.parameters())
    return F.cross_entropy(model(batch[0].to(dtype)).float(), batch[1])


def _tokens(step: int, number: int) -> tuple[Tensor]:
    return (torch.randint(0, 64, (2, 9), generator=_random(step, number)),)


def _shifted(batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    (tokens,) = batch
    return tokens[:, :-1], tokens[:, 1:]


def _next_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    found: Tensor = model(*_shifted(batch))
    return found


def mlp(*widths: int) -> nn.Sequential:
    """Layers with biases, which together take a few pages."""
    sizes = (WIDTH, *(widths or (96, 64, 96)))
    hidden = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], CLASSES))


def decoder() -> nn.Module:
    """A decoder whose embedding is its head, too."""
    model = Decoder(DecoderConfig(width=32, layers=2, heads=2, hidden=48, vocabulary=64))
    model.head.weight = model.embedding.weight
    return model


def _frozen() -> nn.Module:
    """A model with a frozen layer and a frozen bias."""
    model = mlp()
    for each in (*model[1].parameters(), model[3].bias):
        each.requires_grad_(False)
    return model


def _adapted() -> nn.Module:
    """A model with frozen layers, which share pages or have pages of their own."""
    model = mlp()
    for each in (*model[0].parameters(), *model[1].parameters(), *model[2].parameters()):
        each.requires_grad_(False)
    return model


def _convolutions() -> nn.Module:
    """Convolutions whose weights lie channels_last."""
    model = nn.Sequential(
        nn.Unflatten(1, (5, 2, 2)),
        nn.Conv2d(5, 24, 2, padding=1),
        nn.GELU(),
        nn.Conv2d(24, 12, 3, padding=1),
        nn.Flatten(),
        nn.Linear(12 * 9, CLASSES),
    )
    return model.to(memory_format=torch.channels_last)


class _Odd(nn.Module):
    """Parameters of sizes that fill no page: 0, 1, 3 and 4097 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0))
        self.one = nn.Parameter(torch.randn(()))
        self.three = nn.Parameter(torch.randn(3))
        self.many = nn.Parameter(torch.randn(4097))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.out(x * self.many[:WIDTH] + self.many[-WIDTH:] * self.one)
        return scaled + self.three.sum() * torch.arange(CLASSES) + self.none.sum()


class Experts(nn.Module):
    """A residual mixture of experts: each vector goes through one of them, which the router scores highest.

    An expert that no vector of a micro-batch goes to is not called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, 24)
        self.router = nn.Linear(24, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)) for _ in range(EXPERTS)
        )
        self.out = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """Logits (batch, CLASSES). x: (batch, WIDTH). allowed: experts that may be used, bool (EXPERTS,)."""
        hidden = self.inward(x)
        scores = self.router(hidden).masked_fill(~allowed, -torch.inf).softmax(-1)
        weight, chosen = scores.max(-1)
        mixed = hidden
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            brought = self.experts[number](hidden[rows]) * weight[rows, None]
            mixed = mixed.index_add(0, rows, brought.to(mixed.dtype))
        logits: Tensor = self.out(mixed)
        return logits


def _routed(step: int, number: int) -> tuple[Tensor, ...]:
    """Vectors, classes, and the experts allowed: odd micro-batches never use the first, the last is used by
    no micro-batch in every second step, and every fifth micro-batch uses one alone.
    """
    allowed = torch.ones(EXPERTS, dtype=torch.bool)
    allowed[0] = number % 2 == 0
    allowed[-1] = step % 2 == 0
    if (step + number) % 5 == 0:
        allowed[1:] = False
        allowed[1 + step % 2] = True
    return (*vectors(step, number), allowed)


def _expert_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    dtype = next(each.dtype for each in model.parameters())
    return F.cross_entropy(model(batch[0].to(dtype), batch[2]).float(), batch[1])


def _two_groups(model: nn.Module) -> Groups:
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.dim() > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


class _Recomputed(nn.Module):
    """Layers whose activations are computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = mlp()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x.clone().requires_grad_()  # a reentrant recomputation needs it
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class _Dropping(nn.Module):
    """Residual blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32))
            for _ in range(3)
        )
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.out(x)
        return found


def _numbered(step: int, number: int) -> tuple[Tensor, ...]:
    """Vectors, classes, and the seed of what a micro-batch drops."""
    return (*vectors(step, number), torch.tensor(1000 * step + number))


def _seeded(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    torch.manual_seed(int(batch[2]))
    return classes(model, batch)


class _Even(nn.Module):
    """Six layers whose pages have the same number of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 64 - WIDTH))
        for block in self.blocks:
            x = F.gelu(block(x))
        return x[:, :CLASSES]


class Bottlenecks(nn.Module):
    """Pairs of a wide and a tall matrix, 29.9M elements in all by default, and no other parameters."""

    def __init__(self, width: int = 2048, inner: int = 128, blocks: int = 57) -> None:
        super().__init__()
        self.width = width
        self.down = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, self.width - WIDTH))
        for down, up in zip(self.down, self.up, strict=True):
            x = x + up(torch.tanh(down(x)))
        return x[:, :CLASSES]


class _Tiled(nn.Module):
    """An embedding and a head with one weight, a tiled layer and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = infinity.tiled(nn.Embedding(200, 64))
        self.layer = infinity.tiled(nn.Linear(64, 128))
        self.last = nn.Linear(128, 64)
        self.head = infinity.tiled(nn.Linear(64, 200, bias=False))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.last(torch.relu(self.layer(self.embedding(tokens))))
        loss = infinity.linear_cross_entropy(hidden, self.head.weight, targets)
        return loss + F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())


SUBJECTS = {
    "mlp": Subject(mlp),
    "decoder": Subject(decoder, _tokens, _next_token, _shifted),
    "frozen": Subject(_frozen),
    "adapted": Subject(_adapted),
    "convolutions": Subject(_convolutions),
    "dropping": Subject(_Dropping, _numbered, _seeded),
    "dtypes": Subject(decoder, _tokens, _next_token, _shifted, keep=("*norm*",)),
    "groups": Subject(mlp, groups=_two_groups, schedule=True),
    "meta": Subject(mlp, meta=True),
    "odd": Subject(_Odd),
    "tiny": Subject(lambda: nn.Linear(WIDTH, CLASSES)),
    "experts": Subject(Experts, _routed, _expert_loss),
    "large": Subject(lambda: mlp(300, 260, 200, 280)),
    "even": Subject(_Even),
    "recomputed": Subject(lambda: _Recomputed(reentrant=False)),
    "reentrant": Subject(lambda: _Recomputed(reentrant=True)),
    "bottlenecks": Subject(Bottlenecks),
    "tiled": Subject(_Tiled, _tokens, _next_token),
}
