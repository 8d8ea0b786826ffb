"""Task: the model, data and settings of a benchmark's contender, sent to the contender's process as JSON.

A contender is infinity, or a peer with which infinity is compared. Each one trains in a process of its own.
"""

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
    """A training job for one contender."""

    contender: str
    """Name of the contender's file in peers/, without its suffix."""
    mode: str
    """Variant of the contender: one of the modes that the contender's file explains."""
    decoder: dict[str, int]
    """Arguments of DecoderConfig, by name."""
    decoder_file: str
    """Path of the file that defines Decoder. The file imports nothing but torch."""
    batch: int
    seq: int
    learning_rate: float
    clip: float | None
    """Norm to which all gradients together are clipped; None if they are not clipped."""
    device: str
    directory: str
    """Directory for swap files, which no other contender uses. It is removed after the run."""
    text: str
    """Path of the file whose bytes are the tokens."""
    budgets: dict[str, str | int | None]
    """Budgets of infinity by tier ("device", "host", "nvme"), as infinity.Budget takes them."""
    states: str
    """Format of infinity's optimizer states: the argument `states` of infinity.Precision."""
    update: str
    """When infinity's updates run: the argument `update` of infinity.offload."""
    checkpoint: str | None = None
    """Directory of infinity's commits: the argument `checkpoint` of infinity.offload."""
    rank: int = 0
    ranks: int = 1
    """Number of processes that train the model together. Each has a batch of its own in a step."""

    def to_json(self) -> str:
        """Encode the task as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Task:
        """Return the task that `to_json` encoded as `line`."""
        return Task(**json.loads(line))

    def model(self) -> torch.nn.Module:
        """Build the decoder in fp32 on torch's current default device; on "meta" it has no values."""
        module = _load(self.decoder_file)
        built: torch.nn.Module = module.Decoder(module.DecoderConfig(**self.decoder))
        return built

    def real_model(self) -> torch.nn.Module:
        """Build the decoder in fp32 with random initial values, on the GPU or in RAM.

        It is on the GPU if the task's device is a GPU and the decoder takes less than half of the GPU's
        free memory, because drawing random values takes long on a CPU. Otherwise it is in RAM.
        """
        with torch.device("meta"):
            nbytes = 4 * sum(parameter.numel() for parameter in self.model().parameters())
        there = self.device == "cuda" and nbytes < torch.cuda.mem_get_info()[0] // 2
        with torch.device("cuda" if there else "cpu"):
            return self.model()


class Contender(Protocol):
    """A model with an optimizer, which a benchmark trains step by step."""

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Run a training step, and return the loss. tokens, targets: int64 (batch, seq)."""

    def facts(self) -> dict[str, Any]:
        """Return what the benchmark reports about the contender and its last step: name -> JSON value."""

    def close(self) -> None:
        """Free the memory, files and threads of the contender."""


class Batches:
    """Sequence of batches, the same for every contender: windows of the text at seeded random positions.

    In a step, each of several ranks takes the batch of its number out of as many as there are ranks.
    """

    def __init__(self, task: Task) -> None:
        text = bytearray(Path(task.text).read_bytes())
        self._text = torch.frombuffer(text, dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(0)
        self._task = task

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the next batch; returns (tokens, targets), each int64 (batch, seq) on the task's device."""
        batch, seq = self._task.batch, self._task.seq
        drawn = torch.randint(len(self._text) - seq, (self._task.ranks, batch), generator=self._generator)
        starts = drawn[self._task.rank].tolist()
        rows = torch.stack([self._text[start : start + seq + 1] for start in starts]).long()
        rows = rows.to(self._task.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _load(path: str) -> ModuleType:
    """Load the module in the file `path`, without importing the package that contains it."""
    import sys

    spec = importlib.util.spec_from_file_location("benchmarked_decoder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module
