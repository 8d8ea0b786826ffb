"""Architectures of transformers in tiny sizes, with random weights and with batches for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Inputs = dict[str, Any]

_SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_ENCODER = {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 32}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, **_SPECIAL}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
}
_GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **_SPECIAL}
_BART = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    **_SPECIAL,
}
_T5 = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def _language() -> Inputs:
    ids = torch.randint(5, 60, (2, 8))
    return {"input_ids": ids, "labels": ids}


def _images(size: int = 8) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 3])}


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, and a batch for it."""

    model: str
    config: str
    sizes: dict[str, Any]
    """Arguments of the class `config`."""
    batch: Callable[[], Inputs] = _language
    """Makes the keyword arguments of a forward, among them those that give a loss."""

    def build(self, *, reentrant: bool | None = None) -> nn.Module:
        """Build the model in training mode, always with the same weights.

        reentrant: the variant of gradient checkpointing; None: without.
        """
        import transformers

        torch.manual_seed(3)
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.sizes)).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if (
                reentrant and self.model != "SwinForImageClassification"
            ):  # its blocks need an input that requires a gradient
                model.enable_input_require_grads()
        return model

    def inputs(self, step: int) -> Inputs:
        """Seed torch and numpy, and return the keyword arguments of a forward, the same for the same step."""
        torch.manual_seed(step)
        np.random.seed(step)
        return self.batch()


def _causal(name: str, sizes: dict[str, Any] = _DECODER, **more: Any) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", {**sizes, **more})


def _masked(name: str, **more: Any) -> Architecture:
    return Architecture(f"{name}ForMaskedLM", f"{name}Config", {**_ENCODER, **more})


def _image(name: str, size: int = 8, sizes: dict[str, Any] = _VISION, **more: Any) -> Architecture:
    return Architecture(f"{name}ForImageClassification", f"{name}Config", {**sizes, **more}, _images(size))


def _speech() -> Inputs:
    return {"input_features": torch.randn(2, 8, 12), "labels": torch.randint(5, 60, (2, 8))}


def _pairs() -> Inputs:
    ids = torch.randint(5, 60, (2, 8))
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "return_loss": True}


_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 24,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _causal("Llama"),
    "mistral": _causal("Mistral"),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3", head_dim=8),
    "gemma": _causal("Gemma", head_dim=8),
    "gemma2": _causal("Gemma2", head_dim=8),
    "phi": _causal("Phi"),
    "phi3": _causal("Phi3"),
    "olmo": _causal("Olmo"),
    "olmo2": _causal("Olmo2"),
    "granite": _causal("Granite"),
    "cohere": _causal("Cohere"),
    "stablelm": _causal("StableLm"),
    "starcoder2": _causal("Starcoder2"),
    "mixtral": _causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": _causal("GPTNeoX", _ENCODER),
    "falcon": _causal("Falcon", {**_SIZES, **_SPECIAL}),
    "bloom": _causal("Bloom", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_SPECIAL}),
    "opt": _causal(
        "OPT", {**_SIZES, **_SPECIAL}, ffn_dim=48, max_position_embeddings=32, word_embed_proj_dim=32
    ),
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", _GPT),
    "gptj": _causal("GPTJ", _GPT, rotary_dim=4),
    "codegen": _causal("CodeGen", _GPT, rotary_dim=4),
    "mpt": _causal("Mpt", {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}),
    "mamba": _causal("Mamba", {"vocab_size": 61, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}),
    "bert": _masked("Bert"),
    "roberta": _masked("Roberta", max_position_embeddings=40),
    "electra": _masked("Electra", embedding_size=32),
    "albert": _masked("Albert", embedding_size=16),
    "deberta_v2": _masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "distilbert": Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 61, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    ),
    "t5": Architecture("T5ForConditionalGeneration", "T5Config", _T5),
    "bart": Architecture("BartForConditionalGeneration", "BartConfig", _BART),
    "pegasus": Architecture("PegasusForConditionalGeneration", "PegasusConfig", _BART),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{key: value for key, value in _BART.items() if key != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 6,
            "max_target_positions": 16,
        },
        _speech,
    ),
    "vit": _image("ViT"),
    "deit": _image("DeiT"),
    "dinov2": _image("Dinov2"),
    "convnext": _image(
        "ConvNext", 32, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_labels": 5}
    ),
    "resnet": _image(
        "ResNet", 32, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
    ),
    "swin": _image(
        "Swin",
        16,
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 5,
        },
    ),
    "clip": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**_TOWER, "vocab_size": 61, "max_position_embeddings": 16, **_SPECIAL},
            "vision_config": {**_TOWER, "image_size": 8, "patch_size": 4},
            "projection_dim": 24,
        },
        _pairs,
    ),
    "wav2vec2": Architecture(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **_SIZES,
            "intermediate_size": 48,
            "conv_dim": (16, 16),
            "conv_kernel": (10, 3),
            "conv_stride": (5, 2),
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_length": 2,
            "pad_token_id": 0,
        },
        lambda: {"input_values": torch.randn(2, 400), "labels": torch.randint(5, 60, (2, 8))},
    ),
}

_MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}

MIXTURES: dict[str, Architecture] = {
    "qwen2_moe": _causal("Qwen2Moe", **_MOE, shared_expert_intermediate_size=24),
    "qwen3_moe": _causal("Qwen3Moe", **_MOE, head_dim=8),
    "olmoe": _causal("Olmoe", num_experts=4, num_experts_per_tok=2),
    "gpt_oss": _causal("GptOss", **_LOCAL, head_dim=8),
    "phimoe": _causal("Phimoe", **_LOCAL),
    "granite_moe": _causal("GraniteMoe", **_LOCAL),
    "jamba": _causal(
        "Jamba",
        num_experts=4,
        num_experts_per_tok=2,
        use_mamba_kernels=False,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=0,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "llava": Architecture(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **_DECODER},
            "vision_config": {"model_type": "clip_vision_model", **_TOWER, "image_size": 8, "patch_size": 4},
            "image_token_id": 3,
        },
    ),
}
"""Mixtures of experts and a model of two models, which transformers saves in other formats than they have."""
