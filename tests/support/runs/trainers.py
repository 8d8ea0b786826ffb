"""Trainers of transformers over small models, plain and attached, and the numbers that they log."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from homes import budget_for

import infinity
from infinity.integrations.transformers import attach

FEW = 11
"""Examples of training: an odd number, so that the last step of an epoch accumulates fewer."""
DROPPED = 0.2
"""The rate of dropout where a test wants some."""
_WORDS, _LONG = 48, 10
_SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
_LLAMA = {**_SIZES, "vocab_size": _WORDS, "num_key_value_heads": 2, "pad_token_id": 0}


def _llama(dropout: float) -> Any:
    config = transformers.LlamaConfig(**_LLAMA, attention_dropout=dropout)
    return transformers.LlamaForCausalLM(config)


def _mixtral(dropout: float) -> Any:
    config = transformers.MixtralConfig(**_LLAMA, num_local_experts=3, attention_dropout=dropout)
    return transformers.MixtralForCausalLM(config)


def _t5(dropout: float) -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(
        **sizes, vocab_size=_WORDS, dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit(dropout: float) -> Any:
    config = transformers.ViTConfig(
        **_SIZES, image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=dropout
    )
    return transformers.ViTForImageClassification(config)


def _lora(dropout: float) -> Any:
    import peft

    adapters = peft.LoraConfig(
        r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]
    )
    return peft.get_peft_model(_llama(0.0), adapters)


MODELS: dict[str, Callable[[float], Any]] = {
    "llama": _llama,
    "t5": _t5,
    "mixtral": _mixtral,
    "vit": _vit,
    "lora": _lora,
}


def make(name: str, dropout: float = 0.0) -> Any:
    """A model of MODELS, the same each time."""
    transformers.set_seed(7)
    return MODELS[name](dropout)


@functools.cache
def examples(name: str) -> list[dict[str, torch.Tensor]]:
    """FEW examples for a model of MODELS."""
    drawn = torch.Generator().manual_seed(0)
    if name == "vit":
        labels = torch.randint(0, 3, (FEW,), generator=drawn)
        images = torch.randn(FEW, 3, 8, 8, generator=drawn)
        return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    words = torch.randint(1, _WORDS, (FEW, _LONG), generator=drawn)
    return [{"input_ids": each, "labels": each} for each in words]


class Logged(transformers.TrainerCallback):
    """What a Trainer logs that its speed does not change."""

    def __init__(self) -> None:
        self.numbers: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        kept = {name: value for name, value in logs.items() if name in _COMPARED}
        self.numbers += [kept] if kept else []


_COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss")


class Unplaced(transformers.TrainingArguments):
    """Arguments of a Trainer that leaves its model where it is."""

    place_model_on_device = False


def trainer_of(model: Any, name: str, directory: Path, placed: bool = True, **options: Any) -> Any:
    """A Trainer that logs each step to `trainer.logged`. placed: whether its constructor moves the model to
    the device. options: of its TrainingArguments.
    """
    arguments = (transformers.TrainingArguments if placed else Unplaced)(
        output_dir=str(directory),
        **{
            "per_device_train_batch_size": 2,
            "num_train_epochs": 2,
            "learning_rate": 3e-3,
            "weight_decay": 0.1,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        },
    )
    found = examples(name)
    logged = Logged()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=found, eval_dataset=found[:4], callbacks=[logged]
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.logged = logged
    return trainer


def budget(trainer: Any, home: str, directory: Path, compute: str) -> infinity.Budget:
    """The budget under which the pages of a trainer's model rest at `home` of homes.py."""
    accumulation = trainer.args.gradient_accumulation_steps
    precision = infinity.Precision(compute=compute)
    optimizer = trainer.create_optimizer()
    found: infinity.Budget = budget_for(
        home, trainer.model, optimizer, directory, precision, accumulation=accumulation
    )
    trainer.optimizer = None
    if (
        trainer.args.gradient_checkpointing and found.device is not None
    ):  # a layer's graph keeps its parameters
        return infinity.Budget(device=4 * found.device_bytes, host=found.host_bytes, nvme=found.nvme)
    return found


def trained(
    name: str,
    directory: Path,
    home: str | None = None,
    *,
    attached: dict[str, Any] | None = None,
    dropout: float = 0.0,
    resume: str | None = None,
    **options: Any,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train a model of MODELS, and return what was logged and the state dict.

    home: where pages rest; None: without pages. attached: more arguments of `attach`. resume: the checkpoint
    that is resumed from. options: as in `trainer_of`.
    """
    trainer = trainer_of(make(name, dropout), name, directory / "out", **options)
    compute = "bf16" if options.get("bf16") else "fp32"
    if home is None:
        trainer.train(resume_from_checkpoint=resume)
        return trainer.logged.numbers, trainer.model.state_dict()
    pages = directory / "pages"
    pages.mkdir(exist_ok=True)
    given = {"budget": budget(trainer, home, pages, compute), **(attached or {})}
    with attach(trainer, **given):
        trainer.train(resume_from_checkpoint=resume)
        state = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    return trainer.logged.numbers, state


def distance(left: list[dict[str, float]], right: list[dict[str, float]]) -> float:
    """The greatest relative difference of logged numbers. Asserts that the same were logged."""
    assert [each.keys() for each in left] == [each.keys() for each in right] and left
    pairs = [(one[key], two[key]) for one, two in zip(left, right, strict=True) for key in one]
    return max(abs(one - two) / max(abs(two), 1e-12) for one, two in pairs)
