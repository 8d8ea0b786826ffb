"""Tests of offloading again in one process, as a cell of a notebook that is run twice does.

A runtime that nothing refers to is closed by the next offload. One that is still referred to holds its
directories, and the error says how to end that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for
from small_runtime import files, two_layers
from torch import nn

import infinity
from infinity.errors import ConfigError, StorageError

INPUTS = torch.ones(2, 64)


def cell(directory: Path, compute: str = "fp32", **options: Any) -> tuple[nn.Module, Any]:
    """Make a model and offload it to NVMe."""
    model = two_layers()
    optimizer, precision = torch.optim.AdamW(model.parameters()), infinity.Precision(compute=compute)
    runtime = infinity.offload(
        model,
        optimizer,
        budget=budget_for("nvme", model, optimizer, directory, precision),
        precision=precision,
        device="cpu",
        **options,
    )
    return model, runtime


def test_a_runtime_in_use_is_to_be_closed(tmp_path: Path) -> None:
    _, runtime = cell(tmp_path)
    with pytest.raises(StorageError, match=r"in use by this process.*runtime\.close\(\)"):
        cell(tmp_path)
    runtime.close()
    cell(tmp_path)[1].close()
    assert files(tmp_path) == []


def test_a_model_alone_keeps_its_runtime(tmp_path: Path) -> None:
    model, _ = cell(tmp_path)
    with pytest.raises(StorageError, match="its model"):
        cell(tmp_path)
    assert model(INPUTS).shape == (2, 64)
    del model, _
    cell(tmp_path)[1].close()


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_a_graph_and_parameters_do_not_keep_a_runtime(compute: str, tmp_path: Path) -> None:
    model, runtime = cell(tmp_path, compute=compute)
    kept = list(model.parameters())
    loss = model(INPUTS).sum()
    del model, runtime
    other, second = cell(tmp_path)
    for use in (loss.backward, kept[0].sum):
        with pytest.raises(ConfigError, match="closed"):
            use()
    other(INPUTS).sum().backward()
    second.optimizer.step()
    second.close()
    assert files(tmp_path) == []


def test_a_traceback_keeps_a_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        model, _ = cell(tmp_path)
        model(torch.ones(2, 3))

    monkeypatch.setattr(sys, "last_value", None, raising=False)
    try:
        fails()
    except RuntimeError as error:
        sys.last_value = error
    with pytest.raises(StorageError, match=r"sys\.last_value"):
        cell(tmp_path)
    sys.last_value = None  # not by monkeypatch, which would keep the error
    cell(tmp_path)[1].close()


def test_a_pending_commit_of_a_dropped_runtime_becomes_durable(tmp_path: Path) -> None:
    swap, commits = tmp_path / "swap", tmp_path / "commits"
    swap.mkdir()
    model, runtime = cell(swap, checkpoint=commits)
    loss = model(INPUTS).sum()
    loss.backward()
    runtime.optimizer.step()
    runtime.save(state="kept")  # waits for updates that the next forward would complete
    del model, runtime
    _, second = cell(swap, resume=commits)
    assert second.load() == "kept"
    second.close()


def test_an_open_runtime_is_left_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    model, runtime = cell(first)
    cell(second)[1].close()
    assert model(INPUTS).shape == (2, 64)
    runtime.close()
