"""Agreed plan: checks that ranks have equal models and room for all, and has them divide these models alike.

Ranks may have different budgets. Their pages must be cut alike, so all take the division of the rank whose
chunks and units are the smallest.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.config import Budget
from infinity.distributed import claims
from infinity.distributed.option_digests import option_digests
from infinity.errors import ConfigError, RankDivergence
from infinity.layout.chunks import Division
from infinity.layout.names import named_buffers, named_parameters
from infinity.planning.plan import Plan
from infinity.system.version import VERSION

if TYPE_CHECKING:
    from infinity.distributed.communicator import Communicator


def check_equal(
    communicator: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any
) -> None:
    """Check that all ranks offload the same model with the same optimizer and options. Values of parameters
    and buffers may differ.

    options: those of `offload`, by name. Raises RankDivergence if something differs.
    """
    tensors = [
        (name, tuple(each.shape), str(each.dtype), each.stride(), each.requires_grad, each.is_meta)
        for name, each in (
            *named_parameters(model),
            *named_buffers(model, remove_duplicate=False),
        )
    ]
    if options["average"] is not None:
        raise ConfigError(
            "Running averages were asked for with several ranks, for which they are not implemented.",
            "Leave average= out; torch.optim.swa_utils.AveragedModel averages the masters of a model that "
            "fits in RAM.",
        )
    known = {id(each): name for name, each in named_parameters(model)}
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    communicator.same(
        "offload()",
        version=VERSION,
        torch=torch.__version__,
        stage=communicator.share.stage,
        model=_digest(tensors),
        optimizer=type(optimizer).__name__,
        **{
            "parameter groups": _digest(
                [[known.get(id(each)) for each in group["params"]] for group in groups]
            ),
            **{name: str(value) for name, value in options.items()},
        },
    )
    _check_options(communicator.agree("offload()", options=option_digests(groups)))


def _check_options(heard: Mapping[int, Mapping[str, Any]]) -> None:
    """Check that the optimizers' options are equal. heard: rank -> the digests, under "options"."""
    first = heard[0]["options"]
    for rank, said in sorted(heard.items()):
        here = said["options"]
        differing = [name for name in sorted(first | here) if first.get(name) != here.get(name)]
        if differing:
            raise RankDivergence(
                f"At offload() the optimizer of rank {rank} has other options than that of rank 0: "
                f"{', '.join(differing)}.",
                "Make the optimizer with the same options on all ranks.",
            )


def agreed_plan(
    communicator: Communicator,
    budget: Budget,
    plan_with: Callable[[Division | None], Plan],
    *,
    adopts: Callable[[Plan], bool],
) -> Plan:
    """Make this rank's plan, with a model that is divided as on all ranks.

    budget: this rank's. plan_with: makes a plan under it, with a preferred division if there is one. adopts:
    whether the slabs of a plan are there already; all ranks call it once, at the same time. Raises
    ConfigError if this rank's budget has no room for the division, and BudgetError if what the ranks of one
    node are about to take does not fit there together. Raises StorageError for a directory that cannot hold
    slabs.
    """
    plan = _divided_alike(communicator, plan_with)
    told = claims.told(claims.claims_of(plan, budget, adopts=adopts(plan)))
    cache, node = plan.node_cache_bytes, communicator.place.node
    heard = communicator.agree("offload()", node=node, claims=told, cache=cache)
    claims.check({rank: (said["node"], said["claims"]) for rank, said in heard.items()})
    if cache and not all(said["cache"] for said in heard.values() if said["node"] == node):
        return replace(plan, node_cache_bytes=0)  # each rank of a node asks all others there
    return plan


def _divided_alike(communicator: Communicator, plan_with: Callable[[Division | None], Plan]) -> Plan:
    """Make this rank's plan, with the division of the rank whose pieces are the smallest. Raises ConfigError
    if this rank's budget has no room for it.
    """
    plan = plan_with(None)
    division = Division.of(plan.layout)
    size = [division.chunk_elements, max(unit.nbytes for unit in plan.layout.units)]
    heard = communicator.agree("offload()", size=size, digest=_digest(division.units))
    smallest = min(heard, key=lambda rank: (heard[rank]["size"], rank))
    if all(each == heard[smallest] for each in heard.values()):
        return plan
    mine = communicator.share.rank == smallest
    told = communicator.agree("offload()", units=division.units if mine else None)[smallest]["units"]
    wanted = Division(tuple((path, tuple(names)) for path, names in told), heard[smallest]["size"][0])
    if wanted != division:
        plan = plan_with(wanted)
        if Division.of(plan.layout) != wanted:
            raise ConfigError(
                f"The budget of rank {communicator.share.rank} has no room for the division of the model "
                f"that rank {smallest} can use.",
                "Give all ranks budgets of about the same size.",
            )
    return plan


def _digest(value: Any) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"
