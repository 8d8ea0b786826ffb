"""Tests of plans with commits: the bytes on NVMe, the budgets that are enough, the division that a checkpoint
asks for, and what commits and steps write to disk.
"""

from dataclasses import replace

import pytest
import torch
from device_units import kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_models import MiB, check, gradients_on_nvme, partly_frozen, planned, stack

from infinity.config import Budget, format_size
from infinity.errors import BudgetError
from infinity.layout.chunks import Division
from infinity.planning.machine_rates import MachineRates
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.planning.predict import Work
from infinity.tiers import Tier
from infinity.tiers.nvme import STRIPE_BYTES
from infinity.tiers.striping import choose_striping

__all__ = ["kernels"]

models = st.builds(
    stack,
    st.lists(st.sampled_from([3, 17, 64, 90, 130]), min_size=1, max_size=6),
    st.sets(st.integers(0, 5), max_size=2),
)
sizes = st.integers(1, 3 * MiB) | st.integers(1, 100_000)


def on(nvme: int | None) -> dict[str, int] | None:
    return None if nvme is None else {"/nowhere": nvme}


# ---- Budgets ----


def test_a_page_less_than_the_images_is_too_little_however_much_ram_there_is() -> None:
    model = stack([64] * 4, frozen=[2])
    ample = planned(model, host="64MiB", nvme=on(64 * MiB), commits=True)
    assert ample.home_bytes[Tier.NVME] == 0
    needed = ample.durable_bytes
    made = planned(model, host="64MiB", nvme=on(needed), commits=True)
    assert made.homes == ample.homes
    (row,) = [row for row in made.rows() if row["tier"] == "nvme"]
    assert (row["working"], row["params"], row["free"]) == (needed, 0, 0)
    with pytest.raises(BudgetError, match=r"parameters with commits need .* the nvme tier") as caught:
        planned(model, host="64MiB", nvme=on(needed - 1), commits=True)
    assert caught.value.needed == needed
    assert planned(model, host="64MiB", nvme=on(needed - 4096)).smallest  # without commits it is enough


