"""Tests of the trainer's lock: turns are counted, not timed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from infinity.distributed.lock import TrainerLock


def until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds that another thread brings about."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.001)


def wanted(lock: TrainerLock) -> bool:
    """Whether the conductor waits for its turn."""
    return lock._asked.locked()


def test_the_conductor_has_its_turn_before_the_trainers_next_one() -> None:
    lock, order = TrainerLock(), []

    def conduct() -> None:
        with lock.turn():
            order.append("conductor")

    for _ in range(50):
        with lock:
            conductor = threading.Thread(target=conduct)
            conductor.start()
            until(lambda: wanted(lock))
            with lock:
                order.append("trainer, inside")
        for _ in range(3):
            with lock:
                order.append("trainer")
        conductor.join()
    assert order == ["trainer, inside", "conductor", "trainer", "trainer", "trainer"] * 50


def test_acquire_lets_the_conductor_pass_too() -> None:
    lock, order = TrainerLock(), []

    def conduct() -> None:
        with lock.turn():
            order.append("conductor")

    lock.acquire()
    conductor = threading.Thread(target=conduct)
    conductor.start()
    until(lambda: wanted(lock))
    lock.release()
    assert lock.acquire()
    order.append("trainer")
    lock.release()
    conductor.join()
    assert order == ["conductor", "trainer"]


def test_turns_exclude_each_other() -> None:
    lock, inside, most, turns = TrainerLock(), [0], [0], [0]

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


def depth(lock: TrainerLock) -> int:
    """How deep the calling thread holds the lock."""
    found = 0
    while lock.owned():
        lock.release()
        found += 1
    for _ in range(found):
        lock.acquire()
    return found


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_wait_gives_up_the_whole_lock_and_takes_it_back(error: type[BaseException] | None) -> None:
    lock = TrainerLock()
    with lock, lock, lock:
        try:
            with lock.released():
                assert not lock.owned()
                other = threading.Thread(target=lambda: lock.acquire() and lock.release())
                other.start()
                other.join()
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert depth(lock) == 3
    assert not lock.owned()


def test_released_does_nothing_where_the_lock_is_not_held() -> None:
    lock = TrainerLock()
    with lock:
        other = threading.Thread(target=enter, args=(lock,))
        other.start()
        other.join()
        assert depth(lock) == 1


def enter(lock: TrainerLock) -> None:
    with lock.released():
        assert not lock.owned()


def test_an_error_in_the_body_returns_the_lock() -> None:
    lock = TrainerLock()
    for enters in (lambda: lock, lock.turn):
        with pytest.raises(ValueError), enters():
            raise ValueError
        assert not lock.owned()
    with pytest.raises(RuntimeError):
        lock.release()


def test_ctrl_c_while_the_conductor_is_waited_for_takes_nothing() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else this test would wait for ever
    lock, go = TrainerLock(), threading.Event()

    def hold() -> None:
        with lock.turn():
            go.wait()

    def ask_and_interrupt() -> None:
        with lock.turn():
            pass

    holder = threading.Thread(target=hold)
    holder.start()
    until(lambda: not wanted(lock) and not free(lock))
    asker = threading.Thread(target=ask_and_interrupt)
    asker.start()
    until(lambda: wanted(lock))
    main = threading.main_thread().ident
    interrupt = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        interrupt.start()
        with lock:
            pytest.fail("the lock was taken")
    go.set()
    for each in (holder, asker, interrupt):
        each.join()
    assert free(lock)


def free(lock: TrainerLock) -> bool:
    """Whether nobody holds the lock."""
    if not wanted(lock) and lock.acquire(blocking=False):
        lock.release()
        return True
    return False
