"""What every contender is given: sizes, data and where to work. Travels to its process as JSON."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, kw_only=True)
class Task:
    """One job for one contender."""

    contender: str
    """The file in peers/, without its suffix."""
    mode: str
    """What the contender understands by it: where DeepSpeed offloads to; how plain PyTorch updates."""
    decoder: dict[str, int]
    """Arguments of DecoderConfig."""
    decoder_file: str
    """The file that defines Decoder: it needs torch only."""
    batch: int
    seq: int
    learning_rate: float
    clip: float | None
    """The largest norm of all gradients; None: any."""
    device: str
    directory: str
    """For swap; the contender's own, and removed after the run."""
    text: str
    """A file of bytes, the tokens."""
    budgets: dict[str, str | int | None]
    """Of ours: device, host and nvme, sizes as Budget takes them."""
    states: str
    """Of ours: the format of optimizer states, as Precision takes it."""
    update: str
    """Of ours: when updates run, as offload takes it."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Task:
        """The inverse of `to_json`."""
        return Task(**json.loads(line))

    def model(self) -> torch.nn.Module:
        """The decoder, built on whatever device is the default one."""
        module = _load(self.decoder_file)
        built: torch.nn.Module = module.Decoder(module.DecoderConfig(**self.decoder))
        return built

    def real_model(self) -> torch.nn.Module:
        """The decoder with its values in fp32: on the GPU where they take less than half of what is free
        there, since a CPU draws them one after another; else in RAM."""
        with torch.device("meta"):
            nbytes = 4 * sum(parameter.numel() for parameter in self.model().parameters())
        there = self.device == "cuda" and nbytes < torch.cuda.mem_get_info()[0] // 2
        with torch.device("cuda" if there else "cpu"):
            return self.model()


class Contender(Protocol):
    """A model that trains."""

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """One training step on int64 (batch, seq); returns the loss, with everything finished."""

    def facts(self) -> dict[str, Any]:
        """What is to be reported of the last step; JSON."""

    def close(self) -> None:
        """Give everything back."""


class Batches:
    """The same tokens for every contender: places in the text by a generator with a fixed seed."""

    def __init__(self, task: Task) -> None:
        text = bytearray(Path(task.text).read_bytes())
        self._text = torch.frombuffer(text, dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(0)
        self._task = task

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, int64 (batch, seq), on the task's device."""
        batch, seq = self._task.batch, self._task.seq
        starts = torch.randint(len(self._text) - seq, (batch,), generator=self._generator).tolist()
        rows = torch.stack([self._text[start : start + seq + 1] for start in starts]).long()
        rows = rows.to(self._task.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _load(path: str) -> ModuleType:
    """A module by its file alone, without the package around it."""
    import sys

    spec = importlib.util.spec_from_file_location("benchmarked_decoder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
