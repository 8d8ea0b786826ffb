"""A training on several ranks of which one does something wrong; see tests/distributed/test_never_a_hang.py.

The environment variable PLAN has the plan as JSON: the fields of `Plan`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import link_faults
import rank_processes
import torch
import torch.distributed as dist
from hang_plans import Plan
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.aio import Faults
from infinity.cli.command import first_error
from infinity.distributed import agreed_plan, mesh
from infinity.distributed.communicator import Communicator
from infinity.distributed.exchange import Exchange
from infinity.distributed.wire import Wire
from infinity.errors import ConfigError
from infinity.pages.store import Store
from infinity.system.disk_files import injected
from infinity.tiers.arena import available_ram

WIDTH = 48
STEPS = 3
BLOCKS = 8
PHASES: tuple[tuple[str, Any, str], ...] = (
    ("starting the group", dist, "init_process_group"),
    ("coming", mesh, "_meet"),
    ("waiting for others", mesh, "_absent"),
    ("meeting", Communicator, "__init__"),
    ("agreeing", Communicator, "agree"),
    ("opening tiers", Store, "__init__"),
    ("taking values", Exchange, "take"),
    ("having values", Exchange, "end"),
    ("serving", Communicator, "serve"),
    ("leaving", Communicator, "leave"),
    ("closing tiers", Store, "release"),
    ("closing the wire", Wire, "close"),
)
"""(point, class or module, name): the fault comes before this method or function runs."""


class Planted(Exception):
    """The error that a plan raises."""


class Culprit:
    """Does the plan's fault when its point comes for the nth time, on the plan's rank."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.mine = plan.rank == int(os.environ["RANK"])
        self._left = plan.nth

    def at(self, point: str) -> None:
        if not self.mine or point != self.plan.point:
            return
        self._left -= 1
        if self._left:
            return
        if self.plan.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.plan.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.plan.fault == "raise":
            raise Planted("by the plan")
        elif self.plan.fault == "interrupt":
            raise KeyboardInterrupt
        elif self.plan.fault == "exit":
            sys.exit(3)
        elif self.plan.fault == "sleep":
            time.sleep(2.5 * self.plan.timeout)
        elif self.plan.fault == "pause":
            pause(self.plan)
        elif self.plan.fault in (link_faults.CUT, link_faults.BLINK):
            link_faults.strike(self.plan.fault)

    def does(self, fault: str) -> bool:
        return self.mine and self.plan.fault == fault

    def watch(self) -> None:
        """Have the fault come in the phases of offload() and close(), too."""
        for point, kind, name in PHASES:
            setattr(kind, name, self._before(point, getattr(kind, name)))

    def _before(self, point: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def with_fault(*given: Any, **named: Any) -> Any:
            self.at(point)
            return method(*given, **named)

        return with_fault


def pause(plan: Plan) -> None:
    """Make the plan's mark, and go on when a test has removed it, or after the plan's time-out."""
    plan.mark.touch()
    until = time.monotonic() + plan.timeout
    while plan.mark.exists() and time.monotonic() < until:
        time.sleep(0.01)


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
    )


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    parts = (each.contiguous().view(torch.uint8).numpy().tobytes() for each in tensors.values())
    return hashlib.sha1(b"".join(parts)).hexdigest()[:12]


class Training:
    """The training that all ranks run, of which one has the plan's fault."""

    def __init__(self, culprit: Culprit, faults: Faults) -> None:
        plan, self.culprit = culprit.plan, culprit
        self.rank, self.size = int(os.environ["RANK"]), plan.size
        self.model = make_model()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        with injected(faults):
            self.runtime = infinity.offload(
                self.model,
                optimizer,
                budget=infinity.Budget(host=plan.host, nvme={plan.directory: "64MiB"}),
                precision=infinity.Precision(compute="fp32"),
                device="cpu",
                partition=plan.partition,
            )
        if culprit.does("read") or culprit.does("write"):
            faults.fail(plan.fault, plan.nth, errno.EIO, times=None)
        if culprit.does("slow disk"):
            faults.delay("any", 1, plan.latest, times=None)
        self.micro_batches = 0
        self.model[1].register_forward_pre_hook(lambda *_: culprit.at("in forward"))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if self.culprit.does("slow computation"):
            time.sleep(self.culprit.plan.latest)
        hidden = self.model[0](batch)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.culprit.at("in backward"))
        for block in self.model[1:]:
            hidden = block(hidden)
        return hidden.square().mean() / 2

    def next_batch(self) -> torch.Tensor:
        self.micro_batches += 1
        return batch(self.micro_batches * self.size + self.rank)

    def evaluate(self) -> float:
        with torch.no_grad():
            return self.loss(batch(0)).item()

    def run(self) -> dict[str, Any]:
        for step in range(STEPS):
            self.step(step)
        self.culprit.at("evaluation")
        found = {"evaluated": self.evaluate()}
        self.culprit.at("full_parameters")
        with self.runtime.full_parameters(self.model[0]), torch.no_grad():
            self.culprit.at("in full_parameters")
            for each in self.model[0].parameters():
                each.mul_(0.5)
        self.culprit.at("state_dict")
        return {**found, "digest": digest(self.model.state_dict())}

    def step(self, step: int) -> None:
        does = self.culprit.does if step == 1 else lambda _: False
        optimizer = self.runtime.optimizer
        if does("other options"):
            optimizer.param_groups[0]["lr"] = 0.5
        if does("an edit"):
            with torch.no_grad():
                next(self.model[2].parameters()).mul_(2)
        if does("an evaluation"):
            self.evaluate()
        if does("a longer evaluation"):
            for _ in range(3):
                self.evaluate()
        if does("a state_dict"):
            self.model.state_dict()
        self.backwards(step, 3 if does("a backward more") else 2)
        if step == 0 or does("clipping"):
            self.culprit.at("clip_grad_norm_()")
            self.runtime.clip_grad_norm_(1.0)
        self.culprit.at("step()")
        if not does("no step"):
            optimizer.step()
        self.culprit.at("zero_grad()")
        if not does("no zero_grad"):
            optimizer.zero_grad()
        self.culprit.at("between steps")

    def backwards(self, step: int, count: int) -> None:
        batches = [self.next_batch() for _ in range(count)]
        if step == 2:
            self.culprit.at("accumulate()")
            self.runtime.accumulate(batches, self.loss)
            return
        for each in batches:
            self.culprit.at("forward")
            loss = self.loss(each)
            self.culprit.at("backward")
            loss.backward()


