"""Language model: a preset's decoder or a model of transformers, with its loss and its vocabulary."""

from __future__ import annotations

import inspect
import logging
import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.api import as_model
from infinity.errors import ConfigError
from infinity.lm.data import Bytes, Tokens, Vocabulary
from infinity.lm.decoder import PRESETS, Decoder

_FINE_TUNING_RATE = 2e-5
_TRAINING_RATE = 3e-4

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""A directory that has at least one of these files has a tokenizer."""

_OTHER_WEIGHTS = ("pytorch_model*.bin", "tf_model*.h5", "flax_model*.msgpack", "consolidated*.pth", "*.gguf")
"""Names of files with weights in formats that cannot be streamed."""

_BYTES = 256


class PresetModel:
    """The decoder of a preset, on the meta device. Its tokens are bytes."""

    def __init__(self, name: str) -> None:
        preset = PRESETS[name]
        self.name = name
        self.parameters = preset.decoder.parameters
        """Number of parameters. A tied parameter counts once."""
        with torch.device("meta"):
            self.model: nn.Module = Decoder(preset.decoder)
        self.weights: str | None = None
        """Directory of the safetensors files that fill the model; None if its initialisers fill it."""
        self.learning_rate = preset.learning_rate
        self.longest: int | None = None
        """The most tokens of context; None if there is no limit."""
        self.vocabulary: Vocabulary = Bytes()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of predicting the next token, in nats per token: a float32 scalar.

        tokens: int64 (batch, seq + 1), on the model's device.
        """
        found: torch.Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
        return found

    def example_inputs(self, batch: int, seq: int, device: torch.device | str) -> tuple[Any, ...]:
        """Make inputs for `model` of the shapes with which `loss` calls it, with `seq` predicted tokens in a
        sequence.
        """
        tokens = torch.zeros(batch, seq, dtype=torch.int64, device=device)
        return tokens, tokens

    def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """The logits of the token after `position` (from 0): float32 (batch, vocabulary).

        tokens: int64 (batch, seq); those after `position` do not affect the result.
        """
        logits: torch.Tensor = self.model(tokens)
        return logits[:, position].float()


class HuggingFaceModel:
    """A causal language model of transformers in a directory, with its tokenizer. If the directory has no
    tokenizer, tokens are bytes.

    No code from the directory runs, and nothing is downloaded.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Build the model on the meta device. directory: has config.json, as save_pretrained writes it.

        Raises ConfigError if transformers is not installed, if the model is not causal, if there are weights
        but not in safetensors files, or if the tokenizer cannot be read. Raises ConfigError also if there
        is no tokenizer and the model knows fewer than 256 tokens.
        """
        path = Path(directory)
        with _quiet():
            config = _configuration(path)
            try:
                self.model: nn.Module = as_model(config)
            except Exception as error:
                raise _broken(path / "config.json", error) from error
            self.vocabulary = _vocabulary(path, config)
        self.name = path.resolve().name
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.weights = _weights(path)
        self.learning_rate = _TRAINING_RATE if self.weights is None else _FINE_TUNING_RATE
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        # One position less, because `loss` also passes the last target to forward.
        self.longest: int | None = positions - 1 if isinstance(positions, int) and positions > 1 else None
        known = inspect.signature(self.model.forward).parameters
        # A cache would only duplicate what autograd saves. A sample needs the logits of one position only.
        self._always = {"use_cache": False} if "use_cache" in known else {}
        self._choosy = "logits_to_keep" in known

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """See PresetModel.loss."""
        found: torch.Tensor = self.model(**self._training(tokens)).loss
        return found.float()

    def example_inputs(self, batch: int, seq: int, device: torch.device | str) -> Mapping[str, Any]:
        """See PresetModel.example_inputs."""
        return self._training(torch.zeros(batch, seq + 1, dtype=torch.int64, device=device))

    def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """See PresetModel.next_token_logits."""
        keep = {"logits_to_keep": torch.tensor([position], device=tokens.device)} if self._choosy else {}
        logits: torch.Tensor = self.model(input_ids=tokens, **self._always, **keep).logits
        return logits[:, 0 if self._choosy else position].float()

    def _training(self, tokens: torch.Tensor) -> dict[str, Any]:
        return {"input_ids": tokens, "labels": tokens, **self._always}  # the model shifts the labels


LanguageModel = PresetModel | HuggingFaceModel


def language_model(name: str) -> LanguageModel:
    """The model of a preset or of a directory. Raises ConfigError if `name` is neither, and if the directory
    cannot be used.
    """
    if name in PRESETS:
        return PresetModel(name)
    if os.path.isdir(name):
        return HuggingFaceModel(name)
    raise ConfigError(
        f"There is no model {name!r}.",
        f"Give one of {', '.join(PRESETS)}, or a directory with a config.json of transformers.",
    )


def _configuration(path: Path) -> Any:
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} has no config.json.", "Give a directory that save_pretrained of transformers wrote."
        )
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{path} needs transformers, which is not installed.", "Install transformers, or give a preset."
        ) from error
    try:
        # trust_remote_code is False, because the default asks on the terminal whether to run the code.
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _broken(path / "config.json", error) from error
    causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
    # BERT and similar models see the token that they are to predict, unless is_decoder is set.
    masked = type(config) in transformers.AutoModelForMaskedLM._model_mapping
    if not causal or (masked and not getattr(config, "is_decoder", False)):
        raise ConfigError(
            f"{path} is a {config.model_type}, which does not predict the next token.",
            "Give a causal language model, such as a Llama.",
        )
    return config


def _vocabulary(path: Path, config: Any) -> Vocabulary:
    import transformers

    size = config.get_text_config().vocab_size
    if not any((path / name).is_file() for name in _TOKENIZERS):
        if size < _BYTES:
            raise ConfigError(
                f"{path} has no tokenizer, and {size} tokens are too few for the 256 bytes.",
                f"Add the tokenizer's files, or set vocab_size to {_BYTES} or more.",
            )
        return Bytes()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise _broken(f"The tokenizer in {path}", error) from error
    return Tokens(tokenizer, size)


def _weights(path: Path) -> str | None:
    if any(path.glob("*.safetensors")):
        return str(path)
    if other := sorted(file.name for pattern in _OTHER_WEIGHTS for file in path.glob(pattern)):
        raise ConfigError(
            f"{path} has weights only in {other[0]}, which cannot be streamed.",
            "Save the model with safetensors (save_pretrained does), or remove the file to start anew.",
        )
    return None


def _broken(what: object, error: Exception) -> ConfigError:
    """The ConfigError which says that `what` cannot be used, for the reason that transformers gave."""
    reason = " ".join(str(error).split()) or type(error).__name__
    short = textwrap.shorten(reason, 200, placeholder=" ...").rstrip(".")
    return ConfigError(f"{what} cannot be used: {short}.", "Fetch or save the directory again, or mend it.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without the warnings of transformers, which are meant for programs that call it directly."""
    try:
        from transformers.utils import logging as theirs
    except ImportError:
        yield
        return
    before = theirs.get_verbosity()
    theirs.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        theirs.set_verbosity(before)
