"""TRL's SFTTrainer over a model whose states live on disk: attach(trainer).

python examples/sft_trl.py [DIRECTORY]     (a directory on a disk; default: the current one)

The same model is finetuned twice, by the plain trainer and with its pages on disk, from the same seed.
"""

from __future__ import annotations

import sys
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import infinity
from infinity.integrations.transformers import attach

LINES = (__doc__ or "").split("\n\n")
WORDS = ["<pad>", "<eos>", "<unk>", *sorted(set((__doc__ or "").split()))]
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {each: index for index, each in enumerate(WORDS)}
    split = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<eos>")


def finetune(budget: infinity.Budget | None) -> list[float]:
    set_seed(0)
    config = LlamaConfig(**SMALL, vocab_size=len(WORDS), pad_token_id=0, bos_token_id=1, eos_token_id=1)
    data = Dataset.from_list([{"text": each} for each in LINES * 4])
    with tempfile.TemporaryDirectory() as output:
        arguments = SFTConfig(output, learning_rate=1e-2, bf16=False, logging_steps=1, report_to=[])
        model = LlamaForCausalLM(config)  # or from_pretrained(...)
        trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer())
        runtime = None if budget is None else attach(trainer, budget=budget)
        trainer.train()
        if runtime is not None:
            print(runtime.stats)
            runtime.close()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def main(directory: str) -> None:
    losses = finetune(infinity.Budget(host="1MiB", nvme={directory: "64MiB"}))
    pairs = zip(losses, finetune(None), strict=True)
    said = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; largest relative difference to a plain SFTTrainer"
    print(said, f"{max(abs(a - b) / b for a, b in pairs):.1e}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
