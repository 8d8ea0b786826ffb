"""Tests of training a model from a directory that the transformers library saved."""

from __future__ import annotations

import json
import math
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_models import text_of

import infinity
from infinity.errors import ConfigError
from infinity.lm.data import Batches, Text
from infinity.lm.loop import generate
from infinity.lm.model import LanguageModel, language_model

transformers = pytest.importorskip("transformers", reason="needs the transformers package")

VOCABULARY = 300
SENTENCE = "the quick brown fox jumps over the lazy dog, "
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


def configured(folder: Path, **changed: Any) -> Path:
    """Save a tiny Llama's configuration in `folder`, and return `folder`.

    changed: options of the configuration that replace those in LLAMA.
    """
    transformers.LlamaConfig(**{**LLAMA, **changed}).save_pretrained(folder)
    return folder


def weighted(folder: Path, **changed: Any) -> torch.nn.Module:
    """Save a tiny Llama's configuration and random weights in `folder`, and return the model.

    changed: options of the configuration that replace those in LLAMA.
    """
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **changed}))
    model.save_pretrained(folder)
    return model


def tokenized(folder: Path) -> Any:
    """Train a byte-level BPE tokenizer on SENTENCE, save it in `folder`, and return the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [SENTENCE],
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False),
    )
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.fixture
def text(tmp_path: Path) -> Text:
    folder = tmp_path / "text"
    folder.mkdir()
    return text_of(folder, [SENTENCE.encode() * 500])


def train(found: LanguageModel, text: Text, steps: int, learning_rate: float) -> list[float]:
    optimizer = torch.optim.AdamW(found.model.parameters(), lr=learning_rate)
    batches = Batches(text, found, batch=2, seq=24, seed=0)
    losses = []
    torch.manual_seed(0)
    with infinity.offload(
        found.model,
        optimizer,
        device="cpu",
        precision=infinity.Precision(compute="fp32"),
        weights=found.weights,
        example_inputs=found.example_inputs(2, 24, "cpu"),
    ) as runtime:
        for step in range(steps):
            loss = found.loss(batches.training(step, 0))
            loss.backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            losses.append(loss.item())
        written = generate(found, "the", tokens=4, temperature=1.0, seed=0, device="cpu")
        assert written.startswith("the")
        assert len(written) > 3
    return losses


def test_a_configuration_alone_trains_from_the_beginning(tmp_path: Path, text: Text) -> None:
    found = language_model(str(configured(tmp_path / "tiny")))
    assert (found.name, found.weights, found.learning_rate, found.longest) == ("tiny", None, 3e-4, 31)
    assert found.parameters == sum(each.numel() for each in found.model.parameters())
    assert all(parameter.is_meta for parameter in found.model.parameters())
    assert found.vocabulary.decode(found.vocabulary.encode("héllo")) == "héllo"
    losses = train(found, text, 8, 1e-2)
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert losses[-1] < losses[0] - 1


def test_a_directory_with_weights_and_a_tokenizer_goes_on_from_them(tmp_path: Path, text: Text) -> None:
    directory = tmp_path / "tiny"
    reference = weighted(directory)
    tokenizer = tokenized(directory)
    found = language_model(str(directory))
    assert (found.weights, found.learning_rate) == (str(directory), 2e-5)
    assert found.vocabulary.encode(SENTENCE) == tokenizer(SENTENCE)["input_ids"]
    assert len(found.vocabulary.encode(SENTENCE)) < len(SENTENCE)
    assert found.vocabulary.decode(found.vocabulary.encode(SENTENCE)) == SENTENCE
    tokens = Batches(text, found, batch=2, seq=24, seed=0).training(0, 0)
    expected = reference(input_ids=tokens, labels=tokens).loss.item()
    losses = train(found, text, 2, 1e-2)
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    assert losses[1] < losses[0]


def test_tied_parameters_count_once(tmp_path: Path) -> None:
    tied = language_model(str(configured(tmp_path / "tied", tie_word_embeddings=True)))
    free = language_model(str(configured(tmp_path / "free", tie_word_embeddings=False)))
    assert free.parameters - tied.parameters == VOCABULARY * LLAMA["hidden_size"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_loss_is_of_every_next_token_and_the_longest_window_fits(tmp_path: Path, family: str) -> None:
    if family == "llama":
        configured(tmp_path)
    else:
        transformers.GPT2Config(
            vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=32
        ).save_pretrained(tmp_path)
    found = language_model(str(tmp_path))
    found.model = type(found.model)(found.model.config).eval()
    tokens = torch.randint(VOCABULARY, (2, found.longest + 1))
    logits = found.model(input_ids=tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss = found.loss(tokens)
    assert (loss.dtype, loss.dim()) == (torch.float32, 0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.example_inputs(2, found.longest, "cpu")["input_ids"].shape == tokens.shape
    for position in (found.longest - 1, 5):
        after = found.next_token_logits(tokens[:, :-1], position)
        torch.testing.assert_close(after, logits[:, position], rtol=1e-4, atol=1e-6)


def test_a_model_of_half_precision_gives_its_loss_and_logits_in_fp32(tmp_path: Path) -> None:
    found = language_model(str(configured(tmp_path, dtype="bfloat16")))
    assert {parameter.dtype for parameter in found.model.parameters()} == {torch.bfloat16}
    found.model.to_empty(device="cpu")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert found.loss(tokens).dtype == found.next_token_logits(tokens, 3).dtype == torch.float32


def test_transformers_has_nothing_to_say(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configured(tmp_path, bos_token_id=999)  # transformers would warn of this token
    tokenized(tmp_path)
    capfd.readouterr()
    before = transformers.logging.get_verbosity()
    found = language_model(str(tmp_path))
    found.vocabulary.encode(SENTENCE * 100)
    found.model.to_empty(device="cpu")
    found.loss(torch.zeros(1, 4, dtype=torch.int64))
    assert capfd.readouterr() == ("", "")
    assert transformers.logging.get_verbosity() == before


def configuration(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(content) and None


def tokenizer_file(name: str, content: str, **sizes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        configured(folder, **sizes)
        (folder / name).write_text(content)

    return write


@pytest.mark.parametrize(
    ("prepare", "what"),
    [
        (lambda folder: None, "no config.json"),
        (configuration("{"), "config.json cannot be used"),
        (configuration("[]"), "config.json cannot be used"),
        (configuration('{"model_type": "unheard of"}'), "config.json cannot be used"),
        (
            configuration('{"model_type": "llama", "hidden_size": "x"}'),
            "config.json cannot be used.*hidden_size",
        ),
        (configuration('{"model_type": "llama", "vocab_size": -5}'), "config.json cannot be used"),
        (configuration('{"model_type": "vit"}'), "a vit, which does not predict"),
        (configuration('{"model_type": "bert"}'), "a bert, which does not predict"),
        (lambda folder: configured(folder, vocab_size=255), "no tokenizer, and 255 tokens are too few"),
        (tokenizer_file("tokenizer.json", "{"), "tokenizer in .* cannot be used"),
        (tokenizer_file("tokenizer.json", "{}"), "tokenizer in .* cannot be used"),
        (tokenizer_file("pytorch_model.bin", "weights"), "only in pytorch_model.bin"),
    ],
)
def test_what_cannot_be_trained(tmp_path: Path, prepare: Callable[[Path], object], what: str) -> None:
    prepare(tmp_path)
    with pytest.raises(ConfigError, match=what):
        language_model(str(tmp_path))


def test_code_in_the_directory_never_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\n")
    theirs = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(ConfigError, match="custom code"):
        language_model(str(tmp_path))
    configured(tmp_path)
    ours = json.loads((tmp_path / "config.json").read_text())
    ours["auto_map"] = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (tmp_path / "config.json").write_text(json.dumps(ours))
    assert type(language_model(str(tmp_path)).model) is transformers.LlamaForCausalLM
    assert not ran.exists()


def test_without_transformers_there_is_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="Install transformers, or give a preset"):
        language_model(str(tmp_path))
