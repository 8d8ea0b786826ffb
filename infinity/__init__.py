"""infinity: virtual memory for training.

Parameters, gradients and optimizer states are pages that live in device memory, host RAM and NVMe.
"""

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

# GNU's OpenMP reads this variable when torch loads it, so it helps only if this package is imported before
# torch, as on the command line. Threads that spin for long at barriers keep cores from the threads of I/O and
# updates, and a step takes up to 20 times as long while another process is busy. 5,000 spins cost no speed
# otherwise.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

if importlib.util.find_spec("infinity._tiers") is None:
    raise ImportError(
        f"The native modules of infinity are not in {os.path.dirname(__file__)}. Start Python in another "
        "directory to use an installed infinity, or build them there as CONTRIBUTING.md says."
    )

from infinity.api import offload, plan
from infinity.config import Budget, Precision
from infinity.errors import (
    BudgetError,
    ConfigError,
    CorruptState,
    DeviceError,
    IncompatibleCheckpoint,
    InfinityError,
    NonFiniteGradient,
    RankDivergence,
    RankFailure,
    StorageError,
    StorageFull,
    UnsupportedOptimizer,
)
from infinity.losses.linear_cross_entropy import linear_cross_entropy
from infinity.model.tiled_modules import tiled
from infinity.pages.ledger import Commit
from infinity.planning.plan import Plan
from infinity.runtime import Runtime
from infinity.system.version import VERSION
from infinity.telemetry.stats import Stats

if TYPE_CHECKING:
    from infinity.integrations.accelerate import from_accelerate_config
    from infinity.integrations.deepspeed import from_deepspeed_config

__version__ = VERSION

_LATER = {
    "from_accelerate_config": "infinity.integrations.accelerate",
    "from_deepspeed_config": "infinity.integrations.deepspeed",
}
"""Public names that few programs use, and their modules, which are imported when a name is first used."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


__all__ = [
    "Budget",
    "BudgetError",
    "Commit",
    "ConfigError",
    "CorruptState",
    "DeviceError",
    "IncompatibleCheckpoint",
    "InfinityError",
    "NonFiniteGradient",
    "Plan",
    "Precision",
    "RankDivergence",
    "RankFailure",
    "Runtime",
    "Stats",
    "StorageError",
    "StorageFull",
    "UnsupportedOptimizer",
    "from_accelerate_config",
    "from_deepspeed_config",
    "linear_cross_entropy",
    "offload",
    "plan",
    "tiled",
]
