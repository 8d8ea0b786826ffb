"""What one of several ranks does in the tests of Trainers."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import rank_processes
import torch
from trainers import trained

import infinity


def train() -> dict[str, Any]:
    """Train, and go on from the first checkpoint. All ranks have one directory, as on one machine."""
    torch.set_num_threads(1)
    directory = Path(os.environ["DIRECTORY"])
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "dataloader_drop_last": True,
        "bf16": os.environ["COMPUTE"] == "bf16",
    }
    attached = {"budget": infinity.Budget(host="64MiB")}
    name = os.environ["MODEL"]
    run = functools.partial(trained, name, directory, "unified", attached=attached, **options)
    numbers = {"logged": run()[0], "resumed": run(resume=str(directory / "out" / "checkpoint-2"))[0]}
    return {name: [each for each in logged if "loss" in each] for name, logged in numbers.items()}


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started it
        told = Path(os.environ["DIRECTORY"]) / f"rank-{os.environ['RANK']}.json"
        told.write_text(json.dumps(train()))
    else:
        rank_processes.serve(globals())
