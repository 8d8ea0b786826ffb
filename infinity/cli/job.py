"""Job: the training run that the options of `train` and `plan` describe, and the check that a commit is of
it.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infinity import __version__, cpu_adam
from infinity.api import checkpoint_of, plan_for
from infinity.checkpoint import commit_files
from infinity.checkpoint.codec import decode
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.continued_commit import commit_directories, commits_to_continue, directory_of
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.restore import division_of
from infinity.cli.options import EVERY, check_options, directories
from infinity.config import Budget, format_size
from infinity.errors import ConfigError, IncompatibleCheckpoint
from infinity.layout.shards import Share
from infinity.lm.data import Batches, Text, find_text
from infinity.lm.loop import Recipe, make_optimizer
from infinity.lm.model import LanguageModel, language_model
from infinity.planning.budgets import format_count
from infinity.planning.machine_rates import multiplies
from infinity.planning.plan import Plan
from infinity.planning.predict import Prediction
from infinity.ranks import SingleRank
from infinity.system import machine
from infinity.system.disk_files import injected_files
from infinity.system.io_settings import open_engine
from infinity.tiers.tier import usable_device

_WORDS = "The quick brown fox, 0123456789: «größer» 世界\n\tdef f(x): return x ** 2\n"
"""Text whose tokens tell vocabularies apart."""


# --- the job ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainJob:
    """A planned training run."""

    language_model: LanguageModel
    text: Text
    batches: Batches
    recipe: Recipe
    optimizer: torch.optim.Optimizer
    budget: Budget
    device: torch.device
    plan: Plan
    prediction: Prediction | None
    """The prediction for a step with all its micro-batches; None if the plan has no prediction."""
    checkpoint: Checkpoint | None
    """The directory of commits, and the commit to continue; None if commits are off or nothing will be
    trained.
    """
    every: int
    """Number of steps between commits."""
    identity: Mapping[str, Any]
    """The facts by which a commit is recognised as one of this job; see `_identity`."""
    resumed: Mapping[str, Any] | None
    """The state that was saved with the commit that is continued; None for a new run."""
    ranks: SingleRank
    """The connection with the other ranks."""

    @property
    def facts(self) -> dict[str, Any]:
        """The facts about the job that --json of both `train` and `plan` has."""
        model = self.language_model
        return {"model": model.name, "parameters": model.parameters, "device": str(self.device)}

    def lines(self, options: argparse.Namespace) -> str:
        """The first printed lines: device and model; the commit to continue; the plan."""
        share, text = self.plan.share, self.text
        header = [
            f"infinity {__version__}",
            *(
                [_describe_device(self.device), *_describe_engines(self.budget)]
                if self.plan.machine is None
                else [f"{self.device} of another machine"]
            ),
            *([f"{share.ranks} ranks at ZeRO stage {share.stage}"] if share.ranks > 1 else []),
            f"{format_count(self.language_model.parameters)} parameters on text of {text.files} "
            f"files ({format_size(text.nbytes)})",
        ]
        lines = [" · ".join(header)]
        if self.resumed is not None:
            steps, before = self.recipe.steps, self.resumed["steps"]
            lines.append(f"continuing after step {self.resumed['step']}")
            if before != steps:
                lines[-1] += (
                    f"; --steps was {before} and is {steps}: from here on the learning rate follows "
                    f"the schedule of {steps} steps"
                )
        elif options.resume:
            lines.append(f"there is no commit in {options.checkpoint}: beginning anew")
        return "\n".join([*lines, "", str(self.plan)])


def make_job(
    options: argparse.Namespace,
    checkpoint: Checkpoint | None = None,
    *,
    ranks: SingleRank,
) -> TrainJob:
    """Check the options, and plan the job that they describe. No model states are allocated or moved.

    checkpoint: the directory of --checkpoint if the job is to be trained; None to plan only. ranks: the
    connection with the other ranks of a job that is to be trained, who all call this; or the rank for which
    the job is planned.

    Raises ConfigError if an option cannot be used, BudgetError if the job does not fit the budgets,
    IncompatibleCheckpoint if the commit to continue is of another job, and RankDivergence if another rank has
    another job.
    """
    check_options(options)
    torch.manual_seed(options.seed)
    model = language_model(options.model)
    nvme = directories(options.budget_nvme)
    budget = Budget(device=options.budget_device, host=options.budget_host, nvme=nvme)
    slow = False
    if options.machine is None:  # else the machine file checks the device
        device = usable_device(ranks.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        slow = options.compute is None and not multiplies(device, torch.bfloat16)
    if options.compute is None:
        options.compute = "fp32" if slow else "bf16"
    precision = replace(options.precision, compute=options.compute, states=options.states)
    text = find_text(options.data)
    batches = Batches(text, model, batch=options.batch, seq=options.seq, seed=options.seed)
    recipe = Recipe(
        steps=options.steps,
        accumulate=options.accumulate,
        learning_rate=options.lr or model.learning_rate,
        clip=options.clip or math.inf,
    )
    slabs = options.checkpoint
    if slabs is not None:
        slabs = os.path.realpath(directory_of(slabs, ranks.share))
    saved = _commit_to_continue(options, ranks.share) if checkpoint is None else checkpoint.saved
    identity = _identity(options, model, text, recipe.learning_rate, ranks.share.ranks)
    resumed = None if saved is None else _progress(saved, identity, options.steps)
    optimizer = make_optimizer(model.model, recipe.learning_rate)
    said = {**identity, "--steps": options.steps}
    ranks.same("infinity train", **{name: str(value) for name, value in said.items()})
    planned = plan_for(
        ranks,
        model.model,
        optimizer,
        budget=budget,
        precision=precision,
        example_inputs=model.example_inputs(options.batch, options.seq, "meta"),
        update="auto",
        activations=options.activations,
        accumulation=options.accumulate,
        weights=model.weights,
        commits=checkpoint,
        slab_directory=slabs,
        prefer=None if saved is None else division_of(saved),
        machine=options.machine,
    )
    every = options.every or EVERY
    if options.checkpoint is not None:
        planned = replace(planned, commit_interval=every)
    return TrainJob(
        language_model=model,
        text=text,
        batches=batches,
        recipe=recipe,
        optimizer=optimizer,
        budget=budget,
        device=planned.device,
        plan=planned,
        prediction=planned.predict(options.accumulate),
        checkpoint=checkpoint,
        every=every,
        identity=identity,
        resumed=resumed,
        ranks=ranks,
    )


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    cpu = machine.cpu()
    names = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
    isa = cpu_adam.runnable_isas()[0]
    return f"cpu ({min(cpu.allowed, cpu.quota or cpu.allowed):g} cores, {names.get(isa, isa)})"


def _describe_engines(budget: Budget) -> list[str]:
    found = []
    for path in budget.nvme_bytes:
        with open_engine(path) as engine:
            found.append(engine.facts.backend)
    return list(dict.fromkeys(found))


# --- the commit that is continued -------------------------------------------------------------------------


def open_checkpoint(options: argparse.Namespace, ranks: SingleRank) -> Checkpoint | None:
    """Open the directory of --checkpoint, after creating and locking it; returns None without the option.

    With --resume, its last commit is continued, if there is one. All ranks call this. Raises ConfigError if
    there is a commit and --resume was not given, and the errors of `commits_to_continue` and Checkpoint.
    """
    directory = options.checkpoint
    if directory is None:
        return None
    used = commit_directories(directory).values()
    found = {path: generations for path in used if (generations := commit_files.generations(path))}
    if found and not options.resume:
        first, generations = min(found.items())
        raise ConfigError(
            f"{first} has commits of another run, the last is commit-{generations[-1]}.",
            "Continue it with --resume, move the directory, or delete it.",
        )
    continues = options.resume and commits_to_continue(ranks, directory, injected_files())
    return checkpoint_of(ranks, directory, directory if continues else None)


def _commit_to_continue(options: argparse.Namespace, share: Share) -> SavedCommit | None:
    """Find the rank commit that this rank would continue in a run with these options. If this rank has none
    here, another rank's is returned instead, for which the plan is the same. Returns None if the run would
    begin anew. Locks and changes nothing.
    """
    if options.checkpoint is None or not options.resume:
        return None
    mine = Path(os.path.realpath(directory_of(options.checkpoint, share)))
    others = commit_directories(options.checkpoint).values()
    used = next((each for each in (mine, *others) if each.is_dir() and commit_files.generations(each)), None)
    return None if used is None else commit_files.newest(used, injected_files())


def _identity(
    options: argparse.Namespace, model: LanguageModel, text: Text, rate: float, ranks: int
) -> dict[str, Any]:
    """The facts that must be equal for a run to continue another: all that losses depend on, except for the
    number of steps.

    Each key completes the sentence "... was A and is B". rate: the highest learning rate. ranks: number of
    ranks.
    """
    tokens = repr(model.vocabulary.encode(_WORDS)).encode()
    given = ("batch", "seq", "clip", "seed", "states", "compute")
    return {
        "--model": model.name,
        "the number of parameters": model.parameters,
        "the vocabulary's digest": hashlib.blake2b(tokens, digest_size=16).hexdigest(),
        "the digest of --data": text.digest(),
        "--lr": rate,
        "--accumulate times the number of processes": options.accumulate * ranks,
        **{f"--{name}": getattr(options, name) for name in given},
    }


def _progress(saved: SavedCommit, identity: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the state that `infinity train` saved with a commit, if the commit is of the job `identity`.

    steps: the value of --steps. Raises IncompatibleCheckpoint, which names the differences, for a commit of
    another job, and ConfigError for a commit after more than `steps` steps.
    """
    name = f"commit-{saved.manifest.generation}"
    theirs = decode(saved.manifest.run.identity, saved.tensors, "identity")
    state = saved.run.user_state
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
