"""Tests of the decoder that `infinity train` trains.

Its presets have the sizes that their names say, it learns, attention is causal and knows relative positions
only. The loss is the mean cross-entropy of the logits, and initial weights have standard deviation 0.02, or
0.02 / sqrt(2 * layers) where results add to the residual stream.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from homes import each_device

from infinity.lm.decoder import PRESETS, Decoder, DecoderConfig
from infinity.lm.model import language_model

SMALL = DecoderConfig(width=32, layers=2, heads=4, hidden=48)
SCALE = {"m": 1e6, "b": 1e9}


def small(config: DecoderConfig = SMALL) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_its_name_says(name: str) -> None:
    config = PRESETS[name].decoder
    with torch.device("meta"):
        model = Decoder(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    number, unit = re.fullmatch(r"(\d+)([mb])", name).groups()
    said = int(number) * SCALE[unit]
    assert parameters == config.parameters == language_model(name).parameters
    assert parameters == pytest.approx(said, rel=0.02)


@each_device
def test_it_learns_a_repeated_pattern_within_a_few_steps(device: str) -> None:
    model = small().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.tensor(list(b"abcdefgh" * 5), device=device).view(1, -1)
    losses = []
    for _ in range(20):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert losses[-1] < 0.3


def test_no_token_sees_a_later_one() -> None:
    model = small()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).min() > 1e-4


def test_attention_tells_positions_apart() -> None:
    model = small()
    tokens = torch.tensor([[7, 8, 9, 10]])
    swapped = torch.tensor([[8, 7, 9, 10]])
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-5


def test_logits_depend_on_distances_not_on_positions() -> None:
    model = small()
    rotation = model.rotation(12, torch.empty(1))
    attention = model.blocks[0].attention
    x = torch.randn(1, 4, SMALL.width)
    first = attention(x, tuple(each[:4] for each in rotation))
    later = attention(x, tuple(each[8:12] for each in rotation))
    torch.testing.assert_close(first, later, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model = small()
    tokens = torch.randint(256, (3, 9))
    logits = model(tokens[:, :-1]).double()
    chosen = logits.log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-chosen.mean().item(), rel=1e-5)


def test_initial_values_have_the_spread_that_they_should() -> None:
    config = DecoderConfig(width=128, layers=8, heads=4, hidden=256)
    model = small(config)
    block = model.blocks[3]
    for weight in (model.embedding.weight, model.head.weight, block.attention.qkv.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.attention.out.weight, block.feed_forward.out.weight):
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.05)
    assert torch.equal(block.attention_norm.weight, torch.ones(128))
