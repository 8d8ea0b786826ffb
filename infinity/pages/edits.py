"""Edits: what user code writes to parameters, and the views that it holds.

[Note: loans]
User code may write at any later time to a view of a page that it asked for (`p.detach()`, `p.data`, `p[0]`
between steps), without a call of the runtime. So the runtime keeps an alias of each such view, a loan. Before
the page leaves, before an update, and when memory is short, it checks whether the alias's version counter has
moved, and whether any other reference to the storage is left. Edits are written home and become the master;
a loan without other references is forgotten, and its bytes are free again.
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
    """An alias of a view that user code holds, or held."""

    alias: torch.Tensor
    version: int
    index: int
    """Index of the parameter in its page."""


class EditTracker:
    """Writes edits of parameters home, and tells which pages user code sees.

    Called under the runtime's lock.
    """

    def __init__(self, pages: Sequence[ParameterPage], store: Store, states: States | None) -> None:
        """states: the optimizer states, whose masters follow edits; None for inference."""
        self._pages = pages
        self._store = store
        self._states = states
        self._loans: dict[int, list[_Loan]] = {}
        self._replaced: dict[int, set[int]] = {}
        """unit -> parameters of its present page that got other values without a change of their version."""

    def replaced(self, page: ParameterPage, index: int) -> None:
        """Note that parameter `index` of a present page got other values."""
        self._replaced.setdefault(page.index, set()).add(index)

    def write_back(self, page: ParameterPage) -> None:
        """Write the edits in the page's bytes home. Raises ConfigError for an edit that was lost."""
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
        """Whether user code can see the bytes of a unit's page without a call of the runtime."""
        page = self._pages[unit]
        if page.holds:
            return True
        if page.residency is None:
            return page.living() is not None
        return self._held_outside(page, page.residency)

    def sync_edits(self) -> None:
        """Write every edit home."""
        for page in self._pages:
            self.write_back(page)

    def updated(self, unit: int | None = None) -> None:
        """Note an update of one unit, or of all (None): it moved versions of loans, and is no edit."""
        for loans in self._loans.values() if unit is None else [self._loans.get(unit, [])]:
            for loan in loans:
                loan.version = loan.alias._version

    def reclaim(self) -> None:
        """Forget the loans whose storage has no other references."""
        for unit in list(self._loans):
            self.write_back(self._pages[unit])

    def keep_loan(self, page: ParameterPage, index: int, view: torch.Tensor) -> None:
        """Keep a loan of `view`, parameter `index`'s bytes, which user code has got."""
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            alias = view.detach()
        loans = self._loans.setdefault(page.index, [])
        if len(loans) > 4 * len(page.parameters):
            self._forget_loans(page)
            loans = self._loans.setdefault(page.index, [])
        loans.append(_Loan(alias, alias._version, index))

    def forget(self) -> None:
        """Drop every alias."""
        self._loans.clear()
        self._replaced.clear()

    def _write_back(self, page: ParameterPage, index: int, memory: torch.Tensor) -> None:
        if memory is not page.home.memory:
            brought = self._store.copied_to_host(page.flat(index, memory))
            self._store.patch(page.home, page.start(index), brought)
        if self._states is not None:
            self._states.edited(page.index, index)

    def _forget_loans(self, page: ParameterPage) -> None:
        """Forget a page's loans if their storage has no other references."""
        loans = self._loans.get(page.index)
        if not loans:
            return
        if not self._held_outside(page, loans[0].alias):
            del self._loans[page.index]

    def _held_outside(self, page: ParameterPage, memory: torch.Tensor) -> bool:
        """Whether any code but the runtime holds the storage of `memory`, bytes of the page."""
        storage = memory.untyped_storage()
        ours = len(self._loans.get(page.index, ())) + 1  # one for `storage` above
        if page.residency is not None:
            ours += 1 + len(page.parameters)
        return torch._C._storage_Use_Count(storage._cdata) > ours
