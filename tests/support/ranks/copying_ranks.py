"""Programs of ranks that save and load copies of their run, some of which fail, or stream rank commits;
see tests/distributed/test_copies.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
from emulated_device import EmulatedDevice
from failing_disk import FailingDisk
from racing_ranks import RANK, SIZE, TOGETHER, Model, Training

import infinity
from infinity.checkpoint import copies, tensor_files
from infinity.distributed.page_service import PageService
from infinity.errors import InfinityError, StorageError

DIRECTORY = Path(os.environ.get("COPIES", "."))
PARTITIONS = (None, "optimizer", "gradients", "parameters")
LAST = SIZE > 1 and RANK == SIZE - 1


def directory(name: object) -> Path:
    """A directory for one program, which all ranks share."""
    found = DIRECTORY / str(name)
    found.mkdir(exist_ok=True)
    return found


def step(training: Training, number: int) -> str:
    for each in range(TOGETHER):
        training.backward(TOGETHER * number + each)
    return training.end()


def tried(call: Callable[[], object]) -> str:
    """The error that a call raises, or else "done"."""
    try:
        call()
    except InfinityError as error:
        return f"{type(error).__name__}: {error.cause}"
    return "done"


def edited(training: Training, factor: float) -> None:
    """Edit two parameters in place, the last rank later than the others."""
    if LAST:
        time.sleep(0.05)
    with training.runtime.full_parameters(training.model), torch.no_grad():
        training.model.first.weight.mul_(factor)
        training.model.middle[1].bias.data.mul_(factor)


def edits_and_copies() -> list[list[Any]]:
    """For each partition: what parameters are before and after copies, with edits and views in between.

    The last rank is late to put the values of a copy into its pages.
    """
    restore = copies.restore

    def late(*arguments: Any, **options: Any) -> Any:
        if LAST:
            time.sleep(0.05)
        return restore(*arguments, **options)

    copies.restore = late
    return [_edited_and_copied(number, each) for number, each in enumerate(PARTITIONS)]


def _edited_and_copied(number: int, partition: str | None) -> list[Any]:
    where, training = directory(number), Training(partition)
    runtime, view = training.runtime, training.model.first.weight.detach()
    told: list[Any] = [step(training, 0)]
    edited(training, 0.5)
    runtime.save(where / "edited", state=RANK)
    told += [training.digest(), step(training, 1)]
    edited(training, 2.0)
    if LAST:
        time.sleep(0.05)
    told += [runtime.load(where / "edited"), training.digest(), float(view.norm())]
    if RANK == 0:
        told.append(training.digest())  # one rank alone reads rank commits of others
        told.append(float(runtime.optimizer.state[training.model.last.weight]["exp_avg"].norm()))
    told.append(step(training, 1))
    runtime.save(where / "stepped")
    told += [step(training, 2)]
    runtime.optimizer.param_groups[0]["lr"] = 0.5
    runtime.load(where / "stepped")
    told += [training.digest(), step(training, 2), runtime.optimizer.param_groups[0]["lr"]]
    runtime.close()
    training = Training(partition)
    for each in range(TOGETHER):
        training.backward(each)
    training.runtime.optimizer.step()
    training.runtime.optimizer.zero_grad()
    if LAST:  # keeps its part of the step's values for ranks that do not have them yet
        training.model.middle[1].weight.norm()
    training.runtime.load(where / "stepped")
    told.append(training.digest())
    training.runtime.close()
    return told


def refused() -> list[list[Any]]:
    """For each partition: how copies that fail on one rank end on this one, what they leave, and how training
    goes on.
    """
    found = []
    for number, partition in enumerate(PARTITIONS):
        training, where = Training(partition), directory(number)
        told: list[Any] = [step(training, 0)]
        for nth in (1, 3, 9, 14):
            with pytest.MonkeyPatch.context() as patch:
                disk = FailingDisk(patch)
                if RANK == 0:
                    disk.failing = (nth, errno.ENOSPC)
                told.append(tried(partial(training.runtime.save, where / "new" / "copy")))
                told.append(len(list(where.iterdir())))
        occupied = directory(f"{number} occupied")
        if RANK == 0:
            (occupied / "notes").touch()
        told.append(tried(partial(training.runtime.save, occupied)))
        told.append(tried(partial(training.runtime.save, where / "state", state=object())))
        for name in ("one", "two"):
            training.runtime.save(where / name, state=name)
        unseen = where / ("one" if RANK == 0 else "elsewhere")
        told.append(tried(partial(training.runtime.load, unseen)))
        told.append(tried(partial(training.runtime.load, where / ("two" if LAST else "one"))))
        told.append(step(training, 1))
        training.runtime.load(where / "two")
        told.append(step(training, 1))
        training.runtime.close()
        found.append(told)
    return found


def half_way() -> list[Any]:
    """The last rank cannot read a copy to its end. Returns how the load and later calls end."""
    training, where = Training("parameters"), directory("half")
    training.runtime.save(where / "copy")
    if LAST:

        def failing(*_: object, **__: object) -> None:
            raise StorageError("A planted failure.", "None.", path="here", errno=errno.EIO)

        copies.show = failing
    told = [tried(partial(training.runtime.load, where / "copy"))]
    told += [tried(training.digest), tried(partial(training.runtime.load, where / "copy"))]
    training.runtime.close()
    return told


def with_commits() -> list[list[Any]]:
    """For each partition: a run with commits takes back a copy while a commit is pending, commits that, and
    goes on from it in another runtime.
    """
    found = []
    for number, partition in enumerate(PARTITIONS):
        where = directory(number)
        training = Training(partition, checkpoint=where / "commits")
        told: list[Any] = [step(training, 0)]
        training.runtime.save(where / "copy")
        told.append(step(training, 1))
        pending = training.runtime.save(state="pending")
        training.runtime.load(where / "copy")
        told += [pending.done, training.digest()]
        training.runtime.save(state="loaded").wait()
        training.runtime.close()
        training = Training(partition, resume=where / "commits")
        told += [training.runtime.load(), training.digest(), step(training, 1)]
        training.runtime.close()
        found.append(told)
    return found


def one_rank_moves() -> list[list[Any]]:
    """For each partition: the last rank's slab is moved, so that it alone streams its part of a commit."""
    found = []
    for number, partition in enumerate(PARTITIONS):
        where, paths = directory(number), [directory(f"{number} {name}") for name in ("old", "new")]
        here, there = ({"host": "64MiB", "nvme": {str(path): "16MiB"}} for path in paths)
        training = Training(partition, budget=infinity.Budget(**here), checkpoint=where)
        told: list[Any] = [step(training, 0)]
        training.runtime.save().wait()
        told.append(step(training, 1))
        (slab,) = training.runtime._components.store.nvme.slabs
        training.runtime.close()
        if LAST:
            slab.path.rename(where / f"rank-{RANK}" / slab.path.name)
        training = Training(partition, budget=infinity.Budget(**(there if LAST else here)), resume=where)
        checkpoint = training.runtime._components.checkpoint
        told += [checkpoint.streamed_from is not None, training.digest(), step(training, 1)]
        training.runtime.save().wait()
        training.runtime.close()
        training = Training(partition, budget=infinity.Budget(**(there if LAST else here)), resume=where)
        checkpoint = training.runtime._components.checkpoint
        told += [checkpoint.streamed_from is not None, training.digest()]
        training.runtime.close()
        found.append(told)
    return found


