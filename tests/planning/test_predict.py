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


def test_a_lazy_update_runs_beside_forward_and_backward() -> None:
    moved = StepBytes(
        forward=PhaseBytes(disk_read=1 * GB),
        backward=PhaseBytes(disk_read=2 * GB, disk_write=1 * GB),
        update=PhaseBytes(disk_read=3 * GB, disk_write=3 * GB),
    )
    # 8 GB mixed and 2 GB read alone.
    disk = 8 / 1.5 + 1.0
    check(predict(moved, CPU, 4.5), disk, disk + 4.5, "disk", compute=4.5, disk=disk)
    check(predict(moved, CPU, 7.5), 7.5, disk + 7.5, "compute", compute=7.5, disk=disk)


def test_an_update_in_step_follows_forward_and_backward() -> None:
    moved = StepBytes(
        forward=PhaseBytes(disk_read=2 * GB),
        backward=PhaseBytes(disk_read=4 * GB, disk_write=1 * GB),
        update=PhaseBytes(disk_read=3 * GB, disk_write=3 * GB),
        when="sync",
    )
    # Forward and backward: 2 GB mixed (4/3 s) and 5 GB read alone (2.5 s); the update: 6 GB mixed.
    disk = 2 / 1.5 + 2.5 + 4.0
    check(predict(moved, CPU, 1.0), disk, disk + 1.0, "disk", compute=1.0, disk=disk)


def test_an_eager_update_has_the_whole_step_to_hide_in() -> None:
    moved = StepBytes(
        forward=PhaseBytes(disk_read=2 * GB),
        backward=PhaseBytes(disk_read=2 * GB),
        update=PhaseBytes(disk_read=3 * GB, disk_write=4 * GB),
        when="eager",
    )
    # 8 GB mixed at 1.5 GB/s, 3 GB read alone at 2 GB/s.
    disk = 8 / 1.5 + 1.5
    check(predict(moved, CPU, 1.0), disk, disk + 1.0, "disk", compute=1.0, disk=disk)
    check(predict(moved, CPU, 9.0), 9.0, disk + 9.0, "compute", compute=9.0, disk=disk)


def test_compute_hides_the_disk_but_not_that_of_an_update_after_it() -> None:
    update = PhaseBytes(disk_write=3 * GB, host=4 * GB)
    moved = StepBytes(backward=PhaseBytes(disk_read=2 * GB), update=update, when="sync")
    # 6 s of compute hide a second of reads; then 3 s of writes hide a second of updates.
    found = predict(moved, CPU, 6.0)
    check(found, 6.0 + 3.0, 7.0 + 4.0, "compute", compute=6.0, disk=1.0 + 3.0, update=1.0)


def test_on_the_cpu_all_but_the_disk_adds_up() -> None:
    moved = StepBytes(
        forward=PhaseBytes(to_device=1 * GB),
        backward=PhaseBytes(disk_read=2 * GB, to_device=1 * GB, host=4 * GB),
        update=PhaseBytes(host=16 * GB, to_host=2 * GB),
    )
    # Updating and adding gradients take 5 s, copying 2 s, beside the disk's second.
    found = predict(moved, CPU, 1.5)
    check(found, 8.5, 9.5, "update", compute=1.5, link=2.0, update=5.0, disk=1.0)


def test_a_link_runs_beside_compute_and_update() -> None:
    moved = StepBytes(
        forward=PhaseBytes(to_device=3 * GB),
        backward=PhaseBytes(to_device=3 * GB, to_host=1 * GB),
        update=PhaseBytes(host=8 * GB, to_host=1 * GB),
    )
    check(predict(moved, GPU, 1.0), 6.0, 9.0, "link", compute=1.0, link=6.0, update=2.0)


def test_on_the_cpu_copies_from_ranks_add_up_and_the_network_runs_beside() -> None:
    speeds = replace(CPU, network=0.5e9)
    moved = StepBytes(backward=PhaseBytes(disk_read=2 * GB), update=PhaseBytes(host=4 * GB))
    # 3 GB received are read and written at 4 GB/s; 2 GB from other nodes come at 0.5 GB/s.
    busy = {"compute": 3.0, "update": 1.0, "exchange": 1.5, "disk": 2.0, "network": 4.0}
    found = predict(moved, speeds, 1.5, 2, received=3 * GB, crossing=2 * GB)
    check(found, 5.5, 11.5, "compute", **busy)
    found = predict(moved, speeds, 1.5, 2, received=3 * GB, crossing=3 * GB)
    check(found, 6.0, 13.5, "network", **(busy | {"network": 6.0}))
    unknown = predict(moved, CPU, 1.5, 2, received=3 * GB, crossing=3 * GB)
    check(unknown, 5.5, 7.5, "compute", **(busy | {"network": 0.0}))


