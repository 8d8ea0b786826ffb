"""Resumption: the commit that `infinity train --resume` continues, and whether it is of the same job."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.api import checkpoint_of
from infinity.checkpoint import commit_files
from infinity.checkpoint.codec import decode
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.first_commit import commits_to_continue
from infinity.checkpoint.rank_directories import commit_directories, directory_of
from infinity.checkpoint.resume import read_newest, run_state
from infinity.errors import ConfigError, IncompatibleCheckpoint
from infinity.layout.shards import Share
from infinity.lm.language_model import LanguageModel
from infinity.lm.text import Text
from infinity.pages.open_tiers import injected_files

if TYPE_CHECKING:  # a run of one rank does not import the package
    from infinity.distributed.communicator import Communicator

_WORDS = "The quick brown fox, 0123456789: «größer» 世界\n\tdef f(x): return x ** 2\n"
"""Text whose tokens tell vocabularies apart."""


def open_checkpoint(options: argparse.Namespace, communicator: Communicator | None) -> Checkpoint | None:
    """Open the directory of --checkpoint, which is made and locked; None without the option.

    With --resume its last commit is continued, if there is one. communicator: connects with the other ranks,
    which all call this; None with one rank. Raises ConfigError if there is one and --resume was not given,
    and otherwise as `commits_to_continue` and Checkpoint do.
    """
    directory = options.checkpoint
    if directory is None:
        return None
    used = commit_directories(directory) if os.path.isdir(directory) else {}
    found = {path: generations for path in used.values() if (generations := commit_files.generations(path))}
    if found and not options.resume:
        first, generations = min(found.items())
        raise ConfigError(
            f"{first} has commits of another run, the last is commit-{generations[-1]}.",
            "Continue it with --resume, move the directory, or delete it.",
        )
    if communicator is None:
        return Checkpoint(directory, directory if found else None, injected_files())
    continues = options.resume and commits_to_continue(communicator, directory, injected_files())
    return checkpoint_of(communicator, directory, directory if continues else None)


def commit_to_continue(options: argparse.Namespace, share: Share) -> SavedCommit | None:
    """Read the commit that a rank of a run with these options would continue, or the part of another rank,
    from which it is planned alike; None if it would begin anew.

    Nothing is locked or changed. Raises CorruptState and IncompatibleCheckpoint as a run would.
    """
    if options.checkpoint is None or not options.resume:
        return None
    mine = Path(os.path.realpath(directory_of(options.checkpoint, share)))
    others = commit_directories(options.checkpoint).values() if os.path.isdir(options.checkpoint) else ()
    used = next((each for each in (mine, *others) if each.is_dir() and commit_files.generations(each)), None)
    return None if used is None else read_newest(used, injected_files())


def identity_of(options: argparse.Namespace, model: LanguageModel, text: Text, rate: float) -> dict[str, Any]:
    """What makes a run the same job: all that its losses depend on, except for the number of steps.

    Each key completes the sentence "... was A and is B". rate: the highest learning rate.
    """
    return {
        "--model": model.name,
        "the number of parameters": model.parameters,
        "the vocabulary's digest": _digest(repr(model.vocabulary.encode(_WORDS)).encode()),
        "the digest of --data": text.digest(),
        "--batch": options.batch,
        "--seq": options.seq,
        "--accumulate": options.accumulate,
        "--lr": rate,
        "--clip": options.clip,
        "--seed": options.seed,
        "--states": options.states,
        "--compute": options.compute,
    }


def progress_of(saved: SavedCommit, identity: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The state that `infinity train` saved with a commit, if the commit is of the job `identity`.

    steps: --steps. Raises IncompatibleCheckpoint, naming what differs, for a commit of another job, and
    ConfigError if it has more steps already.
    """
    name = f"commit-{saved.manifest.generation}"
    theirs = decode(saved.manifest.run.identity, saved.tensors, "identity")
    state = run_state(saved).user_state
    if not isinstance(theirs, dict) or not isinstance(state, dict) or "step" not in state:
        raise IncompatibleCheckpoint(
            f"{name} was not made by infinity train.", "Continue it with infinity.offload(resume=DIR)."
        )
    differing = [
        f"{key} was {theirs.get(key)} and is {identity.get(key)}"
        for key in {**identity, **theirs}
        if theirs.get(key) != identity.get(key)
    ]
    if differing:
        raise IncompatibleCheckpoint(
            f"{name} is of another job: {', '.join(differing)}.",
            "Give the options and the data with which it was begun, or another directory for --checkpoint.",
        )
    if state["step"] > steps:
        raise ConfigError(
            f"{name} is of step {state['step']}, and --steps is {steps}.",
            f"Give --steps {state['step']} or more.",
        )
    return state


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
