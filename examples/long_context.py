"""The longest sequence that a model can be trained on, by technique: what is kept, computed again, or leaves.

Plans are made and nothing is trained, so any budget and any machine can be asked about:

    python examples/long_context.py --model 926m --vocabulary 128000 --machine rtx4090-desktop
    python examples/long_context.py --budget-device 2GiB --budget-host 16GiB --budget-nvme .:64GiB

A sequence is one micro-batch. Lengths are 1024, 1536, 2048, 3072 and so on.
"""

from __future__ import annotations

import argparse
import bisect
from collections.abc import Iterator
from dataclasses import replace

import torch

import infinity
from infinity.lm.decoder import PRESETS, Decoder

POLICIES = ("keep", "recompute", "recompute+offload", "offload")
LOSSES = ("all logits", "linear_cross_entropy")


class LongDecoder(Decoder):
    """A decoder that computes its loss without holding all logits."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        rotation = self.rotation(tokens.shape[1], x)
        for block in self.blocks:
            x = block(x, rotation)
        assert targets is not None
        return infinity.linear_cross_entropy(self.norm(x), self.head.weight, targets)


def lengths(most: int) -> Iterator[int]:
    length = 1024
    while length <= most:
        yield from (length, length * 3 // 2)
        length *= 2


def plan_for(options: argparse.Namespace, policy: str, loss: str, length: int) -> infinity.Plan | None:
    """The plan for one sequence; None if it does not fit."""
    config = replace(PRESETS[options.model].decoder, vocabulary=options.vocabulary)
    with torch.device("meta"):
        model = (Decoder if loss == "all logits" else LongDecoder)(config)
    nvme = dict([options.budget_nvme.rsplit(":", 1)]) if options.budget_nvme else None
    tokens = torch.zeros(1, length, dtype=torch.int64)
    try:
        return infinity.plan(
            model,
            torch.optim.AdamW(model.parameters()),
            budget=infinity.Budget(device=options.budget_device, host=options.budget_host, nvme=nvme),
            precision=infinity.Precision(compute="bf16"),
            example_inputs=(tokens, tokens),
            device=None if options.machine else "cpu",
            machine=options.machine,
            activations=policy,
            accumulation=1,
        )
    except infinity.BudgetError:
        return None


def longest(options: argparse.Namespace, policy: str, loss: str) -> tuple[int, infinity.Plan | None]:
    """(the greatest length that fits, its plan); (0, None) if none does."""
    tried = [*lengths(options.most)]
    plans: dict[int, infinity.Plan | None] = {}

    def too_long(length: int) -> bool:
        plans[length] = plan_for(options, policy, loss, length)
        return plans[length] is None

    count = bisect.bisect_left(tried, True, key=too_long)
    return (tried[count - 1], plans[tried[count - 1]]) if count else (0, None)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="309m")
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--budget-device", default=None, metavar="SIZE")
    parser.add_argument("--budget-host", default=None, metavar="SIZE")
    parser.add_argument("--budget-nvme", default=None, metavar="PATH:SIZE")
    parser.add_argument("--machine", default=None)
    parser.add_argument("--most", type=int, default=1 << 20, help="the greatest length that is tried")
    options = parser.parse_args(argv)
    print(f"{'activations':20}{'loss':22}{'tokens':>9}{'live MiB':>10}{'left MiB':>10}  predicted s/step")
    for policy in POLICIES:
        for loss in LOSSES:
            length, plan = longest(options, policy, loss)
            live, left, seconds = 0, 0, "-"
            if plan is not None:
                live = (plan.activations or 0) >> 20
                room = plan.residuals.room
                left = 0 if room is None else room.down >> 20
                seconds = "unknown" if plan.prediction is None else plan.prediction.text
            print(f"{policy:20}{loss:22}{length:9}{live:10}{left:10}  {seconds}", flush=True)


if __name__ == "__main__":
    main()
