"""Tests of edits of frozen parameters, before the first commit and after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_device import EmulatedDevice
from faulty import watchdog
from parity import differences
from run_copies import raw, train
from runs_on_disk import FROZEN, Run
from torch import nn

from infinity.errors import ConfigError

__all__ = ["watchdog"]


def first_frozen(model: nn.Module) -> nn.Parameter:
    return next(each for each in model.parameters() if not each.requires_grad and each.numel() > 1)


@pytest.mark.parametrize("home", ["unified", "nvme", "mirrored", "mixed"])
def test_after_a_commit_the_edit_is_undone_and_refused_once(home: str, tmp_path: Path) -> None:
    run = Run(tmp_path, of=FROZEN, home=home)
    with EmulatedDevice().in_use(), run.opened() as (model, runtime):
        parameter = first_frozen(model)
        with torch.no_grad():
            parameter.mul_(2)  # before the first commit
        train(model, runtime, FROZEN, range(1))
        runtime.save().wait()
        before = raw(runtime, model)
        with torch.no_grad():
            parameter.copy_(parameter.clone())  # the same values are no edit
        runtime.save().wait()
        with torch.no_grad():
            parameter.add_(1)
        with pytest.raises(ConfigError, match=r"frozen parameter .* was edited after a commit"):
            runtime.save()
        assert differences(raw(runtime, model), before) == []
        losses = train(model, runtime, FROZEN, range(1, 3))
        runtime.save().wait()
        end = raw(runtime, model)
    with EmulatedDevice().in_use(), run.opened(resume=True) as (model, runtime):
        runtime.load()
        assert differences(raw(runtime, model), end) == []
    assert len(losses) == 2
