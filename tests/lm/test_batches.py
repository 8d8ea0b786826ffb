"""Tests of `Batches` and of vocabularies, which cut windows of bytes or tokens out of a text.

For one text and one shape of batches, the seed, the step and the micro-batch determine a training batch.
Training never sees held-out text. A window holds the text's bytes or tokens from its start on. Sizes, windows
and tokens that cannot be used raise ConfigError.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_models import TINY, preset_of, text_of

from infinity.errors import ConfigError
from infinity.lm.data import Batches, Bytes, Text, Tokens, decode_stretch
from infinity.lm.decoder import PRESETS
from infinity.lm.model import language_model


class Words:
    """A fake of a tokenizer of transformers: each number in the text is a token, whose id is that number."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": [int(word) for word in re.findall(r"\d+", text)]}


@pytest.fixture
def halves(tmp_path: Path) -> Text:
    """A text of 60000 bytes: the letter a in the part to train on, the letter b in the held-out part."""
    return text_of(tmp_path, [b"a" * 56_999, b"b" * 3000])


@pytest.fixture
def numbers(tmp_path: Path) -> Text:
    """A text of the numbers 0000000 to 0007999, each on a line of eight bytes."""
    return text_of(tmp_path, [b"\n".join(b"%07d" % number for number in range(8000))])


def test_batches_are_what_seed_step_and_micro_batch_say(numbers: Text) -> None:
    tiny = preset_of()

    def drawn(seed: int, step: int, micro: int) -> torch.Tensor:
        return Batches(numbers, tiny, batch=3, seq=16, seed=seed).training(step, micro)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = drawn(0, 5, 1)
    assert (first.shape, first.dtype) == ((3, 17), torch.int64)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(drawn(0, 5, 1), first)
    others = [drawn(1, 5, 1), drawn(0, 6, 1), drawn(0, 5, 0), drawn(0, 1, 5)]
    assert not any(torch.equal(other, first) for other in others)
    assert not torch.equal(first[0], first[1])


def test_batches_are_the_same_in_every_release(numbers: Text) -> None:
    # After an upgrade, a run must go on with the data that it would have had before.
    found = Batches(numbers, preset_of(), batch=2, seq=7, seed=3).training(step=11, micro=2)
    assert [bytes(row.tolist()) for row in found] == [b"5\n000087", b"0232\n000"]


def test_training_never_sees_what_is_held_out(halves: Text) -> None:
    assert (halves.train.stop, halves.nbytes) == (57_000, 60_000)
    batches = Batches(halves, preset_of(), batch=32, seq=2000, seed=0)
    seen = torch.cat([batches.training(step, 0) for step in range(20)])
    assert set(seen.unique().tolist()) <= {ord("a"), ord("\n")}
    held_out = torch.cat(batches.held_out())
    assert set(held_out.unique().tolist()) == {ord("b")}


def test_training_reaches_the_first_and_the_last_window(tmp_path: Path) -> None:
    text = text_of(tmp_path, [bytes(range(60))])  # 57 of the bytes are trained on
    batches = Batches(text, preset_of(), batch=64, seq=1, seed=0)
    first = {int(row[0]) for step in range(20) for row in batches.training(step, 0)}
    assert first == set(range(56))


