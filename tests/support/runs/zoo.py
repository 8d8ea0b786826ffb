"""Small models, each of which touches its parameters in a way that a paging runtime can get wrong.

Sizes are odd on purpose: parameters start and end inside pages, span several chunks, and share chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 67
DIM = 40
SEQUENCE = 9
CLASSES = 10

Batch = tuple[Tensor, Tensor]


def words(step: int, micro: int) -> Batch:
    """Return the batch of a step and micro-batch: token ids, and for each the id that follows it.

    Both are int64 (3, SEQUENCE). The same arguments give the same batch.
    """
    generator = torch.Generator().manual_seed(1000 * step + micro)
    ids = torch.randint(VOCABULARY, (3, SEQUENCE + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def images(step: int, micro: int) -> Batch:
    """Return the batch of a step and micro-batch: float32 images (6, 3, 9, 9) and their classes (6,)."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randn(6, 3, 9, 9, generator=generator), torch.randint(CLASSES, (6,), generator=generator)


def vectors(step: int, micro: int) -> Batch:
    """Return the batch of a step and micro-batch: float32 vectors (7, DIM) and their classes (7,)."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randn(7, DIM, generator=generator), torch.randint(CLASSES, (7,), generator=generator)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of the model's output, a float32 scalar on the model's device.

    batch: (inputs, target classes). The output is converted to float32 first.
    """
    device = next(model.parameters()).device
    inputs, targets = (each.to(device) for each in batch)
    return F.cross_entropy(model(inputs).float().flatten(0, -2), targets.flatten())


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 4, DIM // 4)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(DIM)
        self.attention = Attention(dropout)
        self.norm_mlp = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(
            nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """A decoder with dropout, and with a head whose weight is not the embedding's."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tied(Transformer):
    """A decoder whose head is its embedding: one Parameter under two names, used by two modules."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.head.weight = self.embedding.weight


class Borrowing(nn.Module):
    """A model whose own forward uses parameters that its children hold.

    They are the weight and the bias of a linear layer that is never called, and the embedding's weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.first = Block()
        self.never_called = nn.Linear(DIM, DIM)
        self.second = Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embedding(ids))
        x = torch.tanh(F.linear(x, self.never_called.weight, self.never_called.bias))
        return self.second(x) @ self.embedding.weight.t()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 20, 3, padding=1),
            nn.BatchNorm2d(20),
            nn.ReLU(),
            nn.Conv2d(20, 36, 3, stride=2, bias=False),
            nn.BatchNorm2d(36),
            nn.ReLU(),
            nn.Conv2d(36, 12, 1),
        )
        self.head = nn.Linear(12 * 4 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).flatten(1))


def channels_last() -> nn.Module:
    return Convolutions().to(memory_format=torch.channels_last)


class Mixture(nn.Module):
    """A mixture of experts that sends each sequence to one of six. The sixth expert is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.router = nn.Linear(DIM, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM)) for _ in range(6)
        )
        self.head = nn.Linear(DIM, VOCABULARY)
        self.register_buffer("closed", torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -1e4]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        gates = torch.softmax(8 * self.router(x.mean(1)).float() + self.closed, -1)
        chosen = gates.argmax(-1)
        mixed = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            taken = self.experts[number](x[rows]) * gates[rows, number, None, None].to(x.dtype)
            mixed = mixed.index_copy(0, rows, taken)
        return self.head(x + mixed)


class Recurrent(nn.Module):
    """A model of an LSTM and a GRU, which hand a list of all their weights to one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.lstm = nn.LSTM(DIM, 36, num_layers=2, batch_first=True)
        self.gru = nn.GRU(36, 28, batch_first=True)
        self.head = nn.Linear(28, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(self.embedding(ids))[0])[0])


class Checkpointed(nn.Module):
    """A model that recomputes its blocks in the backward pass. One block is used, and recomputed, twice.

    reentrant: the variant of torch.utils.checkpoint.
    """

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.own = Block(0.1)
        self.shared = Block(0.1)
        self.head = nn.Linear(DIM, VOCABULARY)
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in (self.shared, self.own, self.shared):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class PartlyFrozen(nn.Module):
    """A model with a frozen embedding, a frozen block, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM).requires_grad_(False)
        self.frozen = Block().requires_grad_(False)
        self.trained = Block()
        self.trained.norm_mlp.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(DIM, 7))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.trained(self.frozen(self.embedding(ids))))


class ScaledLinear(torch.autograd.Function):
    """The autograd function x @ weight.t() * scale. It takes and saves parameters without a module hook."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight, scale)
        return x @ weight.t() * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def, override]
        x, weight, scale = ctx.saved_tensors
        scaled = grad * scale
        return scaled @ weight, scaled.t() @ x, (grad * (x @ weight.t())).sum()


class Custom(nn.Module):
    """A model with a custom autograd function and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 110)
        self.weight = nn.Parameter(torch.randn(97, 110) / 10)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(97, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = ScaledLinear.apply(torch.relu(self.first(x)), self.weight, self.scale)
        return self.last(torch.tanh(hidden))


class Encoder(nn.Module):
    """A model with nn.MultiheadAttention, which hands its children's weights to one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True, kdim=DIM, vdim=DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(self.embedding(ids))
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


class Patches(nn.Module):
    """A model with parameters of its own, and with a child that only holds parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, DIM, 3, stride=3)
        self.class_token = nn.Parameter(torch.randn(1, 1, DIM) / 5)
        self.pos_embedding = nn.Parameter(torch.randn(1, 10, DIM) / 5)
        self.gains = nn.ParameterDict({"a": nn.Parameter(torch.ones(DIM)), "b": nn.Parameter(torch.ones(1))})
        self.block = Block()
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.class_token.expand(len(x), -1, -1), patches), 1) + self.pos_embedding
        return self.head(self.block(tokens * self.gains["a"] * self.gains["b"])[:, 0])


@dataclass(frozen=True)
class Entry:
    """One model of the zoo, with its batches and its loss. `str()` gives the model's name."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    """A function from (step, micro-batch) to (inputs, targets), with the same result every time."""
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy
    keep: tuple[str, ...] = ()
    """Name patterns of parameters that must stay float32 in bfloat16 training; for `Precision.keep`."""
    one_gradient: bool = True
    """Whether autograd hands over each parameter's gradient once in a backward pass, already summed."""

    def make(self, device: str = "cpu") -> nn.Module:
        """Build a new model on `device`, in training mode. Its weights are the same in every call."""
        torch.manual_seed(7)
        return self.build().to(device)

    def __str__(self) -> str:
        return self.name


ENTRIES = (
    Entry("transformer", Transformer, words),
    Entry("tied", Tied, words),
    Entry("borrowing", Borrowing, words),
    # On the CPU, torch's batch norm cannot combine bfloat16 weights with float32 statistics.
    Entry("convnet", Convolutions, images, keep=("layers.[14].*",)),
    Entry("channels_last", channels_last, images, keep=("layers.[14].*",)),
    Entry("mixture", Mixture, words),
    Entry("recurrent", Recurrent, words),
    Entry("checkpointed", lambda: Checkpointed(reentrant=False), words),
    Entry("reentrant", lambda: Checkpointed(reentrant=True), words, one_gradient=False),
    Entry("frozen", PartlyFrozen, words),
    Entry("custom", Custom, vectors),
    Entry("encoder", Encoder, words),
    Entry("patches", Patches, images),
)


def entry(name: str) -> Entry:
    """Return the entry of ENTRIES with this name."""
    return next(each for each in ENTRIES if each.name == name)
