"""Tests of copies from one rank's device to another's: bits, bytes, orders and failures."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_processes
import torch
from emulated_device import EmulatedDevice, compute_uses
from ranked_cases import Case
from training_ranks import check_bits, launch

from infinity.distributed.peer_copies import PeerCopy
from infinity.distributed.windows import VARIABLE, Windows
from infinity.errors import DeviceError, RankFailure
from infinity.layout.shards import HomeRange
from infinity.pages.home import Home
from infinity.pages.remote import Leg
from infinity.tiers import HostArena, Tier
from infinity.tiers.copy_streams import Order, open_link
from infinity.tiers.device import CpuDeviceTier

PAGE = 4096
CPU = torch.device("cpu")
OFF = {VARIABLE: "0"}
CASES = (
    Case("decoder", 3, home="device", accumulate=2, clip=0.05, generates=True),
    Case("mlp", 3, home="device", update="eager", declared=True),
    Case("decoder", 2, home="device", generates=True),
)


def test_copies_that_do_not_count_are_asked_for(tmp_path: Path) -> None:
    check_bits(CASES, 2, tmp_path, function="training_on_changing_devices")


def test_four_devices_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    check_bits(CASES[:1], 4, tmp_path, function="training_on_devices")


@pytest.mark.parametrize("nodes", [[], [OFF] * 2, [OFF, {}]], ids=["on", "off", "one off"])
def test_what_is_at_home_on_a_device_travels_without_messages(nodes: list[Any], tmp_path: Path) -> None:
    cases = [Case("even", stage, home="device") for stage in (1, 2, 3)]
    found = launch("bytes_between_devices", cases, 2, tmp_path, timeout=200.0, nodes=nodes)
    for case, ranks in zip(cases, found, strict=True):
        for each in ranks:
            if case.stage > 1 and not nodes:  # sums of squares alone come down, and no gradients go up
                assert each["over the link"] < each["received"]["gradients"] == each["copied"]["gradients"]
            received, fetched = each["received"]["parameters"], sum(each["fetches"])
            assert each["copied"].get("parameters", 0) == (0 if nodes else received), case
            assert (fetched, each["sent"].get("parameters", 0) > 0) == (
                (received, True) if nodes else (0, False)
            )


def test_a_rank_dies_while_others_copy_from_its_device() -> None:
    *others, dead = rank_processes.run("window_ranks.py", "dying_device", size=3)
    assert dead.code == -signal.SIGKILL
    for each in others:
        assert each.result, each.text


class Owner:
    """A rank with a page at home on an emulated device: what its windows offer."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device, self.tier = device, CpuDeviceTier(4 * PAGE)
        memory = self.tier.pool("homes", 4 * PAGE).lease(PAGE).residency()
        self.home = Home(Tier.DEVICE, PAGE, memory, False)
        shard = SimpleNamespace(own=(HomeRange(0, 0, PAGE),))
        self.page: Any = SimpleNamespace(index=2, home=self.home, shard=shard, permanent=False, holds=0)
        self.windows, self.link, arena = Windows(1, range(2)), open_link(CPU), HostArena(PAGE, shared=True)
        tier = SimpleNamespace(region=self.tier.region, device=CPU, shares_host=False)
        store: Any = SimpleNamespace(link=self.link, host=arena, device=tier)
        _, self.told = self.windows.tell_memory(store, [self.page])

    def update(self) -> None:
        """Have the device write the home."""
        self.home.withdraw(0, PAGE)
        compute_uses(self.device, self.home.view(0, PAGE), writes=True)
        self.home.written = self.link.record()

    def offer(self) -> bool:
        return self.windows.offer(self.page, (1, 0, 0))


@pytest.fixture
def owner() -> Iterator[Owner]:
    with EmulatedDevice(5).in_use(shared=True) as device:
        yield Owner(device)


def test_a_page_is_offered_when_the_device_has_written_it(owner: Owner) -> None:
    owner.update()
    assert owner.offer() or owner.windows.written(owner.page) == [owner.home.written]
    for event in owner.windows.written(owner.page):
        owner.link.await_event(event)
    assert owner.offer() and owner.windows.offers(owner.page, (1, 0, 0))
    owner.home.withdraw(0, 1)
    assert not owner.windows.offers(owner.page, (1, 0, 0)) and not owner.windows.written(owner.page)


def test_an_edit_in_place_is_waited_for(owner: Owner) -> None:
    owner.page.permanent = True
    owner.home.withdraw(0, PAGE)
    compute_uses(owner.device, owner.home.view(0, PAGE), writes=True)
    while not owner.offer():
        assert owner.windows.written(owner.page)


def test_a_page_that_is_offered_too_early_is_seen() -> None:
    device = EmulatedDevice(5)
    with (
        pytest.raises(AssertionError, match="offered"),
        device.in_use(shared=True),
        device.without(Order.OFFER),
    ):
        owner = Owner(device)
        owner.update()
        while not owner.offer():
            pass


