"""Tests that the programs in examples/ run, and that the figures they print are as good as they claim."""

import argparse
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("warm")
EXAMPLES = Path(__file__).parents[1] / "examples"


def figures(example: str, directory: Path, pattern: str) -> re.Match[str]:
    """Run an example that keeps its pages in `directory`, and return what `pattern` finds in its output.

    Asserts that the example leaves nothing in the directory.
    """
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), str(directory)], check=True, capture_output=True, text=True
    )
    assert list(directory.iterdir()) == []
    found = re.search(pattern, done.stdout)
    assert found is not None, done.stdout
    return found


def test_paged_training(tmp_path: Path) -> None:
    found = figures(
        "paged_training.py",
        tmp_path,
        r"loss (\S+) -> (\S+); largest relative difference to plain PyTorch (\S+)",
    )
    assert float(found[2]) < 0.7 * float(found[1])
    assert float(found[3]) < 1e-5


def test_one_page(tmp_path: Path) -> None:
    found = figures("one_page.py", tmp_path, r"AdamW: (\S+)\nread (\d+) MiB, wrote (\d+) MiB")
    assert float(found[1]) < 5e-6, "a few units in the last place of weights up to 5"
    assert (int(found[2]), int(found[3])) == (40, 48)


def test_lightning_fit(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    found = figures(
        "lightning_fit.py",
        tmp_path,
        r"loss (\S+) -> (\S+); largest relative difference to plain Lightning (\S+)",
    )
    assert float(found[2]) < 0.7 * float(found[1])
    assert float(found[3]) < 1e-5


def test_finetune_hf(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    line = r"loss (\S+) -> (\S+); largest relative difference to a plain Trainer (\S+)"
    found = figures("finetune_hf.py", tmp_path, f"(?s)full: {line}.*LoRA: {line}")
    assert float(found[2]) < 0.8 * float(found[1]) and float(found[5]) < float(found[4])
    assert max(float(found[3]), float(found[6])) < 1e-5


def test_sft_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    line = r"loss (\S+) -> (\S+); largest relative difference to a plain SFTTrainer (\S+)"
    found = figures("sft_trl.py", tmp_path, line)
    assert float(found[2]) < 0.7 * float(found[1])
    assert float(found[3]) < 1e-5


def test_long_context() -> None:
    module: Any = runpy.run_path(str(EXAMPLES / "long_context.py"))
    options = argparse.Namespace(
        model="10m",
        vocabulary=4096,
        budget_device="96MiB",
        budget_host="1GiB",
        budget_nvme=None,
        machine=None,
        most=1024,
    )
    assert module["longest"](options, "keep", "all logits") == (0, None)
    length, plan = module["longest"](options, "recompute", "linear_cross_entropy")
    assert (length, len(plan.residuals.recomputed)) == (1536, 6)