def train() -> dict[str, Any]:
    plan = Plan(**json.loads(os.environ["PLAN"]))
    culprit, faults = Culprit(plan), Faults()
    culprit.watch()
    if plan.fault in ("stop", link_faults.CUT):
        link_faults.quick_liveness()
    if culprit.does("delays"):
        link_faults.delay(plan.nth, plan.latest)
    with contextlib.ExitStack() as inside:
        if plan.fault == link_faults.CUT:
            inside.callback(check_messages_ended)  # behind the runtime's end
        training = Training(culprit, faults)
        if plan.managed:
            inside.enter_context(training.runtime)
        found = training.run()
        culprit.at("close()")
        if plan.closed:
            training.runtime.close()
    return found


def check_messages_ended() -> None:
    """Check that soon nothing is sent or received any more. A lost peer may not have taken the last BYE."""
    for each in threading.enumerate():
        if each.name == "infinity messages":
            each.join(60.0)
            assert not each.is_alive()


# --- bad input ------------------------------------------------------------------------------------------


def offload(model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> Any:
    """Offload a model as the training does, but for what is given, and close the runtime."""
    plan = Plan(**json.loads(os.environ["PLAN"]))
    model = make_model() if model is None else model
    given: dict[str, Any] = {
        "budget": infinity.Budget(host=plan.host, nvme={plan.directory: "64MiB"}),
        "precision": infinity.Precision(compute="fp32"),
        "device": "cpu",
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    with infinity.offload(model, optimizer, **(given | options)):
        return "offloaded"


def second() -> bool:
    return os.environ["RANK"] == "1"


def group() -> None:
    dist.init_process_group("gloo")


def other_models() -> Any:
    return offload(make_model()[: 7 if second() else 8])


def other_optimizers() -> Any:
    model = make_model()
    kind = torch.optim.Adam if second() else torch.optim.AdamW
    return offload(model, kind(model.parameters()))


def other_versions() -> Any:
    if second():
        agreed_plan.VERSION = "0.0.0"
    return offload()


def wrong_mesh() -> Any:
    group()
    return offload(mesh=init_device_mesh("cpu", (2, 2)))


def data_parallel() -> Any:
    group()
    return offload(nn.parallel.DistributedDataParallel(make_model()))


def sharded() -> Any:
    group()
    return offload(fully_shard(make_model(), mesh=init_device_mesh("cpu", (2,))))


def unknown_partition() -> Any:
    return offload(partition="everything")


def own_directory(directory: str) -> Any:
    """Offload with another directory of the NVMe tier on rank 1."""
    if not second():
        return offload()
    host = Plan(**json.loads(os.environ["PLAN"])).host
    return offload(budget=infinity.Budget(host=host, nvme={directory: "64MiB"}))


def no_directory() -> Any:
    return own_directory("/proc/not/there")


def directory_of_root() -> Any:
    return own_directory("/proc/1")


def too_much_together() -> Any:
    half = available_ram() * 2 // 3
    return offload(budget=infinity.Budget(host=half))


def other_budgets() -> Any:
    if second():
        os.environ["PLAN"] = json.dumps({**json.loads(os.environ["PLAN"]), "host": "760KiB"})
    return train()


# --- a store that does not answer -----------------------------------------------------------------------


def reported_without_a_link() -> Any:
    """Rank 1 asks whether it is the first with an error, as `infinity train` does."""
    group()
    if second():
        link_faults.strike(link_faults.CUT)
    return first_error(ConfigError("It is broken.", "Mend it."))


if __name__ == "__main__":
    rank_processes.serve(globals())
