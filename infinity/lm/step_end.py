"""Step end: what a training step leaves outside of pages, kept so that an unfinished step can be undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.run_state import generators, set_generators


class StepEnd:
    """The buffers of a model and the random number generators as they were at the end of a step.

    Forwards in training mode change them (running averages, dropout). Parameters and states are no part of
    it: they change in a step's update only.
    """

    def __init__(self, model: nn.Module) -> None:
        """Keep the present state. model: RAM or the device holds one copy of its buffers from now on."""
        self._model = model
        self._buffers: dict[str, torch.Tensor] = {}
        """The buffers by name. A buffer that is registered in several places has a name for each."""
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """(the buffer, a copy of its values) by the id() of the buffer."""
        self._generators: Mapping[str, Any] = {}
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the present state instead of the one before.

        All buffers are copied, for torch does not count all changes: batch normalisation updates its running
        averages without a new version of the tensor.
        """
        self._buffers = dict(self._model.named_buffers(remove_duplicate=False))
        before, self._copies = self._copies, {}
        for buffer in {id(each): each for each in self._buffers.values()}.values():
            _, copy = before.get(id(buffer), (buffer, None))
            self._copies[id(buffer)] = buffer, buffer.clone() if copy is None else copy.copy_(buffer)
        self._generators = generators()

    @torch.no_grad()
    def restore(self) -> None:
        """Set buffers and generators back to the state that was kept last."""
        for name, buffer in self._buffers.items():
            owner, _, last = name.rpartition(".")
            self._model.get_submodule(owner)._buffers[last] = buffer
        for buffer, copy in self._copies.values():
            buffer.copy_(copy)
        set_generators(self._generators)
