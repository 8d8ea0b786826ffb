"""Tests of plans for one of several ranks: bytes by stage, smallest budgets, and updates on a device."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planned_models import MiB, check, planned, stack

from infinity.config import Budget
from infinity.errors import BudgetError
from infinity.formats.optimizer_rules import Rule
from infinity.layout.shards import Share
from infinity.planning import twin_flow
from infinity.planning.budgets import resident_budget
from infinity.planning.network import bytes_by_stage
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.planning.slab_layout import trainable_bytes
from infinity.tiers import Tier

ROOMY = {"host": 64 * MiB}
DIVIDED_FROM = {Kind.OPTIMIZER: 1, Kind.GRADIENT: 2, Kind.PARAMETER: 3}
"""The stage from which each kind is divided."""
shares = st.tuples(st.integers(2, 6), st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)).map(
    lambda each: Share(each[1] % each[0], each[0], each[2], 0 if each[3] and each[0] % each[3] else each[3])
)
sizes = st.integers(1, 3 * MiB) | st.integers(1, 100_000)


def model():
    return stack([512, 300, 300, 64], frozen={2})


def total(made: Plan, kind: Kind) -> int:
    return sum(made.page_sizes[kind])


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_by_stage(stage, ranks) -> None:
    plans = [planned(model(), **ROOMY, share=Share(rank, ranks, stage)) for rank in range(ranks)]
    regions = [region for unit in plans[0].layout.units for region in unit.regions]
    for rank, made in enumerate(plans):
        assert [region for unit in made.layout.units for region in unit.regions] == regions
        owners = {chunk.owner for unit in made.layout.units for chunk in unit.chunks}
        assert owners == (set(range(ranks)) if stage < 2 else {rank})
    trained = sum(region.elements for region in regions if region.trainable)
    # bf16 parameters, fp32 sums, and of each parameter two fp32 moments and half a master.
    whole = {
        Kind.PARAMETER: sum(region.elements * 2 for region in regions),
        Kind.GRADIENT: trained * 4,
        Kind.OPTIMIZER: trained * 10,
    }
    for kind, nbytes in whole.items():
        found = [total(made, kind) for made in plans]
        assert len(set(found)) == 1
        assert found[0] == (nbytes // ranks if stage >= DIVIDED_FROM[kind] else nbytes)
    # One rank's plan has as many bytes but for padding: less than a block of each rank in each region.
    alone = planned(model(), **ROOMY)
    alone_trained = sum(
        region.elements for unit in alone.layout.units for region in unit.regions if region.trainable
    )
    padding = trained - alone_trained
    assert 0 <= padding < ranks * 4096 * len(regions)
    assert whole[Kind.GRADIENT] - total(alone, Kind.GRADIENT) <= 4 * padding
    assert whole[Kind.OPTIMIZER] - total(alone, Kind.OPTIMIZER) <= 10 * padding


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_has_the_same_plan_at_every_stage(stage) -> None:
    made = planned(model(), **ROOMY, share=Share(0, 1, stage))
    assert dataclasses.replace(made, share=Share()) == planned(model(), **ROOMY)
    assert made.page_sizes == planned(model(), **ROOMY).page_sizes


@settings(max_examples=200, deadline=None)
@given(
    share=shares,
    frozen=st.sets(st.integers(0, 5), max_size=2),
    optimizer=st.sampled_from([None, torch.optim.AdamW, torch.optim.SGD]),
    accumulation=st.sampled_from([None, 1]),
    room=st.tuples(st.none() | sizes, sizes, st.none() | sizes),
)
def test_needed_is_enough(share, frozen, optimizer, accumulation, room) -> None:
    budget = {"device": room[0], "host": room[1], "nvme": room[2] and {"/nowhere": room[2]}}
    others = {"optimizer": optimizer, "accumulation": accumulation, "share": share}
    short: list[str] = []
    for _ in range(4):
        try:
            made = planned(stack([64, 90, 130], frozen), **others, **budget)
        except BudgetError as error:
            tier = next(each for each in ("device", "host", "nvme") if f"the {each} tier" in error.cause)
            assert error.needed is not None
            short.append(tier)
            budget = {**budget, tier: {"/nowhere": error.needed} if tier == "nvme" else error.needed}
        else:
            break
    assert len(short) <= (2 if short[:1] == ["device"] else 1)
    check(made, Budget(**budget))


@settings(max_examples=40, deadline=None)
@given(share=shares, device=st.none() | sizes, nvme=st.booleans())
def test_the_smallest_budgets_do(share, device, nvme) -> None:
    given_nvme = {"/nowhere": 64 * MiB} if nvme else None
    roomy = planned(model(), device=device and 64 * MiB, host=64 * MiB, nvme=given_nvme, share=share).smallest
    budget = {tier.value: nbytes for tier, nbytes in roomy.items()}
    if nvme:
        budget["nvme"] = {"/nowhere": budget.get("nvme", 1)}
    check(planned(model(), **budget, share=share), Budget(**budget))


def test_more_ranks_need_less_at_a_stage_that_divides() -> None:
    needs = [
        sum(planned(model(), **ROOMY, share=Share(0, ranks, 3)).home_bytes.values()) for ranks in (1, 2, 4)
    ]
    assert needs[1] < 0.6 * needs[0]
    assert needs[2] < 0.6 * needs[1]


@pytest.mark.parametrize("unified", [True, False])
def test_at_stage_3_every_page_that_computes_is_in_the_pool(unified) -> None:
    budget = {"host": 64 * MiB} if unified else {"host": 64 * MiB, "device": 64 * MiB}
    whole, parts = (planned(model(), **budget, share=Share(1, 2, stage)) for stage in (2, 3))
    assert all(whole.stays(unit) for unit in range(len(whole.homes)))
    assert whole.resident_bytes == 0
    assert parts.resident_bytes == sum(unit.nbytes for unit in parts.layout.units), "there is room for all"
    check(parts, Budget(**budget))


def test_at_stage_3_gradients_and_states_leave_the_device_to_pages() -> None:
    """A budget for all pages on the device, and for nothing but them and this rank's part of parameters."""
    share = Share(0, 2, 3)
    tight = planned(model(), **ROOMY, device=64 * MiB, share=share).smallest[Tier.DEVICE]
    made = planned(model(), **ROOMY, device=tight, share=share)
    whole = sum(unit.nbytes for unit in made.layout.units)
    enough = resident_budget(made, None)
    assert enough is not None
    assert enough <= (whole + whole // 2 + made.leaving_bytes) * 4 / 3 * 1.1, "a quarter is for activations"
    found = planned(model(), **ROOMY, device=enough, share=share)
    assert found.resident_bytes == whole
    check(found, Budget(**ROOMY, device=enough))
    poor = planned(model(), device=enough, host=found.smallest[Tier.HOST], share=share)
    check(poor, Budget(device=enough, host=found.smallest[Tier.HOST]))


@pytest.mark.parametrize("nvme", [True, False])
def test_a_budget_for_pages_is_enough_for_them(nvme) -> None:
    budget = {"nvme": {"/nowhere": 64 * MiB}} if nvme else {}
    tight = planned(model(), **ROOMY, **budget, share=Share(0, 2, 3)).smallest[Tier.HOST]
    made = planned(model(), host=tight, **budget, share=Share(0, 2, 3))
    whole = sum(unit.nbytes for unit in made.layout.units)
    assert made.resident_bytes < whole
    enough = resident_budget(made, None)
    assert enough is not None
    assert planned(model(), host=enough, **budget, share=Share(0, 2, 3)).resident_bytes == whole
    fewer = planned(model(), host=enough - max(4096, enough // 256), **budget, share=Share(0, 2, 3))
    assert fewer.resident_bytes < whole


ON_NODES = [Share(0, 4, 3, on_node=2), Share(1, 4, 1, on_node=2), Share(1, 2, 3, on_node=1)]


@pytest.mark.parametrize("share", ON_NODES)
def test_what_other_nodes_have_is_kept_where_there_is_room(share: Share) -> None:
    """A device that has room for all pages needs no cache if its rank is the only one of the node."""
    alone = share.on_node == 1
    budget: dict[str, Any] = {"host": 64 * MiB}
    if alone:
        least = planned(model(), **budget, device=64 * MiB, share=share).smallest[Tier.DEVICE]
        assert planned(model(), **budget, device=64 * MiB, share=share).node_cache_bytes == 0
        budget["device"] = least
    made = planned(model(), **budget, share=share)
    owned = sum(unit.nbytes for unit in made.layout.units) // share.ranks
    assert made.node_cache_bytes == owned * (share.ranks // share.on_node - 1)
    assert made.host_bytes == planned(model(), **budget, share=share, node_cache=0).host_bytes + (
        made.node_cache_bytes
    )
    check(made, Budget(**budget))


def test_a_cache_takes_a_share_of_the_ram_that_makes_pages_go_to_nvme() -> None:
    share, nvme = Share(0, 4, 3, on_node=2), {"/nowhere": 64 * MiB}
    wide = stack([512] * 6)
    tight = planned(wide, host=64 * MiB, share=share, node_cache=0).home_bytes[Tier.HOST] * 3 // 4
    made = planned(wide, host=tight, nvme=nvme, share=share)
    without = planned(wide, host=tight, nvme=nvme, share=share, node_cache=0)
    assert made.layout == without.layout
    assert 0 < made.node_cache_bytes <= tight // 4
    assert made.home_bytes[Tier.NVME] > without.home_bytes[Tier.NVME] > 0
    check(made, Budget(host=tight, nvme=nvme))


def test_a_cache_comes_before_mirrors() -> None:
    """The link between nodes is slower than that to the device."""
    share = Share(0, 4, 1, on_node=2)
    roomy = planned(model(), **ROOMY, device=64 * MiB, share=share)
    assert len(roomy.mirrored) == 3 and roomy.node_cache_bytes == roomy.relayed_bytes > 0
    mirrors = sum(roomy.page_bytes(unit, Kind.PARAMETER) for unit in roomy.mirrored)
    tight = roomy.host_bytes - mirrors // 2
    made = planned(model(), host=tight, device=64 * MiB, share=share)
    assert made.node_cache_bytes == roomy.node_cache_bytes and 0 < len(made.mirrored) < 3
    check(made, Budget(host=tight, device=64 * MiB))


def test_no_cache_without_need_or_room() -> None:
    share = Share(0, 4, 3, on_node=2)
    small = planned(model(), host=64 * MiB, share=share, node_cache=4096)
    assert small.node_cache_bytes == 0
    assert planned(model(), **ROOMY, share=replace(share, stage=0)).node_cache_bytes == 0
    assert planned(model(), **ROOMY, share=Share(0, 2, 2, on_node=1)).node_cache_bytes == 0
    least = planned(model(), host=64 * MiB, share=share).smallest[Tier.HOST]
    assert planned(model(), host=least, share=share).node_cache_bytes == 0


def test_the_exchange_takes_little_where_memory_is_at_its_least() -> None:
    roomy = planned(model(), **ROOMY, share=Share(0, 2, 2))
    assert roomy.exchange_bytes == 8 * roomy.exchange_block_bytes > 0
    assert roomy.rows()[0]["working"] == roomy.transit_bytes + roomy.exchange_bytes
    least = planned(model(), host=roomy.smallest[Tier.HOST], share=Share(0, 2, 2))
    assert least.exchange_bytes == 2 * least.exchange_block_bytes > 0
    assert least.waiting_bytes == 0


@pytest.mark.parametrize("stage", range(4))
def test_gradients_that_wait_for_other_ranks_are_planned(stage) -> None:
    made = planned(model(), **ROOMY, share=Share(0, 2, stage))
    assert made.waiting_bytes == (
        2 * made.exchange_block_bytes if stage >= DIVIDED_FROM[Kind.GRADIENT] else 0
    )
    assert made.exchange_bytes > made.waiting_bytes


def test_ranks_send_each_other_few_long_chunks_where_ram_has_room() -> None:
    with torch.device("meta"):
        large = stack([3000, 3000])

    def chunk(host: int, share: Share) -> int:
        made = planned(large, host=host * MiB, nvme={"/nowhere": 1024 * MiB}, share=share)
        assert (
            made.layout.chunk_elements <= 1 << 20 or 16 * made.chunk_update_bytes <= made.budgets[Tier.HOST]
        )
        return made.layout.chunk_elements

    assert [chunk(1024, Share(0, ranks, 3)) for ranks in (1, 2, 4)] == [1 << 20, 1 << 22, 1 << 22]
    assert chunk(400, Share(0, 2, 3)) <= 1 << 20


def test_disk_bytes_are_this_ranks() -> None:
    def moved(ranks: int, stage: int) -> Plan:
        smallest = planned(model(), host=64 * MiB, nvme={"/n": 64 * MiB}).smallest
        made = planned(
            model(),
            host=2 * smallest[Tier.HOST],
            nvme={"/n": 64 * MiB},
            share=Share(0, ranks, stage),
            update="sync",
        )
        homes = tuple({kind: tier and Tier.NVME for kind, tier in home.items()} for home in made.homes)
        return dataclasses.replace(made, homes=homes, resident_bytes=0)

    for stage in range(4):
        made = moved(2, stage)
        trained = sum(
            region.elements * 2 for unit in made.layout.units for region in unit.regions if region.trainable
        )
        own = trained if stage == 0 else trained // 2
        update = made.traffic.update
        states, gradients = total(made, Kind.OPTIMIZER), total(made, Kind.GRADIENT)
        assert update.disk_read == own + states + gradients
        # Whole homes also take in what the other rank has updated.
        assert update.disk_write == states + (trained if stage < 3 else own)
        assert made.traffic.forward.disk_read == total(made, Kind.PARAMETER)


@pytest.mark.parametrize("stage", range(4))
def test_a_rank_s_slabs_have_room_for_what_it_commits(stage: int) -> None:
    """Homes once more than without commits where they change, and twice what the rank updates."""
    made = planned(model(), **ROOMY, commits=True, slab_directory="/x", share=Share(1, 2, stage))
    states, parameters = total(made, Kind.OPTIMIZER), total(made, Kind.PARAMETER)
    trainable = sum(trainable_bytes(unit) for unit in made.layout.units)
    updated = trainable if stage == 0 else trainable // 2
    assert made.durable_bytes == parameters + updated + 2 * states
    assert made.commit_bytes == updated + states  # all pages are in RAM


@pytest.mark.parametrize("stage", range(4))
def test_what_rests_on_the_device_is_updated_there_or_mirrored(stage, monkeypatch) -> None:
    """Units whose part of this rank rests on the device; else parameters are mirrored, or their part is in
    RAM, where the CPU updates it.
    """
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: True)
    share = Share(1, 2, stage)
    roomy = planned(model(), **ROOMY, device=64 * MiB, share=share)
    check(roomy, Budget(**ROOMY, device=64 * MiB))
    assert len(roomy.updated_on_device) == 3
    used = sum(roomy.page_bytes(unit, kind) for unit in roomy.updated_on_device for kind in Kind)
    assert roomy.device_bytes >= used + roomy.workspace_bytes > used + 8 * roomy.upload_bytes > used
    moved = roomy.traffic.update
    assert (moved.disk_read, moved.disk_write) == (0, 0)
    assert moved.host < total(roomy, Kind.OPTIMIZER), "the CPU updates nothing"
    assert (roomy.traffic.backward.to_device > 0) == (stage > 1), "gradients of ranks"
    smallest = planned(model(), **ROOMY, device=64 * MiB, share=share).smallest[Tier.DEVICE]
    for device in range(smallest, 40 * MiB, 2 * MiB):
        made = planned(model(), **ROOMY, device=device, share=share)
        check(made, Budget(**ROOMY, device=device))
        for unit, home in enumerate(made.homes):
            if home[Kind.GRADIENT] is not None and unit not in made.updated_on_device:
                assert home[Kind.PARAMETER] is Tier.HOST
    assert made.updated_on_device


@settings(max_examples=25, deadline=None)
@example(share=Share(0, 3, 0), device=733)  # longer chunks than without updates there
@given(share=shares, device=st.integers(1, 24) | st.integers(600, 1200))
def test_any_budget_with_updates_on_the_device_is_kept(share: Share, device: int) -> None:
    """device: in units of 16 KiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin_flow, "has_kernels", lambda device: True)
        for host in (2 * MiB, 64 * MiB):
            budget = {"device": device << 14, "host": host, "nvme": {"/nowhere": 64 * MiB}}
            try:
                made = planned(model(), **budget, share=share)
            except BudgetError as error:
                assert error.needed is None or error.tier is not None
            else:
                check(made, Budget(**budget))


@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_bytes_by_stage_are_those_of_the_formulas_and_padding(states) -> None:
    parameters = stack([512, 300, 300, 64], frozen={2})
    rule = Rule.of(
        torch.optim.AdamW([each for each in parameters.parameters() if each.requires_grad]), states
    )
    made = dataclasses.replace(planned(parameters, **ROOMY, share=Share(0, 4, 1)), rule=rule)
    numel = sum(each.numel() for each in parameters.parameters())
    trained = sum(each.numel() for each in parameters.parameters() if each.requires_grad)
    found = {(each.stage, each.kind): each for each in bytes_by_stage(made)}
    for (stage, kind), each in found.items():
        elements = numel if kind is Kind.PARAMETER else trained
        # bf16 parameters, fp32 sums, half a master, and two moments: of fp32, or of codes with few scales.
        itemsize = {Kind.PARAMETER: 2, Kind.GRADIENT: 4, Kind.OPTIMIZER: 10 if states == "fp32" else 4}[kind]
        ranks = 4 if stage >= DIVIDED_FROM[kind] else 1
        assert each.formula == pytest.approx(itemsize * elements / ranks, rel=0.02)
        assert each.formula <= each.planned <= 1.25 * each.formula
    assert sum(each.planned for each in found.values() if each.stage == 1) == sum(
        total(made, kind) for kind in Kind
    )


def test_the_text_tells_the_rank() -> None:
    assert "rank" not in str(planned(model(), **ROOMY))
    text = str(planned(model(), **ROOMY, share=Share(1, 4, 2)))
    assert "rank 1 of 4 · stage 2: gradients and optimizer states are divided" in text


def test_a_plan_for_inference_has_parts_of_frozen_pages() -> None:
    parameters = model()
    made = planned(parameters, optimizer=None, **ROOMY, share=Share(2, 4, 3))
    assert 4 * total(made, Kind.PARAMETER) == sum(unit.nbytes for unit in made.layout.units)
    assert total(made, Kind.GRADIENT) == total(made, Kind.OPTIMIZER) == 0
