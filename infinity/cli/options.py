"""Options: tables of the options of `train` and `plan`, and checks of their values."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from typing import Any

from infinity.cli.command import add_json
from infinity.config import Precision, Size
from infinity.errors import ConfigError
from infinity.lm.decoder import PRESETS
from infinity.planning.residual_states import POLICIES

EVERY = 100
"""Number of steps between commits by default."""
STAGE = 3
"""The stage of ZeRO by default: the one at which a rank needs the least memory."""
PARTITIONS = ("parameters", "gradients", "optimizer", "none")

_MOST, _MOST_RANKS = (1 << 31) - 1, 1 << 16


def _option(text: str, default: Any = None, metavar: str | None = None, **how: Any) -> dict[str, Any]:
    shown = "" if default is None or default is False else " (default: %(default)s)"
    return {"help": text + shown, "default": default, **({"metavar": metavar} if metavar else {}), **how}


def _number(text: str, default: int | None = None, metavar: str = "N") -> dict[str, Any]:
    return _option(text, default, metavar, type=int)


_FREE = "that may be used, such as 20GiB (default: what is free)"
_OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "model and data": {
        "--model": _option(f"{', '.join(PRESETS)}, or the directory of a transformers model", "10m"),
        "--data": _option(
            "files or folders of text (default: the source of this Python's standard library)",
            nargs="+",
            metavar="PATH",
        ),
    },
    "training": {
        "--steps": _number("number of training steps", 100),
        "--batch": _number("sequences in a micro-batch", 8),
        "--seq": _number("tokens in a sequence", 128),
        "--accumulate": _number("micro-batches in a step, for each process", 1),
        "--lr": _option("highest learning rate (default: by the model)", metavar="RATE", type=float),
        "--clip": _option("largest norm of all gradients; 0: no clipping", 1.0, "NORM", type=float),
        "--seed": _number("seed of initial weights and of the order of the text", 0),
    },
    "memory": {
        "--device": _option("where to compute: cpu, cuda, cuda:1 (default: cuda if there is one)"),
        "--states": _option("format of optimizer states: fp32, bf16 or int8", "fp32"),
        "--compute": _option(
            "dtype of forward and backward: bf16, fp16 or fp32 (default: bf16; fp32 on a CPU that has no "
            "instructions for bf16)"
        ),
        "--activations": _option(
            "what becomes of the tensors that the backward needs: keep, recompute, recompute+offload, "
            "offload or auto",
            "auto",
            choices=POLICIES,
        ),
        "--budget-device": _option(f"device memory {_FREE}", metavar="SIZE"),
        "--budget-host": _option(f"RAM {_FREE}", metavar="SIZE"),
        "--budget-nvme": _option(
            "a directory on a disk and the bytes that may be used there; repeat the option for each disk",
            metavar="PATH:SIZE",
            action="append",
        ),
    },
    "commits": {
        "--checkpoint": _option("keep commits in this directory, also after a signal", metavar="DIR"),
        "--every": _number(f"steps between commits (default: {EVERY}); there is one at the end, too"),
        "--resume": _option("continue from the last commit, or begin anew", False, action="store_true"),
    },
    "output": {
        "--log": _option("write one JSON object a step to this file", metavar="FILE"),
        "--export": _option("write the trained model here, as safetensors", metavar="DIR"),
        "--trace": _option("write a timeline for https://ui.perfetto.dev to this file", metavar="FILE"),
    },
}
_TRAIN = {
    "ranks": {
        "--partition": _option(
            "what the processes that torchrun has started divide among them: parameters, gradients and "
            "optimizer states; gradients and optimizer states; optimizer states; or nothing (default: "
            f"{PARTITIONS[0]})",
            choices=PARTITIONS,
        ),
    },
}
_PLAN = {
    "other machines and configurations": {
        "--deepspeed": _option(
            "a configuration of DeepSpeed, whose values are the defaults of the other options", metavar="FILE"
        ),
        "--machine": _option(
            "plan for another machine: a file that `infinity tune --machine FILE` has written there, or the "
            "name of one with published figures: h100-sxm-8, rtx4090-desktop, cloud-l4",
            metavar="FILE",
        ),
    },
    "ranks": {
        "--ranks": _number("processes that train the model together; plan and budgets are those of one", 1),
        "--stage": _option(
            "what the ranks divide among them, as in ZeRO: 0 nothing, 1 optimizer states, 2 also gradients, "
            f"3 also parameters (default: {STAGE})",
            type=int,
            choices=range(4),
        ),
        "--nodes": _number("nodes on which the ranks run, equally many on each", 1, "M"),
        "--link": _option(
            "rate of the link between two nodes in each direction, such as 25Gbit (default: what "
            "`infinity tune` has measured, started by torchrun on several nodes)",
            metavar="RATE",
        ),
    },
}
"""The options of both `train` and `plan`, of `train` alone, and of `plan` alone: title of a group -> option
-> keyword arguments of `add_argument`.
"""


def add_options(parser: argparse.ArgumentParser, *, train: bool) -> None:
    """Add the options of `train`, or of `plan`."""
    for title, options in (*_OPTIONS.items(), *(_TRAIN if train else _PLAN).items()):
        group = parser.add_argument_group(title)
        for name, how in options.items():
            group.add_argument(name, **how)
    add_json(parser)
    # What the command line cannot say, for `train` or for both.
    parser.set_defaults(precision=Precision(), **({"machine": None} if train else {}))


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for values that no job can have. No file is looked at."""
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


def check_ranks(options: argparse.Namespace) -> None:
    """Raise ConfigError if --ranks, --nodes, --stage and --link of `plan` do not go together."""
    ranks, nodes = options.ranks, options.nodes
    if not 1 <= ranks <= _MOST_RANKS:
        raise ConfigError(f"--ranks is {ranks}.", f"Give a number from 1 to {_MOST_RANKS}.")
    if ranks == 1 and options.stage is not None:
        raise ConfigError("--stage was given for one rank.", "Add --ranks N, with at least 2 ranks.")
    if nodes < 1 or ranks % nodes:
        raise ConfigError(
            f"--nodes is {nodes}, and --ranks is {ranks}.",
            "Give a number of ranks that the number of nodes divides.",
        )
    if options.link is not None and nodes == 1:
        raise ConfigError("--link was given for one node.", "Add --nodes M, with at least 2 nodes.")


def directories(given: list[str] | None) -> Mapping[str | os.PathLike[str], Size] | None:
    """Convert the values of --budget-nvme to those of `Budget.nvme`; None if it was not given. Raises
    ConfigError.
    """
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
