"""Edits: what user code writes to parameters, and the views of parameters that user code holds.

[Note: loans]
User code can ask for a view of a parameter (`p.detach()`, `p.data`, `p[0]` between steps), and can write to
the view at any later time without calling the runtime. So the runtime keeps a loan for every such view: an
alias, which is a tensor that shares the view's storage and version counter. The runtime checks a page's
loans before the page leaves device memory, before an update, and when memory is short. If an alias's
version counter has moved, the parameter was edited: the new value is written home and becomes the fp32
master. If no code but the runtime refers to the page's storage any more, the loans are forgotten and the
page's bytes are free again.

[Note: masters of edited values]
An edit replaces the fp32 masters of the elements that it changes, and of no others. The memory that is edited
may be the page's home, so a parameter's values before an edit are remembered (`watch`): while an operation
changes the parameter in place, and from when user code gets a view of it until user code gets another view or
edits are written home. Then the masters follow (`follow`). After a later edit, through a view that was kept,
nobody knows which elements have changed: all values of the parameter become its masters.

[Note: frozen parameters]
A commit holds the only place on disk of a frozen parameter. After the first commit, an edit of such a
parameter is undone when it is noticed: the parameter gets its committed values back, and ConfigError says so.

[Note: edits over ranks]
Other ranks see a page as it is at home. Several ranks edit parameters inside of full_parameters, at whose end
they compare digests of the edited parameters. Each rank writes its edits home when all ranks have made them,
so no rank reads edits that it has not made. A request for a page carries the number of changes that the
asking rank has made to the page, and waits until the page at home has as many, so no rank misses edits that
it has made. Any other edit is refused: an operation in place before it changes anything, and an edit through
a view when it is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinity.checksum import crc32c
from infinity.config import round_up
from infinity.errors import ConfigError
from infinity.pages.health import Health
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage, parameter_version
from infinity.pages.store import Store
from infinity.tiers import PAGE_ALIGNMENT

_CURE = (
    "Edit parameters inside of runtime.full_parameters(module), alike on all ranks, in a budget that has "
    "room for the module."
)
_LOANS_PER_PARAMETER = 4
"""Number of loans for each parameter of a page up to which no loan is dropped."""


@dataclass(slots=True)
class _Loan:
    """A loan: an alias of a view of a parameter that user code got; see [Note: loans]."""

    alias: torch.Tensor
    version: int
    index: int
    """Index of the parameter in its page."""
    followed: int
    """The version up to which the fp32 masters have followed edits; see [Note: masters of edited values]."""


class EditTracker:
    """Writes users' edits of parameters home, and tells which pages user code can reach through views.

    Called under the runtime's lock.
    """

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        store: Store,
        states: States | None,
        *,
        health: Health,
        agree: Callable[[str, dict[str, int]], Mapping[int, dict[str, int]]],
        free: Collection[int],
    ) -> None:
        """pages: the parameter pages of all units. store: moves edited values home. states: the optimizer
        states, in which an edited value also replaces the parameter's fp32 master; None for inference.
        health: is told of edits that can neither be kept nor undone. agree: function (call, digests of edited
        parameters by name) that sends the digests to all ranks, and returns rank -> digests. free: the units
        that this rank may edit at any time, without the other ranks; with one rank, all units.
        """
        self._health = health
        self._agree = agree
        self._free = free
        self._agreed: set[int] = set()
        """Units of which all ranks make the same edits now; see [Note: edits over ranks]."""
        self._pages = pages
        self._store = store
        self._states = states
        self._loans: dict[int, list[_Loan]] = {}
        self._most: dict[int, int] = {}
        """Unit -> number of loans of its page at which `keep_loan` looks for loans to drop."""
        self._replaced: dict[int, set[int]] = {}
        """Unit -> indices of the parameters for which `replaced` was called since the last `write_back`.

        Their version counters need not have moved.
        """
        self._watched: list[tuple[ParameterPage, int, torch.Tensor]] = []
        """(page, index of a parameter, values before an edit, (numel,) in memory order); see `watch`."""
        self._followed: dict[tuple[int, int], int] = {}
        """(unit, index of a parameter) -> the version up to which the masters have followed edits."""

    def watch(self, page: ParameterPage, index: int) -> None:
        """Remember the values of a parameter of a present page, which user code may edit next. See
        [Note: masters of edited values].
        """
        states = self._states
        if states is None or not states.keeps_master(page.index, index) or self._unfollowed(page, index):
            return
        assert page.residency is not None
        values = page.flat(index, page.residency)
        try:
            with torch.inference_mode(False), torch.no_grad():
                before = values.clone()
        except torch.OutOfMemoryError:
            before = self._store.copied_to_host(values)
        self._watched.append((page, index, before))

    def follow(self) -> None:
        """Have the fp32 masters of the watched parameters follow the edits, and end the watch.

        After a failure the values before the edits are still remembered, and the next call tries again.
        """
        while self._watched:
            page, index, before = self._watched[0]
            memory = page.living()
            if memory is not None and (
                self._unfollowed(page, index) or index in self._replaced.get(page.index, ())
            ):
                assert self._states is not None
                now = self._store.copied_to_host(page.flat(index, memory))
                with torch.inference_mode(False), torch.no_grad():
                    self._states.edited(page.index, index, now, before.cpu())
                self._followed[page.index, index] = parameter_version(page.parameters[index])
                for loan in self._loans.get(page.index, ()):
                    if loan.index == index:
                        loan.followed = loan.alias._version
            del self._watched[0]

    def _unfollowed(self, page: ParameterPage, index: int) -> bool:
        """Whether a parameter has edits that its fp32 masters have not followed."""
        version = parameter_version(page.parameters[index])
        if version not in (page.versions[index], self._followed.get((page.index, index))):
            return True
        return any(
            each.index == index and each.alias._version not in (each.version, each.followed)
            for each in self._loans.get(page.index, ())
        )

    def replaced(self, page: ParameterPage, index: int) -> None:
        """Note that the values of parameter `index` of a present page were replaced.

        The next `write_back` then writes the parameter home, even if the parameter's version counter has
        not moved.
        """
        self._replaced.setdefault(page.index, set()).add(index)
        if not self.is_free(page):  # all ranks count the changes of a page
            torch.autograd.graph.increment_version(page.parameters[index])

    def write_back(self, page: ParameterPage) -> None:
        """Write user code's edits of a page's parameters to the page's home.

        With an optimizer, the edited values become the fp32 masters too. Loans of a page that only the
        runtime refers to are dropped; see [Note: loans]. Raises ConfigError if a parameter was edited through
        a view whose bytes are no longer in memory, so that the edit is lost.
        """
        self.follow()
        self._write_edits(page)
        self._forget_loans(page)

    def check(self, page: ParameterPage, index: int) -> None:
        """Raise ConfigError if user code may not change a parameter in place now. With several ranks, user
        code may do so only within full_parameters.
        """
        if not (self.is_free(page) or page.holds or page.index in self._agreed):
            raise ConfigError(
                f"The parameter {page.layout.parameters[index].names[0]} was to be edited on one of several "
                "ranks; it is unchanged.",
                _CURE,
            )

    def is_free(self, page: ParameterPage) -> bool:
        """Whether user code may edit a page at any time, without the other ranks."""
        return page.index in self._free

    @contextmanager
    def agreed(self, pages: Sequence[ParameterPage]) -> Iterator[None]:
        """Context in which this rank writes home those edits of `pages` that all ranks have agreed on."""
        units = {page.index for page in pages}
        self._agreed |= units
        try:
            yield
        finally:
            self._agreed -= units

    def publish(self, pages: Sequence[ParameterPage]) -> None:
        """Write home those edits of pages that all ranks have made. Raises the errors of `compare`.

        pages: the pages, which are present.
        """
        self.compare(pages)
        with self.agreed(pages):
            for page in pages:
                self.write_back(page)

    def compare(self, pages: Sequence[ParameterPage]) -> None:
        """Check that all ranks have edited parameters of present pages alike, before the edits are written
        home.

        Does nothing for pages that are free, or without edits. All ranks that have edits call it. Raises
        ConfigError, naming a parameter, if edits differ. They are then undone by the pages' next arrivals. A
        permanent page (stages 0 to 2, at home where the model computes) cannot undo them, since it is edited
        at home: then the error is kept, and the runtime cannot be used any more.
        """
        digests: dict[str, int] = {}
        for page in pages:
            if self.is_free(page):
                continue
            memory = page.living()
            for index in sorted(self._edited(page)) if memory is not None else ():
                assert memory is not None
                values = self._store.copied_to_host(page.flat(index, memory)).view(torch.uint8)
                digests[page.layout.parameters[index].names[0]] = crc32c(values)
        heard = self._agree("the end of full_parameters with edits", digests) if digests else {}
        names = sorted({name for said in heard.values() for name in said})
        differing = [name for name in names if len({said.get(name) for said in heard.values()}) > 1]
        if differing:
            kept = any(page.permanent for page in pages)
            fate = "the edits are undone" if not kept else "no values from before are left"
            error = ConfigError(
                f"The parameter {differing[0]} was edited with different values on the ranks; {fate}.",
                "Edit parameters alike on all ranks."
                + (" This runtime cannot be used any more: start all ranks again." if kept else ""),
            )
            if kept:
                self._health.lose(error)
            for page in pages:
                self._undo_edits(page)
            raise error.again()

    def exposed(self, unit: int) -> bool:
        """Whether user code can read or write the bytes of a unit's page without calling the runtime."""
        page = self._pages[unit]
        if page.holds:
            return True
        if page.residency is None:
            return page.living() is not None
        return self._held_outside(page, page.residency)

    def lent(self, unit: int) -> bool:
        """Whether user code may hold views of the unit's page that it got outside of forwards.

        Unlike `exposed`, this is right while updates are under way, which keep views of pages, too.
        """
        return bool(self._pages[unit].holds or self._loans.get(unit))

    def sync_edits(self) -> None:
        """Write user code's edits of all parameters to the homes of their pages, as `write_back` does."""
        self.follow()
        for page in self._pages:
            self.write_back(page)

    def updated(self, unit: int | None = None) -> None:
        """Note that an update has just changed the parameters of one unit, or of all units (None).

        The update moved the version counters of the loans; see [Note: loans]. Their new versions are
        recorded, so that the update does not count as an edit. The masters in `States.given`, which wait for
        an edit that matches them, are forgotten.
        """
        if self._states is not None:
            self._states.given.clear()
        for loans in self._loans.values() if unit is None else [self._loans.get(unit, [])]:
            for loan in loans:
                loan.version = loan.alias._version

    def reclaim(self) -> None:
        """Free the memory of pages to which user code no longer refers, by dropping their loans.

        Edits of these pages are written home first. See [Note: loans].
        """
        for unit in list(self._loans):
            self.write_back(self._pages[unit])

    def keep_loan(self, page: ParameterPage, index: int, view: torch.Tensor) -> None:
        """Keep an alias of `view`, so that later edits through the view are noticed; see [Note: loans].

        view: a view of parameter `index` of the page that user code is about to get.
        """
        loans = self._loans.setdefault(page.index, [])
        fewest = _LOANS_PER_PARAMETER * len(page.parameters)
        if len(loans) >= self._most.get(page.index, fewest):
            self._write_edits(page)
            self._forget_loans(page, besides=1)
            loans = self._loans.setdefault(page.index, [])
            self._most[page.index] = max(2 * len(loans), fewest)
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            alias = view.detach()
        loans.append(_Loan(alias, alias._version, index, alias._version))
        self.follow()
        self.watch(page, index)

    def forget(self) -> None:
        """Drop all loans (aliases of views that user code holds) and forget all replaced values. No edit is
        written home.
        """
        self._loans.clear()
        self._watched.clear()
        self._followed.clear()
        self._replaced.clear()
        self._most.clear()

    def _write_edits(self, page: ParameterPage) -> None:
        """Write user code's edits of a page's parameters home. Raises the errors of `write_back`.

        An edit counts as written only when all have been: after a failure the next call writes them again.
        """
        moved = [
            (loan, version)
            for loan in self._loans.get(page.index, ())
            if (version := loan.alias._version) != loan.version
        ]
        edited = {*page.edits(), *self._replaced.get(page.index, ()), *(loan.index for loan, _ in moved)}
        if not edited:
            return
        self.follow()
        if not self.is_free(page) and page.index not in self._agreed:
            names = ", ".join(page.layout.parameters[index].names[0] for index in sorted(edited))
            error = ConfigError(
                f"An edit of {names} was noticed on one of several ranks, which have not agreed to it; "
                "values computed since then may be wrong.",
                f"{_CURE} This runtime cannot be used any more: start all ranks again.",
            )
            self._health.lose(error)
            raise error.again()
        memory = page.living()
        undone = []
        for index in edited if memory is not None else ():
            assert memory is not None
            if not self._is_held(page, index):
                self._write_back(page, index, memory)
            elif self._undo(page, index, memory):
                undone.append(page.layout.parameters[index].names[0])
        page.acknowledge()
        self._replaced.pop(page.index, None)
        for loan, version in moved:
            loan.version = loan.alias._version if undone else version
        if undone:
            raise ConfigError(
                f"The frozen parameter {undone[0]} was edited after a commit, which holds its only place on "
                "disk; it has its committed values again.",
                "Edit it before the first commit, or offload it with requires_grad=True.",
            )
        if memory is None:
            names = ", ".join(page.layout.parameters[index].names[0] for index in sorted(edited))
            raise ConfigError(
                f"An edit of {names} was made through a view that its forward had kept, and is lost.",
                "Edit the parameter itself, under torch.no_grad() or in runtime.full_parameters(module).",
            )

    def _edited(self, page: ParameterPage) -> set[int]:
        """The indices of a page's parameters with edits that are not written home."""
        by_loans = (
            each.index for each in self._loans.get(page.index, ()) if each.alias._version != each.version
        )
        return {*page.edits(), *self._replaced.get(page.index, ()), *by_loans}

    def _undo_edits(self, page: ParameterPage) -> None:
        """Forget edits of a page that is about to leave device memory. Its next arrival brings the values
        from home.
        """
        for loan in self._loans.get(page.index, ()):
            loan.version = loan.alias._version
        self._replaced.pop(page.index, None)
        page.acknowledge()
        page.filled_at = -1

    def _write_back(self, page: ParameterPage, index: int, memory: torch.Tensor) -> None:
        if memory is not page.home.memory:
            start, nbytes = page.start(index), page.flat(index, memory).nbytes
            if self._store.device.shares_host:
                # Whole blocks, so that none is read from the disk: the edit may have come while a write from
                # this memory was under way, which has then left other bytes than those of its checksums.
                start, end = start // PAGE_ALIGNMENT * PAGE_ALIGNMENT, start + nbytes
                nbytes = min(round_up(end, PAGE_ALIGNMENT), page.nbytes) - start
            brought = self._store.copied_to_host(memory[start : start + nbytes])
            for each in page.shard.pieces(start, nbytes):
                done = each.page_start - start
                self._store.patch(page.home, each.home_start, brought[done : done + each.nbytes])
        if self._states is not None and self._unfollowed(page, index):
            given = (page.index, index) in self._states.given
            now = self._store.copied_to_host(page.flat(index, memory)) if given else None
            self._states.edited(page.index, index, now)

    def _is_held(self, page: ParameterPage, index: int) -> bool:
        """Whether a commit holds the values of a frozen parameter; see [Note: frozen parameters]."""
        layout, parts = page.layout.parameters[index], page.home.parts
        if layout.trainable or not layout.numel:
            return False
        return any(
            part.durable is not None or part.pending is not None
            for held in page.shard.pieces(page.start(index), layout.numel * layout.dtype.itemsize)
            for part in parts.over(held.home_start, held.home_start + 1)
        )

    def _undo(self, page: ParameterPage, index: int, memory: torch.Tensor) -> bool:
        """Give a parameter its committed values back. Returns False if it had them already."""
        assert self._store.durable is not None
        layout, present = page.layout.parameters[index], page.flat(index, memory)
        start, nbytes = page.start(index), layout.numel * layout.dtype.itemsize
        now = self._store.copied_to_host(present).view(torch.uint8)
        committed = now.clone()
        for held in page.shard.pieces(start, nbytes):
            at = held.page_start - start
            committed[at : at + held.nbytes] = self._store.durable.fetch(
                page.home, held.home_start, held.nbytes
            )
        if torch.equal(now, committed):
            return False
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            present.copy_(committed.view(layout.dtype))
        return True

    def _forget_loans(self, page: ParameterPage, besides: int = 0) -> None:
        """Drop a page's loans (aliases of views that user code got) if only the runtime refers to the
        page's storage. besides: number of further references that do not count, because a caller holds them.
        """
        loans = self._loans.get(page.index)
        if not loans:
            return
        if not self._held_outside(page, loans[0].alias, besides):
            del self._loans[page.index]

    def _held_outside(self, page: ParameterPage, memory: torch.Tensor, besides: int = 0) -> bool:
        """Whether code other than the runtime refers to the page's storage. memory: a tensor over that
        storage. besides: number of references that do not count, because a caller holds them.
        """
        storage = memory.untyped_storage()
        ours = len(self._loans.get(page.index, ())) + 1 + besides  # 1: the reference of `storage` above
        if page.residency is not None:
            ours += 1 + len(page.parameters)
        return torch._C._storage_Use_Count(storage._cdata) > ours
