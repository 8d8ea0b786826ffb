"""Tests of benchmarks/overhead.py, which counts the calls that Python makes in a training step.

It counts the calls of every thread. From counts that were made up with known numbers of calls per unit,
chunk and parameter, it finds these numbers. A quick run reports every layout and leaves no file.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(os.fspath(BENCHMARKS))
    return importlib.import_module("overhead")


def test_a_quick_run(overhead: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--quick", "--json", "--directory", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {(each["update"], each["home"]): each for each in report["results"]}
    assert set(found) == {(update, home) for update in ("lazy", "eager") for home in overhead.HOMES}
    for each in found.values():
        assert len(each["layouts"]) == 8
        for row in each["layouts"]:
            assert min(row["python"], row["c"]) > 0
            assert row["sum"] == row["python"] + row["c"]
        fit = each["calls"]
        assert all(set(fit[kind]) == {*"abcde", "worst"} for kind in ("python", "c", "sum"))
        for factor in "abcde":
            one = fit["python"][factor] + fit["c"][factor]
            # Each factor is fitted by its own relative errors, which differ where the fit is not exact.
            assert each["home"] != "unified" or one == pytest.approx(fit["sum"][factor], abs=20)
    assert found["lazy", "unified"]["calls"]["sum"]["worst"] < 0.01
    assert list(tmp_path.iterdir()) == []


def test_factors_are_those_of_the_counts(overhead: ModuleType) -> None:
    layouts = [overhead.Layout(n, c, p) for n in (4, 8) for c in (1, 4) for p in (1, 4)]
    counts = [7 + 50 * n + 20 * n * c + 3 * n * p + 2 * n * max(0, p - c) for n, c, p in map(_sizes, layouts)]
    fit = overhead.fitted(layouts, [{"python": each, "c": 2 * each, "sum": 3 * each} for each in counts])
    for times, kind in enumerate(("python", "c", "sum"), start=1):
        expected = {factor: times * value for factor, value in zip("abcde", (7, 50, 20, 3, 2), strict=True)}
        assert fit[kind] == pytest.approx(expected | {"worst": 0}, abs=1e-6)


def test_calls_are_counted_in_every_thread(overhead: ModuleType) -> None:
    def calls(times: int) -> None:
        for _ in range(times):
            inner()

    def inner() -> None:
        len("")
        len("")

    def in_a_thread(times: int) -> None:
        thread = threading.Thread(target=calls, args=(times,))
        thread.start()
        thread.join()

    counter = overhead.Calls()
    with counter.installed():
        alone = counter.of(lambda: None)
        here = [counter.of(lambda n=n: calls(n)) for n in (10, 30)]
        there = [counter.of(lambda n=n: in_a_thread(n)) for n in (10, 30)]
    assert alone == (1, 0)
    assert here == [(12, 20), (32, 60)]
    # Starting and joining a thread may take one more or one less look at a lock.
    assert [b - a for a, b in zip(*there, strict=True)] == pytest.approx([20, 40], abs=5)
    assert counter.of(lambda: calls(10)) == (0, 0), "nobody is looked at any more"


def test_steps_that_are_none(overhead: ModuleType) -> None:
    with pytest.raises(SystemExit) as ended:
        overhead.parse(["--steps", "0"])
    assert ended.value.code == 2


def _sizes(layout: object) -> tuple[int, int, int]:
    return layout.units, layout.chunks, layout.parameters  # type: ignore[attr-defined]
