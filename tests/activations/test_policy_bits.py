"""Tests that no policy of activations changes a bit: the zoo with every policy, in every memory."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import zoo
from cover import pairwise
from parity import differences
from policy_runs import Case, Run, plain_gradients, trained

from infinity.activations.recomputation import blocks_of, obstacle

UNKNOWN = ("mixture", "recurrent")
"""Models whose saved tensors a step without data does not know: the order of the first depends on data, and
torch computes an LSTM without data in another way. So it is refused that they leave.
"""
BLOCKS = [each.name for each in zoo.ENTRIES if None in map(obstacle, blocks_of(each.make()).values())]


def fits(case: dict[str, str]) -> bool:
    leaves = case["policy"] not in ("keep", "recompute")
    blocks = case["backwards"] == "blocks together"
    if leaves and (case["model"] in UNKNOWN or (blocks and case["below"] == "NVMe")):
        return False
    # They draw dropout in another order than the plain loop, which runs on unified memory.
    return not blocks or (case["model"] in BLOCKS and case["memory"] != "unified")


FACTORS = {
    "model": [each.name for each in zoo.ENTRIES],
    "policy": ["keep", "recompute", "recompute+offload", "offload", "auto"],
    "memory": ["unified", "apart", "streams"],
    "below": ["RAM", "NVMe"],
    "compute": ["fp32", "bf16"],
    "backwards": ["one", "three", "together", "blocks together"],
}
QUICK = [
    Case("patches", "offload", "apart", "RAM", "fp32", "together"),
    Case("reentrant", "offload", "apart", "RAM", "bf16", "one"),
]
PAIRS = [each for each in (Case(**each) for each in pairwise(FACTORS, fits)) if each not in QUICK]
CASES = QUICK + [pytest.param(each, marks=pytest.mark.slow) for each in PAIRS]


@functools.cache
def kept(case: Case) -> Run:
    """The run that keeps all activations, in the plain loop unless blocks run together."""
    memory = "apart" if case.backwards == "blocks together" else "unified"
    with tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as directory:
        run, _ = trained(replace(case, policy="keep", memory=memory, below="RAM"), Path(directory))
    if case.compute == "fp32" and case.backwards != "blocks together":
        assert differences(run.gradients[0], plain_gradients(case)) == []
    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_policy_changes_a_bit(case: Case, tmp_path: Path) -> None:
    expected = kept(replace(case, policy="", memory="", below=""))
    run, plan = trained(case, tmp_path)
    assert differences(vars(run), vars(expected)) == []
    assert case.policy in (plan.residuals.policy, "auto")
    room = plan.residuals.room
    assert (room is not None) == plan.residuals.policy.endswith("offload")
    assert room is None or room.down > 0
