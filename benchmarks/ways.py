"""Ways: what one process compares, such as policies or loops, in turns; and the report on them."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from machine_facts import machine_facts

Turns = dict[str, dict[str, Any]]
"""What a turn of each way has returned."""


def in_turns(ways: Sequence[str], rounds: int, turn: Callable[[str], dict[str, Any]]) -> list[Turns]:
    """Take a turn of each way in each round, in an order that is reversed each round. turn: takes a turn of
    a way, and returns its "seconds" and others of its figures. Returns the turns of each round.
    """
    found = []
    for number in range(rounds):
        turns = {way: turn(way) for way in (ways if number % 2 == 0 else ways[::-1])}
        found.append(turns)
        shown = "   ".join(f"{way} {turns[way]['seconds']:.2f} s" for way in ways)
        print(f"round {number + 1}: {shown}", flush=True)
    return found


def compared(rounds: Sequence[Turns], baseline: str) -> dict[str, dict[str, Any]]:
    """Return for each way the median of "seconds", its speed divided by that of `baseline` in each round
    ("ratios"), the median of these ("ratio"), and the "bytes" of the last round.
    """
    results = {}
    for way in rounds[0]:
        ratios = [turns[baseline]["seconds"] / turns[way]["seconds"] for turns in rounds]
        results[way] = {
            "seconds": statistics.median(turns[way]["seconds"] for turns in rounds),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "bytes": rounds[-1][way]["bytes"],
        }
    return results


def spread(found: dict[str, Any]) -> str:
    """The ratios of a result of `compared`, for a table."""
    return f"{found['ratio']:.3f} ({min(found['ratios']):.2f}-{max(found['ratios']):.2f})"


def run(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, str], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> int:
    """Measure in a new directory below `options.directory`, show the report, and print it with
    `options.json` as one JSON object. Returns 1 unless the report has "same_bits", and else 0.
    """
    with tempfile.TemporaryDirectory(prefix=f"infinity-{name}-", dir=options.directory) as directory:
        found = measure(options, directory)
    settings = vars(options) | {"directory": ""}
    report = {"benchmark": name, "machine": machine_facts(), "settings": settings} | found
    show(report)
    if options.json:
        print(json.dumps(report))
    return 0 if report["same_bits"] else 1
