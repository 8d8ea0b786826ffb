"""One page's way: from NVMe into host RAM, through an optimizer step in place, and back to NVMe.

python examples/one_page.py [DIRECTORY]     (a directory on a disk; default: the current one)
"""

from __future__ import annotations

import sys

import torch

from infinity import cpu_adam
from infinity.aio import wait_all
from infinity.tiers import HostArena, NvmeLease, NvmeTier, Pool

ELEMENTS = 1 << 20
STATES = ("master", "first_moment", "second_moment")
NBYTES = 4 * ELEMENTS


def main(directory: str) -> None:
    weights, gradient = torch.randn(ELEMENTS), torch.randn(ELEMENTS, dtype=torch.bfloat16)
    zeros = torch.zeros(ELEMENTS)
    with (
        HostArena(4 * NBYTES) as host,
        NvmeTier({directory: 4 * NBYTES}, 3 * NBYTES) as nvme,
        cpu_adam.ThreadPool() as threads,
    ):
        nvme.register(host)
        pool = host.pool("pages", 4 * NBYTES)
        homes = {name: nvme.lease(NBYTES) for name in STATES}
        for name, content in zip(STATES, (weights, zeros, zeros), strict=True):
            nvme.write(homes[name], content).result()
        for step in (1, 2, 3):
            pages = bring_up(nvme, homes, pool)
            threads.run(update(pages, gradient, step))
            wait_all([nvme.write(homes[name], page) for name, page in pages.items()])
            del pages  # returns the leases of the pages
        updated = torch.empty(ELEMENTS)
        nvme.read(homes["master"], updated).result()
        moved = nvme.stats[0]
    print(f"max difference to torch.optim.AdamW: {difference(updated, weights, gradient):.1e}")
    print(f"read {moved.read_bytes >> 20} MiB, wrote {moved.write_bytes >> 20} MiB")


def bring_up(nvme: NvmeTier, homes: dict[str, NvmeLease], pool: Pool) -> dict[str, torch.Tensor]:
    pages = {}
    for name in homes:
        with pool.lease(NBYTES) as lease:  # from here on the residency holds the bytes
            pages[name] = lease.residency().view(torch.float32)
    wait_all([nvme.read(home, pages[name]) for name, home in homes.items()])
    return pages


def update(pages: dict[str, torch.Tensor], gradient: torch.Tensor, step: int) -> cpu_adam.Update:
    return cpu_adam.Update(
        grad=gradient,
        parameter=pages["master"],
        first_moment=pages["first_moment"],
        second_moment=pages["second_moment"],
        segments=[cpu_adam.Segment(0, ELEMENTS)],
        hypers=[cpu_adam.AdamW(lr=1e-2, step=step)],
    )


def difference(updated: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor) -> float:
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2)
    parameter.grad = gradient.float()
    for _ in range(3):
        optimizer.step()
    return float((updated - parameter.detach()).abs().max())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
