"""Cases of ranked_cases.py whose runs go on from commits, or from copies (`Runtime.save(path)`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from ranked_cases import (
    HOMES,
    SEED,
    Case,
    Place,
    digest,
    nothing,
    precision_of,
    running,
    tell_updates,
    tell_values,
)
from ranked_models import SUBJECTS

from infinity import api
from infinity.layout.chunks import Division
from infinity.layout.units import survey
from infinity.model.tiled_parameter import TiledParameter
from infinity.runtime import Runtime

CUTS = ("chunks", "one unit", "small units")
"""How a run cuts pages that goes on from a commit."""


def train_with_a_break(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Train a case as `train` does, but have a second runtime go on from a commit after the second step. The
    first runtime takes another step, which is lost.
    """
    commits, found = directory / "commits" / case.name, nothing()
    with running(case, place, directory, checkpoint=commits) as run:
        run.take_steps(
            range(2),
            found,
            then=lambda: run.runtime.save(state={"rank": place.rank, "schedulers": run.schedules()}),
        )
        run.take_steps(range(2, 3), nothing())
    with running(case, place, directory, resume=commits) as run:
        state = run.runtime.load()
        assert state["rank"] == place.rank
        run.load_schedules(state["schedulers"])
        run.take_steps(range(2, case.steps), found, then=run.runtime.save)
        tell_values(run.model, found)
        tell_updates(run.runtime, found)
    return found


