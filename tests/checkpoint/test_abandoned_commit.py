"""Tests of a commit that is given up because its process has to end at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from small_runtime import two_layers

import infinity
from infinity.checkpoint import commit_files
from infinity.checkpoint.committer import Committer


def test_an_abandoned_commit_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, flush = threading.Event(), Committer._flush

    def held(self: Committer) -> None:
        go_on.wait()
        flush(self)

    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = infinity.Budget(host="16MiB")
    with infinity.offload(model, optimizer, budget=budget, device="cpu", checkpoint=tmp_path) as runtime:
        commits = []
        for number in range(2):
            model(torch.ones(2, 64)).sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            if number:
                commits[0].wait()
                monkeypatch.setattr(Committer, "_flush", held)
            commits.append(runtime.save())
        runtime._abandon()
        runtime._abandon()
        assert not commits[1].done
        go_on.set()
    assert commits[0].failure is None
    assert "given up" in str(commits[1].failure)
    assert commit_files.generations(tmp_path) == [1]
    assert sorted(each.name for each in tmp_path.glob("*commit*")) == ["commit-1", "commit-1.safetensors"]


def test_without_a_pending_commit_nothing_is_abandoned(tmp_path: Path) -> None:
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = infinity.Budget(host="16MiB")
    with infinity.offload(model, optimizer, budget=budget, device="cpu", checkpoint=tmp_path) as runtime:
        runtime._abandon()
        runtime.save().wait()
        runtime._abandon()
    assert commit_files.generations(tmp_path) == [1]
