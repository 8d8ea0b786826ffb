"""The table of driver calls: what fills it, and what its errors say."""

from __future__ import annotations

import pytest

from infinity.errors import ConfigError
from infinity.tiers.driver import Driver


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"libnot-there\.so"):
        Driver.load("libnot-there.so")


def test_a_library_that_lacks_a_call_is_named_with_the_call() -> None:
    with pytest.raises(ConfigError, match=r"libc\.so\.6 has no cuInit"):
        Driver.load("libc.so.6")
