"""Launcher: what torchrun, or whatever else has started the ranks, says in the environment.

A number that a variable gives raises ConfigError if it is none. A variable that is empty counts as absent.
"""

from __future__ import annotations

import os

from infinity.errors import ConfigError


def world_size() -> int:
    """Number of processes that were started together."""
    return _number("WORLD_SIZE", 1, least=1)


def rank() -> int:
    """This process's number among all of them."""
    return _number("RANK", 0)


def local_ranks() -> tuple[int, int]:
    """(this process's number among the ranks of its node, number of ranks there)."""
    return _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1, least=1)


def node_number() -> int:
    """The number of this rank's node."""
    return _number("GROUP_RANK", 0)


def keeps_store() -> bool:
    """Whether the launcher keeps the store of the ranks; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _number(variable: str, absent: int, *, least: int = 0) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return absent
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if found < least:
        raise ConfigError(
            f"The environment variable {variable} is {text!r}, which is not a whole number from {least} on.",
            "Start the program with torchrun, which sets it, or give it such a number.",
        )
    return found
