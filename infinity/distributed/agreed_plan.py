"""Agreed plan: all ranks check that their models are equal, divide them alike, and claim memory and disk
space.

Budgets may differ between ranks, but units and shards must be the same. So all ranks take the units of the
rank with the smallest ones. Each rank cuts its shards into chunks by itself.

The ranks of a node take RAM, device memory and disk space at about the same time, so that each would count
the same free bytes as its own. So they first tell each other how many bytes they will take (their claims),
and check that the sums are free.
"""

from __future__ import annotations

import numbers
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from infinity.config import Budget, format_size
from infinity.errors import BudgetError, ConfigError
from infinity.layout.chunks import Division
from infinity.layout.names import named_buffers, named_parameters
from infinity.planning.plan import Plan
from infinity.system.directory import check_directory, free_bytes
from infinity.system.version import VERSION
from infinity.tiers import Tier
from infinity.tiers.arena import available_ram
from infinity.tiers.device import available_bytes
from infinity.tiers.slab import leftover_bytes

if TYPE_CHECKING:
    from infinity.distributed.communicator import Communicator


def check_equal(
    communicator: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any
) -> None:
    """See SingleRank.check_equal. Raises ConfigError, too, if running averages are asked for (`average`),
    since several ranks cannot keep them.
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
        model=digest(tensors),
        optimizer=type(optimizer).__name__,
        **{
            "parameter groups": digest(
                [[known.get(id(each)) for each in group["params"]] for group in groups]
            ),
            **{name: str(value) for name, value in options.items()},
            **{f"option {name}": each for name, each in option_digests(groups).items()},
        },
    )


def agreed_plan(
    communicator: Communicator,
    budget: Budget,
    plan_with: Callable[[Division | None], Plan],
    *,
    adopts: Callable[[Plan], bool],
) -> tuple[Plan, int]:
    """Make this rank's plan, with units of the model that all ranks use. Returns it, and rank 0's
    time.time_ns() in this call.

    plan_with: function from a preferred division, or None, to a plan within `budget`. adopts: tells whether a
    plan's slabs exist already; all ranks call it once, at the same time. Raises ConfigError if this rank's
    budget has no room for the units, BudgetError if the claims of the ranks of one node do not fit there
    together, and StorageError for a directory that cannot hold slabs.
    """
    plan = _divided_alike(communicator, plan_with)
    claims = claims_of(plan, budget, adopts=adopts(plan))
    node = communicator.place.node
    cache = plan.node_cache_bytes if communicator.reads_all_mates else 0
    heard = communicator.agree(
        "offload()",
        node=node,
        claims=claims,
        cache=cache,
        block=plan.exchange_block_bytes,
        time=time.time_ns(),
    )
    check_claims({rank: (said["node"], said["claims"]) for rank, said in heard.items()})
    # Each rank asks for no more bytes at once than any other one has room for.
    plan = replace(plan, exchange_block_bytes=min(said["block"] for said in heard.values()))
    if not all(said["cache"] for said in heard.values() if said["node"] == node):
        plan = replace(plan, node_cache_bytes=0)  # each rank of a node looks into the RAM of all others
    return plan, heard[0]["time"]


def _divided_alike(communicator: Communicator, plan_with: Callable[[Division | None], Plan]) -> Plan:
    """Make this rank's plan, with the units of the rank whose units are the smallest. Raises ConfigError if
    this rank's budget has no room for them.
    """
    plan = plan_with(None)
    units = Division.of(plan.layout).units
    size = max(unit.nbytes for unit in plan.layout.units)
    heard = communicator.agree("offload()", size=size, digest=digest(units), chunk=plan.layout.chunk_elements)
    smallest = min(heard, key=lambda rank: (heard[rank]["size"], rank))
    if len({each["digest"] for each in heard.values()}) == 1:
        return plan
    mine = communicator.share.rank == smallest
    told = communicator.agree("offload()", units=units if mine else None)[smallest]["units"]
    wanted = tuple((path, tuple(names)) for path, names in told)
    for chunk in sorted({plan.layout.chunk_elements, heard[smallest]["chunk"]}, reverse=True):
        if Division.of(plan.layout).units != wanted:
            plan = plan_with(Division(wanted, chunk))
    if Division.of(plan.layout).units != wanted:
        raise ConfigError(
            f"The budget of rank {communicator.share.rank} has no room for the units of the model that rank "
            f"{smallest} can use.",
            "Give all ranks budgets of about the same size.",
        )
    return plan


def digest(value: Any) -> str:
    """Return a CRC of a value's `repr`."""
    return f"{zlib.crc32(repr(value).encode()):08x}"


_PLAIN = (numbers.Number, str, bytes, type(None), torch.dtype, torch.device)
"""Types whose `repr` gives the value, the same in every process. NumPy's numbers are among them."""


