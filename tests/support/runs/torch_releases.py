"""What releases of torch cannot do, for tests to skip."""

from __future__ import annotations

import pytest
import torch

fsdp2_on_a_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 needs a GPU"
)
