"""Job: the training run that the options of `train` and `plan` describe, checked and planned."""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape

from infinity import cpu_adam
from infinity.api import plan_for, plan_with_others
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.rank_directories import directory_of
from infinity.checkpoint.resume import division_of
from infinity.cli.commits import EVERY
from infinity.cli.resumption import commit_to_continue, identity_of, progress_of
from infinity.config import Budget, Precision, Size, format_size
from infinity.errors import ConfigError
from infinity.layout.shards import ALONE, Share
from infinity.lm.batches import Batches
from infinity.lm.language_model import LanguageModel, language_model
from infinity.lm.presets import PRESETS
from infinity.lm.text import Text, find_text
from infinity.lm.training import Recipe, make_optimizer
from infinity.planning.budgets import format_count
from infinity.planning.plan import Plan
from infinity.planning.predict import Prediction
from infinity.system import launcher, machine
from infinity.system.io_settings import open_engine
from infinity.tiers.tier import usable_device

if TYPE_CHECKING:  # a run of one rank does not import the package
    from infinity.distributed.communicator import Communicator

_MOST = (1 << 31) - 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a training run, which `train` and `plan` share."""
    model = parser.add_argument_group("model and data")
    model.add_argument(
        "--model",
        default="10m",
        help=f"{', '.join(PRESETS)}, or the directory of a transformers model (default: %(default)s)",
    )
    model.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="files or folders of text (default: the source of this Python's standard library)",
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--steps", type=int, default=100, metavar="N", help="number of training steps (default: %(default)s)"
    )
    training.add_argument(
        "--batch", type=int, default=8, metavar="N", help="sequences in a micro-batch (default: %(default)s)"
    )
    training.add_argument(
        "--seq", type=int, default=128, metavar="N", help="tokens in a sequence (default: %(default)s)"
    )
    training.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches in a step, for each process (default: %(default)s)",
    )
    training.add_argument(
        "--lr", type=float, metavar="RATE", help="highest learning rate (default: chosen by the model)"
    )
    training.add_argument(
        "--clip",
        type=float,
        default=1.0,
        metavar="NORM",
        help="largest norm of all gradients together; 0: no clipping (default: %(default)s)",
    )
    training.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of initial weights and of the order of the text (default: %(default)s)",
    )
    parser.set_defaults(precision=Precision(), machine=None)  # what the options do not say
    _add_memory_options(parser.add_argument_group("memory"))
    _add_commit_options(parser.add_argument_group("commits"))
    output = parser.add_argument_group("output")
    output.add_argument("--log", metavar="FILE", help="write one JSON object a step to this file")
    output.add_argument(
        "--export", metavar="DIR", help="write the trained model to this directory, as safetensors"
    )
    output.add_argument(
        "--trace", metavar="FILE", help="write a timeline for https://ui.perfetto.dev to this file"
    )
    output.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line of stdout"
    )


def _add_commit_options(commits: Any) -> None:
    commits.add_argument(
        "--checkpoint", metavar="DIR", help="keep commits of the run in this directory, also after a signal"
    )
    commits.add_argument(
        "--every",
        type=int,
        metavar="N",
        help=f"steps between commits (default: {EVERY}); there is one at the end in any case",
    )
    commits.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last commit in --checkpoint, or begin anew if there is none",
    )


def _add_memory_options(memory: Any) -> None:
    memory.add_argument(
        "--device", help="where to compute: cpu, cuda, cuda:1 (default: cuda if there is one)"
    )
    memory.add_argument(
        "--states",
        default="fp32",
        help="format of optimizer states: fp32, bf16 or int8 (default: %(default)s)",
    )
    memory.add_argument(
        "--compute",
        default="bf16",
        help="dtype of forward and backward: bf16, fp16 or fp32 (default: %(default)s)",
    )
    memory.add_argument(
        "--budget-device",
        metavar="SIZE",
        help="device memory that may be used, such as 20GiB (default: what is free)",
    )
    memory.add_argument(
        "--budget-host", metavar="SIZE", help="RAM that may be used, such as 20GiB (default: what is free)"
    )
    memory.add_argument(
        "--budget-nvme",
        action="append",
        metavar="PATH:SIZE",
        help="a directory on a disk and the bytes that may be used there; repeat the option for each disk",
    )


@dataclass(frozen=True)
class Job:
    """A planned training run: a model, a text, hyper-parameters, budgets and a plan."""

    language_model: LanguageModel
    text: Text
    batches: Batches
    recipe: Recipe
    optimizer: torch.optim.Optimizer
    budget: Budget
    precision: Precision
    device: torch.device
    plan: Plan
    prediction: Prediction | None
    """Predicted time of a step with all its micro-batches; None if the plan has no prediction."""
    checkpoint: Checkpoint | None
    """Where commits go, and the one that is continued; None if commits are off or nothing will be trained."""
    identity: Mapping[str, Any]
    """What `identity_of` says of the job."""
    resumed: Mapping[str, Any] | None
    """The state that was saved with the commit that is continued; None for a new run."""
    communicator: Communicator | None
    """Connects with the other ranks; None if there are none, or if nothing will be trained."""

    @property
    def header(self) -> str:
        """The first printed line: version, device, I/O backends, the number of ranks if there are several,
        and the sizes of the model and the text.
        """
        from infinity import __version__

        share = self.plan.share
        return " · ".join(
            [
                f"infinity {__version__}",
                *(
                    [_describe_device(self.device), *_describe_engines(self.budget)]
                    if self.plan.machine is None
                    else [f"{self.device} of another machine"]
                ),
                *([f"{share.ranks} ranks at ZeRO stage {share.stage}"] if share.ranks > 1 else []),
                f"{format_count(self.language_model.parameters)} parameters on text of {self.text.files} "
                f"files ({format_size(self.text.nbytes)})",
            ]
        )


def show_job(
    options: argparse.Namespace,
    console: Console,
    checkpoint: Checkpoint | None = None,
    *,
    share: Share = ALONE,
    on_node: int = 1,
    communicator: Communicator | None = None,
) -> Job:
    """Make the job that the options describe, and print its first line and its plan.

    Arguments and errors are those of `make_job`. console: where to print.
    """
    with console.status("planning"):
        job = make_job(options, checkpoint, share=share, on_node=on_node, communicator=communicator)
    lines = [job.header, "", str(job.plan)]
    if job.resumed is not None:
        lines.insert(1, _continuation(job))
    elif options.resume:
        lines.insert(1, f"there is no commit in {options.checkpoint}: beginning anew")
    console.print(escape("\n".join(lines)), highlight=False, soft_wrap=True)
    return job


def make_job(
    options: argparse.Namespace,
    checkpoint: Checkpoint | None = None,
    *,
    share: Share = ALONE,
    on_node: int = 1,
    communicator: Communicator | None = None,
) -> Job:
    """Check the options, and plan the job that they describe. No model states are allocated or moved.

    checkpoint: the directory of --checkpoint if the job is to be trained; None to plan only. share: the rank
    for which the job is planned. on_node: number of ranks that will share its node. communicator: connects
    with the other ranks of a job that is to be trained, which all call this.

    Raises ConfigError if an option cannot be used, BudgetError if the job does not fit the budgets,
    IncompatibleCheckpoint if the commit to continue is of another job, and RankDivergence if another rank has
    another job.
    """
    check_options(options)
    torch.manual_seed(options.seed)
    model = language_model(options.model)
    precision = replace(options.precision, compute=options.compute, states=options.states)
    nvme = directories(options.budget_nvme)
    budget = Budget(device=options.budget_device, host=options.budget_host, nvme=nvme)
    device = options.device  # checked by the machine file, if there is one
    if options.machine is None:
        device = usable_device(_device(options.device, several=communicator is not None))
    text = find_text(options.data)
    batches = Batches(text, model, batch=options.batch, seq=options.seq, seed=options.seed)
    recipe = Recipe(
        steps=options.steps,
        accumulate=options.accumulate,
        learning_rate=options.lr or model.learning_rate,
        clip=options.clip or math.inf,
    )
    saved = commit_to_continue(options, share) if checkpoint is None else checkpoint.saved
    identity = identity_of(options, model, text, recipe.learning_rate)
    resumed = None if saved is None else progress_of(saved, identity, options.steps)
    optimizer = make_optimizer(model.model, recipe.learning_rate)
    planner = functools.partial(
        plan_for,
        slab_directory=(
            None if options.checkpoint is None else os.path.realpath(directory_of(options.checkpoint, share))
        ),
        prefer=None if saved is None else division_of(saved),
        share=share,
    )
    if communicator is None:
        # A plan for ranks, or for a machine, that are not here.
        planner = functools.partial(planner, on_node=on_node, machine=options.machine)
    else:
        said = {**identity, "--steps": options.steps}
        communicator.same("infinity train", **{name: str(value) for name, value in said.items()})
        planner = functools.partial(plan_with_others, communicator, weights=model.weights, commits=checkpoint)
    planned = planner(
        model.model,
        optimizer,
        budget=budget,
        precision=precision,
        example_inputs=model.example_inputs(options.batch, options.seq, "meta"),
        device=device,
        update="auto",
        accumulation=options.accumulate,
    )
    if options.checkpoint is not None:
        planned = replace(planned, commit_interval=options.every or EVERY)
    return Job(
        language_model=model,
        text=text,
        batches=batches,
        recipe=recipe,
        optimizer=optimizer,
        budget=budget,
        precision=precision,
        device=planned.device,
        plan=planned,
        prediction=planned.predict(options.accumulate),
        checkpoint=checkpoint,
        identity=identity,
        resumed=resumed,
        communicator=communicator,
    )


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for values of options that no job can have, without looking at any file."""
    for name in ("every", "resume"):
        if getattr(options, name) not in (None, False) and options.checkpoint is None:
            raise ConfigError(f"--{name} was given without --checkpoint.", "Add --checkpoint DIR.")
    counts = ("steps", "batch", "seq", "accumulate", *(() if options.every is None else ("every",)))
    for name in counts:
        if not 1 <= getattr(options, name) <= _MOST:
            raise ConfigError(f"--{name} is {getattr(options, name)}.", f"Give a number from 1 to {_MOST}.")
    if options.lr is not None and not (math.isfinite(options.lr) and options.lr > 0):
        raise ConfigError(f"--lr is {options.lr}.", "Give a positive number.")
    if not (math.isfinite(options.clip) and options.clip >= 0):
        raise ConfigError(f"--clip is {options.clip}.", "Give a positive number, or 0 to clip nothing.")
    if not 0 <= options.seed < 1 << 63:
        raise ConfigError(f"--seed is {options.seed}.", "Give a number from 0 to 2^63 - 1.")


