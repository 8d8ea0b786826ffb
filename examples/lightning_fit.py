"""Lightning's Trainer over a model whose states live on disk: strategy=InfinityStrategy(budget=...).

python examples/lightning_fit.py [DIRECTORY]     (a directory on a disk; default: the current one)

The same module is trained twice, by plain Lightning and with its pages on disk, from the same seed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

import infinity
from infinity.integrations.lightning import InfinityStrategy

OFF = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Characters(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(nn.Embedding(256, 64), block, nn.Linear(64, 256))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)]


def fit(**options: Any) -> list[float]:
    seed_everything(0, verbose=False)
    text, model = torch.tensor(list((__doc__ or "").encode())).unfold(0, 33, 8), Characters()
    trainer = Trainer(accelerator="cpu", max_epochs=4, gradient_clip_val=1.0, logger=False, **options)
    trainer.fit(model, torch.utils.data.DataLoader(text, batch_size=8))  # type: ignore[arg-type]
    return model.losses


def main(directory: str) -> None:
    strategy = InfinityStrategy(budget=infinity.Budget(host="1MiB", nvme={directory: "64MiB"}))
    losses, expected = fit(strategy=strategy, **OFF), fit(**OFF)
    if strategy.runtime is not None:  # it stays open after fit; close(keep=True) would give a plain model
        print(strategy.runtime.stats)
        strategy.runtime.close()
    said = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; largest relative difference to plain Lightning"
    print(said, f"{max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)):.1e}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
