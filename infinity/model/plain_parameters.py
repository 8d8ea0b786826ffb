"""Plain parameters: copies of all parameters of a model, so that it can be used without its runtime."""

from __future__ import annotations

import torch
from torch import nn

from infinity.config import format_size
from infinity.errors import BudgetError
from infinity.model.materialize import registered
from infinity.model.paged_parameter import Place, release
from infinity.model.pager import Pager
from infinity.system import machine


class PlainParameters:
    """Copies, in host RAM, of the parameters of an offloaded model, in the dtypes that they had before. A
    trained parameter that had another floating-point dtype than its page is converted from its fp32 master.
    """

    def __init__(self, model: nn.Module, pager: Pager, on_node: int = 1) -> None:
        """Copy all parameters. The caller holds the runtime's lock, and all updates are complete.

        on_node: number of ranks that share this node's RAM, each of which copies all parameters. Raises
        BudgetError, before anything is copied, if RAM has no room for all copies.
        """
        self._model = model
        self._pager = pager
        places = [Place(pager, page, index) for page in pager.pages for index in range(len(page.parameters))]
        needed = on_node * sum(
            place.page.layout.parameters[place.index].numel * place.page.given[place.index].itemsize
            for place in places
        )
        usable = machine.memory().usable
        if needed > usable:
            raise BudgetError(
                f"Parameters of {format_size(needed)} were to stay after close(), and {format_size(usable)} "
                "of RAM are free.",
                "Write them with runtime.export(path) or runtime.save(path), and call close() without keep.",
                needed=needed,
            )
        with torch.inference_mode(False), torch.no_grad():
            self._values = [self._read(place) for place in places]

    def _read(self, place: Place) -> torch.Tensor:
        dtype = place.page.given[place.index]
        if dtype.is_floating_point:
            return self._pager.master(place, dtype)
        return self._pager.copy(place, "cpu")

    def give_back(self) -> None:
        """Make the model's parameters plain Parameters again, the same objects, with the copies as values,
        and move all buffers to RAM. Called when the pages have ended.
        """
        parameters = [each for page in self._pager.pages for each in page.parameters]
        for parameter, values in zip(parameters, self._values, strict=True):
            release(parameter, values)
        for entry in registered(self._model).values():
            if not isinstance(entry.tensor, nn.Parameter) and entry.tensor.device.type != "cpu":
                entry.put(entry.tensor.cpu())
