"""What windows use of a store, for tests of windows without runtimes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from infinity.tiers import HostArena
from infinity.tiers.link import DeviceLink

CPU = torch.device("cpu")


def store_of(arena: HostArena) -> Any:
    """The store of a rank whose device is the host."""
    device = SimpleNamespace(region=arena.region, device=CPU, shares_host=True)
    return SimpleNamespace(link=DeviceLink(), host=arena, device=device)