def test_memory_that_cannot_be_shared_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    device = EmulatedDevice(6)
    with device.in_use():  # its memory is private
        owner = Owner(device)
        assert owner.told == ("", 0, 0, [(2, 0)]) and not owner.offer()
    assert "cuIpcGetMemHandle" in caplog.text or "cuMemGetAddressRange" in caplog.text
    with device.in_use(shared=True):
        owner = Owner(device)
        assert owner.told is not None
        mine = Windows(0, range(2))
        mine._boards = {1: owner.windows._board}
        told = owner.windows.tell()[0]
        mine.read_memory({1: (told, owner.told)}, CPU)  # as from a device that this one does not reach
        assert mine.unreached == 1
        assert not mine.reaches(1, 2) and not mine.reads(1, 2) and mine.reads(1) and mine.reads(1, 3)


def test_the_plan_says_whose_devices_are_not_reached() -> None:
    for each in rank_processes.run("window_ranks.py", "plans_of_devices", size=2):
        shared, private = each.result
        line = "parameters on the devices of 1 ranks of this node come through RAM and messages"
        assert line in private and line not in shared


def test_a_device_that_has_failed_is_left(owner: Owner) -> None:
    class Failed:
        def close(self) -> None:
            raise DeviceError("It has failed.", "None.", call="cuIpcCloseMemHandle", code=700, name="none")

    for leave in (owner.windows.leave_devices, owner.windows.close):
        owner.windows._devices = {1: (Failed(), torch.empty(0)), 2: (Failed(), torch.empty(0))}  # type: ignore[dict-item]
        leave()
        assert not owner.windows._devices


class Copy:
    """A copy or an answer that ends when it is told to."""

    timing = None

    def __init__(self, failure: RankFailure | None = None) -> None:
        self.ended = False
        self._failure = failure

    def done(self) -> bool:
        return self.ended

    def wait(self) -> object:
        self.ended = True
        if self._failure is not None:
            raise self._failure
        return None


class Wanted:
    """Bytes whose owner allows the copies, and lets them count, as told: wire and windows to them in one."""

    failure = None
    index = 3

    def __init__(self, allows: str, counts: str, failure: RankFailure | None = None) -> None:
        self.allows, self.counts = iter(allows), iter(counts)
        self.answer, self.copies = Copy(failure), list[Copy]()
        self.asked = self.counted = 0

    def course(self) -> PeerCopy:
        us: Any = self
        leg = Leg(1, 64, torch.empty(8))
        return PeerCopy(us, us, us, (1, 0, 0), leg, copy=self.begin, ask=self.ask)

    def peer_bytes(self, owner: int, page: Any, stamp: Any, start: int, nbytes: int) -> Any:
        assert (owner, page, stamp, start, nbytes) == (1, self, (1, 0, 0), 64, 32)
        return None if next(self.allows) == "-" else (len(self.copies) + 1, torch.ones(8))

    def begin(self, into: torch.Tensor, source: torch.Tensor) -> Copy:
        self.copies.append(Copy())
        return self.copies[-1]

    def unchanged(self, owner: int, unit: int, changes: int, into: torch.Tensor) -> bool:
        assert (owner, unit, changes) == (1, 3, len(self.copies)) and self.copies[-1].ended
        return next(self.counts) == "+"

    def copied(self, *_: Any) -> None:
        self.counted += 1

    def ask(self) -> Copy:
        self.asked += 1
        return self.answer


@pytest.mark.parametrize(
    ("allows", "counts", "asked", "here"),
    [
        ("+", "+", 0, True),
        ("-+", "+", 1, True),
        ("++", "-+", 1, True),
        ("--", "", 1, False),
        ("++", "--", 1, False),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_the_course_of_a_copy(allows: str, counts: str, asked: int, here: bool, waits: bool) -> None:
    wanted = Wanted(allows, counts)
    copy = wanted.course()
    assert not copy.done()
    if waits:
        copy.wait()
    else:
        while not copy.done():
            for each in (wanted.answer, *wanted.copies):
                each.ended = True
    assert (wanted.asked, copy.here, wanted.counted, copy.done()) == (asked, here, here, True)


def test_an_abandoned_copy_is_waited_for_and_no_other_begins() -> None:
    wanted = Wanted("+", "")
    wanted.course().abandon()
    assert wanted.copies[0].ended
    asking = Wanted("-", "").course()
    asking.abandon()
    assert asking.done() and not asking.here


def test_a_copy_ends_with_the_owner_s_failure() -> None:
    copy = Wanted("-", "", RankFailure("Rank 1 is lost.", "Start again.", rank=1)).course()
    with pytest.raises(RankFailure):
        copy.wait()
