"""Command `infinity checkpoint`: lists the commits of a run, and verifies one."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from infinity import __version__
from infinity.checkpoint.commit_files import SavedCommit, generations
from infinity.checkpoint.commit_source import Damage
from infinity.checkpoint.rank_parts import RankParts, absent, list_ranks, newest_readable, newest_whole
from infinity.checkpoint.resume import run_state
from infinity.checkpoint.verification import ListedCommit, Verification, list_commits
from infinity.cli.progress import format_seconds
from infinity.config import format_size
from infinity.errors import CorruptState, named_ranks
from infinity.pages.open_tiers import injected_files
from infinity.planning.budgets import format_count
from infinity.system.directory import check_directory

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
    _add_ls(actions)
    _add_verify(actions)


def _add_ls(actions: Any) -> None:
    parser = actions.add_parser(
        "ls", help="list the commits of a directory", description="List commits. No page is read."
    )
    _add_common(parser)
    parser.set_defaults(run=run_ls)


def _add_verify(actions: Any) -> None:
    parser = actions.add_parser(
        "verify",
        help="read a commit whole, and compare every block with its checksum",
        description="Read every page of a commit and compare it with its checksums. Exit code 0: whole. "
        "1: damaged.",
    )
    _add_common(parser)
    parser.add_argument(
        "--generation", type=int, metavar="N", help="verify commit-N (default: the newest that is whole)"
    )
    parser.set_defaults(run=run_verify)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", help="the directory of the commits, or of several ranks' directories"
    )
    parser.add_argument(
        "--slabs", nargs="+", default=[], metavar="PATH", help="directories where slabs lie, beside DIR"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line of stdout"
    )


# --- ls ---------------------------------------------------------------------------------------------------


def run_ls(options: argparse.Namespace) -> int:
    """Print the commits of a directory, and of the ranks that have directories in it. Returns 0 even if some
    are not whole, which is what the list says.
    """
    console = Console(stderr=options.json)
    found = list_commits(options.directory, options.slabs, injected_files())
    ranks = list_ranks(options.directory, options.slabs, injected_files())
    if not found and not ranks:
        _say(console, f"no commit in {options.directory}")
    for commit in found:
        for line in _lines(commit):
            _say(console, line)
    for rank, parts in ranks.items():
        _say(console, f"rank {rank} · {parts.directory}" + ("" if parts.commits else " · no commit"))
        for line in (line for commit in parts.commits for line in _lines(commit)):
            _say(console, f"  {line}")
    if ranks:
        _say(console, _common(ranks))
    if options.json:
        said: dict[str, Any] = {"infinity": __version__, "directory": options.directory}
        said["commits"] = [_listed(commit) for commit in found]
        if ranks:
            newest = newest_whole(ranks)
            said["ranks"] = [
                {
                    "rank": rank,
                    "directory": str(parts.directory),
                    "commits": [_listed(commit) for commit in parts.commits],
                }
                for rank, parts in ranks.items()
            ]
            said["whole_on_all"] = None if newest is None else newest._asdict()
            said["absent"] = absent(ranks)
        print(json.dumps(said))
    return 0


def _common(ranks: Mapping[int, RankParts]) -> str:
    """Say which commit is whole on all ranks that were found."""
    newest, lacking = newest_whole(ranks), absent(ranks)
    others = f"; without a directory here: {named_ranks(lacking)}" if lacking else ""
    if newest is None:
        return f"no commit is whole on {named_ranks(ranks)}{others}"
    return f"commit-{newest.generation} is the newest that is whole on {named_ranks(ranks)}{others}"


def _lines(commit: ListedCommit) -> list[str]:
    name = f"commit-{commit.generation}"
    if commit.saved is None:
        return [f"{name} · not whole: {commit.fault}"]
    manifest = commit.saved.manifest
    said = _described(commit.saved)
    step = "" if said["step"] is None else f"step {said['step']} · "
    lines = [
        f"{name} · {step}{manifest.created} · {format_count(said['parameters'])} parameters · "
        f"{said['optimizer']}, {said['states']} states · {manifest.world_size} rank(s) · "
        f"{format_size(sum(slab.nbytes for slab in commit.slabs))} · "
        + ("whole" if commit.whole else "not whole")
    ]
    for slab in commit.slabs:
        where = slab.path or "nowhere"
        fault = "" if slab.fault is None else f": {slab.fault}"
        lines.append(f"  slab {slab.uuid} · {format_size(slab.nbytes)} · {where}{fault}")
    return [*lines, f"  by {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}"]


def _listed(commit: ListedCommit) -> dict[str, Any]:
    said = {} if commit.saved is None else _described(commit.saved)
    return {
        "generation": commit.generation,
        "whole": commit.whole,
        "fault": commit.fault,
        **said,
        "bytes": sum(slab.nbytes for slab in commit.slabs),
        "slabs": [asdict(slab) for slab in commit.slabs],
    }


def _described(saved: SavedCommit) -> dict[str, Any]:
    manifest = saved.manifest
    return {
        "step": _step(saved),
        "created": manifest.created,
        "parameters": sum(entry.numel for entry in manifest.parameters),
        "optimizer": manifest.rule.name,
        "states": manifest.rule.states,
        "world_size": manifest.world_size,
        "versions": dict(manifest.versions),
    }


def _step(saved: SavedCommit) -> int | None:
    """The number of steps in the user's state, if it is a dict that has one."""
    try:
        state = run_state(saved).user_state
    except CorruptState:
        return None
    step = state.get("step") if isinstance(state, dict) else None
    return step if isinstance(step, int) else None


