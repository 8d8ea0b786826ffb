"""What releases of torch cannot do, for tests to skip."""

from __future__ import annotations

import pytest
import torch

fsdp2_on_a_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 needs a GPU"
)

survives_failed_backwards = pytest.mark.skipif(
    torch.__version__.startswith("2.15."),
    # What an error leaves in autograd's queue is destroyed after Python's end, and its hooks ask for the GIL.
    reason="this torch crashes at the end of a process whose backward raised between saved-tensor hooks",
)
