"""Step end: what a training step leaves outside of pages, kept so that an unfinished step can be undone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.record import generators, set_generators


@dataclass
class _Kept:
    """A buffer as it was: the tensor, its version then, and a copy of its values."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor


class StepEnd:
    """The buffers of a model and the random number generators as they were at the end of a step.

    Forwards in training mode change them (running averages, dropout). Parameters and states are no part of
    it: they change in a step's update only.
    """

    def __init__(self, model: nn.Module) -> None:
        """Keep the present state. model: its buffers are copied once, and later where they have changed."""
        self._model = model
        self._buffers: dict[str, _Kept] = {}
        self._generators: Mapping[str, Any] = {}
        self.keep()

    def keep(self) -> None:
        """Keep the present state instead of the one before."""
        for name, buffer in self._model.named_buffers():
            kept = self._buffers.get(name)
            if kept is None or kept.tensor is not buffer or kept.version != buffer._version:
                self._buffers[name] = _Kept(buffer, buffer._version, buffer.detach().clone())
        self._generators = generators()

    @torch.no_grad()
    def restore(self) -> None:
        """Set buffers and generators back to the state that was kept last."""
        for name, kept in self._buffers.items():
            owner, _, last = name.rpartition(".")
            self._model.get_submodule(owner)._buffers[last] = kept.tensor
            if kept.tensor._version != kept.version:
                kept.tensor.copy_(kept.copy)
                kept.version = kept.tensor._version
        set_generators(self._generators)