def _continuation(job: Job) -> str:
    """A line that says what is continued."""
    assert job.resumed is not None
    line, steps = f"continuing after step {job.resumed['step']}", job.recipe.steps
    if job.resumed["steps"] == steps:
        return line
    return (
        f"{line}; --steps was {job.resumed['steps']} and is {steps}: from here on the learning rate follows "
        f"the schedule of {steps} steps"
    )


def directories(given: list[str] | None) -> Mapping[str | os.PathLike[str], Size] | None:
    """What --budget-nvme says, as `Budget.nvme`; None if it was not given. Raises ConfigError."""
    found: dict[str | os.PathLike[str], Size] = {}
    for each in given or ():
        path, colon, size = each.rpartition(":")
        if not colon or not path:
            raise ConfigError(
                f"--budget-nvme {each} names no directory and size.",
                "Give PATH:SIZE, such as /mnt/nvme0:400GiB.",
            )
        if path in found:
            raise ConfigError(f"--budget-nvme names {path} twice.", "Give each directory once.")
        found[path] = size
    return found or None


def _device(given: str | None, *, several: bool) -> str:
    """The device that --device names. several: whether there are several ranks; then each rank of a node has
    a GPU of its own by default.
    """
    chosen = given or ("cuda" if torch.cuda.is_available() else "cpu")
    if not several or chosen != "cuda":
        return chosen
    return f"cuda:{launcher.local_rank()}"


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    cpu = machine.cpu()
    names = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
    isa = cpu_adam.runnable_isas()[0]
    return f"cpu ({min(cpu.allowed, cpu.quota or cpu.allowed):g} cores, {names.get(isa, isa)})"


def _describe_engines(budget: Budget) -> list[str]:
    """Names of the I/O backends that serve the budget's NVMe directories, without duplicates."""
    found = []
    for path in budget.nvme_bytes:
        with open_engine(path) as engine:
            found.append(engine.facts.backend)
    return list(dict.fromkeys(found))
