"""Presets: decoders of fixed sizes, whose tokens are bytes, for the command line and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.lm.decoder import DecoderConfig


@dataclass(frozen=True)
class Preset:
    """A decoder and its default learning rate."""

    decoder: DecoderConfig
    learning_rate: float


def _preset(width: int, layers: int, heads: int, hidden: int, learning_rate: float) -> Preset:
    return Preset(DecoderConfig(width=width, layers=layers, heads=heads, hidden=hidden), learning_rate)


PRESETS = {
    "10m": _preset(384, 6, 6, 896, 2e-3),
    "30m": _preset(512, 9, 8, 1472, 1.5e-3),
    "124m": _preset(768, 18, 12, 1952, 6e-4),
    "309m": _preset(1024, 24, 16, 2816, 4e-4),
    "926m": _preset(2048, 18, 16, 5632, 3e-4),
    "4b": _preset(3072, 36, 24, 7936, 2e-4),
    "7b": _preset(4096, 34, 32, 11008, 1.5e-4),
    "14b": _preset(5120, 44, 40, 13824, 1e-4),
}
"""Presets by name. 309m and 926m have the shapes of the models with which DeepSpeed was measured."""
