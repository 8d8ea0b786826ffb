"""Tests of the flag that the first signal sets, and of what a second signal raises."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from infinity.cli.command import StopFlag, Stopped, signal_of
from infinity.cli.training_run import TrainingRun
from infinity.ranks import SingleRank


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_the_flag_and_the_second_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    flag = StopFlag()
    with flag.installed():
        flag.check()
        signal.raise_signal(number)
        assert flag.signal is number
        with pytest.raises(Stopped):
            flag.check()
        for second in (signal.SIGINT, signal.SIGTERM):
            with pytest.raises(KeyboardInterrupt) as raised:
                signal.raise_signal(second)
            assert signal_of(raised.value) is second
        assert flag.signal is number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_interrupt_of_python_is_that_of_ctrl_c() -> None:
    assert signal_of(KeyboardInterrupt()) is signal.SIGINT


def test_outside_of_the_main_thread_the_flag_takes_no_signals() -> None:
    before, entered = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with StopFlag().installed():
            entered.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [before]


def test_a_signal_that_comes_while_ranks_agree_stops_none_before_all_know_of_it() -> None:
    run = object.__new__(TrainingRun)
    run._commits = True
    run._flag = StopFlag()

    class Two(SingleRank):
        def gather(self, call: str, fact: Any, patient: object = None) -> dict[int, Any]:
            run._flag.signal = signal.SIGTERM
            return {0: fact, 1: 0}

    run._ranks = Two()
    run._check_stopped()
    with pytest.raises(Stopped):
        run._check_stopped()
