"""Command `infinity checkpoint`: lists the commits of a run, and verifies one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from infinity.checkpoint.commit_files import SavedCommit, generations
from infinity.checkpoint.manifest import named_commits
from infinity.checkpoint.verification import (
    ListedCommit,
    Verification,
    absent,
    list_commits,
    list_ranks,
    newest_of_all,
)
from infinity.cli.command import Output, add_json
from infinity.config import format_size
from infinity.errors import CorruptState, named_ranks
from infinity.planning.budgets import format_count
from infinity.system.directory import check_directory
from infinity.system.disk_files import injected_files

_MOST_LINES = 100
"""Number of damaged ranges that are printed for people; --json has all."""


def add_parser(subparsers: Any) -> None:
    """Add `checkpoint` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "checkpoint",
        help="list the commits of a run, or read one whole and check it",
        description="Look at the commits that infinity train --checkpoint or Runtime.save has made.",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the commits of a directory; no page is read")
    text = "read a commit whole, and compare every block with its checksum; exit code 1: damaged"
    verify = actions.add_parser("verify", help=text)
    for each, run in ((ls, run_ls), (verify, run_verify)):
        where = "the directory of the commits, or of several ranks' directories"
        each.add_argument("directory", metavar="DIR", help=where)
        slabs = "directories where slabs lie, beside DIR"
        each.add_argument("--slabs", nargs="+", default=[], metavar="PATH", help=slabs)
        add_json(each)
        each.set_defaults(run=run)
    newest = "verify commit-N (default: the newest that is whole)"
    verify.add_argument("--generation", type=int, metavar="N", help=newest)


# --- ls ---------------------------------------------------------------------------------------------------


def run_ls(options: argparse.Namespace) -> int:
    """Print the commits of a directory and of the directories of ranks in it. Returns 0 even if some commits
    are not whole; the printed list says which.
    """
    out, directory = Output(options), options.directory
    commits = list_commits(directory, options.slabs, injected_files())
    ranks = list_ranks(directory, options.slabs, injected_files())
    for commit in commits:
        out.say(_lines(commit))
    found = {"directory": directory, "commits": [_listed(commit) for commit in commits]}
    for rank, parts in ranks.items():
        out.say(f"rank {rank} · {parts.directory}" + ("" if parts.commits else " · no commit"))
        for commit in parts.commits:
            out.say("  " + _lines(commit).replace("\n", "\n  "))
    if ranks:
        newest, lacking = newest_of_all(ranks, slabs=True), absent(ranks)
        others = f"; without a directory here: {named_ranks(lacking)}" if lacking else ""
        which = "no commit is" if newest is None else f"commit-{newest.generation} is the newest that is"
        out.say(f"{which} whole on {named_ranks(ranks)}{others}")
        found["ranks"] = [
            {"rank": rank, "directory": str(parts.directory), "commits": [_listed(c) for c in parts.commits]}
            for rank, parts in ranks.items()
        ]
        found |= {"whole_on_all": newest and newest._asdict(), "absent": lacking}
    elif not commits:
        out.say(f"no commit in {directory}")
    out.json(found)
    return 0


def _lines(commit: ListedCommit) -> str:
    """The text of a commit and its slabs, one line each."""
    said, name = _listed(commit), f"commit-{commit.generation}"
    if commit.saved is None:
        return f"{name} · not whole: {commit.fault}"
    lines = [
        f"{name} · " + ("" if said["step"] is None else f"step {said['step']} · ") + f"{said['created']} · "
        f"{format_count(said['parameters'])} parameters · {said['optimizer']}, {said['states']} states · "
        f"{said['world_size']} rank(s) · {format_size(said['bytes'])} · "
        + ("whole" if commit.whole else "not whole")
    ]
    for slab in commit.slabs:
        fault = "" if slab.fault is None else f": {slab.fault}"
        lines.append(f"  slab {slab.uuid} · {format_size(slab.nbytes)} · {slab.path or 'nowhere'}{fault}")
    return "\n".join([*lines, "  by " + ", ".join(" ".join(each) for each in said["versions"].items())])


def _listed(commit: ListedCommit) -> dict[str, Any]:
    """A commit as a dict for --json."""
    slabs = [asdict(slab) for slab in commit.slabs]
    found = {
        "generation": commit.generation,
        "whole": commit.whole,
        "fault": commit.fault,
        "bytes": sum(slab["nbytes"] for slab in slabs),
        "slabs": slabs,
    }
    if commit.saved is not None:
        manifest = commit.saved.manifest
        found |= {
            "step": _step(commit.saved),
            "created": manifest.created,
            "parameters": sum(entry.numel for entry in manifest.parameters),
            "optimizer": None if manifest.rule is None else manifest.rule.name,
            "states": manifest.precision.states,
            "world_size": manifest.world_size,
            "versions": dict(manifest.versions),
        }
    return found


