"""Claims: what the ranks of one node are about to take of the same RAM, device or file system, and whether
that fits there together.

What one rank takes by itself is checked where it takes it. Ranks take theirs at about the same time, so each
would find the room free that all of them need.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from infinity.config import Budget, format_size
from infinity.errors import BudgetError
from infinity.planning.plan import Plan
from infinity.system.directory import check_directory, free_bytes
from infinity.tiers import Tier
from infinity.tiers.arena import available_ram
from infinity.tiers.device import available_bytes
from infinity.tiers.slab import leftover_bytes

_CURES = {
    Tier.HOST: "",
    Tier.DEVICE: ", or a device of its own",
    Tier.NVME: ", free space there, or give ranks directories on other disks",
}
"""What helps beside smaller budgets, as the end of a sentence."""


@dataclass(frozen=True)
class Claim:
    """What one rank is about to take in one place."""

    tier: Tier
    place: str
    """Tells the places of a tier on one node apart."""
    name: str
    """The place, for users."""
    wanted: int
    """Bytes that the rank may take there."""
    free: int
    """Bytes that are free there, as this rank sees them."""
    returned: int = 0
    """Bytes there that the rank gives back before it takes any."""


def claims_of(plan: Plan, budget: Budget, *, adopts: bool) -> list[Claim]:
    """The claims of this rank. plan: its plan, under `budget`. adopts: whether its slabs are there already.

    Of RAM and of a CUDA device a rank claims its budget. Where no host budget is given it claims none: the
    default is a part of what is free. Of file systems it claims what its slabs need, as `disk_claims` says.
    Raises StorageError for a directory that cannot hold slabs.
    """
    on_cpu = plan.device.type == "cpu"
    ram = (budget.host_bytes or 0) + ((budget.device_bytes or 0) if on_cpu else 0)
    found = [Claim(Tier.HOST, "", "RAM", ram, available_ram())]
    if not on_cpu:
        free = available_bytes(plan.device)
        name = f"the memory of {plan.device}"
        found.append(Claim(Tier.DEVICE, _identity(plan.device), name, plan.budgets[Tier.DEVICE], free))
    directories = {plan.slab_directory: plan.nvme_bytes} if plan.slab_directory else budget.nvme_bytes
    return found if adopts else found + disk_claims(plan.nvme_bytes, directories, plan.share.rank)


def disk_claims(nbytes: int, budgets: Mapping[str, int], rank: int) -> list[Claim]:
    """The claims of a rank whose slabs hold `nbytes` bytes.

    budgets: directory -> the most bytes of its slab. Each file system gets at least what the directories on
    other ones have no room for; how much more, only the striping says. What dead processes have left of this
    rank's slabs is removed before new ones are made. Raises StorageError for a directory that cannot hold
    slabs.
    """
    directories = defaultdict(list)
    for path in budgets if nbytes else ():
        directory = check_directory(path)
        directories[os.stat(directory).st_dev].append((directory, budgets[path]))
    found = []
    for system, inside in directories.items():
        elsewhere = sum(budgets.values()) - sum(size for _, size in inside)
        if elsewhere >= nbytes:
            continue
        first, _ = inside[0]
        found.append(
            Claim(
                Tier.NVME,
                str(system),
                f"the file system of {first}",
                nbytes - elsewhere,
                free_bytes(first),
                sum(leftover_bytes(directory, rank) for directory, _ in inside),
            )
        )
    return found


def told(claims: Sequence[Claim]) -> list[Any]:
    """Claims as JSON can hold them."""
    return [[each.tier.value, *astuple(each)[1:]] for each in claims]


def check(heard: Mapping[int, tuple[int, Sequence[Any]]]) -> None:
    """Check that the claims of all ranks fit where they are. Pure.

    heard: rank -> (its node, its claims by `told`). Raises BudgetError, the same on all ranks.
    """
    groups: dict[tuple[int, Tier, str], dict[int, Claim]] = {}
    for rank, (node, claims) in sorted(heard.items()):
        for tier, *others in claims:
            claim = Claim(Tier(tier), *others)
            groups.setdefault((node, claim.tier, claim.place), {})[rank] = claim
    for (_, tier, _), group in groups.items():
        wanted = sum(each.wanted for each in group.values())
        free = max(each.free for each in group.values()) + sum(each.returned for each in group.values())
        if len(group) > 1 and wanted > free:
            first = next(iter(group.values()))
            raise BudgetError(
                f"Ranks {', '.join(map(str, group))} together want {format_size(wanted)} of {first.name}, "
                f"where {format_size(free)} are free.",
                f"Give each of them at most {format_size(free // len(group))} there{_CURES[tier]}.",
                tier=tier.value,
            )


def _identity(device: torch.device) -> str:
    """A text for a CUDA device, equal in all processes of a node, whatever devices each of them sees."""
    properties: Any = torch.cuda.get_device_properties(device)
    return str(properties.uuid)
