"""transformers' Trainer over a model whose states live on disk: attach(trainer). Full and with LoRA.

python examples/finetune_hf.py [DIRECTORY]     (a directory on a disk; default: the current one)

Each model is finetuned twice, by a plain Trainer and with its pages on disk, from the same seed.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import infinity
from infinity.integrations.transformers import attach

TEXT = torch.tensor(list((__doc__ or "").encode())).unfold(0, 33, 8)
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(lora: bool) -> Any:
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=256))  # or from_pretrained(...)
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")) if lora else model


def finetune(lora: bool, budget: infinity.Budget | None) -> list[float]:
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output, num_train_epochs=3, learning_rate=1e-2, logging_steps=1, disable_tqdm=True, report_to=[]
        )
        data = [{"input_ids": each, "labels": each} for each in TEXT]
        trainer = Trainer(build(lora), arguments, train_dataset=data)  # type: ignore[arg-type]
        runtime = None if budget is None else attach(trainer, budget=budget)
        trainer.train()
        if runtime is not None:
            print(runtime.stats)
            runtime.close()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def main(directory: str) -> None:
    for lora in (False, True):
        losses = finetune(lora, infinity.Budget(host="1MiB", nvme={directory: "64MiB"}))
        pairs = zip(losses, finetune(lora, None), strict=True)
        said = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; largest relative difference to a plain Trainer"
        print("LoRA:" if lora else "full:", said, f"{max(abs(a - b) / b for a, b in pairs):.1e}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
