"""Tests of a run that is killed in a backward while activations are on disk, and that goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import killed_activations
import pytest
import torch
from killed_activations import KILLED_IN, opened, train
from parity import copied, differences
from warm_python import Popen

from infinity.checkpoint import commit_files
from infinity.tiers.slab import scratch_name

SLOW = [("offload", "keep"), ("offload", "offload"), ("recompute+offload", "offload")]


@pytest.mark.parametrize(
    ("policy", "again"),
    [("offload", "recompute"), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_it_leaves_no_scratch_and_goes_on_with_any_policy(policy: str, again: str, tmp_path: Path) -> None:
    whole, root = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    root.mkdir()
    with opened(whole, "keep") as (model, runtime):
        torch.manual_seed(4)
        losses, state = train(model, runtime, 0), copied(model.state_dict())
    child = Popen(
        [sys.executable, killed_activations.__file__, str(root), policy], stdout=subprocess.PIPE, text=True
    )
    written = child.communicate(timeout=60)[0]
    assert child.returncode == -signal.SIGKILL
    assert (int(written) > 0) == (policy == "offload")
    slabs = list((root / "pages").glob("*.slab"))
    assert len(slabs) == 1
    assert not (root / "pages" / scratch_name(0)).exists()
    with opened(root, again, resume=True) as (model, runtime):
        assert runtime.load() == KILLED_IN
        assert runtime._components.checkpoint.streamed_from is None, "slabs are adopted"
        assert train(model, runtime, KILLED_IN) == losses[KILLED_IN:]
        assert differences(copied(model.state_dict()), state) == []
    assert list((root / "pages").glob("*.slab")) == slabs
    assert len(commit_files.generations(root / "commits")) == 1