def test_beside_a_device_all_that_comes_from_ranks_runs_beside_compute() -> None:
    speeds = replace(GPU, network=1e9)
    # 6 GB received take 3 s of copies in RAM, 4 GB from other nodes 4 s on the network.
    found = predict(StepBytes(), speeds, 3.5, received=6 * GB, crossing=4 * GB)
    check(found, 4.0, 10.5, "network", compute=3.5, exchange=3.0, network=4.0)
    check(predict(StepBytes(), speeds, 1.0, received=6 * GB), 3.0, 4.0, "exchange", compute=1.0, exchange=3.0)


def test_without_a_disk_nothing_waits_for_one() -> None:
    speeds = replace(CPU, disk=None)
    moved = StepBytes(backward=PhaseBytes(to_device=0), update=PhaseBytes(host=4 * GB))
    check(predict(moved, speeds, 0.5), 1.5, 1.5, "update", compute=0.5, update=1)


def test_micro_batches_repeat_forward_and_backward_and_read_gradients_again() -> None:
    moved = StepBytes(
        forward=PhaseBytes(disk_read=1 * GB),
        backward=PhaseBytes(disk_read=1 * GB, host=4 * GB),
        accumulation=PhaseBytes(disk_read=1 * GB, host=2 * GB),
        update=PhaseBytes(disk_write=1 * GB),
        when="sync",
    )
    # Disk: 3 x 2 + 2 x 1 GB read, then 1 GB written; adding gradients: 3 x 1 + 2 x 0.5 s.
    found = predict(moved, CPU, 0.5, 3)
    check(found, 5.5 + 1.0, 5.5 + 4.0 + 1.0, "update", compute=1.5, update=4.0, disk=4.0 + 1.0)
    with pytest.raises(ConfigError, match="0 micro-batches"):
        predict(moved, CPU, 0.5, 0)


def test_inference_is_all_forward() -> None:
    found = predict(StepBytes(forward=PhaseBytes(disk_read=2 * GB)), CPU, 3.0)
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
    update=st.sampled_from(["lazy", "eager", "sync"]),
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
    moved = replace(moved, when=update)
    less = predict(moved, speeds, seconds, micro_batches)
    assert less.least <= less.most * (1 + 1e-9)
    for more_of_it in (
        predict(both, speeds, seconds, micro_batches),
        predict(moved, speeds, seconds + 1, micro_batches),
        predict(moved, speeds, seconds, micro_batches + 1),
    ):
        assert more_of_it.least >= less.least * (1 - 1e-9)
        assert more_of_it.most >= less.most * (1 - 1e-9)


PAGES = {Kind.PARAMETER: [100, 100], Kind.GRADIENT: [40, 40], Kind.OPTIMIZER: [300, 300]}


def moved_with(
    tier: Tier, *, unified: bool, computes_in_ram: bool, resident: int = 0, update: UpdateTime = "lazy"
) -> StepBytes:
    plan: Any = SimpleNamespace(
        homes=tuple(dict.fromkeys(Kind, tier) for _ in range(2)),
        page_sizes=PAGES,
        gradient_bytes=PAGES[Kind.GRADIENT],
        layout=SimpleNamespace(units=[SimpleNamespace(nbytes=each) for each in PAGES[Kind.PARAMETER]]),
        stays=lambda unit: tier is (Tier.HOST if unified else Tier.DEVICE),
        resident_bytes=resident,
        update=update,
        unified=unified,
        device=torch.device("cpu" if computes_in_ram else "cuda"),
        share=ALONE,
        updated_on_device=(),
        mirrored=(),
    )
    return traffic(plan, [80, 80])


def test_traffic_of_pages_on_disk() -> None:
    moved = moved_with(Tier.NVME, unified=True, computes_in_ram=True)
    assert moved.forward == PhaseBytes(disk_read=200)
    assert moved.backward == PhaseBytes(disk_read=200, disk_write=80, host=2 * 160)
    assert moved.accumulation == PhaseBytes(disk_read=80, host=80)
    # The parameters that forward reads are also the ones that are updated.
    assert moved.update == PhaseBytes(disk_read=2 * 340, disk_write=2 * 380, host=2 * (160 + 40 + 600))
    assert (moved.disk_read, moved.disk_write) == (400 + 680, 80 + 760)
    apart = moved_with(Tier.NVME, unified=False, computes_in_ram=False)
    assert (apart.forward.to_device, apart.backward.to_device, apart.backward.to_host) == (200, 200, 160)
    by_itself = moved_with(Tier.NVME, unified=True, computes_in_ram=True, update="sync")
    assert by_itself.update == PhaseBytes(disk_read=2 * 420, disk_write=2 * 380, host=2 * (160 + 40 + 600))
    assert apart.update.disk_read == by_itself.update.disk_read


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
