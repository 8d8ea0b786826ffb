"""Ranks of a command: how `infinity train` meets the other processes that torchrun has started, and how all
of them end together, with one paragraph for one error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from infinity.api import several_ranks, stage_of
from infinity.cli.failure import Told, first_error, report
from infinity.errors import ConfigError, InfinityError
from infinity.lm.loop import ONE_RANK, RunRanks
from infinity.system import launcher
from infinity.telemetry.timeline import Timeline

if TYPE_CHECKING:  # a run of one rank does not import the package
    from infinity.distributed.communicator import Communicator

PARTITIONS = ("parameters", "gradients", "optimizer", "none")
"""Values of --partition: what the ranks divide among them."""


@contextlib.contextmanager
def met(options: argparse.Namespace) -> Iterator[Communicator | None]:
    """Context in which this process is connected with the other ranks; None if it trains by itself.

    An error in the context ends the run on all ranks. Raises ConfigError for options that do not go with the
    number of ranks, and the errors of Communicator.
    """
    if not several_ranks(None):
        if options.partition is not None:
            raise ConfigError(
                "--partition was given for one process.",
                "Leave it out, or start several: torchrun --nproc-per-node 2 -m infinity train ...",
            )
        yield None
        return
    from infinity.distributed.communicator import Communicator

    partition = options.partition or PARTITIONS[0]
    cuda = torch.cuda.is_available() and not str(options.device).startswith("cpu")
    stage = stage_of(None if partition == "none" else partition)
    with Communicator(None, stage, cuda=cuda) as communicator, ending_together(communicator, options):
        communicator.find_place()
        yield communicator


@contextlib.contextmanager
def ending_together(communicator: Communicator | None, options: argparse.Namespace) -> Iterator[None]:
    """Context whose error, or interruption, ends the run on all ranks; no rank waits for another one then.

    An InfinityError is printed, and Told is raised in its place: torchrun ends all ranks once one has ended,
    which could be before this one has closed its files. Use the context inside of those that close what other
    ranks need. communicator: None with one rank, where nothing is changed.
    """
    try:
        yield
    except Told:
        raise
    except BaseException as error:
        if communicator is None:
            raise
        first_error(error)  # before the others hear of it
        communicator.fail(error)
        if isinstance(error, InfinityError):
            raise Told(report(error, options)) from None
        raise


def open_timeline(path: str, communicator: Communicator | None) -> Timeline:
    """Open the file of --trace. The ranks from 1 on have names of their own, such as out.rank-1.json.

    Raises StorageError or StorageFull.
    """
    if communicator is None:
        return Timeline(path)
    rank = communicator.ranks.rank
    if rank:
        stem, suffix = os.path.splitext(path)
        path = f"{stem}.rank-{rank}{suffix}"
    return Timeline(path, rank=rank, since=communicator.met)


def run_ranks(communicator: Communicator | None) -> RunRanks:
    """The ranks as the training loop sees them."""
    if communicator is None:
        return ONE_RANK

    def gather(call: str, value: Any) -> list[Any]:
        return [said["value"] for said in communicator.agree(call, value=value).values()]

    return RunRanks(communicator.share.rank, communicator.share.ranks, gather)


def leads() -> bool:
    """Whether this process prints and writes the results: rank 0, or the only one. Raises ConfigError."""
    return not several_ranks(None) or launcher.rank() == 0
