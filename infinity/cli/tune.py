"""Command `infinity tune`: finds the best I/O settings for this machine's disks, and saves them."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from infinity.api import several_ranks
from infinity.cli.command import Output, add_json, ending_together, leads
from infinity.config import format_size
from infinity.errors import ConfigError
from infinity.planning import machine_rates
from infinity.planning.machine_file import Machine, check_writable
from infinity.planning.network import rate_text
from infinity.tiers.trial_file import MODES
from infinity.tuning.tune import DiskSweep, Measured, Tuning, tune


def add_parser(subparsers: Any) -> None:
    """Add `tune` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "tune",
        help="find the I/O engine, block size and depth that suit each disk, and keep them",
        description="Try I/O engines, block sizes, depths and threads in turn on a test file, which is "
        "removed at the end. With several paths, also find the share of the bytes that each path should get. "
        "The settings are saved in the user's cache, where plan, train and all I/O find them. Takes under a "
        "minute. Started by torchrun on several nodes, measure the network between these instead.",
    )
    path = "a directory on a disk to be tuned (repeatable; default: the current directory)"
    parser.add_argument("--path", action="append", metavar="DIR", help=path)
    size = "size of the test file in each path, such as 8GiB (default: 2GiB, or half of the free space)"
    parser.add_argument("--size", help=size)
    machine = (
        "also write the rates, memory sizes and links of this machine to FILE, for `infinity plan --machine "
        "FILE` on another one"
    )
    parser.add_argument("--machine", metavar="FILE", help=machine)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Find the best I/O settings for the disks that the options name, save and print them. Returns 0.

    One of several ranks measures the network between nodes instead. Raises InfinityError if a directory is
    unusable.
    """
    if several_ranks(None):
        return _tune_network(options)
    if options.machine is not None:
        check_writable(options.machine)
    out = Output(options)
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    what = TextColumn("{task.description}")
    with Progress(*columns, what, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        found = tune(
            options.path or [os.getcwd()],
            size=options.size,
            report=lambda done, what: bar.update(task, completed=done, description=escape(what)),
        )
    _print(out, found)
    if options.machine is not None:
        disks = [{mode: getattr(disk.chosen, mode) for mode in MODES} for disk in found.disks]
        link = None if found.link is None else min(found.link.to_device, found.link.to_host)
        Machine.measure(disks, found.stream, link).write(options.machine)
        out.say(f"machine: {options.machine}")
    out.json(asdict(found))
    return 0


def _tune_network(options: argparse.Namespace) -> int:
    """Measure the link between nodes together with the other ranks, save and print its rate. Returns 0."""
    from infinity.distributed.communicator import Communicator
    from infinity.distributed.node_link import measure_node_link

    cpu = torch.device("cpu")
    with Communicator(None, 0, cpu) as communicator, ending_together(communicator, options):
        if options.path or options.size or options.machine:
            raise ConfigError(
                "Several processes were started, which measure the network, and an option is about disks.",
                "Leave the options out; to tune disks, start one process.",
            )
        found = measure_node_link(communicator)
        # Ranks of one node share a cache, unless they are different users'.
        saved = communicator.place.rank != 0 or machine_rates.keep_network(found.rate)
        communicator.leave()
    kept = "kept on each node" if saved else "NOT kept, for this user cannot write the cache"
    out = Output(options, quiet=not leads())
    out.say(f"network: {rate_text(found.rate)}/s into the slowest of {found.nodes} nodes · {kept}")
    out.json({"saved": saved, **asdict(found)})
    return 0


def _print(out: Output, found: Tuning) -> None:
    for disk in found.disks:
        out.console.print(_table(disk), "")
    if found.stripes is not None:
        shares = zip(found.stripes.paths, found.stripes.shares, strict=True)
        out.say("all paths together: " + ", ".join(f"{share:.0%} on {path}" for path, share in shares))
        rates = ", ".join(f"{mode} {getattr(found.stripes, mode) / 1e9:.2f}" for mode in MODES)
        out.say(f"{rates} GB/s")
    for one, other in found.shared:
        out.say(f"{one} and {other} are on one device: striping over both brings nothing.")
    out.say(f"memory: {found.stream / 1e9:.1f} GB/s read and written in place")
    if found.link is not None:
        to_device, to_host = found.link.to_device / 1e9, found.link.to_host / 1e9
        out.say(f"device link: {to_device:.1f} GB/s to the device, {to_host:.1f} GB/s back")
    if found.note is not None:
        out.say(found.note)
    kept = "kept in" if found.saved else "NOT kept, for this user cannot write"
    out.say(f"done in {found.seconds:.0f} s · {kept} {found.profile}")


def _table(disk: DiskSweep) -> Table:
    """Make the table of the I/O settings that were best at reading, at writing and at a mix of both, and of
    the chosen settings, with their rates in GB/s.
    """
    how = "O_DIRECT" if disk.direct else "through the page cache: no O_DIRECT here"
    title = f"{disk.path} · {len(disk.points)} settings tried on {format_size(disk.nbytes)} · {how}"
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    for name in ("", "engine", "block", "depth", *(f"{mode} GB/s" for mode in MODES)):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for mode in MODES:
        table.add_row(f"best {mode}", *_cells(disk.best[mode]))
    table.add_row("chosen", *_cells(disk.chosen), style="bold")
    return table


def _cells(found: Measured) -> list[str]:
    settings = found.settings
    rates = [f"{getattr(found, mode) / 1e9:.2f}" for mode in MODES]
    return [settings.backend, format_size(settings.block_bytes), str(settings.depth), *rates]
