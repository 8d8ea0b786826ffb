"""Tests of timelines of several ranks: they show what crosses between ranks as it is counted."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import training_ranks
from ranked_cases import Case
from timelines import Event, check_rows, crossings, load, rows_of

from infinity.distributed.windows import VARIABLE


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[dict[str, Any]]]:
    """What both ranks returned for each case, and the "events" of their timelines."""
    cases = [
        Case("frozen", 3, home="host", accumulate=2),
        Case("mlp", 2),
        Case("mlp", 1),
        Case("mlp", 0),
    ]
    return recorded(cases, tmp_path_factory.mktemp("timelines"), {VARIABLE: "0"})


def recorded(
    cases: list[Case], directory: Path, environment: dict[str, str]
) -> dict[Case, list[dict[str, Any]]]:
    """The timelines of two ranks."""
    nodes = [environment] * 2
    ranks = training_ranks.launch("bytes_in_timelines", cases, 2, directory, timeout=120.0, nodes=nodes)
    for each in ranks:
        for one in each:
            assert isinstance(one, dict), one
            one["events"] = load(Path(one["path"]))
    return dict(zip(cases, ranks, strict=True))


def summed(spans: list[Event], key: str) -> Counter[Any]:
    """Bytes of spans by an argument."""
    sums: Counter[Any] = Counter()
    for each in spans:
        sums[each["args"][key]] += each["args"]["bytes"]
    return sums


def test_the_bytes_in_timelines_are_those_of_the_counters(found: dict[Case, list[dict[str, Any]]]) -> None:
    for case, ranks in found.items():
        for rank, each in enumerate(ranks):
            check_rows(each["events"])
            for way in ("from", "to"):
                spans = crossings(each["events"], way, 1 - rank)
                assert summed(spans, "what") == each[way], (case, rank, way)
                assert not crossings(each["events"], way, rank)
            labels = set(each["from"]) | set(each["to"])
            assert labels == ({"gradients"} if case.stage == 0 else {"parameters", "gradients"}), case


def test_each_payload_has_its_unit(found: dict[Case, list[dict[str, Any]]]) -> None:
    for case, ranks in found.items():
        for rank, each in enumerate(ranks):
            came = crossings(each["events"], "from", 1 - rank)
            parameters = summed([one for one in came if one["args"]["what"] == "parameters"], "unit")
            assert parameters == Counter({unit: size for unit, size in enumerate(each["fetches"]) if size})
            assert all("unit" in one["args"] for one in came), case


def test_what_one_rank_gets_the_other_has_sent(found: dict[Case, list[dict[str, Any]]]) -> None:
    def told(spans: list[Event]) -> list[tuple[str, int, int]]:
        """Sorted, for streams and payloads do not wait for each other."""
        return sorted((each["args"]["what"], each["args"]["unit"], each["args"]["bytes"]) for each in spans)

    for case, ranks in found.items():
        for rank, each in enumerate(ranks):
            sent = crossings(ranks[1 - rank]["events"], "to", rank)
            assert told(crossings(each["events"], "from", 1 - rank)) == told(sent), case


def test_what_a_rank_copies_itself_comes_from_the_other_one(tmp_path: Path) -> None:
    for ranks in recorded([Case("mlp", 2)], tmp_path, {}).values():
        for rank, each in enumerate(ranks):
            came = crossings(each["events"], "from", 1 - rank)
            assert summed(came, "what") == each["from"] and each["from"]["parameters"]
            # A gradient for which the pool of waiting ones has no room at the moment is sent.
            sent = crossings(each["events"], "to", 1 - rank)
            assert {one["args"]["what"] for one in sent} <= {"gradients"}


def test_waits_for_other_ranks_stand_among_the_waits(found: dict[Case, list[dict[str, Any]]]) -> None:
    for case, ranks in found.items():
        for each in ranks:
            rows = rows_of(each["events"])
            waits = [one for one in rows["waits"] if one["name"] == "ranks"]
            seconds = sum(one["end"] - one["start"] for one in waits) / 1e9
            assert seconds == pytest.approx(each["seconds"], abs=1e-5), case
            wanted = Counter(one["args"]["for"] for one in waits)
            assert wanted["step()"] >= case.steps, case
            trainer = sorted((one["start"], one["end"]) for one in [*rows["compute"], *rows["waits"]])
            assert all(one[1] == next_one[0] for one, next_one in itertools.pairwise(trainer)), case


def test_files_of_ranks_can_be_joined(found: dict[Case, list[dict[str, Any]]]) -> None:
    """Ranks are processes of their own, and no payload comes before it was sent. Alike ones are compared in
    their order.
    """

    def alike(spans: list[Event]) -> list[Event]:
        keys = ("what", "unit", "bytes")
        return sorted(spans, key=lambda each: [str(each["args"][key]) for key in keys])

    for case, ranks in found.items():
        for rank, each in enumerate(ranks):
            assert {one["pid"] for one in each["events"]} == {1 + rank}
            sent = crossings(each["events"], "to", 1 - rank)
            came = crossings(ranks[1 - rank]["events"], "from", rank)
            for one, other in zip(alike(sent), alike(came), strict=True):
                assert one["start"] <= other["end"], case