# --- verify -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """What reading one commit, or one rank's part of it, has found."""

    saved: SavedCommit
    skipped: tuple[str, ...]
    """What is wrong with newer commits that are not whole, and were passed over."""
    nbytes: int
    damage: list[Damage]
    seconds: float

    @property
    def whole(self) -> bool:
        return not self.damage and not self.skipped

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {
            "generation": self.saved.manifest.generation,
            "whole": self.whole,
            "parameters": len(self.saved.manifest.parameters),
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "damage": [asdict(each) for each in self.damage],
            "skipped": list(self.skipped),
        }


def run_verify(options: argparse.Namespace) -> int:
    """Read a commit whole, and print what is damaged. Returns 1 if anything is, else 0."""
    files = injected_files()
    ranks = {}
    if not generations(check_directory(options.directory)):
        ranks = list_ranks(options.directory, options.slabs, files)
    if ranks:
        return _verify_ranks(options, ranks)
    console = Console(stderr=options.json)
    started = time.monotonic()
    with Verification(options.directory, options.slabs, files, generation=options.generation) as verification:
        result = _verified(verification, verification.saved.skipped, started)
    _tell(console, result)
    if options.json:
        print(json.dumps({"infinity": __version__, "directory": options.directory, **result.as_dict()}))
    return 0 if result.whole else 1


def _verify_ranks(options: argparse.Namespace, ranks: Mapping[int, RankParts]) -> int:
    """Do what `run_verify` does for the parts of a commit in the directories of ranks.

    Without --generation, the newest commit is taken that a restart of these ranks would continue.
    """
    console = Console(stderr=options.json)
    generation = options.generation
    if generation is None:
        generation = newest_readable(options.directory, ranks).generation
    started = time.monotonic()
    results: dict[int, _Result] = {}
    with ExitStack() as stack:
        opened = {
            rank: stack.enter_context(
                Verification(parts.directory, options.slabs, injected_files(), generation=generation)
            )
            for rank, parts in ranks.items()
        }
        times = {each.saved.manifest.created for each in opened.values()}
        if len(times) > 1:
            raise CorruptState(
                f"The parts of commit-{generation} in {options.directory} are of several commits, which were "
                f"made at {', '.join(sorted(times))}.",
                "Give each rank the directory that it had in one run.",
            )
        for rank, verification in opened.items():
            skipped = ranks[rank].skipped(generation) if options.generation is None else ()
            results[rank] = _verified(verification, skipped, time.monotonic())
            _tell(console, results[rank], f"rank {rank}: ")
    lacking = absent(ranks)
    if lacking:
        _say(console, f"not verified, without a directory here: {named_ranks(lacking)}")
    whole = all(each.whole for each in results.values())
    if options.json:
        said = {
            "infinity": __version__,
            "directory": options.directory,
            "generation": generation,
            "whole": whole,
            "seconds": time.monotonic() - started,
            "ranks": [{"rank": rank, **each.as_dict()} for rank, each in results.items()],
            "absent": lacking,
        }
        print(json.dumps(said))
    return 0 if whole else 1


def _verified(verification: Verification, skipped: tuple[str, ...], started: float) -> _Result:
    """Read everything. skipped: as in the result. started: time.monotonic() when the work began."""
    saved = verification.saved
    of_ranks = saved.manifest.world_size > 1
    name = f"commit-{saved.manifest.generation}" + (f" of rank {saved.manifest.rank}" if of_ranks else "")
    nbytes, damage = _check(verification, name)
    return _Result(saved, skipped, nbytes, damage, time.monotonic() - started)


def _tell(console: Console, result: _Result, of: str = "") -> None:
    """Print what was found. of: the beginning of each line."""
    damage, saved = result.damage, result.saved
    for fault in result.skipped:
        _say(console, f"{of}a newer commit is not whole: {fault}")
    for each in damage[:_MOST_LINES]:
        _say(
            console, f"{of}{each.parameter}, {each.array}, elements {each.first} to {each.end}: {each.cause}"
        )
    if len(damage) > _MOST_LINES:
        _say(console, f"{of}and {len(damage) - _MOST_LINES} ranges more")
    count = len(saved.manifest.parameters)
    state = f"damaged in {len({each.parameter for each in damage})} of" if damage else "whole:"
    _say(
        console,
        f"{of}commit-{saved.manifest.generation} is {state} {count} parameters, {format_size(result.nbytes)} "
        f"read in {format_seconds(result.seconds)}",
    )


def _check(verification: Verification, name: str) -> tuple[int, list[Damage]]:
    """Read everything, with a bar on a terminal. Returns the number of bytes read, and all damage."""
    nbytes = 0
    damage: list[Damage] = []
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=verification.nbytes)
        for checked in verification.check():
            nbytes += checked.nbytes
            damage += checked.damage
            bar.advance(task, checked.nbytes)
    return nbytes, damage


def _say(console: Console, line: str) -> None:
    console.print(escape(line), highlight=False, soft_wrap=True)
