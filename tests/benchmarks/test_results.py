"""Tests of the result files under benchmarks/results/current: README and the index of results (the file
benchmarks/results/README.md) must quote them correctly, and the figures that each result file states must
agree with the measured data in the same file.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
if not RESULTS.is_dir():
    pytest.skip("an sdist comes without results", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))

import results_index  # noqa: E402
from results_index import Result  # noqa: E402

FOUND = results_index.results()
NUMBER = re.compile(r"(?<![A-Za-z\d.])\d+(?:\.\d+)*")
"""Matches a number in a text, but not digits inside a name such as bf16."""
each_result = pytest.mark.parametrize("result", FOUND, ids=lambda each: each.path.with_suffix("").as_posix())


def section(readme: str) -> str:
    """Return the section "Measured" of README without the targets of its links. readme: README's text."""
    text = readme.partition("\n## Measured\n")[2].partition("\n## ")[0]
    return re.sub(r"\]\([^)]*\)", "]", text)


def numbers(data: Any, *, below: tuple[str, ...] = ()) -> Iterator[float]:
    """Iterate over the numbers in JSON data, except those under the key "sweep".

    below: if not empty, only numbers that lie at any depth under one of these keys are yielded.
    """
    if isinstance(data, dict):
        for key in data.keys() - {"sweep"}:
            yield from numbers(data[key], below=() if key in below else below)
    elif isinstance(data, list):
        for each in data:
            yield from numbers(each, below=below)
    elif isinstance(data, int | float) and not isinstance(data, bool) and not below:
        yield data


def stated(figure: dict[str, Any], *keys: str) -> list[str]:
    """Return the numbers, as written, in the texts that `figure` has under the given keys.

    figure: an entry of "figures" in a result file.
    """
    return NUMBER.findall(" ".join(figure[key] or "" for key in keys))


def is_one_of(text: str, values: set[float]) -> bool:
    """Return whether the number in `text` equals one of `values` after rounding to as many decimals."""
    decimals = len(text.partition(".")[2])
    return any(f"{value:.{decimals}f}" == text for value in values)


def of_turns(data: dict[str, Any], contender: str) -> dict[str, str | None]:
    """Make the texts that an entry of "figures" in a result file must have, and return them by key.

    data: the JSON object that benchmarks/train.py printed. contender: name of a run of infinity in the data;
    it is compared with the data's first peer. The keys are "peer" and "ours" (median step time and peak RSS
    of the peer and of the contender), "ratio" (median of the ratios of their speeds), and "spread" (the least
    and the largest ratio). Without a peer, "peer" and "ratio" are None and "spread" is missing.
    """

    def cell(name: str) -> str:
        each = data["contenders"][name]
        return f"{each['median_s']:.3g} s/step, {each['rss_peak'] / 1e9:.2f} GB"

    if data["first_peer"] is None:
        return {"peer": None, "ours": cell(contender), "ratio": None}
    ratio = data["ratios"][contender]
    return {
        "peer": cell(data["first_peer"]),
        "ours": cell(contender),
        "ratio": f"{ratio['median']:.2f}",
        "spread": f"{min(ratio['rounds']):.2f} to {max(ratio['rounds']):.2f}",
    }


def test_the_index_and_the_table_are_what_the_files_make() -> None:
    readme = (ROOT / "README.md").read_text()
    assert (RESULTS / "README.md").read_text() == results_index.index(FOUND)
    assert readme == results_index.with_table(readme, results_index.measured(FOUND))


@pytest.mark.parametrize("edited", ["README.md", "benchmarks/results/README.md"])
def test_an_edit_by_hand_is_seen_and_undone(
    edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(RESULTS, tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(results_index, "ROOT", tmp_path)
    monkeypatch.setattr(results_index, "RESULTS", tmp_path / "benchmarks" / "results")
    assert results_index.main(["--check"]) == 0

    file = tmp_path / edited
    text = file.read_text()
    spread = next(each["spread"] for result in FOUND for each in result.figures if each.get("readme") == 1)
    assert spread in text
    file.write_text(text.replace(spread, "9.99 to 99.9"))
    assert results_index.main(["--check"]) == 1
    assert results_index.main([]) == 0
    assert file.read_text() == text


def test_there_are_few_files_and_none_without_a_claim() -> None:
    files = {file.relative_to(RESULTS) for file in RESULTS.rglob("*") if file.is_file()}
    data = {result.path.relative_to("benchmarks/results") for result in FOUND}
    assert files == {Path("README.md")} | data | {file.with_suffix(".md") for file in data}
    assert len(files) <= 30


@each_result
def test_a_result_says_where_and_how_it_was_measured(result: Result) -> None:
    record = result.record
    assert record["claim"] == result.path.parent.name
    assert record["machine"]["name"] and record["machine"]["cpu"] and record["machine"]["memory_gib"] > 0
    assert re.fullmatch(r"[0-9a-f]{7,40}", record["commit"]), "of a tree without changes"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert re.match(r"(python benchmarks/\w+\.py|pytest) ", record["command"])
    assert record["figures"] and record["data"]


@each_result
def test_a_figure_is_what_was_measured(result: Result) -> None:
    data = result.record["data"]
    known = {value * scale for value in numbers(data) for scale in (1, 100, 1e-9)}
    ratios = set(numbers(data, below=("ratio", "ratios", "speedups")))
    for figure in result.figures:
        if "contender" in figure:
            written = of_turns(data, figure["contender"])
            assert {key: figure[key] for key in written} == written
        else:
            of = ratios if figure["ratio"] else known
            wrong = [text for text in stated(figure, "peer", "ours") if not is_one_of(text, known)]
            wrong += [text for text in stated(figure, "ratio", "spread") if not is_one_of(text, of)]
            assert wrong == [], figure["what"]


def test_every_figure_that_readme_states_is_one_of_a_result() -> None:
    known = set()
    for result in FOUND:
        known |= set(NUMBER.findall(f"{result.machine} {result.record['peer']}"))
        for figure in result.figures:
            known |= set(stated(figure, "what", "peer", "ours", "ratio", "spread"))
            if "contender" in figure:
                known |= {str(result.record["data"]["settings"][key]) for key in ("batch", "seq")}
    found = set(NUMBER.findall(section((ROOT / "README.md").read_text())))
    assert len(found) > 20
    assert sorted(found - known) == []


def test_readme_has_few_rows() -> None:
    rows = [figure["readme"] for result in FOUND for figure in result.figures if "readme" in figure]
    assert sorted(rows) == list(range(1, len(rows) + 1)) and 1 <= len(rows) <= 5
