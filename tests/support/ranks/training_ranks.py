"""Programs of ranks that train the cases of ranked_cases.py, many of them one after the other."""

from __future__ import annotations

import faulthandler
import functools
import itertools
import json
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import rank_processes
import torch
from emulated_device import EmulatedDevice
from ranked_cases import Case, Place, backwards, differences, opened, train
from resumed_cases import (
    begin,
    go_on,
    resume_with_other_frozen_layers,
    train_and_copy,
    train_back_and_forth,
    train_cut_otherwise,
    train_from_copy,
    train_on_other_nodes,
    train_with_a_break,
    train_with_a_move,
)
from two_memories import TwoMemories

from infinity import api
from infinity.activations import residual_pages
from infinity.activations.residual_room import ResidualRoom
from infinity.checkpoint import restore as restoring
from infinity.checkpoint import tensor_files
from infinity.distributed.gradient_shards import GradientShards
from infinity.distributed.windows import Windows
from infinity.errors import DeviceError, InfinityError
from infinity.formats.muon import Muon
from infinity.gradients.device import DeviceUnits
from infinity.gradients.gradients import Gradients
from infinity.pages.gradient_copies import GradientCopies
from infinity.planning import plan as planning
from infinity.planning import twin_flow
from infinity.planning.machine_rates import MachineRates
from infinity.planning.network import messages
from infinity.planning.placement import Kind
from infinity.planning.plan import UPLOAD_BUFFERS
from infinity.telemetry.stats import Edge
from infinity.tiers.copy_streams import Order
from infinity.tiers.link import User
from infinity.tiers.trial_file import MODES

CASES, DIRECTORY = "TRAINING_CASES", "TRAINING_DIRECTORY"
"""Environment variables: the cases as JSON, and a directory for pages."""
_PATIENCE = 120
"""Seconds after which a rank that hangs in a case ends and says where. There is a second more for each step,
and for each 4 MiB of room that the case has in a tier.
"""


def launch(
    function: str,
    cases: Sequence[Case],
    size: int,
    directory: Path,
    *,
    timeout: float,
    nodes: Sequence[Mapping[str, str]] = (),
) -> list[list[Any]]:
    """Run a function of this file on `size` ranks. Returns, for each case, what it returned on each rank.

    A rank that raised an error stands there as the error's text; later cases then stand there as None.
    """
    environment = {
        CASES: json.dumps([asdict(each) for each in cases]),
        DIRECTORY: str(directory),
        "INFINITY_RANK_TIMEOUT": str(_PATIENCE // 2),
    }
    outcomes = rank_processes.run(
        "training_ranks.py", function, size=size, timeout=timeout, environment=environment, nodes=nodes
    )
    found = [each.result or [f"The rank ended with {each.code}: {each.text}"] for each in outcomes]
    return [[each[at] if at < len(each) else None for each in found] for at in range(len(cases))]


def check_bits(
    cases: tuple[Case, ...],
    size: int,
    directory: Path,
    *,
    timeout: float = 300.0,
    function: str = "training",
    nodes: Sequence[Mapping[str, str]] = (),
) -> None:
    """Assert that `size` ranks and one rank train the cases to the same results.

    function: what the ranks run. One rank trains without a break. nodes: those of the ranks.
    """
    found = launch(function, cases, size, directory, timeout=timeout, nodes=nodes)
    told: list[str] = []
    for case, each in zip(cases, found, strict=True):
        told += differences(case, size, each, train(case, Place(0, size, alone=True), directory))
        if told and not all(isinstance(one, dict) for one in each):
            break  # later cases did not run
    assert not told, "\n".join(told)


def _each_case(run: Any) -> list[Any]:
    """Run all cases on this rank, until one fails."""
    torch.set_num_threads(1)
    place = Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), alone=False)
    found: list[Any] = []
    for options in json.loads(os.environ[CASES]):
        case = Case(**options)
        print(case.name, flush=True)  # is told if the rank ends without a result
        faulthandler.dump_traceback_later(_PATIENCE + case.steps + (case.roomy >> 22), exit=True)
        try:
            found.append(run(case, place, Path(os.environ[DIRECTORY])))
        except Exception:
            found.append(traceback.format_exc())
            break
    faulthandler.cancel_dump_traceback_later()
    return found


def training() -> list[Any]:
    return _each_case(train)


def training_with_activations_away() -> list[Any]:
    return _each_case(functools.partial(_away, train))


