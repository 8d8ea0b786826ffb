"""Tests of leases, pools and residencies: leases do not overlap, nothing leaks, and no budget is exceeded.

Memory is not leased again while a view of it lives.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import _tiers
from infinity.errors import BudgetError, ConfigError
from infinity.tiers import HostArena, Pool

PAGE = 4096


@pytest.fixture
def pool() -> Iterator[Pool]:
    with HostArena(16 * PAGE) as arena:
        yield arena.pool("pages", 16 * PAGE)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5 * PAGE), st.booleans()), max_size=8), st.integers(0, 12 * PAGE))
def test_budget_errors_name_the_smallest_pool_that_would_do(
    history: list[tuple[int, bool]], nbytes: int
) -> None:
    """If a lease raises BudgetError, the same calls succeed in a pool of `error.needed` bytes, and raise
    BudgetError in a pool that is 4 KiB smaller.

    history: (bytes, whether the lease is kept) of each lease that is made before the lease of `nbytes`
    bytes. Leases that are not kept are released before that lease, and leave gaps.
    """

    def ask(pages: int) -> None:
        with HostArena(64 * PAGE) as arena:
            pool = arena.pool("pages", pages * PAGE)
            leases = [(pool.lease(size), stays) for size, stays in history]
            for lease, stays in leases:
                if not stays:
                    lease.release()
            pool.lease(nbytes)

    taken = sum(max(1, -(-size // PAGE)) for size, _ in history)
    pages = max(taken, 1)
    try:
        ask(pages)
    except BudgetError as error:
        assert error.needed is not None
        assert error.needed % PAGE == 0
        ask(error.needed // PAGE)
        with pytest.raises(BudgetError):
            ask(error.needed // PAGE - 1)


@pytest.mark.parametrize("nbytes", [17 * PAGE, 1 << 63, 1 << 70])
def test_what_can_never_fit_fails_at_once(pool: Pool, nbytes: int) -> None:
    with pytest.raises(BudgetError) as error:
        pool.lease(nbytes, timeout=5)
    assert pool.counters.waits == 0
    if nbytes == 17 * PAGE:
        assert error.value.needed == nbytes


def test_a_closed_pool_grants_nothing_and_keeps_what_is_out(pool: Pool) -> None:
    lease = pool.lease(PAGE)
    tensor = lease.residency().fill_(7)
    pool.close()
    with pytest.raises(ConfigError, match="closed"):
        pool.lease(PAGE)
    lease.release()
    assert int(tensor.sum()) == 7 * PAGE


def test_negative_sizes_are_refused(pool: Pool) -> None:
    with pytest.raises(ConfigError):
        pool.lease(-1)


def test_a_waiter_gets_the_bytes_when_a_storage_dies(pool: Pool) -> None:
    lease = pool.lease(16 * PAGE)
    tensor = lease.residency()
    lease.release()
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(pool.lease(PAGE, timeout=60).nbytes))
    waiter.start()
    while pool.counters.waits == 0:
        time.sleep(0.001)
    assert not got
    del tensor
    waiter.join(60)
    assert got == [PAGE]


def test_waiters_are_served_in_order_so_that_a_large_one_does_not_starve(pool: Pool) -> None:
    held = [pool.lease(8 * PAGE), pool.lease(8 * PAGE)]
    order: list[str] = []

    def wait(name: str, nbytes: int) -> None:
        with pool.lease(nbytes, timeout=60):
            order.append(name)

    large = threading.Thread(target=wait, args=("large", 16 * PAGE))
    large.start()
    while pool.counters.waits < 1:
        time.sleep(0.001)
    small = threading.Thread(target=wait, args=("small", PAGE))
    small.start()
    while pool.counters.waits < 2:
        time.sleep(0.001)
    held[0].release()
    with pytest.raises(BudgetError, match="waiting before") as error:
        pool.lease(PAGE)  # fits, but would overtake the waiter
    assert error.value.needed is None
    held[1].release()
    large.join(60)
    small.join(60)
    assert order == ["large", "small"]


def test_waiting_lets_other_python_threads_run_and_ends_on_close(pool: Pool) -> None:
    with pool.lease(16 * PAGE):
        failed: list[str] = []

        def wait() -> None:
            try:
                pool.lease(PAGE, timeout=60)
            except ConfigError as error:
                failed.append(error.cause)

        waiter = threading.Thread(target=wait)
        waiter.start()
        while pool.counters.waits == 0:
            time.sleep(0.001)
        pool.close()
        waiter.join(60)
        assert "closed" in failed[0]


def test_a_storage_dropped_by_another_thread_returns_its_lease(pool: Pool) -> None:
    lease = pool.lease(PAGE)
    held = [lease.residency()]
    lease.release()
    dropper = threading.Thread(target=held.clear)
    dropper.start()
    dropper.join()
    assert pool.counters.leased == 0


def test_autograd_pins_a_saved_alias(pool: Pool) -> None:
    lease = pool.lease(1024)
    weight = lease.residency().view(torch.float32).view(16, 16).fill_(0.5).requires_grad_()
    lease.release()
    inputs = torch.ones(4, 16, requires_grad=True)
    loss = (inputs @ weight).sum()
    del weight
    gc.collect()
    assert pool.counters.leased == PAGE, "the graph still needs the bytes"
    loss.backward()
    assert torch.equal(inputs.grad, torch.full((4, 16), 8.0))
    del loss
    gc.collect()
    assert pool.counters.leased == 0


def test_a_parameter_swaps_residencies_and_views_keep_the_old_one(pool: Pool) -> None:
    def resident(value: float) -> torch.Tensor:
        with pool.lease(256) as lease:
            return lease.residency().view(torch.float32).fill_(value)

    parameter = torch.nn.Parameter(resident(1.0))
    kept = parameter.detach()[3:5]
    parameter.data = resident(2.0)
    assert pool.counters.leased == 2 * PAGE
    assert kept.tolist() == [1.0, 1.0]
    del kept
    assert pool.counters.leased == PAGE
    assert parameter.tolist() == [2.0] * 64


def test_dtypes_of_pages_view_the_bytes(pool: Pool) -> None:
    with pool.lease(4096) as lease:
        base = lease.residency()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int16, torch.float64):
        view = base.view(dtype)
        assert view.data_ptr() == base.data_ptr()
        view.fill_(3)
        assert bool((view == 3).all())
    assert base.untyped_storage().nbytes() == 4096


def test_an_unused_capsule_returns_its_share(pool: Pool) -> None:
    lease = pool.lease(PAGE)
    capsule = lease._native.to_dlpack()
    lease.release()
    assert pool.counters.leased == PAGE
    del capsule
    assert pool.counters.leased == 0


def test_empty_leases_have_addresses_of_their_own(pool: Pool) -> None:
    with pool.lease(0) as first, pool.lease(0) as second:
        assert first.address != second.address
        assert first.residency().numel() == 0


def test_many_threads_never_share_a_byte() -> None:
    with HostArena(32 * PAGE) as arena:
        pool = arena.pool("pages", 32 * PAGE)
        wrong: list[int] = []

        def churn(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            for _ in range(300):
                nbytes = int(torch.randint(1, 6 * PAGE, (), generator=generator))
                with pool.lease(nbytes, timeout=60) as lease:
                    tensor = lease.residency().fill_(number)
                view = tensor[: nbytes // 2]
                del tensor
                if not bool((view == number).all()):
                    wrong.append(number)
                del view  # otherwise every thread would hold some bytes and wait for more

        threads = [threading.Thread(target=churn, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not wrong
        assert pool.counters.leased == 0
        assert pool.counters.granted == 8 * 300


def in_a_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked child, and return the child's exit code: 0 if `body` returns."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_in_a_forked_child_a_pool_refuses_and_its_memory_is_left_alone() -> None:
    arena = HostArena(64 << 20)
    pool = arena.pool("pages", 64 << 20)

    def child() -> None:
        for use in (lambda: pool.lease(1), lambda: pool.counters, lambda: pool.largest_free):
            with pytest.raises(ConfigError, match="forked"):
                use()
        own = [numpy.ones(16 << 20, dtype=numpy.uint8) for _ in range(8)]  # may land in the hole
        nonlocal arena
        arena.close()
        del arena
        gc.collect()
        assert sum(int(each.sum(dtype=numpy.int64)) for each in own) == 8 * (16 << 20)
        with HostArena(1 << 20) as mine:
            assert mine.pool("pages", 1 << 20).lease(1).residency().fill_(3).item() == 3

    assert in_a_child(child) == 0
    assert pool.lease(PAGE).residency().fill_(2).sum() == 2 * PAGE


def test_the_process_ends_while_a_daemon_thread_waits(warm: None) -> None:
    program = f"""
