"""Tests of the helper `process_resources`: it finds leaked descriptors and threads, and waits for threads
that are about to end.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from process_resources import check_nothing_left, nothing_left, resources


def test_a_descriptor_that_leaks_is_named(tmp_path: Path) -> None:
    (tmp_path / "leaked").touch()
    before = resources()
    descriptors = [os.open(tmp_path / "leaked", os.O_RDONLY) for _ in range(2)]
    try:
        with pytest.raises(AssertionError, match=r"left after 0\.1 s: 2 open on /.*/leaked"):
            check_nothing_left(before, bound=0.1)
        os.close(descriptors.pop())
        with pytest.raises(AssertionError, match="1 open on"):
            check_nothing_left(before, bound=0.1)
    finally:
        for each in descriptors:
            os.close(each)
    check_nothing_left(before)


def test_a_thread_that_leaks_is_named() -> None:
    before, end = resources(), threading.Event()
    thread = threading.Thread(target=end.wait, name="the leaked one")
    thread.start()
    try:
        with pytest.raises(AssertionError, match=rf"thread {thread.native_id} \(the leaked one\)"):
            check_nothing_left(before, bound=0.1)
    finally:
        end.set()
    check_nothing_left(before)  # although nobody has joined the thread


def test_a_leak_is_not_hidden_by_what_ends_meanwhile() -> None:
    """A leaked thread is found even if another thread ends meanwhile, so that their number is the same."""
    ends = threading.Event(), threading.Event()
    ending, leaked = (threading.Thread(target=each.wait) for each in ends)
    ending.start()
    before = resources()
    leaked.start()
    ends[0].set()
    ending.join()
    try:
        with pytest.raises(AssertionError, match=f"thread {leaked.native_id} "):
            check_nothing_left(before, bound=0.1)
    finally:
        ends[1].set()
    check_nothing_left(before)


def test_what_ends_late_is_waited_for(tmp_path: Path) -> None:
    """The check waits for a thread that closes a descriptor after the check has begun."""
    (tmp_path / "open").touch()
    looking = threading.Event()
    with nothing_left():
        descriptor = os.open(tmp_path / "open", os.O_RDONLY)

        def close() -> None:
            looking.wait()
            os.close(descriptor)

        threading.Thread(target=close).start()
        threading.Timer(0.05, looking.set).start()
    assert resources().descriptors[str(tmp_path / "open")] == 0