def commits() -> None:
    """Two commits of a run, each in a directory of its own, as they lay when they were made."""
    training = Training("parameters", checkpoint=directory("run"))
    for number in range(2):
        step(training, number)
        training.runtime.save(state={"step": number + 1}).wait()
        shutil.copytree(
            directory("run") / f"rank-{RANK}",
            directory(number + 1) / f"rank-{RANK}",
            ignore=shutil.ignore_patterns("*.lock"),
        )
    training.runtime.close()


def inference() -> list[Any]:
    """A model without an optimizer takes over a copy of a trained one, and is copied itself."""
    training, where = Training("parameters"), directory("inference")
    wanted = step(training, 0)
    training.runtime.save(where / "trained")
    training.runtime.close()
    training.model = Model()
    with infinity.offload(training.model, None, budget=infinity.Budget(host="64MiB")) as runtime:
        runtime.load(where / "trained")
        loaded = training.digest()
        runtime.save(where / "again")
        runtime.load(where / "again")
        return [loaded == wanted, training.digest() == wanted]


def killed_in_save() -> list[Any]:
    """The last rank dies when it has served a few requests of the rank that writes a copy."""
    training, where = Training("parameters"), directory("killed")
    step(training, 0)
    serve, served = PageService._serve, []

    def dying(self: PageService, request: Any) -> None:
        served.append(request)
        if len(served) > 3:
            os._exit(7)
        serve(self, request)

    if LAST:
        PageService._serve = dying  # type: ignore[method-assign]
    told = tried(partial(training.runtime.save, where / "new" / "copy"))
    return [told.partition(":")[0], len(list(where.iterdir()))]


def parts_from_a_device() -> list[int]:
    """The most bytes that were copied to RAM at once, of a device with memory of its own, for a copy and for
    an export.
    """
    tensor_files.WINDOW = 1 << 12
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = infinity.Budget(device="16MiB", host="16MiB")
    found = []
    device = EmulatedDevice(0).in_use()
    with device, infinity.offload(model, optimizer, budget=budget, device="cpu") as runtime:
        store = runtime._components.store
        copied, sizes = store.copied_to_host, []

        def counted(memory: torch.Tensor) -> torch.Tensor:
            sizes.append(memory.nbytes)
            return copied(memory)

        store.copied_to_host = counted
        where = directory("device")
        runtime.save(where / "copy")
        found.append(max(sizes, default=0))
        sizes.clear()
        if RANK == 0:
            runtime.export(where / "export")
            found.append(max(sizes))
        assert not store.link.direct
    return found


if __name__ == "__main__":
    rank_processes.serve(globals())