import threading, time
from infinity.tiers import HostArena
pool = HostArena({PAGE}).pool("pages", {PAGE})
held = pool.lease(1)
threading.Thread(target=lambda: pool.lease(1, timeout=600), daemon=True).start()
while pool.counters.waits == 0:
    time.sleep(0.001)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == 0


def test_a_lease_says_up_to_which_return_its_bytes_were_in_use(pool: Pool) -> None:
    first, second, third = (pool.lease(PAGE) for _ in range(3))
    assert (first.last_return, second.last_return, third.last_return) == (0, 0, 0)
    tensor = first.residency()
    first.release()
    second.release()
    assert pool.counters.returns == 1, "an alias still holds the first"
    with pool.lease(PAGE) as again:
        assert again.offset == PAGE
        assert again.last_return == 1
    del tensor
    assert pool.counters.returns == 3
    with pool.lease(2 * PAGE) as merged:
        assert merged.offset == 0
        assert merged.last_return == 3, "the latest of all that merged"
    with pool.lease(13 * PAGE) as untouched:
        assert untouched.last_return == 0
    third.release()


def test_a_forked_child_may_drop_storages_without_touching_the_pool(pool: Pool) -> None:
    lease = pool.lease(PAGE)
    held = [lease.residency()]

    def child() -> None:
        held.clear()
        lease.release()

    assert in_a_child(child) == 0
    assert pool.counters.leased == PAGE
    assert held[0].fill_(1).sum() == PAGE


