"""Whole gradients: sums of gradients where every rank keeps gradients of all parameters (stages 0 and 1).

Each rank adds up the gradients of its own backwards. At the end of a step, it pulls the other ranks'
gradients of the pieces that it owns, and adds them in the order of the ranks. The sum replaces its own
gradient. At stage 0, each rank then pulls the sums of all other pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from infinity.distributed.remote_parts import RemoteParts
from infinity.errors import ConfigError
from infinity.gradients.gradients import Gradients
from infinity.layout.chunks import OwnedRange, Piece
from infinity.layout.shards import Share
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.gradient_page import GradientPage
from infinity.tiers.link import Joined


class WholeGradients:
    """Sums gradients over ranks at the end of a step. Called by the training thread, under the lock."""

    def __init__(
        self, share: Share, gradients: Gradients, scheduler: UpdateScheduler, remote: RemoteParts
    ) -> None:
        self._share = share
        self._gradients = gradients
        self._scheduler = scheduler
        self._remote = remote
        self.summed = False
        """Whether all ranks have the sums of this step that they need."""

    def check(self) -> None:
        """Raise ConfigError if a new gradient would be added to a sum over ranks."""
        if self.summed:
            raise ConfigError(
                "A backward came after gradients were summed over ranks, in step() or for a norm.",
                'Call runtime.optimizer.zero_grad() after step(), or offload with partition="gradients".',
            )

    def sum_up(self, contents: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Sum up all ranks' gradients of the pieces that this rank owns. Does nothing if this was already
        done in this step.

        contents: rank -> for each unit, the parameters that have a gradient on that rank. Raises the errors
        of transfers between ranks, and StorageError.
        """
        if self.summed:
            return
        for place, page in enumerate(self._gradients.pages.values()):
            for parameter in sorted(set().union(*(each[place] for each in contents.values()))):
                ranks = [rank for rank in sorted(contents) if parameter in contents[rank][place]]
                for chunk_index, piece in page.owned(parameter):
                    total = self._sum(page, parameter, piece.start, piece.count, ranks)
                    assert total is not None, "a rank said that it has a gradient"
                    self._replace(page, chunk_index, piece, total)

    def share_sums(self) -> None:
        """Replace this rank's gradients of pieces that other ranks own by the sums, pulled from the owners.

        Called after all ranks have called `sum_up`.
        """
        for page in self._gradients.pages.values():
            for parameter in sorted(page.content):
                for chunk_index, piece in page.layout.pieces(parameter):
                    owner = page.layout.chunks[chunk_index].owner
                    if owner != self._share.rank:
                        found = self._sum(page, parameter, piece.start, piece.count, [owner])
                        assert found is not None, "the owner has summed up what any rank has"
                        self._replace(page, chunk_index, piece, found)

    def sum_of(self, page: GradientPage, parameter: int, wanted: OwnedRange) -> torch.Tensor | None:
        """Return the sum of all ranks' gradients of a range of a parameter so far, (wanted.numel,); None if
        no rank has one.

        Before the step ends, the gradients are pulled from all ranks; afterwards, the sum from its owner.
        """
        ranks = [wanted.owner] if self.summed else range(self._share.ranks)
        return self._sum(page, parameter, wanted.start, wanted.numel, ranks)

    def _sum(
        self, page: GradientPage, parameter: int, first: int, count: int, ranks: Iterable[int]
    ) -> torch.Tensor | None:
        """Sum up the ranks' gradients of elements [first, first + count) of a parameter, in the order of
        `ranks`; None if no rank has one.
        """
        total: torch.Tensor | None = None
        for rank in ranks:
            if rank == self._share.rank:
                found = self._gradients.elements(page, parameter, first, count)
            else:
                into = torch.empty(count, dtype=page.stored_dtype(parameter), device="cpu")
                there = self._remote.local_gradient(rank, page.index, parameter, first, into)
                found = into if there else None
            if found is not None:
                total = found if total is None else total.add_(found)
        return total

    def _replace(self, page: GradientPage, chunk_index: int, piece: Piece, total: torch.Tensor) -> None:
        # Of a unit that this rank has not used since its last update, that update may still be due, and use
        # the memory of its gradients.
        self._scheduler.complete(page.index)
        page.forget_piece(chunk_index, piece)
        Joined(self._scheduler.accumulate_piece(page.index, chunk_index, piece, total, last=True)).wait()