@pytest.mark.parametrize(
    ("batch", "seq", "count"), [(1, 64, 8), (8, 256, 8), (8, 1024, 2), (16, 1024, 1), (64, 1024, 1)]
)
def test_the_held_out_batches_are_few_and_spread_evenly(
    tmp_path: Path, batch: int, seq: int, count: int
) -> None:
    text = text_of(tmp_path, [b"".join(b"%06d\n" % number for number in range(10_000))])
    first, second = (
        Batches(text, preset_of(), batch=batch, seq=seq, seed=seed).held_out() for seed in (1, 2)
    )
    assert [each.shape for each in first] == [(batch, seq + 1)] * count
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    rows = torch.cat(first)
    held_out = text.read(text.held_out.start, len(text.held_out))
    assert bytes(rows[0].tolist()) == held_out[: seq + 1]
    if len(rows) > 1:
        assert bytes(rows[-1].tolist()) == held_out[-seq - 1 :]
    if len(rows) > 2:
        middle = held_out.index(bytes(rows[(len(rows) - 1) // 2].tolist()))
        assert middle == pytest.approx((len(held_out) - seq) / 2, rel=0.2)


def test_windows_longer_than_the_held_out_text_are_refused(halves: Text) -> None:
    with pytest.raises(ConfigError, match="window of 3001 tokens"):
        Batches(halves, preset_of(), batch=1, seq=3000, seed=0)


def test_windows_longer_than_the_models_context_are_refused(halves: Text) -> None:
    tiny = preset_of()
    tiny.longest = 8
    Batches(halves, tiny, batch=1, seq=8, seed=0)
    with pytest.raises(ConfigError, match="--seq 8"):
        Batches(halves, tiny, batch=1, seq=9, seed=0)


def test_a_window_of_bytes_is_the_bytes(numbers: Text) -> None:
    assert bytes(Bytes().window(numbers, 8, 15).tolist()) == b"0000001\n0000002"


def test_a_window_of_tokens_begins_where_it_should(numbers: Text) -> None:
    # The guess is six bytes a token, and these tokens have eight, so a second pass is needed.
    window = Tokens(Words(), 8000).window(numbers, 800, 50)
    assert (window.dtype, window.tolist()) == (torch.int64, list(range(100, 150)))


@pytest.mark.parametrize("vocabulary", [Bytes(), Tokens(Words(), 8000)])
def test_a_window_at_the_end_of_its_part_begins_further_back(numbers: Text, vocabulary: Any) -> None:
    for part in (numbers.train, numbers.held_out):
        last = vocabulary.window(numbers, part.stop - 1, 40)
        whole = vocabulary.encode(numbers.read(part.start, len(part)).decode())
        assert last.tolist() == whole[-40:]


def test_a_part_with_too_few_tokens_is_refused(numbers: Text) -> None:
    with pytest.raises(ConfigError, match=r"window of 600 tokens.*have 40"):
        Tokens(Words(), 8000).window(numbers, numbers.held_out.start, 600)


def test_a_token_that_the_model_does_not_know_is_refused() -> None:
    assert Tokens(Words(), 11).encode("9 10") == [9, 10]
    with pytest.raises(ConfigError, match="token 10, and the model knows 10"):
        Tokens(Words(), 10).encode("9 10")


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=8), st.data())
def test_text_cut_anywhere_loses_half_characters_only(text: str, data: st.DataObject) -> None:
    whole = text.encode()
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    found = decode_stretch(whole[begin:end])
    assert found in text
    assert len(found.encode()) >= end - begin - 6


def test_bytes_that_are_no_text_show_as_such() -> None:
    assert Bytes().encode("é\ud800") == [0xC3, 0xA9, ord("?")]
    assert Bytes().decode([0xC3, 0xA9, 0xFF, 65, 300]) == "é\ufffdA\ufffd"


def test_subjects_have_the_presets_numbers() -> None:
    for name, preset in PRESETS.items():
        found = language_model(name)
        assert (found.name, found.weights, found.longest) == (name, None, None)
        assert found.learning_rate == preset.learning_rate
        assert all(parameter.is_meta for parameter in found.model.parameters())


def test_a_presets_loss_is_its_models_and_example_inputs_fit_it() -> None:
    tiny = preset_of()
    tokens = torch.randint(256, (2, 9))
    assert torch.equal(tiny.loss(tokens), tiny.model(tokens[:, :-1], tokens[:, 1:]))
    inputs = tiny.example_inputs(2, 8, "cpu")
    assert [(each.shape, each.dtype) for each in inputs] == [((2, 8), torch.int64)] * 2
    assert tiny.model(*inputs).dim() == 0
    logits = tiny.next_token_logits(tokens, 6)
    assert (logits.shape, logits.dtype) == ((2, TINY.vocabulary), torch.float32)
    assert torch.equal(logits, tiny.model(tokens)[:, 6])


def test_a_name_that_is_no_model_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no model '8m'.*10m, 30m.*config\.json"):
        language_model("8m")
