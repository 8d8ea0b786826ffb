"""Command `infinity checkpoint`: lists the commits of a run, and verifies one."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from infinity import __version__
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import Damage
from infinity.checkpoint.resume import run_state
from infinity.checkpoint.verification import ListedCommit, Verification, list_commits
from infinity.cli.progress import format_seconds
from infinity.config import format_size
from infinity.errors import CorruptState
from infinity.pages.open_tiers import injected_files
from infinity.planning.budget_errors import format_count

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
    parser.add_argument("directory", metavar="DIR", help="the directory of the commits")
    parser.add_argument(
        "--slabs", nargs="+", default=[], metavar="PATH", help="directories where slabs lie, beside DIR"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line of stdout"
    )


# --- ls ---------------------------------------------------------------------------------------------------


def run_ls(options: argparse.Namespace) -> int:
    """Print the commits of a directory. Returns 0 even if some are not whole, which is what the list says."""
    console = Console(stderr=options.json)
    found = list_commits(options.directory, options.slabs, injected_files())
    if not found:
        _say(console, f"no commit in {options.directory}")
    for commit in found:
        for line in _lines(commit):
            _say(console, line)
    if options.json:
        commits = [_listed(commit) for commit in found]
        print(json.dumps({"infinity": __version__, "directory": options.directory, "commits": commits}))
    return 0


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


def run_verify(options: argparse.Namespace) -> int:
    """Read a commit whole, and print what is damaged. Returns 1 if anything is, else 0."""
    console = Console(stderr=options.json)
    started = time.monotonic()
    with Verification(
        options.directory, options.slabs, injected_files(), generation=options.generation
    ) as verification:
        saved = verification.saved
        nbytes, damage = _check(verification, f"commit-{saved.manifest.generation}")
    for fault in saved.skipped:
        _say(console, f"a newer commit is not whole: {fault}")
    for each in damage[:_MOST_LINES]:
        _say(console, f"{each.parameter}, {each.array}, elements {each.first} to {each.end}: {each.cause}")
    if len(damage) > _MOST_LINES:
        _say(console, f"and {len(damage) - _MOST_LINES} ranges more")
    seconds = time.monotonic() - started
    count = len(saved.manifest.parameters)
    state = f"damaged in {len({each.parameter for each in damage})} of" if damage else "whole:"
    _say(
        console,
        f"commit-{saved.manifest.generation} is {state} {count} parameters, {format_size(nbytes)} read in "
        f"{format_seconds(seconds)}",
    )
    whole = not damage and not saved.skipped
    if options.json:
        print(
            json.dumps(
                {
                    "infinity": __version__,
                    "directory": options.directory,
                    "generation": saved.manifest.generation,
                    "whole": whole,
                    "parameters": count,
                    "bytes": nbytes,
                    "seconds": seconds,
                    "damage": [asdict(each) for each in damage],
                    "skipped": list(saved.skipped),
                }
            )
        )
    return 0 if whole else 1


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
