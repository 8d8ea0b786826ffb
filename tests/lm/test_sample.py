"""Tests of `generate`, with which a model writes a sample text: which tokens it draws, when it stops, what
the model is given, and which logits end a text.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import each_device
from lm_models import ScriptedSubject, preset_of, text_of
from torch import nn

import infinity
from infinity.lm.data import Batches
from infinity.lm.decoder import DecoderConfig
from infinity.lm.loop import generate


def write(language_model: Any, prompt: str = "a", **changed: Any) -> str:
    options = {"tokens": 5, "temperature": 1.0, "seed": 0, "device": "cpu", **changed}
    return generate(language_model, prompt, **options)


def test_it_goes_on_where_the_prompt_ends() -> None:
    assert write(ScriptedSubject(), "xa") == "xabcdef"


@each_device
def test_a_model_that_was_paged_and_trained_writes_what_it_read(device: str, tmp_path: Path) -> None:
    text = text_of(tmp_path, [b"0123456789" * 50])
    tiny = preset_of(DecoderConfig(width=32, layers=2, heads=2, hidden=48))
    optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=tiny.learning_rate)
    batches = Batches(text, tiny, batch=4, seq=20, seed=0)
    with infinity.offload(
        tiny.model, optimizer, device=device, example_inputs=tiny.example_inputs(4, 20, device)
    ) as runtime:
        for step in range(40):
            tiny.loss(batches.training(step, 0).to(device)).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        written = write(tiny, "345", tokens=15, temperature=1e-30, device=device)
    assert written == "345678901234567890"


def test_the_seed_decides_and_nothing_else() -> None:
    tiny = preset_of()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = write(tiny, tokens=30)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert write(tiny, tokens=30) == first
    assert write(tiny, tokens=30, seed=1) != first


def test_with_hardly_any_temperature_it_takes_the_likeliest() -> None:
    tiny = preset_of()
    likeliest = tiny.next_token_logits(torch.tensor([[97]]), 0).argmax().item()
    texts = {write(tiny, temperature=1e-30, seed=seed, tokens=1) for seed in range(5)}
    assert texts == {"a" + tiny.vocabulary.decode([likeliest])}


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 0.1])
def test_a_low_temperature_is_nearly_that(temperature: float) -> None:
    assert write(ScriptedSubject(), temperature=temperature) == "abcdef"


def test_it_makes_as_many_tokens_as_it_may() -> None:
    language_model = ScriptedSubject()
    assert write(language_model, tokens=1) == "ab"
    assert language_model.asked == 1


@pytest.mark.parametrize(("longest", "seen"), [(None, 256), (8, 8), (1000, 256)])
def test_the_context_is_cut(longest: int | None, seen: int) -> None:
    language_model = ScriptedSubject(longest)
    assert write(language_model, "z" * 300 + "a") == "z" * 300 + "abcdef"
    assert language_model.seen.shape == (1, seen)


def test_what_fills_a_context_up_changes_nothing_and_lengths_are_few() -> None:
    tiny = preset_of(DecoderConfig(width=32, layers=2, heads=2, hidden=48))
    lengths, told, truth = set(), tiny.next_token_logits, []

    def watched(tokens: torch.Tensor, position: int) -> torch.Tensor:
        lengths.add(tokens.shape[1])
        logits = told(tokens, position)
        alone = tokens[:, : position + 1]
        torch.testing.assert_close(logits, told(alone, position))
        truth.append(alone.shape[1])
        return logits

    tiny.next_token_logits = watched
    write(tiny, "abc", tokens=300)
    assert truth == [min(256, 3 + made) for made in range(300)]
    assert lengths == {64, 128, 192, 256}


def test_an_empty_prompt_is_a_new_line_that_is_not_shown() -> None:
    assert write(ScriptedSubject(), "", tokens=2) == "\x0b\x0c"


def test_every_module_gets_its_own_mode_back() -> None:
    language_model = ScriptedSubject()
    language_model.model = nn.Sequential(language_model.model, nn.Identity())
    language_model.model[1].eval()
    assert write(language_model) == "abcdef"  # dropout, if it were on, would change the text
    assert [module.training for module in language_model.model.modules()] == [True, True, True, False]


def test_the_mode_comes_back_after_an_error() -> None:
    class Fails(ScriptedSubject):
        def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
            raise RuntimeError("no")

    language_model = Fails()
    with pytest.raises(RuntimeError, match="no"):
        write(language_model)
    assert language_model.model.training


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_gives_no_numbers_writes_nothing(value: float) -> None:
    class Diverged(ScriptedSubject):
        def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
            logits = torch.zeros(1, 256)
            logits[0, 5] = value
            return logits

    assert write(Diverged()) == "a"


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    class Masked(ScriptedSubject):
        def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
            logits = torch.full((1, 256), -math.inf)
            logits[0, 98:100] = 0
            return logits

    assert set(write(Masked(), tokens=40)) == {"a", "b", "c"}