def option_digests(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return option -> CRC of its values in all param groups, which is equal on all ranks for equal values.

    A value that is neither plain nor a collection of plain values counts by its type, or by its name if it
    has one, as a function has: its `repr` may contain an address, which differs between ranks.
    """
    names = sorted({name for group in groups for name in group if name != "params"})
    return {name: digest([_text(group[name]) if name in group else "" for group in groups]) for name in names}


def _text(value: Any) -> str:
    """Describe a value by a text that is equal on all ranks for equal values."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, torch.Tensor):
        values = None if value.is_meta else value.tolist()
        return f"{name}({values}, {value.dtype}, {tuple(value.shape)})"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        # Sorted, as sets are: their order may be another one in each process.
        return f"{name}({sorted((_text(key), _text(each)) for key, each in value.items())})"
    if isinstance(value, Set):
        return f"{name}({sorted(map(_text, value))})"
    if isinstance(value, Sequence):
        return f"{name}({[_text(each) for each in value]})"
    own = getattr(value, "__qualname__", "")
    return f"{name} {getattr(value, '__module__', '')}.{own}" if isinstance(own, str) and own else name


_CURES = {
    Tier.HOST.value: "",
    Tier.DEVICE.value: ", or a device of its own",
    Tier.NVME.value: ", free space there, or give ranks directories on other disks",
}
"""What a user can do instead of giving smaller budgets, as the end of a sentence."""


class Claim(NamedTuple):
    """The bytes that one rank will take of a node's RAM, of a device or of a file system.

    It travels as a list.
    """

    tier: str
    """Value of a Tier."""
    place: str
    """Identifies the device or file system among all of its node; "" for RAM."""
    name: str
    """The name of the RAM, device or file system in errors."""
    wanted: int
    """Bytes that the rank may take."""
    free: int
    """Bytes that are free, as this rank sees them."""
    returned: int = 0
    """Bytes that the rank frees before it takes any."""


def claims_of(plan: Plan, budget: Budget, *, adopts: bool) -> list[Claim]:
    """Return this rank's claims. plan: made within `budget`. adopts: whether the rank's slabs exist already.

    A rank claims its budgets of RAM and of a CUDA device. A host budget that was not given is not claimed,
    because its default is a fraction of the free RAM. The rank also claims disk space, as `disk_claims` says,
    for scratch, and for its slabs if they do not exist yet. Raises StorageError for a directory that cannot
    hold slabs.
    """
    on_cpu = plan.device.type == "cpu"
    ram = (budget.host_bytes or 0) + ((budget.device_bytes or 0) if on_cpu else 0)
    found = [Claim(Tier.HOST.value, "", "RAM", ram, available_ram())]
    if not on_cpu:
        free = available_bytes(plan.device)
        name = f"the memory of {plan.device}"
        wanted = plan.budgets[Tier.DEVICE]
        found.append(Claim(Tier.DEVICE.value, _identity(plan.device), name, wanted, free))
    directories = {plan.slab_directory: plan.nvme_bytes} if plan.slab_directory else budget.nvme_bytes
    nbytes = plan.residuals.disk + (0 if adopts else plan.nvme_bytes)
    return found + disk_claims(nbytes, directories, plan.share.rank)


def disk_claims(nbytes: int, budgets: Mapping[str, int], rank: int) -> list[Claim]:
    """Return a rank's claims on file systems for slabs of `nbytes` bytes.

    budgets: directory -> the most bytes of its slab. A claim has the fewest bytes that its file system must
    hold: those for which the directories on other file systems have no room. The striping, which is chosen
    later, may put more bytes there. Slabs left by dead processes of this rank are removed before new slabs
    are made, so their bytes count as returned. Raises StorageError for a directory that cannot hold slabs.
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
                Tier.NVME.value,
                str(system),
                f"the file system of {first}",
                nbytes - elsewhere,
                free_bytes(first),
                sum(leftover_bytes(directory, rank) for directory, _ in inside),
            )
        )
    return found


def check_claims(heard: Mapping[int, tuple[int, Sequence[Any]]]) -> None:
    """Check that the claims of a node's ranks on one device or file system together fit its free bytes. Pure.

    heard: rank -> (its node, its claims). Raises BudgetError, the same on all ranks.
    """
    groups: dict[tuple[int, str, str], dict[int, Claim]] = {}
    for rank, (node, claims) in sorted(heard.items()):
        for claim in map(Claim._make, claims):
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
                tier=tier,
            )


def _identity(device: torch.device) -> str:
    """Return a CUDA device's UUID, the same in all processes, whichever devices each of them sees."""
    properties: Any = torch.cuda.get_device_properties(device)
    return str(properties.uuid)
