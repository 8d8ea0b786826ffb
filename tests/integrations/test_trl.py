"""Tests of TRL's trainers over models in pages: the numbers of plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import peft
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainers import distance

import infinity
from infinity.integrations.transformers import attach

FEW = 11
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(40))]


def tokenizer() -> Any:
    words = {each: index for index, each in enumerate(WORDS)}
    split = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<eos>")


def model(directory: Path) -> Any:
    """A small Llama, the same each time. GRPO makes its reference of what it saves in a directory."""
    transformers.set_seed(7)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=len(WORDS), pad_token_id=0, bos_token_id=1, eos_token_id=1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


def text(seed: int, words: int) -> str:
    drawn = torch.randint(0, 40, (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{each}" for each in drawn.tolist())


def trainer_of(kind: str, directory: Path, lora: bool) -> Any:
    given: dict[str, Any] = {
        "model": model(directory / "base"),
        "processing_class": tokenizer(),
        "peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    }
    arguments: dict[str, Any] = {
        "output_dir": str(directory / "out"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
    }
    if kind in ("sft", "packed"):
        arguments |= {"packing": True, "max_length": 16} if kind == "packed" else {}
        data = Dataset.from_list([{"text": text(each, 8)} for each in range(FEW)])
        return trl.SFTTrainer(args=trl.SFTConfig(**arguments), train_dataset=data, **given)
    if kind in ("dpo", "precomputed"):
        arguments["precompute_ref_log_probs"] = kind == "precomputed"
        rows = [{"prompt": text(each, 3), "chosen": text(99 + each, 8)} for each in range(FEW)]
        data = Dataset.from_list([{**row, "rejected": text(50 - each, 8)} for each, row in enumerate(rows)])
        given["ref_model"] = None if lora else model(directory / "base")
        return trl.DPOTrainer(args=trl.DPOConfig(**arguments), train_dataset=data, **given)
    if kind == "kto":
        rows = [{"prompt": text(each, 3), "completion": text(99 + each, 8)} for each in range(FEW)]
        data = Dataset.from_list([{**row, "label": each % 3 > 0} for each, row in enumerate(rows)])
        given["ref_model"] = None if lora else model(directory / "base")
        return trl.KTOTrainer(args=trl.KTOConfig(**arguments), train_dataset=data, **given)
    data = Dataset.from_list([{"prompt": text(each, 3)} for each in range(FEW)])
    config = trl.GRPOConfig(num_generations=2, max_completion_length=6, beta=0.1, **arguments)
    return trl.GRPOTrainer(reward_funcs=distinct, args=config, train_dataset=data, **given)


def distinct(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each))) for each in completions]


def numbers(trainer: Any) -> list[dict[str, float]]:
    """The loss, away from zero, and the norm of the gradients of each step."""
    steps = [each for each in trainer.state.log_history if "loss" in each]
    return [{"loss": 1.0 + each["loss"], "grad_norm": 1e-2 + each["grad_norm"]} for each in steps]


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("dpo", False),
        pytest.param("dpo", True, marks=pytest.mark.slow),
        pytest.param("precomputed", False, marks=pytest.mark.slow),
        pytest.param("sft", False, marks=pytest.mark.slow),
        pytest.param("sft", True, marks=pytest.mark.slow),
        pytest.param("packed", False, marks=pytest.mark.slow),
        pytest.param("grpo", False, marks=pytest.mark.slow),
        pytest.param("grpo", True, marks=pytest.mark.slow),
        pytest.param("kto", False, marks=pytest.mark.slow),
        pytest.param("kto", True, marks=pytest.mark.slow),
    ],
)
def test_numbers_of_a_plain_trainer(kind: str, lora: bool, tmp_path: Path) -> None:
    plain = trainer_of(kind, tmp_path / "plain", lora)
    plain.train()
    paged = trainer_of(kind, tmp_path / "paged", lora)
    (tmp_path / "pages").mkdir()
    budget = infinity.Budget(host="1MiB", nvme={str(tmp_path / "pages"): "64MiB"})
    with attach(paged, budget=budget) as runtime:
        reference = getattr(paged, "ref_model", None)
        assert (reference is None) == (lora or kind in ("sft", "packed"))
        if reference is None:
            paged.train()
        else:  # its pages lie beside those of the model that is trained
            with infinity.offload(reference, None, budget=budget, precision=runtime.plan.precision):
                paged.train()
    assert distance(numbers(paged), numbers(plain)) < 1e-5
