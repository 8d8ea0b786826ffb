"""Components: the parts of one runtime, as `infinity.offload` has made and connected them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from infinity import cpu_adam
from infinity.checkpoint.committer import Committer
from infinity.checkpoint.directory import Checkpoint
from infinity.gradients.gradients import Gradients
from infinity.gradients.loss_scale import LossScale
from infinity.model.pager import Pager
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.edits import EditTracker
from infinity.pages.health import Health
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.store import Store
from infinity.planning.plan import Plan
from infinity.prefetch.engine import PrefetchEngine
from infinity.telemetry.meter import Meter

if TYPE_CHECKING:  # a runtime of one rank does not import the package
    from infinity.distributed.peers import Peers


@dataclass(frozen=True, kw_only=True)
class Components:
    """The connected parts of one runtime. `gradients`, `states` and `scheduler` are None for inference.

    The model is not among them: its hooks refer to the runtime, and components may outlive the runtime.
    `committer` and `checkpoint` are None if commits are off, and `peers` is None with one rank.
    """

    plan: Plan
    health: Health
    store: Store
    meter: Meter
    threads: cpu_adam.ThreadPool
    scale: LossScale
    pages: list[ParameterPage]
    edits: EditTracker
    prefetch_engine: PrefetchEngine
    pager: Pager
    gradients: Gradients | None
    states: States | None
    scheduler: UpdateScheduler | None
    peers: Peers | None
    committer: Committer | None
    checkpoint: Checkpoint | None
