"""Tests of the runtime's lock: turns, which are counted and not timed, and signals, which wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from interrupted_lines import Lines, places

from infinity.system.lock import RuntimeLock, _locks, undivided


def until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds that another thread brings about."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.001)


def wanted(lock: RuntimeLock) -> bool:
    """Whether the service thread waits for its turn."""
    return lock._asked.locked()


def test_the_service_thread_has_its_turn_before_the_trainers_next_one() -> None:
    lock, order = RuntimeLock(), []

    def serve() -> None:
        with lock.turn():
            order.append("service thread")

    for _ in range(50):
        with lock:
            service = threading.Thread(target=serve)
            service.start()
            until(lambda: wanted(lock))
            with lock:
                order.append("trainer, inside")
        for _ in range(3):
            with lock:
                order.append("trainer")
        service.join()
    assert order == ["trainer, inside", "service thread", "trainer", "trainer", "trainer"] * 50


def test_turns_exclude_each_other() -> None:
    lock, inside, most, turns = RuntimeLock(), [0], [0], [0]

    def work(enter: Callable[[], object]) -> None:
        for _ in range(300):
            with enter():  # type: ignore[attr-defined]
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                with lock:
                    turns[0] += 1
                inside[0] -= 1

    threads = [
        threading.Thread(target=work, args=(each,)) for each in (lambda: lock, lambda: lock, lock.turn)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (most[0], turns[0]) == (1, 900)


def depth(lock: RuntimeLock) -> int:
    """How deep the calling thread holds the lock."""
    found = 0
    while lock.owned():
        lock._lock.release()
        found += 1
    for _ in range(found):
        lock._lock.acquire()
    return found


def take(lock: RuntimeLock) -> None:
    with lock:
        pass


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_wait_gives_up_the_whole_lock_and_takes_it_back(error: type[BaseException] | None) -> None:
    lock = RuntimeLock()
    with lock, lock, lock:
        try:
            with lock.released():
                assert not lock.owned()
                other = threading.Thread(target=take, args=(lock,))
                other.start()
                other.join()
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert depth(lock) == 3
    assert not lock.owned()


def test_released_does_nothing_where_the_lock_is_not_held() -> None:
    lock = RuntimeLock()
    with lock:
        other = threading.Thread(target=enter, args=(lock,))
        other.start()
        other.join()
        assert depth(lock) == 1


def enter(lock: RuntimeLock) -> None:
    with lock.released():
        assert not lock.owned()


def test_an_error_in_the_body_returns_the_lock() -> None:
    lock = RuntimeLock()
    for enters in (lambda: lock, lock.turn):
        with pytest.raises(ValueError), enters():
            raise ValueError
        assert not lock.owned()


def test_ctrl_c_while_the_service_thread_is_waited_for_takes_nothing() -> None:
    lock, go = RuntimeLock(), threading.Event()

    def hold() -> None:
        with lock.turn():
            go.wait()

    threads = [threading.Thread(target=hold)]
    threads[0].start()
    until(lambda: not wanted(lock) and not free(lock))
    threads.append(threading.Thread(target=lambda: lock.turn().__enter__()))
    threads[1].start()
    until(lambda: wanted(lock))
    main = threading.main_thread().ident
    assert main is not None
    threads.append(threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        threads[2].start()
        with lock:
            pytest.fail("the lock was taken")
    go.set()
    for each in threads:
        each.join()
    assert not lock.broken


def free(lock: RuntimeLock) -> bool:
    """Whether nobody holds the lock."""
    if not lock._lock.acquire(blocking=False):
        return False
    lock._lock.release()
    return True


# --- signals ------------------------------------------------------------------------------------------------


class Late(Exception):
    """What the handler of SIGALRM raises in these tests."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Python's handler of Ctrl-C, and one of SIGALRM that raises Late, until the test ends."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGALRM, late)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGALRM, before[1])


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, Late)], ids=["int", "alarm"]
)
@pytest.mark.parametrize("wait", [False, True])
def test_a_signal_waits_for_the_end_of_the_lock(
    number: signal.Signals, error: type[BaseException], wait: bool
) -> None:
    lock, done = RuntimeLock(), []
    with pytest.raises(error):
        with lock:
            with lock, lock.released() if wait else contextlib.nullcontext():
                signal.raise_signal(number)
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"]
    assert not lock.owned()
    assert not lock.broken


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM], ids=["int", "alarm"])
@pytest.mark.parametrize("wait", [False, True])
def test_the_same_signal_again_breaks_what_is_under_way(number: signal.Signals, wait: bool) -> None:
    lock, other = RuntimeLock(), RuntimeLock()
    waiting = lock.released if wait else contextlib.nullcontext
    with pytest.raises((KeyboardInterrupt, Late)), lock, waiting():
        signal.raise_signal(number)
        signal.raise_signal(number)
        pytest.fail("the second one came too late")
    assert lock.broken
    assert not lock.owned()
    assert not other.broken
    with other:  # nothing waits any more
        pass


