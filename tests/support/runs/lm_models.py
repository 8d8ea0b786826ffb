"""Tiny language models and texts for the tests of infinity.lm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from infinity.lm.data import Bytes, Text
from infinity.lm.decoder import PRESETS, Decoder, DecoderConfig, Preset
from infinity.lm.model import LanguageModel, language_model

TINY = DecoderConfig(width=16, layers=2, heads=2, hidden=32)


def preset_of(config: DecoderConfig = TINY) -> LanguageModel:
    """Make the LanguageModel of a preset with this configuration, with random weights on the CPU."""
    PRESETS["tiny"] = Preset(config, 1e-2)
    try:
        made = language_model("tiny")
    finally:
        del PRESETS["tiny"]
    torch.manual_seed(0)
    made.model = Decoder(config)
    return made


def text_of(folder: Path, contents: Sequence[bytes]) -> Text:
    """Write each of `contents` to a file of its own in `folder`, and return the Text of these files."""
    paths = [folder / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return Text([str(path) for path in paths], [len(each) for each in contents])


class Scripted(nn.Module):
    """A model that predicts for each byte that the next byte is greater by one (0 after 255). In training,
    its dropout spoils the predictions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.9)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, seq, 256), float32. tokens: int64 (batch, seq)."""
        likely = nn.functional.one_hot((tokens + 1) % 256, 256).float()
        return self.dropout(20 * likely)


class ScriptedSubject:
    """A stand-in for a LanguageModel that predicts for each byte that the next byte is greater by one.

    `asked`: how often logits were asked for. `seen`: the tokens of the last such call. longest: as in
    LanguageModel.
    """

    def __init__(self, longest: int | None = None) -> None:
        self.vocabulary = Bytes()
        self.model: nn.Module = Scripted()
        self.longest = longest
        self.asked = 0
        self.seen = torch.empty(0)

    def next_token_logits(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Return the logits (batch, 256) of the token that follows the token at `position`, counted from 0.

        tokens: int64 (batch, seq).
        """
        assert not torch.is_grad_enabled()
        self.asked += 1
        self.seen = tokens
        return self.model(tokens)[:, position]