class TestSpanAllocator:
    def test_neighbours_merge_into_the_whole(self) -> None:
        spans = _tiers.SpanAllocator(10 * PAGE + 17, PAGE)
        assert spans.capacity == 10 * PAGE
        offsets = [spans.take(PAGE) for _ in range(10)]
        assert offsets == [PAGE * index for index in range(10)]
        assert spans.take(1) is None
        for index in (1, 3, 5, 7, 9, 0, 2, 4, 6, 8):
            spans.give_back(PAGE * index, PAGE)
        assert spans.largest_free == 10 * PAGE
        assert spans.used == 0

    def test_best_fit_keeps_the_large_hole_whole(self) -> None:
        spans = _tiers.SpanAllocator(16 * PAGE, PAGE)
        first = spans.take(2 * PAGE)
        spans.take(PAGE)
        assert first is not None
        assert spans.capacity_for(14 * PAGE) == 17 * PAGE
        spans.give_back(first, 2 * PAGE)
        assert spans.take(2 * PAGE) == first
        assert spans.largest_free == 13 * PAGE

    @given(st.lists(st.integers(-8, 6), max_size=40))
    def test_the_same_calls_can_do_with_the_capacity_that_they_have_used(self, calls: list[int]) -> None:
        """calls: the granules of a span to take, or which of those that are out comes back."""

        def taken(capacity: int) -> list[int | None]:
            spans = _tiers.SpanAllocator(capacity * PAGE, PAGE)
            offsets: list[int | None] = []
            out: list[tuple[int | None, int]] = []
            for call in calls:
                if call > 0:
                    offsets.append(spans.take(call * PAGE))
                    out.append((offsets[-1], call * PAGE))
                elif out:
                    offset, nbytes = out.pop(call % len(out))
                    assert offset is not None
                    spans.give_back(offset, nbytes)
            return offsets

        found = taken(1 << 20)
        sizes = [call for call in calls if call > 0]
        ends = [(offset or 0) // PAGE + size for offset, size in zip(found, sizes, strict=True)]
        assert taken(max(ends, default=0)) == found

    @pytest.mark.parametrize(("offset", "nbytes"), [(PAGE, PAGE), (0, 2 * PAGE), (1, PAGE)])
    def test_what_is_not_out_cannot_come_back(self, offset: int, nbytes: int) -> None:
        spans = _tiers.SpanAllocator(16 * PAGE, PAGE)
        spans.take(PAGE)
        with pytest.raises(ValueError, match="not out"):
            spans.give_back(offset, nbytes)
        assert spans.used == PAGE

    def test_a_granule_is_a_power_of_two(self) -> None:
        for granule in (0, 3, 4097):
            with pytest.raises(ValueError, match="power of two"):
                _tiers.SpanAllocator(1 << 20, granule)

    def test_absurd_sizes_do_not_overflow(self) -> None:
        spans = _tiers.SpanAllocator(16 * PAGE, PAGE)
        assert spans.take((1 << 64) - 1) is None
        assert spans.take(1 << 63) is None
