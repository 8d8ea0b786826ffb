"""Tests of dry runs and of training with architectures of transformers, with and without gradient
checkpointing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted_steps import counted
from object_state import global_generators, state_of
from torch import nn

import infinity
from infinity.planning.fake_step import run_fake_step

pytest.importorskip("transformers", reason="needs the transformers package")

from architectures import ARCHITECTURES
from transformers import masking_utils

FP32 = infinity.Precision(compute="fp32")
VARIANTS = {"plain": None, "reentrant": True, "non-reentrant": False}
DEFAULT = {("llama", "non-reentrant"), ("gpt2", "reentrant"), ("t5", "plain"), ("vit", "reentrant")}
DEFAULT |= {("wav2vec2", "non-reentrant")}
NOT_CHECKPOINTED = {"albert", "convnext", "resnet"}  # by transformers

UNKNOWN = {
    "mixtral": "Expected inputs of BF16 type",  # the grouped product's kernel without data
    "wav2vec2": "values of tensors",  # draws which time steps it masks
}
"""What the reason says where a dry run in fp32 cannot be run."""

CASES = [
    pytest.param(name, variant, marks=() if (name, variant) in DEFAULT else pytest.mark.slow)
    for name in ARCHITECTURES
    for variant in VARIANTS
    if variant == "plain" or name not in NOT_CHECKPOINTED
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> list[float]:
    losses = []
    for step in range(2):
        inputs = batch(step)
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_dry_run_counts_a_real_step_and_changes_nothing(name: str, variant: str, monkeypatch) -> None:
    chosen, reentrant = ARCHITECTURES[name], VARIANTS[variant]
    model = chosen.build(reentrant=reentrant)
    inputs = chosen.inputs(0)
    before = state_of(model, inputs, global_generators())
    found = run_fake_step(model, inputs, precision=FP32, device=torch.device("cpu"), train=True)
    assert state_of(model, inputs, global_generators()) == before
    if name in UNKNOWN:
        assert found.activations is None
        assert UNKNOWN[name] in (found.unknown or "")
    else:
        # Asked for data that is not there, transformers makes a mask. The real step then has to make it too.
        monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
        real = counted(chosen.build(reentrant=reentrant), **inputs)
        # Constants of Python count: a real one is made where a dispatch mode does not see it.
        assert found.activations is not None
        assert real <= found.activations <= 1.01 * real


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_losses_with_example_inputs_are_those_of_plain_training(name: str, variant: str) -> None:
    chosen, reentrant = ARCHITECTURES[name], VARIANTS[variant]
    plain = chosen.build(reentrant=reentrant)
    right = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), chosen.inputs)
    model = chosen.build(reentrant=reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(host="64MiB"),
        precision=FP32,
        device="cpu",
        example_inputs=chosen.inputs(0),
    ) as runtime:
        assert (runtime.plan.activations_unknown is None) == (name not in UNKNOWN)
        losses = train(model, runtime.optimizer, chosen.inputs)
    assert losses == pytest.approx(right, rel=1e-5)
