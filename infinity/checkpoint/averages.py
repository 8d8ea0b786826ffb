"""Averages: exchanges the fp32 masters of a model with their running averages, and back, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.store import Store


def exchange_averages(pages: Sequence[ParameterPage], states: States, store: Store) -> None:
    """Exchange the masters of all trainable parameters with their running averages.

    Works on pages at home, as `infinity.checkpoint.restore.restore` does in a running model; `show` must
    follow. RAM holds one parameter at a time, a few times in fp32. pages: all parameter pages. While averages
    have no values yet, they are those of the masters, and nothing moves. Raises StorageError; then the
    contents of the pages are a mixture.
    """
    if states.keeps_averages:
        store.link.drain()  # copies of pages on their way to a device still read homes in RAM
        for page in pages:
            for index in sorted(states.pages[page.index].trainable):
                _exchange(page, index, states, store)
    states.exchanged = not states.exchanged


def _exchange(page: ParameterPage, index: int, states: States, store: Store) -> None:
    layout = page.layout.parameters[index]
    if not layout.numel:
        return
    start, nbytes = page.start(index), layout.numel * layout.dtype.itemsize
    values = store.fetch(page.home, start, nbytes).view(layout.dtype)
    master = states.master(page.index, index, values).clone()
    average = states.average(page.index, index, values)
    store.patch(page.home, start, states.encode(page.index, index, average))
    states.write_average(page.index, index, master)
