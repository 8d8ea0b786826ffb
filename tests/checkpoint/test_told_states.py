"""Tests that a resumed run and a loaded copy tell the same of states that could not be taken over."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from runs_on_disk import Run
from torch import nn
from zoo import Entry, entry

WHOLE = entry("tied")


def without(names: Sequence[str]) -> Entry:
    """The model with these parameters frozen."""

    def build() -> nn.Module:
        model = WHOLE.build()
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return replace(WHOLE, build=build)


def names_in(run: Run) -> list[str]:
    return [name for name, each in run.of.make().named_parameters() if each.ndim > 1][:2]


@pytest.mark.parametrize("case", ["begins anew", "left out", "the same"])
def test_a_resumed_run_tells_what_a_loaded_copy_tells(case: str, tmp_path: Path) -> None:
    one, two = names_in(Run(tmp_path, of=WHOLE))
    then, now, wanted = {
        "begins anew": ([one, two], [two], [f"The optimizer states of {one} begin anew"]),
        "left out": ([two], [one, two], [f"The checkpoint's optimizer states of {one} were left out"]),
        "the same": ([one], [one], []),
    }[case]
    run = Run(tmp_path, of=without(then))
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(2))
        runtime.save(state=2).wait()
        runtime.save(tmp_path / "copy", state=2)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with replace(run, of=without(now)).opened(resume=True) as (model, runtime):
            assert runtime.load() == 2
            run.train(model, runtime, range(2, 3))
        told.append([each for each in caught if "optimizer states" in str(each.message)])
    (tmp_path / "other").mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Run(tmp_path / "other", of=without(now)).opened() as (model, runtime):
            assert runtime.load(tmp_path / "copy") == 2
            run.train(model, runtime, range(2, 3))
        told.append([each for each in caught if "optimizer states" in str(each.message)])
    resumed, loaded = ([str(each.message) for each in some] for some in told)
    assert resumed == loaded
    assert len(resumed) == len(wanted)
    assert all(text.startswith(start) for text, start in zip(resumed, wanted, strict=True))
    callers = [[Path(each.filename).name for each in some] for some in told]
    assert callers == [["runs_on_disk.py"] * len(wanted), [Path(__file__).name] * len(wanted)]