def train_with_a_move(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Train a case as `train` does, but have a second runtime stream a commit into slabs elsewhere and go on
    from it, and a third one end with what the second one has committed.

    Slabs that lay on paths of their own are then in the directories of the ranks, and commits go on in these.
    Otherwise the commits go to other directories, too.
    """
    commits, elsewhere = directory / "commits" / case.name, directory / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    found = nothing()
    with running(case, place, directory, checkpoint=commits) as run:
        run.take_steps(range(2), found)
        run.runtime.save(state=run.schedules()).wait()
        old = [each.path for each in run.runtime._components.store.nvme.slabs]
    further = {"resume": commits}
    if case.home == "nvme":
        old = [each.rename(commits / f"rank-{place.rank}" / each.name) for each in old]
    else:
        further = {"resume": commits, "checkpoint": directory / "other commits" / case.name}
    with running(case, place, elsewhere, **further) as run:
        runtime, checkpoint = run.runtime, run.runtime._components.checkpoint
        assert checkpoint.streamed_from is not None
        run.load_schedules(runtime.load())

        def commit() -> None:
            runtime.save().wait()
            assert checkpoint.streamed_from is None

        run.take_steps(range(2, case.steps), found, then=commit)
        assert all(each.exists() != checkpoint.continues for each in old)
        tell_values(run.model, found)
        states = digests_of_states(runtime)
    with running(case, place, elsewhere, resume=further.get("checkpoint", commits)) as run:
        assert run.runtime._components.checkpoint.streamed_from is None
        last: dict[str, Any] = {}
        tell_values(run.model, last)
        assert last["digests"] == found["digests"]
        assert digests_of_states(run.runtime) == states
    return found


def begin(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Take the first step of a case, commit, and end."""
    found = nothing()
    with running(case, place, directory, checkpoint=_commits_of_all(case, directory)) as run:
        run.take_steps(range(1), found)
        run.runtime.save(state=run.schedules()).wait()
    return found


def go_on(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Go on from the last commit of a case, which any number of ranks may have made, and take one more step.

    Nothing of that commit is left then but what it has in common with the new one.
    """
    found, commits = nothing(), _commits_of_all(case, directory)
    with running(case, place, directory, resume=commits) as run:
        run.load_schedules(run.runtime.load())
        run.take_steps(range(case.first, case.first + 1), found)
        run.runtime.save(state=run.schedules()).wait()
        tell_values(run.model, found)
        found["states"] = digests_of_states(run.runtime)
    return found


def left_over(case: Case, ranks: int, directory: Path) -> list[str]:
    """How the files of commits of a case differ from those of one commit of so many ranks."""
    commits = _commits_of_all(case, directory)
    number = case.first + 1
    mine = {f"rank-{rank}/commit-{number}" for rank in range(ranks)} if ranks > 1 else {f"commit-{number}"}
    of_ranks = {f"rank-{rank}" for rank in range(ranks)} if ranks > 1 else set()
    found = [*commits.rglob("commit-*"), *commits.glob("rank-*")]
    wanted = mine | {f"{each}.safetensors" for each in mine} | of_ranks
    return sorted({f"{each.relative_to(commits)}" for each in found} ^ wanted)


def _commits_of_all(case: Case, directory: Path) -> Path:
    return directory / "commits" / replace(case, first=0, accumulate=1, stage=0).name


def train_on_other_nodes(case: Case, place: Place, directory: Path, how: str | None = None) -> dict[str, Any]:
    """Train a case as `train` does, but have each rank go on from a commit on the node of another rank,
    and begin there once more in the end. A node is a directory. how: of CUTS, how the second run cuts pages;
    None: as the first.
    """
    found = nothing()
    node, commits = _node(directory, place.rank), _commits(case, place.rank, directory)
    with running(case, place, node, checkpoint=commits) as run:
        run.take_steps(range(2), found)
        run.runtime.save(state=run.schedules()).wait()
    number = (place.rank + 1) % place.ranks
    node, commits = _node(directory, number), _commits(case, number, directory)
    with nullcontext() if how is None else cut(case, how), running(case, place, node, resume=commits) as run:
        runtime = run.runtime
        continued = runtime._components.checkpoint.continued
        assert continued.own is None and continued.recut == (how is not None)
        run.load_schedules(runtime.load())
        run.take_steps(range(2, case.steps), found, then=lambda: runtime.save().wait())
        tell_values(run.model, found)
        states = digests_of_states(runtime)
    # What was here of another rank is gone, as all ranks have committed where they are now.
    assert sorted(each.name for each in commits.rglob("commit-*[0-9]")) == [f"commit-{case.steps - 1}"]
    assert {each.name.split("-")[1] for each in node.rglob("*.slab")} == {f"rank{place.rank}"}
    with running(case, place, node, resume=commits) as run:
        assert run.runtime._components.checkpoint.continued.own is not None
        last: dict[str, Any] = {}
        tell_values(run.model, last)
        assert last["digests"] == found["digests"]
        assert digests_of_states(run.runtime) == states
    return found


def train_back_and_forth(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Train a case as `train` does, but have each rank go on from a commit on the node of another rank, and
    from there on its first node. Both nodes still have what it committed first, as after power cuts.
    """
    found, number = nothing(), (place.rank + 1) % place.ranks
    node, commits = _node(directory, place.rank), _commits(case, place.rank, directory)
    with running(case, place, node, checkpoint=commits) as run:
        run.take_steps(range(1), found)
        run.runtime.save(state=run.schedules()).wait()
    files = (path for path in node.rglob("*") if path.is_file() and path.suffix != ".lock")
    kept = {path: path.read_bytes() for path in files}
    there, elsewhere = _node(directory, number), _commits(case, number, directory)
    with running(case, place, there, resume=elsewhere) as run:
        run.load_schedules(run.runtime.load())
        run.take_steps(range(1, 2), found)
        run.runtime.save(state=run.schedules()).wait()
    assert not any(path.exists() for path in kept)
    for path, content in kept.items():
        for each in (path, there / path.relative_to(node)):
            each.parent.mkdir(parents=True, exist_ok=True)
            each.write_bytes(content)
    node = _node(directory, place.rank)
    with running(case, place, node, resume=commits) as run:
        assert run.runtime._components.checkpoint.continued.own is None
        run.load_schedules(run.runtime.load())
        assert all(path.exists() for path in kept)
        run.take_steps(range(2, case.steps), found)
        run.runtime.save(state=run.schedules()).wait()
        tell_values(run.model, found)
        (slab,) = node.rglob("*.slab")
        assert slab not in kept
        assert len(list(node.rglob("commit-*[0-9]"))) == 1
    return found


def train_cut_otherwise(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Train a case as `train` does, but have a runtime with other chunks, units, homes and another stage go
    on from a commit before each step but the first.
    """
    commits, found = directory / "commits" / case.name, nothing()
    divisions = set()
    with running(case, place, directory, checkpoint=commits) as run:
        run.take_steps(range(1), found)
        run.runtime.save(state=run.schedules())
        divisions.add(Division.of(run.runtime.plan.layout))
        states = digests_of_states(run.runtime)
    for step in range(1, case.steps):
        for slab in _slabs(directory, place):
            slab.rename(commits / f"rank-{place.rank}" / slab.name)
        other = replace(case, home=HOMES[(HOMES.index(case.home) + step) % len(HOMES)])
        if step % 2:
            other = replace(other, stage=case.stage ^ 1 if case.accumulate > 1 else (case.stage + 1) % 4)
        with cut(case, CUTS[step % len(CUTS)]), running(other, place, directory, resume=commits) as run:
            divisions.add(Division.of(run.runtime.plan.layout))
            run.load_schedules(run.runtime.load())
            assert states == digests_of_states(run.runtime)
            run.take_steps(range(step, step + 1), found)
            run.runtime.save(state=run.schedules())
            tell_values(run.model, found)
            states = digests_of_states(run.runtime)
    for slab in _slabs(directory, place):
        slab.rename(commits / f"rank-{place.rank}" / slab.name)
    assert len(divisions) > 1
    slabs = list((commits / f"rank-{place.rank}").glob("*.slab"))
    assert len(slabs) == 1, slabs
    return found


def resume_with_other_frozen_layers(case: Case, place: Place, directory: Path) -> bool:
    """Go on from a commit of a case with another model, of which other layers are frozen. Returns whether it
    begins with the values of the commit.
    """
    commits, before, after = directory / "commits" / case.name, nothing(), nothing()
    with running(case, place, directory, checkpoint=commits) as run:
        run.take_steps(range(2), before)
        run.runtime.save()
        tell_values(run.model, before)
    other = replace(case, subject="mlp" if case.subject == "adapted" else "adapted")
    with running(other, place, directory, resume=commits) as run:
        tell_values(run.model, after)
        run.take_steps(range(2, 3), nothing(), then=lambda: run.runtime.save().wait())
    same: bool = after["digests"] == before["digests"]
    return same


def cut(case: Case, how: str) -> Any:
    """Context in which runs that go on from commits prefer another division. how: of CUTS."""
    make = SUBJECTS[case.subject].make

    def division(saved: Any) -> Division:
        before = division_of(saved)
        if how == "chunks":
            return replace(before, chunk_elements=12288 if before.chunk_elements == 8192 else 8192)
        surveyed = survey(make(), precision_of(case))
        grouped = surveyed.group(1 << 30 if how == "one unit" else 1)
        names = [each.names[0] for each in surveyed.parameters]
        units = tuple((name, tuple(names[index] for index in members)) for name, members in grouped)
        return Division(units, before.chunk_elements)

    division_of = api.division_of
    return mock.patch.object(api, "division_of", division)


def _slabs(directory: Path, place: Place) -> list[Path]:
    """A rank's slabs in the directory of homes on NVMe."""
    return list(directory.glob(f"infinity-rank{place.rank}-*.slab"))


def digests_of_states(runtime: Runtime) -> dict[str, str]:
    """Digests of all entries of the optimizer's state, by number of the parameter and name."""
    state = runtime.optimizer.state_dict()["state"]
    return {f"{number} {name}": digest(each) for number, of in state.items() for name, each in of.items()}


def _node(directory: Path, number: int) -> Path:
    """Put this rank on a node, for runtimes that it makes from now on. Returns the node's disk."""
    os.environ.update(GROUP_RANK=str(number), LOCAL_WORLD_SIZE="1")
    node = directory / f"node-{number}"
    node.mkdir(exist_ok=True)
    return node


def _commits(case: Case, number: int, directory: Path) -> Path:
    """Where the commits of a case go on a node."""
    return directory / f"node-{number}" / "commits" / case.name


# --- copies -----------------------------------------------------------------------------------------------


def train_and_copy(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Train two steps of a case, save a copy of the run, and go on. Returns what `train` does."""
    found = nothing()
    with running(case, place, directory) as run:
        run.take_steps(range(2), found)
        state = {"rank": place.rank, "schedulers": run.schedules()}
        run.runtime.save(_copy_of(case, directory), state=state).wait()
        run.take_steps(range(2, case.steps), found)
        tell_values(run.model, found)
    return found


def train_from_copy(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Train a step of a case with other values, take over a copy of a run, and go on from there.

    Returns what `train` does about the steps after the copy's.
    """
    found = nothing()
    with running(case, place, directory, seed=SEED + 100) as run:
        run.take_steps(range(1), nothing())
        roomy = case.home in ("unified", "device")  # the other budgets have no room for views that are held
        first = list(run.model.named_parameters())[: 2 * roomy]
        # What `detach` returns of a tiled weight is a copy.
        held = {name: each.detach() for name, each in first if not isinstance(each, TiledParameter)}
        state = run.runtime.load(_copy_of(case, directory))
        for name in list(held):
            assert digest(held.pop(name)) == digest(run.model.get_parameter(name)), (
                "views have the new values"
            )
        assert state["rank"] == 0
        run.load_schedules(state["schedulers"])
        run.take_steps(range(2, case.steps), found)
        tell_values(run.model, found)
    return found


def train_in_turns(case: Case, places: Sequence[Place], directory: Path) -> dict[str, Any]:
    """Train a case on one rank, with the micro-batches of one place for two steps, and of another one for the
    others. Returns what `train_from_copy` does at the second place.
    """
    found = nothing()
    with running(case, places[0], directory) as run:
        run.take_steps(range(2), nothing())
        replace(run, place=places[1]).take_steps(range(2, case.steps), found)
        tell_values(run.model, found)
    return found


def _copy_of(case: Case, directory: Path) -> Path:
    return directory / "copies" / case.copy
