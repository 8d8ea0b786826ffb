"""An ordinary training loop over a model whose states do not fit where they are used: they live on disk.

python examples/paged_training.py [DIRECTORY]     (a directory on a disk; default: the current one)

The same model is trained twice, once as it is and once offloaded, from the same seed.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import infinity

STEPS = 20
BUDGET = "1MiB"


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(256, 64), *blocks, nn.Linear(64, 256))


def batch(step: int) -> tuple[Tensor, Tensor]:
    text = torch.tensor(list((__doc__ or "").encode()))
    starts = torch.randint(len(text) - 33, (4,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + 33] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: object) -> list[float]:
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        clip(1.0)  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(directory: str) -> None:
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    expected = train(plain, optimizer, lambda norm: nn.utils.clip_grad_norm_(plain.parameters(), norm))

    model = build()
    with infinity.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        budget=infinity.Budget(host=BUDGET, nvme={directory: "64MiB"}),
        precision=infinity.Precision(compute="fp32"),
        device="cpu",
    ) as runtime:
        print(runtime.plan)
        losses = train(model, runtime.optimizer, runtime.clip_grad_norm_)
        print(runtime.stats)
    largest = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", end="; ")
    print(f"largest relative difference to plain PyTorch {largest:.1e}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
