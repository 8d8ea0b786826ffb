"""Plans of small models on a CPU with 64 MiB in each memory tier, and a check that every plan must pass."""

from __future__ import annotations

import torch
from torch import nn

from infinity.config import Budget, Precision
from infinity.formats.optimizer_rules import Rule
from infinity.layout.shards import ALONE, part_bytes
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.planning.planner import Available, make_plan
from infinity.tiers import Tier

CPU = torch.device("cpu")


MiB = 1 << 20


def stack(widths, frozen=()) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, 2 * width) for width in widths))
    for index in frozen:
        model[index % len(widths)].requires_grad_(False)
    return model


def partly_frozen(model: nn.Module) -> nn.Module:
    """Freeze every bias, so that pages have frozen regions beside trainable ones."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.requires_grad_(False)
    return model


def planned(
    model,
    *,
    optimizer=torch.optim.AdamW,
    precision=None,
    activations=None,
    accumulation=None,
    speeds=None,
    work=None,
    update="lazy",
    commits=False,
    slab_directory=None,
    prefer=None,
    share=ALONE,
    node_cache=None,
    **budget,
) -> Plan:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rule = Rule.of(optimizer(parameters)) if optimizer and parameters else None
    return make_plan(
        model,
        rule,
        budget=Budget(**budget),
        precision=precision or Precision(),
        device=CPU,
        available=Available(device=64 * MiB, host=64 * MiB),
        activations=activations,
        accumulation=accumulation,
        speeds=speeds,
        work=work,
        update=update,
        commits=commits,
        slab_directory=slab_directory,
        prefer=prefer,
        share=share,
        node_cache=node_cache,
    )


def gradients_on_nvme(made: Plan) -> int:
    return sum(
        made.page_bytes(unit, Kind.GRADIENT)
        for unit, home in enumerate(made.homes)
        if home[Kind.GRADIENT] is Tier.NVME
    )


def check(made: Plan, budget: Budget) -> None:
    """Assert what the runtime relies on: the plan `made` fits `budget`, and its sizes fit each other.

    Working buffers must hold the largest page or chunk that moves through them. Inside of a page, each
    chunk must begin where the chunk before it ends.
    """
    away = [
        unit.nbytes
        for index, (unit, homes) in enumerate(zip(made.layout.units, made.homes, strict=True))
        if (
            not made.share.whole_parameters
            or homes[Kind.PARAMETER] is not (Tier.HOST if made.unified else Tier.DEVICE)
        )
        and index not in made.mirrored
    ]
    assert made.resident_bytes >= max(away, default=0)
    assert made.transit_bytes >= made.transit_buffer_bytes
    moves = not made.unified or made.home_bytes[Tier.NVME]
    assert made.staging_bytes >= (made.chunk_update_bytes if made.rule and moves else 0)
    for index, unit in enumerate(made.layout.units):
        ends = {Kind.GRADIENT: 0, Kind.OPTIMIZER: 0}
        for number, chunk in enumerate(unit.chunks):
            dtype = unit.regions[chunk.region].dtype
            summed = torch.float32 if made.precision.accumulate == "fp32" else dtype
            single = made.accumulation == 1 and made.share.ranks == 1
            itemsize = (dtype if single else summed).itemsize
            gradients = -(-chunk.count * itemsize // 4096) * 4096 if made.rule else 0
            states = made.state_format(index, number).nbytes
            assert made.gradient_offset(index, number) == ends[Kind.GRADIENT]
            assert made.state_offset(index, number) == ends[Kind.OPTIMIZER]
            owned = chunk.owner == made.share.rank
            ends[Kind.GRADIENT] += gradients * (owned or made.share.whole_gradients)
            ends[Kind.OPTIMIZER] += states * (owned or made.share.whole_states)
            assert (
                made.chunk_update_bytes
                >= -(-chunk.count * dtype.itemsize // 4096) * 4096 + gradients + states
            )
        for kind, end in ends.items():
            assert made.page_bytes(index, kind) == end
            assert (made.homes[index][kind] is None) == (end == 0)
        ranks = 1 if made.share.whole_parameters else made.share.ranks
        assert made.page_bytes(index, Kind.PARAMETER) == part_bytes(unit, ranks)
    check_exchange(made)
    total = sum(made.page_bytes(unit, kind) for unit in range(len(made.homes)) for kind in Kind)
    assert sum(made.home_bytes.values()) == total
    assert made.host_bytes <= made.budgets[Tier.HOST]
    if budget.nvme_bytes or not made.commits:
        assert made.nvme_bytes <= sum(budget.nvme_bytes.values())
    else:
        assert made.home_bytes[Tier.NVME] == 0
    if not made.unified:
        assert made.device_bytes <= made.budgets[Tier.DEVICE]
    assert all(row["free"] >= 0 for row in made.rows())


def check_exchange(made: Plan) -> None:
    """Assert that exchange buffers hold any chunk in fp32, and that one rank has none."""
    if made.share.ranks == 1:
        assert (made.exchange_block_bytes, made.exchange_bytes) == (0, 0)
        return
    counts = [chunk.count for unit in made.layout.units for chunk in unit.chunks]
    assert made.exchange_block_bytes >= 4 * max(counts, default=0)
    assert made.exchange_block_bytes % 4096 == 0
    assert made.exchange_bytes in (2 * made.exchange_block_bytes, 8 * made.exchange_block_bytes)
