"""Tests of InfinityStrategy: what Lightning's Trainer does with it equals what it does with a plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from living_tensors import Living
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError, UnsupportedOptimizer

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities import grad_norm

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


SLOW = {"plain", "anomalies", "schedule by step", "validation between"}
"""Cases whose parts other cases have, too."""


def marked(*values: Any, slow: bool) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("case", [marked(each, slow=each in SLOW) for each in CASES])
def test_training_equals_plain_lightning(case: str, tmp_path: Path) -> None:
    make, options, ours = CASES[case]
    expected = fit(make(), tmp_path, **options)
    found = fit(make(), tmp_path, strategy(tmp_path, **ours), **options)
    check_equal(found, expected)


@pytest.mark.parametrize(
    ("compute", "every"),
    [
        marked("fp32", {"every_n_epochs": 1}, slow=True),
        marked("bf16", {"every_n_epochs": 1, "save_on_train_epoch_end": True}, slow=False),
        marked("fp32", {"every_n_train_steps": 4}, slow=False),
        marked("bf16", {"every_n_train_steps": 4}, slow=True),
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


@pytest.mark.parametrize("precision", [marked("bf16-mixed", slow=True), marked("bf16-true", slow=False)])
def test_precision_of_the_trainer_becomes_that_of_pages(precision: str, tmp_path: Path) -> None:
    plain = fit(Net(), tmp_path, precision=precision)
    given = strategy(tmp_path)
    found = fit(Net(), tmp_path, given, precision=precision)
    assert given.runtime is not None
    assert given.runtime.plan.precision == infinity.Precision(compute="bf16")
    assert {each.dtype for each in found.parameters()} == {torch.float32}, "close(keep=True) gives masters"
    assert found.losses[0] == pytest.approx(plain.losses[0], rel=2**-8)
    assert found.losses[-1] == pytest.approx(plain.losses[-1], rel=0.05)


class Wide(Net):
    """Has 3 MiB of parameters, of which no tensor is larger than 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Linear(512, 512, bias=False) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(16, 512), *wide, nn.Linear(512, 16))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_a_checkpoint_takes_no_ram_for_all_tensors(tmp_path: Path) -> None:
    """The run has 12 MiB: parameters and AdamW's states."""
    (tmp_path / "pages").mkdir()
    budget = infinity.Budget(device="3MiB", host="4MiB", nvme={tmp_path / "pages": "64MiB"})
    given, model = InfinityStrategy(budget=budget), Wide()
    made = trainer(tmp_path, strategy=given, max_epochs=1)
    made.fit(model, data(2))
    with Living() as living:
        made.save_checkpoint(tmp_path / "one.ckpt")
        made.save_checkpoint(tmp_path / "two.ckpt", weights_only=True)
        made.strategy.load_model_state_dict(made.strategy.load_checkpoint(tmp_path / "one.ckpt"))
    assert living.peak < 4 << 20  # some tensors of 1 MiB at a time
    assert sum(each.stat().st_size for each in (tmp_path / "one.ckpt" / "run").iterdir()) > 9 << 20