def training_with_activations_away_and_a_break() -> list[Any]:
    return _each_case(functools.partial(_away, train_with_a_break))


def _away(run: Any, case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Run a case with residual pages of few bytes, some of which leave wherever the policy lets them. Rank 1
    takes its CPU for slower.
    """
    rates = MachineRates(
        disk=dict.fromkeys(MODES, 1e9), host_stream=1e10, flops={torch.float32: 1e11}, compute_memory=1e10
    )
    slow = {each: rate / (1 + 9 * place.rank) for each, rate in rates.flops.items()}
    measured = mock.patch.object(api, "measure_rates", return_value=replace(rates, flops=slow))
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        method = getattr(ResidualRoom, name)

        def call(self: ResidualRoom, *arguments: Any) -> Any:  # a mock would keep the arguments
            calls[name] += 1
            return method(self, *arguments)

        return mock.patch.object(ResidualRoom, name, call)

    with mock.patch.object(residual_pages, "SMALLEST", 256), measured, counted("down"), counted("write"):
        found: dict[str, Any] = run(case, place, directory)
    leaves = case.activations.endswith("offload")
    assert (calls["down"] > 0) == leaves, case
    if case.home != "nvme" or place.ranks == 2:  # what one of four ranks has of RAM may be enough
        assert (calls["write"] > 0) == (leaves and case.home == "nvme"), case
    return found


def training_on_devices() -> list[Any]:
    """As `training`, each rank on an emulated device with update kernels and with memory of its own, which
    the other ranks can read, and whose checker finds an order for every access to memory.
    """
    return _each_case(functools.partial(_on_device, train))


def training_on_devices_with_a_break() -> list[Any]:
    return _each_case(functools.partial(_on_device, train_with_a_break))


def losing_gradients() -> list[Any]:
    """A step on devices in which rank 0 loses gradients on their way down, another one in which it loses some
    on their way up, and a step after each. Returns how the steps end.
    """
    return _each_case(functools.partial(_on_device, _lose_gradients))


def _lose_gradients(case: Case, place: Place, directory: Path) -> dict[str, list[str]]:
    def failing(*_: Any, **__: Any) -> None:
        raise DeviceError("A planted failure.", "None.", call="none", code=1, name="none")

    told = []
    with opened(case, place, directory) as (model, runtime):
        for owner, name in ((GradientCopies, "_await"), (None, ""), (DeviceUnits, "add_piece"), (None, "")):
            plant = owner is not None and place.rank == 0
            with mock.patch.object(owner, name, failing) if plant else nullcontext():
                try:
                    backwards(case, place, model, runtime, 0)
                    runtime.optimizer.step()
                    told.append("stepped")
                except InfinityError as error:
                    told.append(type(error).__name__)
            runtime.optimizer.zero_grad()
    return {"told": told}


def clearing_on_devices() -> list[Any]:
    """Backwards on devices and zero_grad() without a step: first while rank 1 copies what rank 0 has offered,
    then after a backward of rank 1 alone. Returns whether this rank's gradients are kept, after each.
    """
    return _each_case(_clear_on_device)


def _clear_on_device(case: Case, place: Place, directory: Path) -> list[bool]:
    held, was_read, kept = list[tuple[Any, ...]](), GradientShards._was_read, list[bool]()
    holding, holds = threading.Lock(), True

    def hold(self: GradientShards, offer: Any, began: int) -> None:
        with holding:
            if holds and place.rank == 1 and offer.source == 0:
                held.append((self, offer, began))
                return
        was_read(self, offer, began)

    def arrived(self: Gradients, number: int) -> bool:
        """Whether a gradient is seen to have come: in a wait for it alone."""
        return not number or bool(waited)

    def await_arrivals(self: Gradients) -> None:
        wait(self)
        waited.append(True)

    wait, waited = Gradients.await_arrivals, list[bool]()
    late = mock.patch.multiple(Gradients, arrived=arrived, await_arrivals=await_arrivals)
    with _on(EmulatedDevice(place.rank)), opened(case, place, directory) as (model, runtime), late:
        step: Any = runtime.training_step._ranks
        shards = step.shards
        for both in (True, False):
            waited.clear()
            holds = True
            with mock.patch.object(GradientShards, "_was_read", hold):
                if both or place.rank == 1:
                    backwards(case, place, model, runtime, 0)
                runtime.optimizer.zero_grad()
                step.await_cleared()
                step.agree("all have cleared their gradients")
            kept.append(shards._waiting_there.leased > 0)
            step.agree("all have looked")
            with holding:  # another thread may be about to hold one more
                holds = False
            while held:
                was_read(*held.pop(0))
            assert step._wire.wait(lambda: not shards._outgoing and not shards._going_up, "gradients")
            # The service thread drops the last view later, of which nobody is told.
            deadline = time.monotonic() + 60
            while shards._waiting_there.leased and time.monotonic() < deadline:
                time.sleep(0.001)
            kept.append(shards._waiting_there.leased > 0)
    return kept


@contextmanager
def _on(device: EmulatedDevice) -> Iterator[None]:
    with (
        device.in_use(shared=True),
        mock.patch.object(twin_flow, "has_kernels", lambda _: True),
        TwoMemories().checked(),
    ):
        yield
    assert not [each for each in device.left if "opened" in each]


def _on_device(run: Any, case: Case, place: Place, directory: Path) -> dict[str, Any]:
    device = EmulatedDevice(place.rank + case.accumulate)
    with (
        _on(device),
        mock.patch.object(DeviceUnits, "update", autospec=True, side_effect=DeviceUnits.update) as update,
    ):
        found: dict[str, Any] = run(case, place, directory)
    assert device.count("cuMemcpyAsync") > 4
    assert bool(update.call_count) == (case.home == "device"), case
    return found


def training_on_changing_devices() -> list[Any]:
    """As `training_on_devices`, but of two copies from another rank's device, one does not count, as if the
    bytes had changed meanwhile, and there are other bytes. Some gradients find no room in device memory.
    """
    planning._MOST_WAITING_THERE = 8192
    unchanged, numbers = Windows.unchanged, itertools.count()

    def fails(self: Windows, owner: int, unit: int, changes: int, into: torch.Tensor) -> bool:
        if next(numbers) % 2:
            return unchanged(self, owner, unit, changes, into)
        into.fill_(255)
        return False

    Windows.unchanged = fails  # type: ignore[method-assign]
    return training_on_devices()


def bytes_between_devices() -> list[Any]:
    """As `bytes_over_the_wire`, on devices."""
    return _each_case(_traffic_of_device)


def _traffic_of_device(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    with _on(EmulatedDevice(place.rank)):
        return traffic(case, place, directory)


def training_without_waits_for_gradients() -> list[Any]:
    """As `training_on_devices`, but gradients are offered before they are in RAM."""
    begin = GradientCopies._begin

    def late(self: GradientCopies, *block: Any) -> Any:
        time.sleep(0.02)
        return begin(self, *block)

    GradientCopies._begin = late  # type: ignore[method-assign]
    Gradients.arrived = lambda self, number: True  # type: ignore[method-assign]
    return training_on_devices()


def orders_missed() -> list[Any]:
    """As `training_on_devices`, without one order after another. Returns for each case the names of orders
    of which a checker complains, with the labels of what lacks them in its own words.
    """
    return _each_case(_missed)


def _missed(case: Case, place: Place, directory: Path) -> list[str]:
    missed = set()
    was_read = GradientShards._was_read

    def given_back(self: GradientShards, offer: Any, began: int) -> None:
        if offer.there and offer.source == place.rank:  # the checker knows only the bytes of this rank
            link = self._gradients._store.link
            link.uses(User.HOST, offer.here, writes=True, label="gradient that is given back")
        was_read(self, offer, began)

    both = (Order.HOST_WAITS, Order.HOST_ASKS)  # which of them comes first depends on the copy's time
    # On a busy machine one training in some twenty meets no copy that is too early for its last use.
    last_uses = [(Order.LAST_USE,)] * 3
    orders = ((Order.ARRIVAL,), *last_uses, (Order.LAST_WRITER,), both[:1], both, (Order.OFFER,))
    for number, taken_away in enumerate(orders):
        device = EmulatedDevice(place.rank + 2 * number)
        with (
            suppress(AssertionError),
            _on(device),
            device.without(*taken_away),
            mock.patch.object(GradientShards, "_was_read", given_back),
            opened(case, place, directory) as (model, runtime),
        ):
            _steps(case, place, model, runtime)
            _upload_often(runtime)
        labels = ("fresh gradient", "gradient of a rank", "update writes")
        labels += ("copied from a rank", "gradient that is offered", "gradient that is given back")
        text = " ".join(device.violations)
        name = taken_away[-1].name
        missed |= {f"{name}: {label}" for label in labels if label in text}
    return sorted(missed)


def _upload_often(runtime: Any) -> None:
    """Add zeros to sums on the device more often than it has upload buffers."""
    parts = runtime._components
    for unit in runtime.plan.updated_on_device:
        page, zeros = parts.gradients.pages[unit], torch.zeros(runtime.plan.layout.chunk_elements)
        places = [each for index in range(len(page.layout.parameters)) for each in page.pieces(index)]
        with parts.pager.lock:
            for _ in range(3 * UPLOAD_BUFFERS if places else 0):
                index, piece = places[0]
                parts.gradients.add_piece_on_device(page, index, piece, zeros[: piece.count], again=True)
            parts.store.link.drain()


def training_on_unequal_devices() -> list[Any]:
    """As `training`, but rank 1 rounds the directions of Muon otherwise."""
    if os.environ["RANK"] == "1":
        iteration: Any = Muon._orthogonal
        Muon._orthogonal = lambda self, matrix: iteration(self, matrix) * (1 + 2**-7)  # type: ignore[method-assign]
    return training()


def training_with_failing_copies() -> list[Any]:
    """As `training`, but of two copies from another rank's RAM, one fails and has written other bytes."""
    copy, numbers = Windows.copy, itertools.count()

    def fails(self: Windows, *wanted: Any) -> bool:
        if next(numbers) % 2:
            wanted[-1].into.fill_(255)
            return False
        return copy(self, *wanted)

    Windows.copy = fails  # type: ignore[method-assign]
    return training()


def training_with_a_break() -> list[Any]:
    return _each_case(train_with_a_break)


def beginning() -> list[Any]:
    return _each_case(begin)


def going_on() -> list[Any]:
    return _each_case(go_on)


def training_with_a_move() -> list[Any]:
    restoring.WINDOW = 1 << 12  # several parts of each chunk
    return _each_case(train_with_a_move)


def training_cut_otherwise() -> list[Any]:
    restoring.WINDOW = 1 << 12
    return _each_case(train_cut_otherwise)


def training_on_other_nodes() -> list[Any]:
    restoring.WINDOW = 1 << 12
    return _each_case(train_on_other_nodes)


def resuming_with_other_frozen_layers() -> list[Any]:
    restoring.WINDOW = 1 << 12
    return _each_case(resume_with_other_frozen_layers)


def training_back_and_forth() -> list[Any]:
    return _each_case(train_back_and_forth)


def training_on_other_nodes_cut_otherwise() -> list[Any]:
    restoring.WINDOW = 1 << 12
    return _each_case(functools.partial(train_on_other_nodes, how="one unit"))


def training_and_copying() -> list[Any]:
    tensor_files.WINDOW = 1 << 12
    return _each_case(train_and_copy)


def training_from_copies() -> list[Any]:
    restoring.WINDOW = 1 << 12
    return _each_case(train_from_copy)


def bytes_of_homes_and_pools() -> list[Any]:
    return _each_case(homes_and_pools)


def bytes_over_the_wire() -> list[Any]:
    return _each_case(traffic)


def bytes_in_timelines() -> list[Any]:
    return _each_case(timeline)


def homes_and_pools(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Bytes of all homes by kind, of the plan, and of pools and their peaks, after the steps of a case."""
    with opened(case, place, directory) as (model, runtime):
        _steps(case, place, model, runtime)
        parts, plan = runtime._components, runtime.plan
        pages = {
            Kind.PARAMETER: parts.pages,
            Kind.GRADIENT: list(parts.gradients.pages.values()),
            Kind.OPTIMIZER: list(parts.states.pages.values()),
        }
        return {
            "homes": {kind.name: [each.home.nbytes for each in pages[kind]] for kind in Kind},
            "planned": {kind.name: list(plan.page_sizes[kind]) for kind in Kind},
            "regions": [
                [(each.elements, each.dtype.itemsize, each.trainable) for each in unit.regions]
                for unit in plan.layout.units
            ],
            "pools": {name: (pool.counters.peak, pool.nbytes) for name, pool in parts.store.pools.items()},
            "plan": {tier.value: nbytes for tier, nbytes in plan.home_bytes.items()}
            | {
                name: getattr(plan, name)
                for name in ("resident_bytes", "staging_bytes", "transit_bytes", "exchange_bytes")
            },
        }


def traffic(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Bytes that this rank sent and received in all steps of a case, by what they were.

    "received from": (rank, what it was, bytes).
    "fetches": bytes of each unit that this rank asked others for. "pages": bytes of each unit's parameter
    page, in the order of units. "owned", "trained": elements of gradients that this rank sums up, and that
    the model has; "pieces", "all pieces": the numbers of pieces of both at stages 0 and 1. "messages": that
    this rank sent in all steps and at their end; "planned messages": in a step. "over the link": bytes
    between RAM and the device, in all steps.
    """
    with opened(case, place, directory) as (model, runtime):
        communicator = runtime._components.ranks
        layouts = runtime.plan.layout.units
        fetches = _counted_fetches(runtime)
        started, planned = communicator.wire.traffic().messages_sent, messages(runtime.plan, case.accumulate)
        moved = _over_the_link(runtime)
        _steps(case, place, model, runtime)
        _land_all(runtime)
        moved, rank = _over_the_link(runtime) - moved, runtime.plan.share.rank
        pieces = [chunk.owner == rank for unit in layouts for chunk in unit.chunks for _ in chunk.pieces]
        ranges = [
            (each.owner == rank, each.numel)
            for unit in layouts
            for index, parameter in enumerate(unit.parameters)
            for each in (unit.owned(index) if parameter.trainable else ())
        ]
    counters = communicator.wire.traffic()  # all has come, now that the runtime is closed
    return {
        "received": dict(counters.received),
        "sent": dict(counters.sent),
        "copied": dict(counters.copied),
        "received from": [[*sent, nbytes] for sent, nbytes in counters.received_from.items()],
        "fetches": fetches,
        "pages": [unit.nbytes for unit in layouts],
        "owned": sum(numel for mine, numel in ranges if mine),
        "pieces": sum(pieces),
        "trained": sum(numel for _, numel in ranges),
        "all pieces": len(pieces),
        "over the link": moved,
        "messages": counters.messages_sent - started,
        "planned messages": planned,
    }


def _over_the_link(runtime: Any) -> int:
    edges = runtime.stats.edges
    return edges[Edge.HOST_TO_DEVICE].bytes + edges[Edge.DEVICE_TO_HOST].bytes


def timeline(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Bytes that this rank sent and received while a timeline was recorded, by what they were.

    "path": the timeline's file. "fetches": as in `traffic`, meanwhile. "seconds": that this rank waited for
    the other one meanwhile, by its statistics. There are two ranks.
    """
    path = directory / f"{case.name}-{place.rank}.json"
    with opened(case, place, directory) as (model, runtime):
        _settled_traffic(runtime)
        fetches = _counted_fetches(runtime)
        waited = runtime.stats.rank_seconds
        with runtime.timeline(path):
            before = _settled_traffic(runtime)  # the other rank's timeline has begun, too, before a step
            _steps(case, place, model, runtime)
            after = _settled_traffic(runtime)
        waited = runtime.stats.rank_seconds - waited
        return {
            "path": str(path),
            "from": dict(after.received - before.received),
            "to": dict(after.sent - before.sent),
            "fetches": fetches,
            "seconds": waited,
        }


def _settled_traffic(runtime: Any) -> Any:
    """The wire's counters while nothing is under way between two ranks, which both call this."""
    communicator = runtime._components.ranks
    wire = communicator.wire
    _land_all(runtime)
    communicator.agree("nothing is asked for")
    traffic = wire.traffic()
    mine = sum(traffic.received.values()) - sum(traffic.copied.values())
    other = communicator.agree("all has come", received=mine)[wire.peers[0]]["received"]
    communicator.failure_event.wait_for(lambda: sum(wire.traffic().sent.values()) == other)
    found = wire.traffic()
    communicator.agree("all is counted")
    return found


def _land_all(runtime: Any) -> None:
    """Wait for what is on its way, such as the page with which a further step would begin."""
    with runtime._components.pager.lock:
        runtime._components.prefetch_engine.land_all()


def _counted_fetches(runtime: Any) -> list[int]:
    """A list that counts, from now on, the bytes of each unit that this rank asks others for."""
    remote = runtime._components.ranks.remote
    fetches = [0] * len(runtime.plan.layout.units)
    fetch = remote.fetch

    def counted(page: Any, legs: Any) -> Any:
        fetches[page.index] += sum(each.into.nbytes for each in legs)
        return fetch(page, legs)

    remote.fetch = counted
    return fetches


def _steps(case: Case, place: Place, model: Any, runtime: Any) -> None:
    for step in range(case.steps):
        backwards(case, place, model, runtime, step)
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()


if __name__ == "__main__":
    rank_processes.serve(globals())