def test_states_on_nvme_take_no_bytes_beside_their_images_but_gradients_do() -> None:
    model = stack([64] * 9)
    least = planned(model, host="64MiB", nvme=on(64 * MiB), commits=True).smallest[Tier.HOST]
    made = planned(model, host=least, nvme=on(64 * MiB), commits=True)
    on_disk = gradients_on_nvme(made)
    assert 0 < on_disk < made.home_bytes[Tier.NVME]
    assert made.nvme_bytes == made.durable_bytes + on_disk
    with pytest.raises(BudgetError, match="the nvme tier") as caught:
        planned(model, host=least, nvme=on(made.durable_bytes), commits=True)
    assert made.durable_bytes < caught.value.needed <= made.nvme_bytes
    (row,) = [row for row in made.rows() if row["tier"] == "nvme"]
    used = row["params"] + row["gradients"] + row["optimizer"] + row["working"]
    assert used == made.nvme_bytes == row["budget"] - row["free"]


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from([17, 64, 300]),
    shares=st.lists(st.floats(0.1, 1), min_size=2, max_size=8),
    host=st.sampled_from(["400KiB", "16MiB"]),
)
def test_a_plan_for_several_paths_can_be_opened(width, shares, host) -> None:
    """The volume that a plan accepts can be striped over its paths."""
    model = stack([width] * 4)
    with pytest.raises(BudgetError, match="the nvme tier") as caught:
        planned(model, host="16MiB", nvme={f"/{path}": 1 for path in range(len(shares))}, commits=True)
    for total in (caught.value.needed, 2 * caught.value.needed):
        limits = [4096 + int(total * share / sum(shares)) // 4096 * 4096 for share in shares]
        nvme = {f"/{path}": limit for path, limit in enumerate(limits)}
        try:
            made = planned(model, host=host, nvme=nvme, commits=True)
        except BudgetError:
            assert host != "16MiB" or sum(limits) < caught.value.needed
            continue
        check(made, Budget(host=host, nvme=nvme))
        choose_striping(made.nvme_bytes, limits, [1.0 + path for path in range(len(limits))], STRIPE_BYTES)


# ---- The places of images ----


@pytest.mark.parametrize("device", [None, "1MiB"])
def test_places_do_not_depend_on_homes(device: str | None) -> None:
    model = stack([64] * 9, frozen=[3])
    few, prefer = {"host": 500 << 10, "nvme": on(64 * MiB)}, None
    tight = planned(model, commits=True, device=device and 200 << 10, **few)
    prefer = Division.of(tight.layout)
    roomy = planned(
        model, commits=True, device=device, host="64MiB", nvme=on(64 * MiB), accumulation=1, prefer=prefer
    )
    elsewhere = planned(
        model, commits=True, device=device, host="64MiB", slab_directory="/kept", prefer=prefer
    )
    assert tight.home_bytes[Tier.NVME] > 0 == roomy.home_bytes[Tier.NVME]
    assert tight.homes != roomy.homes
    assert tight.slab_layout == roomy.slab_layout == elsewhere.slab_layout


@settings(max_examples=40, deadline=None)
@given(model=models, device=st.none() | sizes, host=sizes)
def test_a_slab_in_the_directory_of_a_checkpoint_has_no_budget(model, device, host) -> None:
    """Without an NVMe tier, commits change no home, no pool and no smallest budget."""
    try:
        without = planned(model, device=device, host=host)
    except BudgetError as error:
        with pytest.raises(BudgetError) as caught:
            planned(model, device=device, host=host, commits=True, slab_directory="/kept")
        assert caught.value.needed == error.needed
        return
    made = planned(model, device=device, host=host, commits=True, slab_directory="/kept")
    assert replace(made, commits=False, slab_directory=None) == without
    assert made.slab_directory == "/kept"
    assert made.nvme_bytes == made.durable_bytes > 0
    assert Tier.NVME not in made.smallest
    assert [row["tier"] for row in made.rows()] == [row["tier"] for row in without.rows()]


def test_the_slabs_of_an_nvme_tier_are_not_in_the_directory_of_the_checkpoint() -> None:
    made = planned(stack([64]), host="16MiB", nvme=on(MiB), commits=True, slab_directory="/kept")
    assert made.slab_directory is None


def test_without_commits_there_are_no_images() -> None:
    made = planned(stack([64] * 4), host="16MiB", nvme=on(16 * MiB), slab_directory="/kept")
    assert (made.commits, made.slab_directory, made.slab_layout) == (False, None, None)
    assert made.durable_bytes == 0
    assert (made.commit_bytes, made.first_commit_bytes) == (0, 0)
    assert made.nvme_bytes == made.home_bytes[Tier.NVME] == 0
    assert "commit" not in str(made)


# ---- The division that a checkpoint asks for ----


@pytest.mark.parametrize("unit_bytes", [1, 1 << 30])
@pytest.mark.parametrize("chunk", [4096, 8192, 12288])
@pytest.mark.parametrize("commits", [False, True])
def test_the_preferred_division_is_taken(unit_bytes: int, chunk: int, commits: bool) -> None:
    model = stack([64] * 4)
    names = [name for name, _ in model.named_parameters()]
    units = tuple((name, (name,)) for name in names) if unit_bytes == 1 else (("", tuple(reversed(names))),)
    prefer = Division(units, chunk)
    ample = {"host": "64MiB", "nvme": on(64 * MiB), "commits": commits}
    assert Division.of(planned(model, **ample).layout) != prefer
    made = planned(model, prefer=prefer, **ample)
    assert Division.of(made.layout) == prefer
    check(made, Budget(host="64MiB", nvme=on(64 * MiB)))


def test_the_preferred_division_is_taken_down_to_its_smallest_budget_and_ignored_in_less() -> None:
    """The preferred division comes before others that would have more working room, as long as it fits."""
    model = stack([128] * 6)
    whole = Division((("", tuple(name for name, _ in model.named_parameters())),), 4096)
    found = []
    for host in range(200 << 10, 3 * MiB, 32 << 10):
        budget = {"host": host, "nvme": on(64 * MiB), "commits": True}
        try:
            made = planned(model, prefer=whole, **budget)
        except BudgetError:
            continue
        check(made, Budget(host=host, nvme=on(64 * MiB)))
        found.append((Division.of(made.layout) == whole, made, planned(model, **budget)))
    taken = [each[0] for each in found]
    assert taken == sorted(taken)  # as the budget grows it is not given up again
    assert taken[0] < taken[-1]
    assert all(made.homes == other.homes for is_taken, made, other in found if not is_taken)
    _, least, other = found[taken.index(True)]
    assert least.staging_bytes == least.chunk_update_bytes
    assert other.staging_bytes >= 2 * other.chunk_update_bytes


def test_the_division_of_another_model_is_ignored() -> None:
    model, budget = stack([64] * 4), {"host": "64MiB", "nvme": on(64 * MiB), "commits": True}
    other = Division.of(planned(stack([64] * 5), **budget).layout)
    assert planned(model, prefer=other, **budget) == planned(model, **budget)


@settings(max_examples=60, deadline=None)
@given(model=models, chunk=st.sampled_from([4096, 1 << 20]), whole=st.booleans(), host=sizes, nvme=sizes)
def test_needed_knows_the_preferred_division(model, chunk, whole, host, nvme) -> None:
    """A preferred division that needs less than all others is counted in `needed` and in `smallest`."""
    names = [name for name, _ in model.named_parameters()]
    units = (("", tuple(names)),) if whole else tuple((name, (name,)) for name in names)
    others = {"prefer": Division(units, chunk), "commits": True}
    budget = {"host": host, "nvme": on(nvme)}
    for _ in range(3):
        try:
            made = planned(model, **others, **budget)
        except BudgetError as error:
            tier = "nvme" if "the nvme tier" in error.cause else "host"
            needed = error.needed
            less = max(1, needed - 4096)
            with pytest.raises(BudgetError):
                planned(model, **others, **{**budget, tier: on(less) if tier == "nvme" else less})
            budget = {**budget, tier: on(needed) if tier == "nvme" else needed}
        else:
            break
    smallest = {"host": made.smallest[Tier.HOST], "nvme": made.smallest[Tier.NVME]}
    assert (
        planned(model, **others, host=smallest["host"], nvme=on(smallest["nvme"])).smallest == made.smallest
    )
    for tier, nbytes in smallest.items():
        less = {**smallest, tier: max(1, nbytes - 4096)}
        with pytest.raises(BudgetError):
            planned(model, **others, host=less["host"], nvme=on(less["nvme"]))


def test_a_preferred_division_may_need_less_than_all_others() -> None:
    """Several layers share a 4 KiB page in the preferred division alone."""
    model = stack([3] * 4)
    whole = Division((("", tuple(name for name, _ in model.named_parameters())),), 4096)
    needed = 2 * (4096 + 3 * 4096)  # two places of parameters and three state arrays
    for prefer in (None, whole):
        with pytest.raises(BudgetError, match="the nvme tier") as caught:
            planned(model, host="1MiB", nvme=on(8192), commits=True, prefer=prefer)
        assert (caught.value.needed == needed) == (prefer is whole)
    made = planned(model, host="1MiB", nvme=on(needed), commits=True, prefer=whole)
    assert made.smallest[Tier.NVME] == needed
    # A host budget with which all pages rest in RAM; other divisions have more pages.
    assert made.smallest[Tier.HOST] < planned(model, host="1MiB").smallest[Tier.HOST]


def test_updates_on_the_device_do_not_give_the_preferred_division_up(kernels: None) -> None:
    """Where a workspace for updates on the device would take the room of the preferred division, the CPU
    updates.
    """
    model = stack([130, 64, 17, 64, 90])
    names = [name for name, _ in model.named_parameters()]
    units = (("0", tuple(names[:4])), ("2", tuple(names[4:8])), ("4", tuple(names[8:])))
    prefer = Division(units, 1 << 20)
    budget = {"host": "64MiB", "optimizer": torch.optim.SGD, "accumulation": 1}
    assert planned(model, device=122 << 10, **budget).updated_on_device
    made = planned(model, prefer=prefer, device=122 << 10, **budget)
    assert Division.of(made.layout) == prefer and not made.updated_on_device
    made = planned(model, prefer=prefer, device="16MiB", **budget)
    assert Division.of(made.layout) == prefer and made.updated_on_device


# ---- Bytes written ----


@settings(max_examples=60, deadline=None)
@given(model=models, frozen=st.booleans(), device=st.none() | sizes, host=sizes)
def test_a_commit_writes_what_updates_do_not(model, frozen, device, host) -> None:
    model = partly_frozen(model) if frozen else model
    try:
        made = planned(model, device=device, host=host, nvme=on(64 * MiB), commits=True)
    except BudgetError:
        return
    trained = at_rest = 0
    for index, (unit, home) in enumerate(zip(made.layout.units, made.homes, strict=True)):
        for number, chunk in enumerate(unit.chunks):
            if home[Kind.PARAMETER] is not Tier.NVME:
                itemsize = unit.regions[chunk.region].dtype.itemsize
                trained += -(-chunk.count * itemsize // 4096) * 4096
            if home[Kind.OPTIMIZER] is not Tier.NVME:
                trained += made.state_format(index, number).nbytes
        for region in unit.regions:
            if not region.trainable and home[Kind.PARAMETER] is not Tier.NVME:
                at_rest += -(-region.elements * region.dtype.itemsize // 4096) * 4096
    assert made.commit_bytes == trained
    assert made.first_commit_bytes == trained + at_rest


def test_commits_change_no_byte_that_a_step_moves() -> None:
    model, budget = stack([64] * 9), {"host": 500 << 10, "nvme": on(64 * MiB)}
    made, without = planned(model, commits=True, **budget), planned(model, **budget)
    assert made.home_bytes[Tier.NVME] and made.homes == without.homes
    assert made.traffic == without.traffic
    everything = planned(model, commits=True, host="64MiB", nvme=on(64 * MiB))
    assert everything.traffic.disk_write == 0
    in_ram = sum(unit.nbytes for unit in everything.layout.units) + sum(everything.page_sizes[Kind.OPTIMIZER])
    assert everything.commit_bytes == everything.first_commit_bytes == in_ram


RATES = MachineRates(
    disk={"read": 1e9, "write": 1e9, "mixed": 1e9},
    host_stream=1e10,
    flops={torch.bfloat16: 1e12},
    compute_memory=1e10,
)


def timed(**budget: object) -> Plan:
    return planned(
        stack([64] * 9, frozen=[0]), speeds=RATES, work=Work({torch.bfloat16: 5 * 10**11}, 0), **budget
    )


def test_the_text_has_what_is_written() -> None:
    made = timed(host=500 << 10, nvme=on(64 * MiB), commits=True)
    assert made.prediction is not None
    per_day = made.traffic.disk_write * 86_400 / made.prediction.seconds
    assert made.bytes_per_day == pytest.approx(per_day)
    assert made.commit_bytes > 0
    assert str(made).splitlines()[4].endswith(f"/day), plus {format_size(made.commit_bytes)} a commit")
    assert (
        f"commits: {format_size(made.durable_bytes)} on nvme (two places for each trained byte) · "
        f"a commit writes {format_size(made.commit_bytes)}" in str(made).splitlines()
    )
    plain = str(timed(host=500 << 10, nvme=on(64 * MiB))).splitlines()[4]
    assert plain.endswith("/day)")
    assert "to disk" not in str(timed(host="64MiB"))


@pytest.mark.parametrize("interval", [1, 7])
@pytest.mark.parametrize(
    "budget",
    [
        {"host": 500 << 10, "nvme": on(64 * MiB)},
        {"host": "64MiB", "nvme": on(64 * MiB)},
        {"host": "64MiB", "slab_directory": "/kept"},
    ],
)
def test_commits_wear_the_disk_as_often_as_they_come(interval: int, budget: dict[str, object]) -> None:
    made = replace(timed(**budget, commits=True), commit_interval=interval)
    assert made.commit_bytes and made.prediction is not None
    assert made.bytes_per_step == made.traffic.disk_write + made.commit_bytes / interval
    per_day = made.bytes_per_step * 86_400 / made.prediction.seconds
    assert made.bytes_per_day == pytest.approx(per_day)
    (line,) = [each for each in str(made).splitlines() if "s/step" in each]
    every = "step" if interval == 1 else "7 steps"
    assert (
        f"writes {format_size(round(made.bytes_per_step))}/step to disk ({format_size(round(per_day))}/day), "
        f"with a commit every {every}" in line
    )


def test_a_commit_that_writes_no_page_is_not_told_apart() -> None:
    made = timed(host=500 << 10, nvme=on(64 * MiB), commits=True)
    on_nvme = [{kind: tier and Tier.NVME for kind, tier in each.items()} for each in made.homes]
    everything = replace(made, homes=on_nvme)
    assert everything.commit_bytes == 0 < everything.traffic.disk_write
    for each in (everything, replace(everything, commit_interval=2)):
        assert each.bytes_per_step == each.traffic.disk_write
        assert "commit" not in next(line for line in str(each).splitlines() if "s/step" in line)


def test_where_seconds_are_unknown_no_day_is_told() -> None:
    unknown = planned(stack([64] * 9), host=500 << 10, nvme=on(64 * MiB), commits=True)
    assert unknown.traffic.disk_write and unknown.bytes_per_day is None
    assert "/day" not in str(unknown)
    assert timed(host="64MiB", nvme=on(64 * MiB), commits=True).bytes_per_day == 0


def test_the_text_names_the_directory_of_the_slab() -> None:
    made = timed(host="64MiB", commits=True, slab_directory="/kept")
    line = f"commits: {format_size(made.durable_bytes)} in /kept (two places for each trained byte)"
    assert f"{line} · a commit writes {format_size(made.commit_bytes)}" in str(made).splitlines()
    written = f"writes 0 B/step to disk (0 B/day), plus {format_size(made.commit_bytes)} a commit"
    assert any(each.endswith(written) for each in str(made).splitlines())
    frozen = planned(
        stack([64], frozen=[0]), optimizer=None, host="64MiB", commits=True, slab_directory="/kept"
    )
    assert frozen.commit_bytes == 0 < frozen.first_commit_bytes
    assert str(frozen).splitlines()[-2].endswith("(two places for each trained byte)")
