"""Tests of Hugging Face model families, trained with every page on disk. The models are tiny, and their
initial weights are random.

First losses and first gradients must have the bits of training in plain PyTorch, and second losses must
differ from its losses by at most 1e-5 of their value.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for, check_homes
from parity import copied, differences, gradients_of
from torch import Tensor, nn

import infinity

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs the transformers package")

Inputs = dict[str, Any]
Family = Callable[[], tuple[nn.Module, Callable[[], Inputs]]]

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 32}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def ids() -> Tensor:
    return torch.randint(5, 60, (2, 8))


def language() -> Inputs:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens}


def named(model: str, config: str, **sizes: Any) -> tuple[nn.Module, Callable[[], Inputs]]:
    """Make a language model of transformers, and return (model, function that makes a batch for it).

    The function returns the keyword arguments of a call of the model. model, config: names of classes in
    transformers. sizes: arguments of the class `config`.
    """
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)), language


def vit() -> tuple[nn.Module, Callable[[], Inputs]]:
    sizes = {**SIZES, "intermediate_size": 48, "image_size": 8, "patch_size": 4, "num_labels": 5}
    sizes.pop("vocab_size")
    return (
        transformers.ViTForImageClassification(transformers.ViTConfig(**sizes)),
        lambda: {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([1, 3])},
    )


def whisper() -> tuple[nn.Module, Callable[[], Inputs]]:
    config = transformers.WhisperConfig(
        vocab_size=61,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_source_positions=6,
        max_target_positions=16,
        decoder_start_token_id=3,
        **SPECIAL,
    )
    return (
        transformers.WhisperForConditionalGeneration(config),
        lambda: {"input_features": torch.randn(2, 8, 12), "labels": ids()},
    )


def clip() -> tuple[nn.Module, Callable[[], Inputs]]:
    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "projection_dim": 24,
    }
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 61, "max_position_embeddings": 16, **SPECIAL},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=24,
    )
    return (
        transformers.CLIPModel(config),
        lambda: {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 8, 8), "return_loss": True},
    )


FAMILIES: dict[str, Family] = {
    "llama": lambda: named("LlamaForCausalLM", "LlamaConfig", **DECODER),
    "qwen2": lambda: named("Qwen2ForCausalLM", "Qwen2Config", **DECODER),
    "mistral": lambda: named("MistralForCausalLM", "MistralConfig", **DECODER),
    "gemma2": lambda: named("Gemma2ForCausalLM", "Gemma2Config", **DECODER, head_dim=8),
    "mixtral": lambda: named(
        "MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt2": lambda: named(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=61,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "gpt_neox": lambda: named(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES, intermediate_size=48, max_position_embeddings=32
    ),
    "opt": lambda: named(
        "OPTForCausalLM",
        "OPTConfig",
        **SIZES,
        ffn_dim=48,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
    ),
    "bert": lambda: named(
        "BertForMaskedLM", "BertConfig", **SIZES, intermediate_size=48, max_position_embeddings=32
    ),
    "t5": lambda: named(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=61,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "mamba": lambda: named(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=61,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        use_mambapy=False,
    ),
    "vit": vit,
    "whisper": whisper,
    "clip": clip,
}

STEPS = 2


def build(family: str) -> tuple[nn.Module, Callable[[], Inputs]]:
    torch.manual_seed(3)
    model, inputs = FAMILIES[family]()
    return model.train(), inputs


def train(
    model: nn.Module,
    inputs: Callable[[], Inputs],
    optimizer: torch.optim.Optimizer,
    gradients: Callable[[nn.Module], dict[str, Tensor | None]],
) -> tuple[list[float], dict[str, Tensor | None]]:
    """Train STEPS steps, and return the losses of all steps and the gradients of the first step.

    inputs: makes the model's arguments for a step. gradients: reads the gradients of the model, by name.
    """
    losses: list[float] = []
    first: dict[str, Tensor | None] = {}
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(**inputs()).loss
        loss.backward()
        first = first or gradients(model)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


@pytest.mark.sweep(most=5)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_on_disk_as_in_memory(family: str, tmp_path: Path) -> None:
    model, inputs = build(family)
    before = copied(model.state_dict())
    losses, gradients = train(model, inputs, torch.optim.AdamW(model.parameters(), lr=1e-3), gradients_of)
    assert losses[0] != losses[1]
    assert any(gradient is not None for gradient in gradients.values())

    paged, inputs = build(family)
    assert differences(copied(paged.state_dict()), before) == []
    optimizer = torch.optim.AdamW(paged.parameters(), lr=1e-3)
    precision = infinity.Precision(compute="fp32")
    budget = budget_for("nvme", paged, optimizer, tmp_path, precision)
    with infinity.offload(paged, optimizer, budget=budget, precision=precision, device="cpu") as runtime:
        check_homes("nvme", runtime.plan)
        paged_losses, paged_gradients = train(
            paged,
            inputs,
            runtime.optimizer,
            lambda model: {name: runtime.grad(each) for name, each in model.named_parameters()},
        )
        assert paged.state_dict().keys() == before.keys()
    assert paged_losses[0] == losses[0]
    assert paged_losses[1] == pytest.approx(losses[1], rel=1e-5)
    assert differences(paged_gradients, gradients) == []
