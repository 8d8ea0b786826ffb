"""Tests that a restored run has the bits of the saved one, and that what does not fit is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import watchdog
from parity import differences
from run_copies import changed, copy_to, load_into, offloaded, opened, quiet, raw, take_rest, train
from torch import nn
from zoo import entry

from infinity.checkpoint import restore as restoring
from infinity.checkpoint import tensor_files
from infinity.checkpoint.commit_source import CommitSource
from infinity.checkpoint.manifest import ParameterEntry
from infinity.errors import IncompatibleCheckpoint
from infinity.planning import homes

__all__ = ["watchdog"]

SHORT, LONG = 1 << 12, 1 << 16
"""Lengths of chunks in elements. A chunk of SHORT elements is shorter than some of the parameters."""

CASES = [
    # model, from, to, compute, states, optimizer, chunks from, chunks to
    ("frozen", "nvme", "mixed", "fp16", "fp32", "adagrad", LONG, SHORT),
    ("channels_last", "host", "nvme", "bf16", "int8", "adagrad", SHORT, LONG),
    ("mixture", "nvme", "mirrored", "bf16", "fp32", "adamw", SHORT, LONG),
    ("tied", "mirrored", "nvme", "bf16", "bf16", "plain_sgd", LONG, SHORT),
]


def chunks(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Have plans made with chunks of this many elements, or fewer if the model is smaller."""
    monkeypatch.setattr(homes, "_CHUNKS", (length,))


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_training_goes_on_with_equal_bits(
    case: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, home, new_home, compute, states, optimizer, length, new_length = case
    of = entry(name)
    options = {"compute": compute, "states": states, "optimizer": optimizer, "keep": of.keep}
    for window in (restoring, tensor_files):
        monkeypatch.setattr(window, "WINDOW", 1 << 12)
    swap, other = tmp_path / "swap", tmp_path / "other"
    swap.mkdir()
    other.mkdir()
    model, again = of.make(), changed(of.make())
    chunks(monkeypatch, length)
    with offloaded(model, swap, home=home, **options) as runtime:
        train(model, runtime, of, range(2))
        copy_to(tmp_path / "copy", runtime)
        chunks(monkeypatch, new_length)
        with offloaded(again, other, home=new_home, **options) as resumed:
            same = runtime.plan.layout.chunk_elements == resumed.plan.layout.chunk_elements
            assert same == (length == new_length)
            saved = raw(runtime, model)
            assert differences(raw(resumed, again), saved) != []
            found = load_into(resumed, tmp_path / "copy")
            assert (found.fresh, found.left_out) == ((), ())
            assert differences(raw(resumed, again), saved) == []
            assert any(each.get("begun") for each in saved.values()) == (optimizer != "plain_sgd")
            take_rest(again, resumed, model, runtime)
            losses = train(model, runtime, of, range(2, 4))
            assert train(again, resumed, of, range(2, 4)) == losses
            end = raw(runtime, model)
            assert differences(end, saved) != []
            assert differences(raw(resumed, again), end) == []


def test_edits_since_the_last_step(tmp_path: Path) -> None:
    of = entry("tied")
    for name in ("swap", "other"):
        (tmp_path / name).mkdir()
    model, again = of.make(), changed(of.make())
    with (
        offloaded(model, tmp_path / "swap") as runtime,
        offloaded(again, tmp_path / "other", home="unified") as resumed,
    ):
        train(model, runtime, of, range(1))
        with torch.no_grad():
            torch._foreach_mul_([model.head.weight], 2)  # all values become masters
        copy_to(tmp_path / "copy", runtime)
        load_into(resumed, tmp_path / "copy")
        assert raw(resumed, again)["embedding.weight"]["edited"]
        assert train(again, resumed, of, range(1, 3)) == train(model, runtime, of, range(1, 3))
        assert differences(raw(resumed, again), raw(runtime, model)) == []


class Odd(nn.Module):
    """A module with parameters of unusual dtypes, shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(4, 0))
        self.turned = nn.Parameter(torch.randn(40, 11, 30).permute(2, 0, 1))
        self.thin = nn.Parameter(torch.randn(1, 70, 1).transpose(0, 1))
        self.counts = nn.Parameter(torch.arange(6000), requires_grad=False)
        self.wave = nn.Parameter(torch.randn(7, 3, dtype=torch.complex64).t(), requires_grad=False)

    def forward(self) -> torch.Tensor:
        return sum(each.float().mean() for each in (self.weight, self.scale, self.turned, self.thin))


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_odd_tensors(compute: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("swap", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(restoring, "WINDOW", 1 << 12)
    model, again = Odd(), Odd()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    options = {"compute": compute, "states": states}
    with (
        offloaded(model, tmp_path / "swap", **options) as runtime,
        offloaded(again, tmp_path / "other", home="unified", **options) as resumed,
    ):
        (model() / 64).backward()
        runtime.optimizer.step()
        copy_to(tmp_path / "copy", runtime)
        load_into(resumed, tmp_path / "copy")
        saved = raw(runtime, model)
        assert saved["turned"]["begun"]
        assert differences(raw(resumed, again), saved) == []


# --- what may differ ---------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """A layer and a weight."""

    def __init__(self, *, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(96, 70))
        self.layer = nn.Linear(70, 3)
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x @ self.weight)


def step(model: nn.Module, runtime: Any) -> None:
    torch.manual_seed(9)
    model(torch.randn(8, 96).to(model.weight.dtype) / 16).square().mean().backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


def test_a_parameter_that_is_trainable_only_here(tmp_path: Path) -> None:
    """Its states begin anew, although its chunk has moments of other parameters."""
    for name in ("swap", "other"):
        (tmp_path / name).mkdir()
    model, again = Weighted(frozen=("layer.weight",)), changed(Weighted())
    with (
        offloaded(model, tmp_path / "swap") as runtime,
        offloaded(again, tmp_path / "other") as resumed,
    ):
        step(model, runtime)
        step(again, resumed)
        copy_to(tmp_path / "copy", runtime)
        found = load_into(resumed, tmp_path / "copy")
        assert (found.fresh, found.left_out) == (("layer.weight",), ())
        assert resumed.optimizer.state[again.layer.weight] == {}
        place = again.layer.weight._place
        page = resumed._components.states.pages[place.page.index]
        assert all(page.begun)
        assert not resumed._components.states._read(page, place.index, "exp_avg").any()
        assert torch.equal(model.layer.weight.detach(), again.layer.weight.detach())
        before = again.layer.weight.detach().clone()
        values = raw(resumed, again)["layer.weight"]["values"]
        master = resumed._components.states.master(place.page.index, place.index, values)
        assert torch.equal(master, values.float()), "not with the bits of the step before"
        step(again, resumed)
        quiet(resumed)
        assert resumed.optimizer.state[again.layer.weight]["step"] == 1
        assert not torch.equal(before, again.layer.weight.detach())


def test_a_parameter_that_is_frozen_only_here(tmp_path: Path) -> None:
    for name in ("swap", "other"):
        (tmp_path / name).mkdir()
    model, again = Weighted(), changed(Weighted(frozen=("weight",)))
    with (
        offloaded(model, tmp_path / "swap") as runtime,
        offloaded(again, tmp_path / "other") as resumed,
    ):
        step(model, runtime)
        copy_to(tmp_path / "copy", runtime)
        found = load_into(resumed, tmp_path / "copy")
        assert (found.fresh, found.left_out) == ((), ("weight",))
        assert torch.equal(model.weight.detach(), again.weight.detach())
        kept = {name: each for name, each in raw(runtime, model).items() if name != "weight"}
        there = {name: each for name, each in raw(resumed, again).items() if name != "weight"}
        assert differences(there, kept) == []


@pytest.mark.parametrize("saved", ["adamw", None])
def test_inference_on_either_side(saved: str | None, tmp_path: Path) -> None:
    for name in ("swap", "other"):
        (tmp_path / name).mkdir()
    here = None if saved else "adamw"
    model, again = Weighted(), changed(Weighted())
    with (
        offloaded(model, tmp_path / "swap", optimizer=saved) as runtime,
        offloaded(again, tmp_path / "other", optimizer=here) as resumed,
    ):
        copy_to(tmp_path / "copy", runtime)
        found = load_into(resumed, tmp_path / "copy")
        assert len(found.fresh) == (0 if saved else 3)
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.detach(), other.detach())


# --- what is refused ---------------------------------------------------------------------------------------


class Changed:
    """A CommitSource with some things other than in the source that it wraps."""

    def __init__(self, source: CommitSource, **changes: Any) -> None:
        self._source = source
        self.rule = source.rule
        for name, value in changes.pop("optimizer", {}).items():
            self.rule = dataclasses.replace(self.rule, **{name: value})
        self._changes = changes
        self.reads = 0

    def parameters(self) -> Mapping[str, ParameterEntry]:
        found = dict(self._source.parameters())
        for name, change in self._changes.items():
            if change is None:
                del found[name.replace("__", ".")]
            else:
                before = found.get(name.replace("__", "."), next(iter(found.values())))
                found[name.replace("__", ".")] = dataclasses.replace(before, **change)
        return found

    def read(self, name: str, array: str, first: int, count: int) -> torch.Tensor:
        self.reads += 1
        return self._source.read(name, array, first, count)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": None}, r"lacks weight\."),
        ({"more": {"names": ("more",)}}, r"also has more\."),
        ({"weight": {"names": ("other",)}}, r"lacks weight and also has weight\."),
        ({"weight": {"shape": (70, 96)}}, r"weight has the shape \[96, 70\], and \[70, 96\]"),
        ({"weight": {"stride": (1, 96)}}, r"weight has the strides \[70, 1\], and \[1, 96\]"),
        ({"weight": {"dtype": "float32"}}, r"weight has the dtype torch.bfloat16, and torch.float32"),
        (
            {"layer__bias": {"names": ("layer.bias", "weight")}},
            r"layer\.bias, weight are one parameter in",
        ),
        ({"weight": {"names": ("t",)}, "layer__bias": {"names": ("layer.bias", "weight")}}, "several here"),
        ({"optimizer": {"name": "Adam"}}, r"optimizer is AdamW, and Adam in"),
        ({"optimizer": {"states": "bf16"}}, r"states is fp32, and bf16 in"),
        (
            {"optimizer": {"moments": ("exp_avg",)}},
            r"moments is \['exp_avg', 'exp_avg_sq'\], and \['exp_avg'\]",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    model = Weighted()
    with offloaded(model, tmp_path / "swap") as runtime:
        copy_to(tmp_path / "copy", runtime)
        before = raw(runtime, model)
        source = Changed(opened(tmp_path / "copy")[1], **changes)
        with pytest.raises(IncompatibleCheckpoint, match=said) as caught:
            load_into(runtime, source)
        assert caught.value.cure
        assert source.reads == 0
        assert differences(raw(runtime, model), before) == []


def test_reads_begin_at_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read begins at a multiple of 4096, and ends at one or with the parameter."""
    asked: list[tuple[str, int, int]] = []

    class Watched(Changed):
        def read(self, name: str, array: str, first: int, count: int) -> torch.Tensor:
            asked.append((name, first, count))
            return super().read(name, array, first, count)

    of = entry("tied")
    (tmp_path / "swap").mkdir()
    monkeypatch.setattr(restoring, "WINDOW", 1 << 13)
    chunks(monkeypatch, SHORT)
    model = of.make()
    with offloaded(model, tmp_path / "swap", states="int8") as runtime:
        train(model, runtime, of, range(1))
        copy_to(tmp_path / "copy", runtime)
        source = Watched(opened(tmp_path / "copy")[1])
        load_into(runtime, source)
    sizes = {name: each.numel for name, each in source.parameters().items()}
    assert any(first for _, first, _ in asked)
    for name, first, count in asked:
        assert first % 4096 == 0
        assert 0 < count <= 1 << 13
        assert count % 4096 == 0 or first + count == sizes[name]