def _step(saved: SavedCommit) -> int | None:
    """The number of steps in the user's state; None if the state is not a dict with such a number."""
    try:
        state = saved.run.user_state
    except CorruptState:
        return None
    step = state.get("step") if isinstance(state, dict) else None
    return step if isinstance(step, int) else None


# --- verify -----------------------------------------------------------------------------------------------


def run_verify(options: argparse.Namespace) -> int:
    """Read all bytes of a commit, or of its rank commits in the directories of ranks, and print damage.

    Without --generation, the commit is the newest one, which a restart would continue. Returns 1 if anything
    is damaged, else 0. Raises CorruptState if the ranks have no whole commit in common.
    """
    out, directory, files = Output(options), options.directory, injected_files()
    several = not generations(check_directory(directory))
    ranks = list_ranks(directory, options.slabs, files) if several else {}
    generation, started = options.generation, time.monotonic()
    if ranks and generation is None:
        newest = newest_of_all(ranks, slabs=False)
        if newest is None:
            told = (
                f"rank {rank} has {named_commits(each.names(slabs=False))}" for rank, each in ranks.items()
            )
            raise CorruptState(
                f"There is no commit in {directory} whose rank commits are all whole: {'; '.join(told)}.",
                "Give the directory of --checkpoint, or of checkpoint=, of one run.",
            )
        generation = newest.generation
    with ExitStack() as stack:
        opened = {
            rank: stack.enter_context(Verification(where, options.slabs, files, generation=generation))
            for rank, where in (
                {rank: each.directory for rank, each in ranks.items()} or {0: directory}
            ).items()
        }
        times = sorted({each.saved.manifest.created for each in opened.values()})
        if len(times) > 1:
            raise CorruptState(
                f"The rank commits numbered {generation} in {directory} are of several commits, made at "
                f"{', '.join(times)}.",
                "Give each rank the directory that it had in one run.",
            )
        results = []
        for rank, verification in opened.items():
            skipped = verification.saved.skipped
            if ranks:
                newer = (each for each in reversed(ranks[rank].commits) if each.generation > generation)
                faults = tuple(each.fault for each in newer if each.fault is not None)
                skipped = faults if options.generation is None else ()
            results.append(_verified(verification, skipped))
            _tell(out, results[-1], f"rank {rank}: " if ranks else "")
    whole = all(each["whole"] for each in results)
    if not ranks:
        out.json({"directory": directory, **results[0]})
        return 0 if whole else 1
    lacking = absent(ranks)
    if lacking:
        out.say(f"not verified, without a directory here: {named_ranks(lacking)}")
    found = {"directory": directory, "generation": generation, "whole": whole, "absent": lacking}
    parts = [{"rank": rank, **each} for rank, each in zip(ranks, results, strict=True)]
    out.json({**found, "seconds": time.monotonic() - started, "ranks": parts})
    return 0 if whole else 1


def _verified(verification: Verification, skipped: tuple[str, ...]) -> dict[str, Any]:
    """Read all bytes of a rank's commit, with a progress bar on a terminal, and return the result for --json.
    skipped: the faults of newer commits, which are not whole and were passed over.
    """
    manifest, started, nbytes = verification.saved.manifest, time.monotonic(), 0
    damage = []
    name = f"commit-{manifest.generation}"
    name += f" of rank {manifest.rank}" if manifest.world_size > 1 else ""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=verification.nbytes)
        for checked in verification.check():
            nbytes += checked.nbytes
            damage += [asdict(each) for each in checked.damage]
            bar.advance(task, checked.nbytes)
    return {
        "generation": manifest.generation,
        "whole": not damage and not skipped,
        "parameters": len(manifest.parameters),
        "bytes": nbytes,
        "seconds": time.monotonic() - started,
        "damage": damage,
        "skipped": list(skipped),
    }


def _tell(out: Output, result: Mapping[str, Any], of: str) -> None:
    """Print a result of `_verified` as lines for people. of: text before each line, such as "rank 0: "."""
    damage = result["damage"]
    for fault in result["skipped"]:
        out.say(f"{of}a newer commit is not whole: {fault}")
    for each in damage[:_MOST_LINES]:
        elements = f"elements {each['first']} to {each['end']}"
        out.say(f"{of}{each['parameter']}, {each['array']}, {elements}: {each['cause']}")
    if len(damage) > _MOST_LINES:
        out.say(f"{of}and {len(damage) - _MOST_LINES} ranges more")
    state = f"damaged in {len({each['parameter'] for each in damage})} of" if damage else "whole:"
    out.say(
        f"{of}commit-{result['generation']} is {state} {result['parameters']} parameters, "
        f"{format_size(result['bytes'])} read in {timedelta(seconds=round(result['seconds']))}"
    )
