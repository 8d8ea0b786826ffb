"""Tests of restoring into a runtime that is being made, and into one that has trained."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from emulated_device import EmulatedDevice
from faulty import watchdog
from parity import differences
from run_copies import copy_to, load_into, offloaded, raw, train
from zoo import entry

from infinity.aio import Faults
from infinity.checkpoint.restore import show
from infinity.errors import StorageError

__all__ = ["watchdog"]


@pytest.mark.sweep
@pytest.mark.parametrize("home", ["nvme", "unified", "mirrored", "device"])
@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_a_run_that_goes_back(home: str, states: str, tmp_path: Path) -> None:
    """A running model that takes back its own earlier copy repeats its steps, though it has trained on."""
    of = entry("tied")
    swap = tmp_path / "swap"
    swap.mkdir()
    model = of.make()
    with offloaded(model, swap, home=home, states=states) as runtime:
        copy_to(tmp_path / "start", runtime)
        first = train(model, runtime, of, range(3))
        middle = raw(runtime, model)
        copy_to(tmp_path / "copy", runtime)
        losses = train(model, runtime, of, range(3, 5))
        end = raw(runtime, model)
        view = None if home == "nvme" else model.head.weight.detach()
        for _ in range(2):
            load_into(runtime, tmp_path / "copy")
            assert differences(raw(runtime, model), middle) == []
            assert view is None or torch.equal(view, model.head.weight.detach())
            assert train(model, runtime, of, range(3, 5)) == losses
            assert differences(raw(runtime, model), end) == []
        load_into(runtime, tmp_path / "start")
        assert train(model, runtime, of, range(3)) == first
        assert differences(raw(runtime, model), middle) == []


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("home", ["host", "mirrored", "mixed", "device"])
def test_a_device_with_late_streams(home: str, seed: int, tmp_path: Path) -> None:
    """A running model takes back its copy on a device whose streams are late; each access has an order."""
    of = entry("tied")
    (tmp_path / "swap").mkdir()
    model = of.make()
    with EmulatedDevice(seed).in_use(), offloaded(model, tmp_path / "swap", home=home) as runtime:
        train(model, runtime, of, range(1))
        copy_to(tmp_path / "copy", runtime)
        losses = train(model, runtime, of, range(1, 3))
        end = raw(runtime, model)
        with torch.no_grad():
            of.loss(model, of.batch(0, 0))
        load_into(runtime, tmp_path / "copy")
        with torch.no_grad():
            of.loss(model, of.batch(0, 0))
        parts = runtime._components
        parts.prefetch_engine.land_all()
        show(parts.pages, parts.edits, parts.store)
        assert train(model, runtime, of, range(1, 3)) == losses
        assert differences(raw(runtime, model), end) == []


def test_states_that_were_read_ahead(tmp_path: Path) -> None:
    """A step does not use the states that its backward had brought near before a copy was restored."""
    of = entry("tied")
    (tmp_path / "swap").mkdir()
    found = []
    for home in ("unified", "mixed"):
        model = of.make()
        with offloaded(model, tmp_path / "swap", home=home, accumulation=1) as runtime:
            train(model, runtime, of, range(1))
            copy_to(tmp_path / home, runtime)
            train(model, runtime, of, range(1, 3))
            of.loss(model, of.batch(3, 0)).backward()
            assert (runtime._components.store.staging.leased > 0) == (home == "mixed")
            pages = runtime._components.states.pages.values()
            before = [page.version for page in pages]
            load_into(runtime, tmp_path / home)
            assert all(now.version > old for now, old in zip(pages, before, strict=True))
            runtime.optimizer.step()
            found.append(raw(runtime, model))
    assert differences(*found) == []


def test_a_backward_through_values_that_were_replaced(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    of = entry("tied")
    model = of.make()
    with offloaded(model, tmp_path / "swap", home="unified") as runtime:
        train(model, runtime, of, range(1))
        copy_to(tmp_path / "copy", runtime)
        loss = of.loss(model, of.batch(1, 0))
        load_into(runtime, tmp_path / "copy")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_pages_that_cannot_be_written(tmp_path: Path) -> None:
    faults = Faults()
    (tmp_path / "swap").mkdir()
    of = entry("tied")
    model = of.make()
    with offloaded(model, tmp_path / "swap", faults=faults) as runtime:
        train(model, runtime, of, range(1))
        copy_to(tmp_path / "copy", runtime)
        faults.fail("write", 1, errno.EIO)
        with pytest.raises(StorageError) as caught:
            load_into(runtime, tmp_path / "copy")
        assert caught.value.errno == errno.EIO
        faults.clear()