def test_a_handler_that_is_set_later_is_called() -> None:
    lock, calls = RuntimeLock(), list[str]()
    for name in ("first", "second"):
        signal.signal(signal.SIGINT, lambda *_, name=name: calls.append(name))
        with lock:
            signal.raise_signal(signal.SIGINT)
            assert name not in calls
            signal.raise_signal(signal.SIGINT)
            assert calls[-1] == name  # it raises nothing, so that nothing is lost
    assert calls == ["first", "first", "second", "second"]
    assert not lock.broken


def test_a_handler_that_is_put_back_is_the_programs() -> None:
    lock, calls = RuntimeLock(), list[int]()
    with lock:
        pass
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    with lock:
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), lock:
        signal.raise_signal(signal.SIGINT)
    assert calls == [1]


def test_the_handlers_are_given_back_with_the_last_lock() -> None:
    before = signal.getsignal(signal.SIGINT)
    gc.collect()
    locks = RuntimeLock(), RuntimeLock()
    for lock in locks:
        with lock:
            pass
    locks[0].close()
    ours = signal.getsignal(signal.SIGINT)
    others = len(_locks) - 1  # of runtimes that earlier tests have left open
    locks[1].close()
    assert ours is not before
    assert signal.getsignal(signal.SIGINT) is (ours if others else before)


def test_a_signal_without_a_handler_is_left_alone() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with RuntimeLock():
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_safe_point_ends_the_caller_and_loses_nothing() -> None:
    lock = RuntimeLock()
    with pytest.raises(KeyboardInterrupt), lock, lock:
        lock.safe_point()
        signal.raise_signal(signal.SIGINT)
        lock.safe_point()
        pytest.fail("the signal did not come")
    assert not lock.broken


def test_other_ways_out_of_the_middle_break_the_lock() -> None:
    for error, broken in ((SystemExit, True), (KeyboardInterrupt, True), (ValueError, False)):
        lock = RuntimeLock()
        with pytest.raises(error), lock:
            raise error
        assert lock.broken is broken


def test_a_function_is_undivided_from_its_first_instruction_on() -> None:
    lock, done = RuntimeLock(), []

    def function() -> None:
        with lock:
            done.append(1)
        done.append(2)

    with lock:  # from now on our handler is there
        pass
    call = undivided(function)
    first = True

    def entered(frame: FrameType, event: str, argument: object) -> None:
        nonlocal first
        if frame.f_code is call.__code__ and first:  # type: ignore[attr-defined]
            first = False
            signal.raise_signal(signal.SIGINT)

    sys.settrace(entered)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(None)
    assert done == [1, 2]


def test_no_line_of_the_lock_leaves_it_held() -> None:
    """Ctrl-C before each line of the lock's own code: it waits, or comes while nothing is held."""

    def use(lock: RuntimeLock) -> None:
        with lock, lock, lock.released():
            pass

    use(RuntimeLock())  # from now on our handler is there
    lock = RuntimeLock()
    with Lines() as lines:
        use(lock)
    for place in places(lines):
        lock = RuntimeLock()
        with pytest.raises(KeyboardInterrupt), Lines(place):
            use(lock)
        assert not lock.owned(), place
        assert not lock.broken, place
    with lock:
        pass


def test_asyncio_run_gives_its_handler_back() -> None:
    lock = RuntimeLock()

    async def main() -> None:
        with lock:
            pass

    asyncio.run(main())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    lock.close()