def test_checkpoints_are_tested_validated_and_replaced(tmp_path: Path) -> None:
    given = strategy(tmp_path)
    saving = ModelCheckpoint(tmp_path / "kept", save_last=True, save_top_k=1, monitor=None)
    made = trainer(tmp_path, strategy=given, enable_checkpointing=True, callbacks=[saving])
    model = Net()
    made.fit(model, data(), data(2))
    assert sorted(each.name for each in (tmp_path / "kept").iterdir()) == [
        "epoch=1-step=14.ckpt",
        "last.ckpt",
    ]
    before = model.evaluated[-2:]
    torch.manual_seed(5)
    made.test(model, data(2), verbose=False)
    drawn = torch.random.get_rng_state()
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    torch.manual_seed(5)
    made.test(model, data(2), ckpt_path="last", verbose=False)
    assert model.evaluated[-2:] == before
    assert torch.equal(torch.random.get_rng_state(), drawn)
    made.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert not list((tmp_path / "weights.ckpt").rglob("states*"))
    given.runtime.close(keep=True)  # type: ignore[union-attr]

    other = Net()  # offloaded for inference alone
    fresh = trainer(tmp_path, strategy=strategy(tmp_path / "kept"))
    fresh.validate(other, data(2), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert other.evaluated == before
    with pytest.raises(KeyError, match="contains only the model"):
        fresh.fit(other, data(), ckpt_path=tmp_path / "weights.ckpt")
    fresh.fit(other, data(1), ckpt_path=tmp_path / "kept" / "last.ckpt")  # has ended: does nothing
    assert not other.losses


def test_a_second_fit_goes_on_with_a_new_optimizer_as_plain_lightning_does(tmp_path: Path) -> None:
    runs = []
    for options in ({}, {"strategy": strategy(tmp_path)}):
        model = Net()
        made = trainer(tmp_path, max_epochs=1, **options)
        made.fit(model, data(2))
        made.fit_loop.max_epochs = 2
        made.fit(model, data(2))
        runs.append(model)
    runs[1].cpu()
    check_equal(runs[1], runs[0])
    given = made.strategy
    assert isinstance(given, InfinityStrategy) and given.runtime is not None
    given.runtime.close()
    made.validate(Net(), data(1), verbose=False)
    assert not given.runtime.closed, "another model is offloaded though the first is gone"


def test_a_file_of_another_strategy_is_resumed(tmp_path: Path) -> None:
    plain = Net(schedule="step")
    made = trainer(tmp_path)
    made.fit(plain, data(3))
    made.save_checkpoint(tmp_path / "plain.ckpt")
    expected = Net(schedule="step")
    trainer(tmp_path, max_epochs=3).fit(expected, data(3), ckpt_path=tmp_path / "plain.ckpt")
    found, given = Net(schedule="step"), strategy(tmp_path)
    trainer(tmp_path, max_epochs=3, strategy=given).fit(found, data(3), ckpt_path=tmp_path / "plain.ckpt")
    check_equal(found, expected)


def test_norms_skipped_batches_and_schedules_of_accumulation(tmp_path: Path) -> None:
    class Hooked(Net):
        norms: list[float]

        def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
            loss = super().training_step(batch, index)
            return None if index in (2, 4) else loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found = grad_norm(self.net, 2)
            self.norms = [*getattr(self, "norms", []), float(found.get("grad_2.0_norm_total", 0.0))]

    def run(given: InfinityStrategy | None) -> Hooked:
        model = Hooked()
        accumulation = GradientAccumulationScheduler({0: 1, 1: 3})
        fit(model, tmp_path, given, callbacks=[accumulation])
        return model

    expected, found = run(None), run(strategy(tmp_path))
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    check_equal(found, expected)


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    def refused(says: str, kind: type[Exception] = ConfigError, *, of: Any = None, **options: Any) -> None:
        with pytest.raises(kind, match=says):
            trainer(tmp_path, strategy=strategy(tmp_path), max_epochs=1, **options).fit(of or Net(), data(2))

    def optimizers(made: Callable[[Net], Any]) -> Net:
        model = Manual()
        model.configure_optimizers = lambda: made(model)  # type: ignore[method-assign]
        return model

    sgd, lbfgs = torch.optim.SGD, torch.optim.LBFGS
    several = optimizers(lambda model: [sgd([each]) for each in model.parameters()])
    refused("returned 5 optimizers", of=several)
    refused("LBFGS", UnsupportedOptimizer, of=optimizers(lambda model: lbfgs(model.parameters())))
    with pytest.warns(UserWarning, match="no optimizer"):
        refused("returned no optimizer", of=optimizers(lambda model: None))
    refused("DoublePrecision", precision="64-true")
    refused("AsyncCheckpointIO", plugins=[AsyncCheckpointIO()])
    for option in ("devices", "num_nodes"):
        made = Trainer(accelerator="cpu", **{"devices": 1, option: 2}, strategy=strategy(tmp_path))
        with pytest.raises(ConfigError, match=f"{option}=2"):
            made.fit(Net(), data(1))
    half = InfinityStrategy(precision=infinity.Precision(compute="fp16"))
    with pytest.raises(ConfigError, match="computes in fp16"):
        Trainer(accelerator="cpu", strategy=half, precision="bf16-true").fit(Net(), data(1))
    with pytest.raises(ConfigError, match="was given mesh, resume"):
        InfinityStrategy(mesh=None, resume="somewhere")


def test_hooks_cannot_read_or_replace_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    class Reads(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = len(checkpoint["state_dict"])

    class Replaces(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {}

    for callback, says in ((Reads(), "has read"), (Replaces(), "has replaced")):
        made = trainer(tmp_path, strategy=strategy(tmp_path), max_epochs=1, callbacks=[callback])
        made.fit(Net(), data(1))
        with pytest.raises(ConfigError, match=says):
            made.save_checkpoint(tmp_path / "never.ckpt")
        assert not (tmp_path / "never.ckpt").exists()
        made.callbacks.remove(callback)  # type: ignore[attr-defined]
        (tmp_path / "mine").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match="no checkpoint of this strategy"):
            made.save_checkpoint(tmp_path / "mine")
        with pytest.raises(ConfigError, match="not to be a local directory"):
            made.save_checkpoint("s3://bucket/a.ckpt")


def test_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.integrations.lightning.several_ranks", lambda mesh: True)
    with pytest.raises(ConfigError, match="one of several ranks"):
        trainer(tmp_path, strategy=strategy(tmp_path)).fit(Net(), data(1))
