"""Tests of InfinityStrategy: what Lightning's Trainer does with it equals what it does with a plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from infinity.integrations.lightning import InfinityStrategy

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "The '.*_dataloader' does not have many workers",
        "The number of training batches",
        "Saved activations take",
        "You defined a `validation_step`",
        ".*is not resumable",
        "Checkpoint directory",
    )
]

BATCHES = 7


class Net(LightningModule):
    """Two linear layers with dropout between, trained to a fixed map; records losses."""

    def __init__(self, *, dropout: float = 0.0, schedule: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(16, 96, bias=False),
            nn.BatchNorm1d(96),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(96, 16),
        )
        self.schedule = schedule
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs).float(), targets.float())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        inputs, targets = batch
        self.evaluated.append(nn.functional.mse_loss(self.net(inputs), targets).item())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        norms, others = self.net[1].parameters(), [*self.net[0].parameters(), *self.net[4].parameters()]
        groups = [{"params": others}, {"params": list(norms), "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        if self.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


class Manual(Net):
    """Steps by itself, every second batch, and clips."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        with optimizer.toggle_model():
            loss = super().training_step(batch, index)
            self.manual_backward(loss)
        if index % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            assert len(optimizer.param_groups) == 2
            optimizer.step()
            optimizer.zero_grad()


def data(count: int = BATCHES, *, shuffle: bool = False) -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4 * count, 16, generator=generator)
    pairs = torch.utils.data.TensorDataset(inputs, inputs.roll(1, 1) * 2)
    return torch.utils.data.DataLoader(pairs, batch_size=4, shuffle=shuffle)


class Resumable:
    """Batches in an order that torch's generator draws for each epoch. As Lightning asks of data that can go
    on in the middle of an epoch, it has a state.
    """

    def __init__(self) -> None:
        self.batches = list(data())
        self.state: dict[str, Any] = {"order": [], "given": 0}
        self.resumed = False

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(BATCHES).tolist()
        if not self.resumed:
            self.state = {"order": order, "given": 0}
        self.resumed = False
        return self

    def __next__(self) -> Any:
        if self.state["given"] == BATCHES:
            raise StopIteration
        self.state["given"] += 1
        return self.batches[self.state["order"][self.state["given"] - 1]]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.resumed = dict(state), state["given"] < BATCHES


def trainer(directory: Path, **options: Any) -> Trainer:
    options = {"max_epochs": 2, "enable_checkpointing": False, **options}
    return Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def strategy(directory: Path, **options: Any) -> InfinityStrategy:
    """A strategy that keeps all pages on disk."""
    pages = directory / "pages"
    pages.mkdir(exist_ok=True)
    return InfinityStrategy(
        budget=infinity.Budget(device="96KiB", host="1MiB", nvme={pages: "16MiB"}), **options
    )


def fit(model: Net, directory: Path, given: InfinityStrategy | None = None, **options: Any) -> Net:
    """Train a model, with a strategy if one is given, and return it with parameters in RAM."""
    torch.manual_seed(7)
    if given is not None:
        options["strategy"] = given
    trainer(directory, **options).fit(model, data(), data(2))
    if given is not None and given.runtime is not None:
        given.runtime.close(keep=True)
    return model


def check_equal(found: Net, expected: Net, tolerance: float = 1e-6) -> None:
    assert len(found.losses) == len(expected.losses) > 0
    for name in ("losses", "evaluated"):
        torch.testing.assert_close(
            torch.tensor(getattr(found, name)),
            torch.tensor(getattr(expected, name)),
            rtol=tolerance,
            atol=0.0,
        )
    expected_state = expected.state_dict()
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, expected_state[name], rtol=tolerance, atol=tolerance)


CASES: dict[str, tuple[Callable[[], Net], dict[str, Any], dict[str, Any]]] = {
    "plain": (Net, {}, {}),
    "clipped": (Net, {"gradient_clip_val": 0.2}, {}),
    "clipped by value": (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
    "accumulated, the last step shorter": (Net, {"accumulate_grad_batches": 3}, {}),
    "eager, the last step shorter": (Net, {"accumulate_grad_batches": 3}, {"update": "eager"}),
    "manual": (Manual, {}, {}),
    "anomalies": (Net, {"detect_anomaly": True, "max_epochs": 1}, {}),
    "schedule by step": (lambda: Net(schedule="step"), {"accumulate_grad_batches": 2}, {}),
    "schedule by epoch": (lambda: Net(schedule="epoch"), {"max_epochs": 3}, {}),
    "validation between": (lambda: Net(dropout=0.2), {"val_check_interval": 3}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain_lightning(case: str, tmp_path: Path) -> None:
    make, options, ours = CASES[case]
    expected = fit(make(), tmp_path, **options)
    found = fit(make(), tmp_path, strategy(tmp_path, **ours), **options)
    check_equal(found, expected)


@pytest.mark.parametrize(
    ("compute", "every"),
    [
        ("fp32", {"every_n_epochs": 1}),
        ("bf16", {"every_n_epochs": 1, "save_on_train_epoch_end": True}),
        ("fp32", {"every_n_train_steps": 4}),
        ("bf16", {"every_n_train_steps": 4}),
    ],
)
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(
    compute: str, every: dict[str, int], tmp_path: Path
) -> None:
    precision = infinity.Precision(compute=compute)
    saving = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, save_last=True, **every)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saving]}

    def run(model: Net, ckpt_path: Path | None = None, **more: Any) -> Net:
        torch.manual_seed(7)
        ours = strategy(tmp_path, precision=precision)
        loader = data(shuffle=True) if "every_n_epochs" in every else Resumable()
        trainer(tmp_path, strategy=ours, **more).fit(model, loader, data(2), ckpt_path=ckpt_path)
        assert ours.runtime is not None
        ours.runtime.close(keep=True)
        return model

    whole = run(Net(dropout=0.2, schedule="step"), **options)
    first = sorted((tmp_path / "kept").glob("epoch*"))[0]
    resumed = run(Net(dropout=0.2, schedule="step"), first)
    assert 0 < len(resumed.losses) < len(whole.losses)
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    states = whole.state_dict()
    assert all(torch.equal(value, states[name]) for name, value in resumed.state_dict().items())
