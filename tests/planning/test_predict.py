"""Tests of the seconds predicted for a step from its bytes and the machine's rates: they must equal sums made
by hand.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import ConfigError
from infinity.layout.shards import ALONE
from infinity.planning.machine_rates import MachineRates
from infinity.planning.placement import Kind
from infinity.planning.predict import (
    PhaseBytes,
    Prediction,
    StepBytes,
    UpdateTime,
    Work,
    predict,
    traffic,
)
from infinity.tiers import Tier

GB = 10**9
CPU = MachineRates(
    disk={"read": 2e9, "write": 1e9, "mixed": 1.5e9},
    host_stream=4e9,
    flops={torch.bfloat16: 1e11, torch.float32: 5e10},
    compute_memory=1e10,
)
GPU = replace(CPU, link=1e9)


def check(found: Prediction, least: float, most: float, limited_by: str, **busy: float) -> None:
    assert (found.least, found.most) == pytest.approx((least, most))
    assert found.seconds == pytest.approx((least + most) / 2)
    assert found.limited_by == limited_by
    parts = {
        name: getattr(found, name) for name in ("compute", "disk", "update", "link", "exchange", "network")
    }
    assert parts == pytest.approx({**dict.fromkeys(parts, 0.0), **busy})
    assert not found.measured


def test_products_go_by_their_dtype_and_other_operations_by_their_bytes() -> None:
    assert Work({torch.bfloat16: 10**11, torch.float32: 10**11}, 10**10).seconds(CPU) == 1 + 2 + 1
    assert Work({torch.float64: 10**11}, 0).seconds(CPU) == 2, "the slowest dtype that is known"


def test_forward_and_backward_have_work_of_their_own() -> None:
    step = Work({torch.bfloat16: 10**11}, 10**10, forward=Work({torch.bfloat16: 2 * 10**10}, 10**9))
    assert step.passes(CPU) == pytest.approx((0.2 + 0.1, 2 - 0.3))
    assert Work({}, 10**10).passes(CPU) == (1.0, 0.0), "inference"


def test_a_lazy_update_runs_beside_the_forward_alone() -> None:
    moved = StepBytes(
        forward=PhaseBytes(disk_read=1 * GB),
        backward=PhaseBytes(disk_read=2 * GB, disk_write=1 * GB),
        update=PhaseBytes(disk_read=3 * GB, disk_write=3 * GB),
    )
    # Forward: 6 GB mixed and 1 GB read alone, 4.5 s. Backward: 2 GB mixed and 1 GB read alone.
    backward = 2 / 1.5 + 0.5
    disk = 4.5 + backward
    check(predict(moved, CPU, (1, 1)), disk, disk + 2, "disk", compute=2, disk=disk)
    check(predict(moved, CPU, (1, 8)), 4.5 + 8, disk + 9, "compute", compute=9, disk=disk)
    check(predict(moved, CPU, (5, 1)), 5 + backward, disk + 6, "compute", compute=6, disk=disk)


def test_an_update_in_step_follows_forward_and_backward() -> None:
    moved = StepBytes(
        forward=PhaseBytes(disk_read=2 * GB),
        backward=PhaseBytes(disk_read=4 * GB, disk_write=1 * GB),
        update=PhaseBytes(disk_read=3 * GB, disk_write=3 * GB),
        when="sync",
    )
    # Forward: 1 s. Backward: 2 GB mixed (4/3 s) and 3 GB read alone (1.5 s). The update: 6 GB mixed.
    disk = 1 + 2 / 1.5 + 1.5 + 4.0
    check(predict(moved, CPU, (0.5, 0.5)), disk, disk + 1.0, "disk", compute=1.0, disk=disk)


@pytest.mark.parametrize("when", ["eager", "speculative"])
def test_an_early_update_has_the_whole_step_to_hide_in(when: UpdateTime) -> None:
    update = PhaseBytes(disk_read=3 * GB, disk_write=4 * GB)
    moved = StepBytes(
        forward=PhaseBytes(disk_read=2 * GB),
        backward=PhaseBytes(disk_read=2 * GB),
        update=update,
        early=update,
        when=when,
    )
    # 8 GB mixed at 1.5 GB/s, 3 GB read alone at 2 GB/s.
    disk = 8 / 1.5 + 1.5
    check(predict(moved, CPU, (0.3, 0.7)), disk, disk + 1.0, "disk", compute=1.0, disk=disk)
    check(predict(moved, CPU, (3, 6)), 9.0, disk + 9.0, "compute", compute=9.0, disk=disk)
    # Of a step that has to wait for the disk before the backward begins, too little is left.
    slow = replace(moved, forward=PhaseBytes(disk_read=12 * GB))
    found = predict(slow, CPU, (0, 6))
    check(found, 6.0 + 6.0, 8 / 1.5 + 6.5 + 6.0, "disk", compute=6.0, disk=8 / 1.5 + 6.5)


def test_of_early_updates_those_without_a_second_place_wait_for_the_forward() -> None:
    late, early = PhaseBytes(host=12 * GB), PhaseBytes(host=4 * GB)
    moved = StepBytes(backward=PhaseBytes(to_host=1 * GB), update=late + early, early=early)
    # Forward: 3 s in RAM; backward: 1 s on the link and 0.25 s in RAM. All in RAM would take 4.25 s.
    busy = {"compute": 2.0, "update": 4.25, "link": 1.0}
    check(predict(moved, GPU, (1.0, 1.0)), 4.25, 7.25, "update", **busy)
    check(predict(moved, GPU, (0.0, 2.0)), 5.0, 7.25, "update", **busy)


def test_compute_hides_the_disk_but_not_that_of_an_update_after_it() -> None:
    update = PhaseBytes(disk_write=3 * GB, host=4 * GB)
    moved = StepBytes(backward=PhaseBytes(disk_read=2 * GB), update=update, when="sync")
    # 6 s of compute hide a second of reads; then 3 s of writes hide a second of updates.
    found = predict(moved, CPU, (2.0, 4.0))
    check(found, 6.0 + 3.0, 7.0 + 4.0, "compute", compute=6.0, disk=1.0 + 3.0, update=1.0)


def test_on_the_cpu_all_but_the_disk_adds_up() -> None:
    moved = StepBytes(
        forward=PhaseBytes(to_device=1 * GB),
        backward=PhaseBytes(disk_read=2 * GB, to_device=1 * GB, host=4 * GB),
        update=PhaseBytes(host=16 * GB, to_host=2 * GB),
    )
    # Updating and adding gradients take 5 s, copying 2 s, beside the disk's second.
    found = predict(moved, CPU, (0.5, 1.0))
    check(found, 8.5, 9.5, "update", compute=1.5, link=2.0, update=5.0, disk=1.0)


def test_a_link_runs_beside_compute_and_moves_bytes_of_ram() -> None:
    moved = StepBytes(
        forward=PhaseBytes(to_device=3 * GB),
        backward=PhaseBytes(to_device=3 * GB, to_host=1 * GB),
        update=PhaseBytes(host=4 * GB, to_host=1 * GB),
    )
    # RAM: 4 GB of updates and 4 GB of copies beside the forward, 4 GB of copies beside the backward.
    busy = {"compute": 1.0, "link": 6.0, "update": 2 + 1}
    check(predict(moved, GPU, (0.5, 0.5)), 6.0, 10.0, "link", **busy)


def test_chunks_visit_until_ram_and_link_are_busy_for_equally_long() -> None:
    update = PhaseBytes(host=40 * GB, to_device=1 * GB)
    visits = StepBytes(
        backward=PhaseBytes(to_host=-1 * GB),
        update=PhaseBytes(host=-40 * GB, to_device=3 * GB, to_host=5 * GB),
    )
    moved = StepBytes(backward=PhaseBytes(to_host=1 * GB), update=update, visits=visits)
    # Beside the forward, x of the chunks leave (40 - 40x + 1 + 3x + 5x) / 4 s to RAM and 5x s to the link.
    share = 41 / 52
    found = predict(moved, GPU, (1.0, 1.0))
    assert found.visiting_share == pytest.approx(share, abs=1e-5)
    assert found.least == pytest.approx(5 * share + 1.0)
    # Early visits have the backward's gradients beside them, 1 - x of them, and end before the forward.
    early = replace(moved, early=update, visits=replace(visits, early=visits.update), when="eager")
    found = predict(early, GPU, (0.5, 1.0))
    share = (42 / 4 - 1 - 0.5) / (4 + 33 / 4)
    assert found.visiting_share == pytest.approx(share, abs=1e-5)
    assert found.least == pytest.approx(1 + 4 * share + 0.5)
    assert predict(replace(moved, visits=None), GPU, (1.0, 1.0)).visiting_share is None


def test_on_the_cpu_copies_from_ranks_add_up_and_the_network_runs_beside() -> None:
    speeds = replace(CPU, network=0.5e9)
    moved = StepBytes(backward=PhaseBytes(disk_read=2 * GB), update=PhaseBytes(host=4 * GB))
    gradients = PhaseBytes(received=3 * GB, crossing=2 * GB)
    # 3 GB received are read and written at 4 GB/s; 2 GB from other nodes come at 0.5 GB/s, in the backwards.
    busy = {"compute": 3.0, "update": 1.0, "exchange": 1.5, "disk": 2.0, "network": 4.0}
    found = predict(moved.with_ranks(PhaseBytes(), gradients, 2), speeds, (0.5, 1.0), 2)
    check(found, 0.5 + 0.5 + 1.0 + 4.0, 11.5, "network", **busy)
    # Parameters come in all passes alike: 1 s on the network in each.
    found = predict(moved.with_ranks(gradients, PhaseBytes(), 2), speeds, (0.5, 1.0), 2)
    check(found, 1.875 + 1.375 + 1.0 + 1.375, 11.5, "compute", **busy)
    unknown = predict(moved.with_ranks(gradients, PhaseBytes(), 2), CPU, (0.5, 1.0), 2)
    check(unknown, 5.5, 7.5, "compute", **(busy | {"network": 0.0}))


def test_beside_a_device_all_that_comes_from_ranks_runs_beside_compute() -> None:
    speeds = replace(GPU, network=1e9)
    brought = PhaseBytes(received=6 * GB, crossing=4 * GB)
    # 6 GB received take 3 s of copies in RAM, 4 GB from other nodes 4 s on the network.
    moved = StepBytes().with_ranks(PhaseBytes(), brought, 1)
    check(predict(moved, speeds, (0, 3.5)), 4.0, 10.5, "network", compute=3.5, exchange=3.0, network=4.0)
    check(predict(moved, GPU, (0, 1.0)), 3.0, 4.0, "exchange", compute=1.0, exchange=3.0)


def test_without_a_disk_nothing_waits_for_one() -> None:
    speeds = replace(CPU, disk=None)
    moved = StepBytes(backward=PhaseBytes(to_device=0), update=PhaseBytes(host=4 * GB))
    check(predict(moved, speeds, (0.2, 0.3)), 1.5, 1.5, "update", compute=0.5, update=1)


def test_micro_batches_repeat_forward_and_backward_and_read_gradients_again() -> None:
    moved = StepBytes(
        forward=PhaseBytes(disk_read=1 * GB),
        backward=PhaseBytes(disk_read=1 * GB, host=4 * GB),
        accumulation=PhaseBytes(disk_read=1 * GB, host=2 * GB),
        update=PhaseBytes(disk_write=1 * GB),
        when="sync",
    )
    # Three forwards of 0.5 s of reads, backwards of 1.25 s and twice another 0.5 s on the CPU, 1 s of writes.
    found = predict(moved, CPU, (0.25, 0.25), 3)
    check(found, 1.5 + 3.75 + 1.0 + 1.0, 5.5 + 4.0 + 1.0, "update", compute=1.5, update=4.0, disk=4.0 + 1.0)
    with pytest.raises(ConfigError, match="0 micro-batches"):
        predict(moved, CPU, (0.5, 0.5), 0)


def test_inference_is_all_forward() -> None:
    found = predict(StepBytes(forward=PhaseBytes(disk_read=2 * GB)), CPU, (3.0, 0.0))
    check(found, 3.0, 4.0, "compute", compute=3.0, disk=1.0)


@pytest.mark.parametrize(
    "least, most, text", [(0.2849, 0.41, "0.28 to 0.41"), (1.3, 1.301, "1.3"), (99.6, 314.1, "100 to 314")]
)
def test_a_range_is_shown_with_two_digits(least: float, most: float, text: str) -> None:
    parts = {"limited_by": "disk", "compute": 0.1, "disk": 0.2, "update": 0.0, "link": 0.0}
    found = Prediction(least=least, most=most, **parts)
    assert found.text == text
    assert found.as_dict()["seconds"] == (least + most) / 2


sizes = st.integers(0, 100 * GB)
phases = st.builds(PhaseBytes, disk_read=sizes, disk_write=sizes, to_device=sizes, to_host=sizes, host=sizes)
plain_rates = st.floats(1e8, 1e11)
some = phases.map(lambda each: each + PhaseBytes(host=1))  # so that a backward moves something
traffics = st.builds(StepBytes, forward=phases, backward=some, accumulation=phases, update=phases)


@given(
    moved=traffics,
    more=traffics,
    update=st.sampled_from(["lazy", "eager", "speculative", "sync"]),
    link=st.none() | plain_rates,
    read=plain_rates,
    write=plain_rates,
    share=st.floats(0, 1),
    seconds=st.floats(0, 100),
    micro_batches=st.integers(1, 5),
)
def test_more_bytes_never_take_less(
    *, moved, more, update, link, read, write, share, seconds, micro_batches
) -> None:
    # A disk that reads and writes at once is no faster than the two would be beside one another.
    mixed = min(read, write) * (1 + share)
    speeds = replace(CPU, disk={"read": read, "write": write, "mixed": mixed}, host_stream=5e9, link=link)
    both = StepBytes(
        forward=moved.forward + more.forward,
        backward=moved.backward + more.backward,
        accumulation=moved.accumulation + more.accumulation,
        update=moved.update + more.update,
        when=update,
    )
    if update in ("eager", "speculative"):
        part = PhaseBytes() if update == "speculative" else more.update
        moved, both = replace(moved, early=moved.update), replace(both, early=moved.update + part)
    moved = replace(moved, when=update)
    less = predict(moved, speeds, (seconds, 2 * seconds), micro_batches)
    assert less.least <= less.most * (1 + 1e-9)
    for more_of_it in (
        predict(both, speeds, (seconds, 2 * seconds), micro_batches),
        predict(moved, speeds, (seconds, 2 * seconds + 1), micro_batches),
        predict(moved, speeds, (seconds, 2 * seconds), micro_batches + 1),
    ):
        assert more_of_it.least >= less.least * (1 - 1e-9)
        assert more_of_it.most >= less.most * (1 - 1e-9)


PAGES = {Kind.PARAMETER: [100, 100], Kind.GRADIENT: [40, 40], Kind.OPTIMIZER: [300, 300]}


def moved_with(
    tier: Tier,
    *,
    unified: bool,
    computes_in_ram: bool,
    resident: int = 0,
    update: UpdateTime = "lazy",
    **more: Any,
) -> StepBytes:
    others: dict[str, Any] = {"accumulation": None, "mirrored": (), "speculating": (), "visiting_units": ()}
    chunks = [SimpleNamespace(region=0)] * 3 + [SimpleNamespace(region=1)]
    regions = [SimpleNamespace(trainable=True), SimpleNamespace(trainable=False)]
    plan: Any = SimpleNamespace(
        **(others | more),
        homes=tuple(dict.fromkeys(Kind, tier) for _ in range(2)),
        page_sizes=PAGES,
        gradient_bytes=PAGES[Kind.GRADIENT],
        layout=SimpleNamespace(
            units=[
                SimpleNamespace(nbytes=each, chunks=chunks, regions=regions) for each in PAGES[Kind.PARAMETER]
            ]
        ),
        staging_bytes=50,
        chunk_update_bytes=20,
        stays=lambda unit: tier is (Tier.HOST if unified else Tier.DEVICE),
        resident_bytes=resident,
        update=update,
        unified=unified,
        device=torch.device("cpu" if computes_in_ram else "cuda"),
        share=ALONE,
        updated_on_device=(),
    )
    return traffic(plan, [80, 80])


def test_traffic_of_pages_on_disk() -> None:
    moved = moved_with(Tier.NVME, unified=True, computes_in_ram=True)
    assert moved.forward == PhaseBytes(disk_read=200)
    assert moved.backward == PhaseBytes(disk_read=200, disk_write=80, host=2 * 160)
    assert moved.accumulation == PhaseBytes(disk_read=80, host=80)
    # The parameters that forward reads are also the ones that are updated.
    # Staging holds two of the three chunks that each unit trains.
    bytes_in_ram, turns = 2 * (160 + 40 + 600), {"staged": 2 * 3, "waits": 2 * 3}
    assert moved.update == PhaseBytes(disk_read=2 * 340, disk_write=2 * 380, host=bytes_in_ram, **turns)
    assert (moved.disk_read, moved.disk_write) == (400 + 680, 80 + 760)
    apart = moved_with(Tier.NVME, unified=False, computes_in_ram=False)
    assert (apart.forward.to_device, apart.backward.to_device, apart.backward.to_host) == (200, 200, 160)
    by_itself = moved_with(Tier.NVME, unified=True, computes_in_ram=True, update="sync")
    assert by_itself.update == PhaseBytes(disk_read=2 * 420, disk_write=2 * 380, host=bytes_in_ram, **turns)
    assert apart.update.disk_read == by_itself.update.disk_read


def test_chunks_in_staging_take_calls_and_waits() -> None:
    moved = StepBytes(update=PhaseBytes(host=4 * GB, staged=1000, waits=500))
    check(predict(moved, CPU, (1.0, 1.0)), 3.45, 3.45, "compute", compute=2.0, update=1.0 + 0.4 + 0.05)


def test_resident_pages_need_not_come_up_again() -> None:
    moved = moved_with(Tier.NVME, unified=True, computes_in_ram=True, resident=100)
    assert (moved.forward.disk_read, moved.backward.disk_read) == (100, 100)
    all_of_them = moved_with(Tier.HOST, unified=False, computes_in_ram=True, resident=300)
    assert (all_of_them.forward.to_device, all_of_them.backward.to_device) == (0, 0)


def test_traffic_of_pages_on_the_device() -> None:
    moved = moved_with(Tier.DEVICE, unified=False, computes_in_ram=True)
    assert moved.forward == PhaseBytes()
    assert moved.backward == PhaseBytes(to_device=80, host=2 * 160)
    assert moved.update == PhaseBytes(to_host=840, to_device=760, host=2 * (160 + 40 + 600))
    assert moved.accumulation == PhaseBytes(to_host=80, host=80)


def test_traffic_of_pages_in_unified_memory_is_the_update_s_alone() -> None:
    moved = moved_with(Tier.HOST, unified=True, computes_in_ram=True)
    for phase in (moved.forward, moved.backward, moved.accumulation, moved.update):
        assert phase == PhaseBytes(host=phase.host)


def test_a_gradient_that_is_alone_in_its_step_is_stored_by_its_copy_to_ram() -> None:
    for accumulation, host in ((None, 320), (2, 320), (1, 0)):
        moved = moved_with(Tier.HOST, unified=False, computes_in_ram=False, accumulation=accumulation)
        assert (moved.backward.to_host, moved.backward.host) == (160, host)


def test_early_are_the_updates_that_may_begin_in_the_backward() -> None:
    def moved(update: UpdateTime, **more: Any) -> StepBytes:
        return moved_with(Tier.HOST, unified=False, computes_in_ram=False, update=update, **more)

    assert moved("lazy").early == moved("sync").early == PhaseBytes()
    assert moved("eager").early == moved("eager").update == moved("lazy").update
    half = moved("speculative", speculating={1})
    assert half.update == moved("lazy").update, "an update that is written beside moves the same bytes"
    assert half.early * 2 == half.update


@pytest.mark.parametrize("update", ["lazy", "eager"])
def test_a_visit_moves_the_bytes_by_which_the_share_is_balanced(update: UpdateTime) -> None:
    """In RAM and over the link these are the bytes that infinity/optim/balance.py counts."""
    facts = {"mirrored": (0, 1), "visiting_units": (0, 1), "accumulation": 1, "update": update}
    moved = moved_with(Tier.HOST, unified=False, computes_in_ram=False, **facts)
    parameters, gradients, states = 160, 160, 600  # in the dtype of parameters, as fresh gradients are
    stored = sum(PAGES[Kind.GRADIENT])
    # With lazy updates gradients come home, however many chunks visit, and go up with the states.
    comes, goes = (0, 0) if update == "eager" else (gradients, stored)
    for share, in_ram, down, up in (
        (0, 3 * parameters + stored + 2 * states + gradients, gradients, parameters),
        (1, parameters + 2 * states + comes + goes, parameters + states + comes, states + goes),
    ):
        found = moved.visited(share)
        assert found.visits is None
        assert found.early == (found.update if update == "eager" else PhaseBytes())
        every = found.backward + found.update
        assert (every.to_host, every.to_device) == (down, up)
        assert every.host + every.to_host + every.to_device == in_ram
