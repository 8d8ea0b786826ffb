"""Tests of transformers' architectures that take floating-point inputs: their losses in bf16 are those of
plain models in fp32, but for bf16's rounding, and no input needs a cast.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infinity

pytest.importorskip("transformers", reason="needs the transformers package")

from architectures import ARCHITECTURES, Architecture, Inputs

_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
_PATCHES = {
    "num_input_channels": 2,
    "context_length": 16,
    "patch_length": 4,
    "patch_stride": 4,
    "prediction_length": 4,
    "d_model": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "head_dropout": 0.0,
}


def _series() -> Inputs:
    return {
        "past_values": torch.rand(2, 10) * 1000,
        "past_time_features": torch.randn(2, 10, 2),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": torch.rand(2, 4) * 1000,
        "future_time_features": torch.randn(2, 4, 2),
    }


def _patches() -> Inputs:
    return {"past_values": torch.rand(2, 16, 2) + 1000, "future_values": torch.rand(2, 4, 2) + 1000}


def _embedded() -> Inputs:
    mask = torch.full((8, 8), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 8, 8)
    ids = torch.randint(5, 60, (2, 8))
    return {"inputs_embeds": torch.randn(2, 8, 32), "attention_mask": mask, "labels": ids}


def _targets() -> Inputs:
    return {"input_ids": torch.randint(5, 60, (2, 8)), "labels": torch.tensor([1.5, 1003.0])}


_LLAMA, _BERT = (ARCHITECTURES[name].sizes for name in ("llama", "bert"))
_FLOATS = {
    "time series": Architecture(
        "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", _SERIES, _series
    ),
    "informer": Architecture("InformerForPrediction", "InformerConfig", _SERIES, _series),
    "patchtsmixer": Architecture("PatchTSMixerForPrediction", "PatchTSMixerConfig", _PATCHES, _patches),
    "llama embedded": Architecture("LlamaForCausalLM", "LlamaConfig", _LLAMA, _embedded),
    "bert regression": Architecture(
        "BertForSequenceClassification",
        "BertConfig",
        {**_BERT, "num_labels": 1},
        _targets,
    ),
    "bit": Architecture(
        "BitForImageClassification",
        "BitConfig",
        {
            "embedding_size": 16,
            "num_groups": 4,
            "hidden_sizes": [16] * 4,
            "depths": [1] * 4,
            "num_labels": 5,
        },
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 3])},
    ),
}


def _takes_floats(architecture: Architecture) -> bool:
    return any(key in ("pixel_values", "input_features", "input_values") for key in architecture.batch())


CASES = {name: each for name, each in ARCHITECTURES.items() if _takes_floats(each)} | _FLOATS
DEFAULT = {"vit", "time series", "llama embedded", "bit"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in CASES]
)
def test_losses_are_those_of_fp32_but_for_rounding(name: str) -> None:
    chosen = CASES[name]

    def losses(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for step in range(2):
            loss = model(**chosen.inputs(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = chosen.build()
    right = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4))
    model = chosen.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with infinity.offload(model, optimizer, budget=infinity.Budget(host="64MiB"), device="cpu") as runtime:
        first, second = losses(model, runtime.optimizer)
    assert first == pytest.approx(right[0], rel=0.03)
    # AdamW's first update takes the signs of gradients, which in bf16 are noise for some of BiT's parameters.
    assert second == pytest.approx(right[1], rel=0.1)
