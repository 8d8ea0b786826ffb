"""Edits: what code outside writes to parameters, and which views it holds.

[Note: loans]
A view of a page that code outside asked for (`p.detach()`, `p.data`, `p[0]` between steps) may be written to
later, by torch, when nobody looks. So the runtime keeps an alias of each such view, a loan, and looks again
before the page leaves, before an update, and when memory is short: whether a version counter has moved, and
whether anybody else still holds the storage. Edits go home and become the master; a loan that nobody else
holds is forgotten, and the bytes return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.errors import ConfigError
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.store import Store


@dataclass(slots=True)
class _Loan:
    """An alias of a view that code outside holds, or held."""

    alias: torch.Tensor
    version: int
    index: int
    """Of the parameter."""


class EditTracker:
    """Takes edits of parameters home, and tells who sees a page. Called under the runtime's lock."""

    def __init__(self, pages: Sequence[ParameterPage], store: Store, states: States | None) -> None:
        """states: told of edits; None for inference."""
        self._pages = pages
        self._store = store
        self._states = states
        self._loans: dict[int, list[_Loan]] = {}
        self._replaced: dict[int, set[int]] = {}
        """unit -> parameters whose present page was given values that no version tells of."""

    def replaced(self, page: ParameterPage, index: int) -> None:
        """Parameter `index` of a present page was given other values."""
        self._replaced.setdefault(page.index, set()).add(index)

    def write_back(self, page: ParameterPage) -> None:
        """Take what was edited in the page's bytes home. Raises ConfigError for an edit that was lost."""
        edited = set(page.edits()) | self._replaced.pop(page.index, set())
        for loan in self._loans.get(page.index, ()):
            if loan.alias._version != loan.version:
                edited.add(loan.index)
                loan.version = loan.alias._version
        if edited:
            memory = page.living()
            if memory is None:
                names = ", ".join(page.layout.parameters[index].names[0] for index in sorted(edited))
                page.acknowledge()
                raise ConfigError(
                    f"An edit of {names} was made through a view that its forward had kept, and is lost.",
                    "Edit the parameter itself, under torch.no_grad() or in runtime.full_parameters(module).",
                )
            for index in edited:
                self._write_back(page, index, memory)
            page.acknowledge()
        self._forget_loans(page)

    def exposed(self, unit: int) -> bool:
        """Whether code outside sees the bytes of a unit's page without asking for them."""
        page = self._pages[unit]
        if page.holds:
            return True
        if page.residency is None:
            return page.living() is not None
        return self._held_outside(page, page.residency)

    def sync_edits(self) -> None:
        """Take every edit home."""
        for page in self._pages:
            self.write_back(page)

    def updated(self, unit: int | None = None) -> None:
        """All pages were updated, or one: versions that views share with parameters moved by no edit."""
        for loans in self._loans.values() if unit is None else [self._loans.get(unit, [])]:
            for loan in loans:
                loan.version = loan.alias._version

    def reclaim(self) -> None:
        """Forget the loans that nobody else holds."""
        for unit in list(self._loans):
            self.write_back(self._pages[unit])

    def keep_loan(self, page: ParameterPage, index: int, view: torch.Tensor) -> None:
        """Code outside has `view`, of parameter `index`'s bytes: look at it again."""
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            alias = view.detach()
        loans = self._loans.setdefault(page.index, [])
        if len(loans) > 4 * len(page.parameters):
            self._forget_loans(page)
            loans = self._loans.setdefault(page.index, [])
        loans.append(_Loan(alias, alias._version, index))

    def forget(self) -> None:
        """Let go of every alias."""
        self._loans.clear()
        self._replaced.clear()

    def _write_back(self, page: ParameterPage, index: int, memory: torch.Tensor) -> None:
        if memory is not page.home.memory:
            brought = self._store.copied_to_host(page.flat(index, memory))
            self._store.patch(page.home, page.start(index), brought)
        if self._states is not None:
            self._states.edited(page.index, index)

    def _forget_loans(self, page: ParameterPage) -> None:
        """Forget them if nobody outside holds the storage any more."""
        loans = self._loans.get(page.index)
        if not loans:
            return
        if not self._held_outside(page, loans[0].alias):
            del self._loans[page.index]

    def _held_outside(self, page: ParameterPage, memory: torch.Tensor) -> bool:
        """Whether anybody but the runtime holds the storage of `memory`, bytes of the page."""
        storage = memory.untyped_storage()
        ours = len(self._loans.get(page.index, ())) + 1  # the wrapper above
        if page.residency is not None:
            ours += 1 + len(page.parameters)
        return torch._C._storage_Use_Count(storage._cdata) > ours
