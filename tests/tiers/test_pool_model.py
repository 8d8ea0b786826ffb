"""Tests of a pool against a model of it: no overlap, no leak, no byte over the budget. Memory is not leased
again while a view of it lives.
"""

import gc

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from infinity.errors import BudgetError
from infinity.tiers import HostArena

PAGE = 4096


class PoolMachine(RuleBasedStateMachine):
    """A state machine of random leases, residencies and views, with a record of the bytes that are in use.

    Each residency is filled with a byte value derived from the number of its lease. After every step, each
    live view must still have its value. If a span is leased again while a view of it lives, the view has a
    wrong byte.
    """

    CAPACITY = 64 * PAGE

    leases = Bundle("leases")
    views = Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.arena = HostArena(self.CAPACITY + 3 * PAGE)
        self.arena.pool("below", PAGE)
        self.pool = self.arena.pool("pages", self.CAPACITY)
        self.handles: dict[int, object] = {}  # stamp -> lease not yet released
        self.seen: dict[int, list[tuple[torch.Tensor, int]]] = {}  # stamp -> live views and their byte
        self.sizes: dict[int, int] = {}
        self.stamp = 0

    def taken(self) -> int:
        out = [stamp for stamp in self.sizes if stamp in self.handles or self.seen.get(stamp)]
        return sum(max(PAGE, -(-self.sizes[stamp] // PAGE) * PAGE) for stamp in out)

    @rule(target=leases, nbytes=st.one_of(st.integers(0, 20 * PAGE), st.sampled_from([1, PAGE, PAGE + 1])))
    def borrow(self, nbytes: int) -> tuple[int, object] | None:
        before = self.taken()
        largest = self.pool.largest_free
        try:
            lease = self.pool.lease(nbytes)
        except BudgetError:
            assert max(nbytes, 1) > largest
            assert self.pool.counters.leased == before
            return None
        assert max(nbytes, 1) <= largest
        assert lease.address % PAGE == 0
        assert lease.nbytes == nbytes
        self.stamp += 1
        self.handles[self.stamp] = lease
        self.sizes[self.stamp] = nbytes
        return self.stamp, lease

    @rule(target=views, lease=leases)
    def become_resident(self, lease: tuple[int, object] | None) -> tuple[int, torch.Tensor] | None:
        if lease is None or lease[0] not in self.handles:
            return None
        stamp, handle = lease
        tensor = handle.residency()  # type: ignore[attr-defined]
        assert tensor.shape == (handle.nbytes,)  # type: ignore[attr-defined]
        tensor.fill_(stamp % 251)
        return self.hold(stamp, tensor)

    @rule(target=views, view=views, start=st.integers(0, PAGE))
    def alias(self, view: tuple[int, int] | None, start: int) -> tuple[int, int] | None:
        if view is None or not self.alive(view):
            return None
        tensor, _ = self.seen[view[0]][view[1]]
        return self.hold(view[0], tensor[start:])

    def hold(self, stamp: int, tensor: torch.Tensor) -> tuple[int, int]:
        views = self.seen.setdefault(stamp, [])
        views.append((tensor, stamp % 251))
        return stamp, len(views) - 1

    def alive(self, view: tuple[int, int]) -> bool:
        return len(self.seen.get(view[0], [])) > view[1]

    @rule(lease=consumes(leases))
    def release(self, lease: tuple[int, object] | None) -> None:
        if lease is None or lease[0] not in self.handles:
            return
        stamp, handle = lease
        handle.release()  # type: ignore[attr-defined]
        handle.release()  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="released"):
            handle.residency()  # type: ignore[attr-defined]
        del self.handles[stamp]

    @rule(view=consumes(views))
    def drop_views(self, view: tuple[int, int] | None) -> None:
        if view is not None:
            self.seen.pop(view[0], None)

    @invariant()
    def the_budget_holds_and_counts(self) -> None:
        counters = self.pool.counters
        assert counters.leased == self.taken()
        assert counters.leased <= counters.peak <= self.CAPACITY
        assert self.pool.largest_free <= self.CAPACITY - counters.leased

    @invariant()
    def nothing_overlaps(self) -> None:
        spans = []
        for stamp, lease in self.handles.items():
            spans.append((lease.offset, self.sizes[stamp]))  # type: ignore[attr-defined]
        for (start, nbytes), (following, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert start + nbytes <= following

    @invariant()
    def every_alias_has_its_bytes(self) -> None:
        for views in self.seen.values():
            for tensor, byte in views:
                assert bool((tensor == byte).all())

    def teardown(self) -> None:
        pool = self.pool
        self.arena.close()
        self.every_alias_has_its_bytes()
        for lease in self.handles.values():
            lease.release()  # type: ignore[attr-defined]
        self.seen.clear()
        self.handles.clear()
        gc.collect()
        assert pool.counters.leased == 0
        assert pool.counters.leases == 0
        assert pool.largest_free == self.CAPACITY


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=40, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
