"""State prefetch: the choice of chains whose states are read ahead, that is, before their gate opens.

A chain is the update of one chunk, and its gate opens when the update is decided (infinity/optim/chain.py).
Lazy updates of a unit run between the backward and the unit's next forward, when the disk is busiest;
during the backward the disk has little to do. So the states of the chains whose updates will run first are
read during the backward, each unit's when its gradients are complete, as long as staging (buffers in host
RAM) has room for them. An eager update begins with its unit's last gradient. So the states of the units
that come next in the backward are read before their gradients come. If the staging is needed for something
else before the gate opens, the chain gives it up (`Chain.revoke`), and its states are read again when the
gate is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from infinity.gradients.host import Gradients
from infinity.optim.chain import Chain
from infinity.optim.chain_state import ChainState


class ReadAhead:
    """Chooses the chains (updates of chunks) of a runtime whose states are read before their update is
    decided.

    Called under the runtime's lock.
    """

    def __init__(
        self,
        chains: Mapping[int, Sequence[Chain]],
        parameters: Sequence[Sequence[torch.Tensor]],
        gradients: Gradients,
        *,
        eager: bool,
        accumulation: int,
        room: int,
    ) -> None:
        """chains: unit -> its chains. parameters: for every unit, its parameters in the unit's order.

        gradients: the gradient pages of all units. eager: whether updates are eager, not lazy. accumulation:
        number of gradients that each parameter gets in a step. room: bytes of staging that lazy updates may
        use to read ahead.
        """
        self._chains = chains
        self._parameters = parameters
        self._gradients = gradients
        self._eager = eager
        self._accumulation = accumulation
        self._room = room
        self._chosen: dict[int, Sequence[Chain]] = {}
        """Unit -> those of its chains whose states are to be read once the unit has all its gradients. Used
        only if updates are lazy.
        """
        self._unlocked: deque[Chain] = deque()
        """Chains whose states can be read now, because their unit has all its gradients. Used only if
        updates are lazy.
        """
        self._next: deque[int] = deque()
        """Units whose states are still to be read ahead, in the order in which the backward brings
        gradients. Used only if updates are eager.
        """
        self._cleared = False
        """Whether the gradients of the last step have been dropped, as by zero_grad(). The method `stepped`
        sets it to False. While it is False, gradients that are present belong to the step that has ended;
        once it is True, they belong to the next step. Used only if updates are eager.
        """

    def stepped(self, due: Sequence[int], order: Sequence[int]) -> None:
        """Choose the chains to read ahead for the next step.

        due: the units whose update is pending, in the order of their updates. order: units in the expected
        order of the next forward. The next backward brings gradients in the reverse order.
        """
        self._cleared = False
        if self._eager:
            self._next = deque(unit for unit in reversed(order) if self._on_disk(unit))
            return
        self._chosen, left = {}, self._room
        self._unlocked.clear()
        for unit in filter(self._on_disk, due):
            chosen = []
            for chain in self._chains[unit]:
                left -= chain.needed_ahead
                if left < 0:
                    break
                chosen.append(chain)
            self._chosen[unit] = chosen
            if left < 0:
                return

    def gradient_added(self, unit: int) -> bool:
        """Record that a parameter of `unit` has got a new gradient.

        Returns True if `candidates` thereby has more chains to yield; always False if updates are eager.
        """
        if not self._chosen.get(unit) or not self._complete(unit, self._accumulation):
            return False
        self._unlocked.extend(self._chosen.pop(unit))
        return True

    def candidates(self, pending: Callable[[int], bool]) -> Iterator[Sequence[Chain]]:
        """Yield groups of chains whose states are to be read ahead next.

        The caller begins to read all chains of a group before it asks for the next group, or stops for lack
        of room. pending: function of a unit's index; True while an update of the unit has not ended.
        """
        return self._before_gradients(pending) if self._eager else self._after_gradients()

    def _after_gradients(self) -> Iterator[Sequence[Chain]]:
        while self._unlocked:
            chain = self._unlocked[0]
            page = self._gradients.pages[chain.unit]
            # A gradient that is not in RAM was written home for lack of room: its states have no room either.
            if self._can_read(chain) and page.is_in_ram(chain.chunk_index):
                yield (chain,)
            self._unlocked.popleft()

    def _before_gradients(self, pending: Callable[[int], bool]) -> Iterator[Sequence[Chain]]:
        self._cleared = self._cleared or not self._gradients.any_stored
        while self._next and self._cleared:
            unit = self._next[0]
            if not self._gradients.pages[unit].consumed and not self._complete(unit, self._accumulation):
                if not self._complete(unit, self._accumulation - 1) or pending(unit):
                    return
                page = self._gradients.pages[unit]
                yield [
                    chain
                    for chain in self._chains[unit]
                    if self._can_read(chain) and page.chunks[chain.chunk_index].staged is None
                ]
            self._next.popleft()

    def _on_disk(self, unit: int) -> bool:
        chains = self._chains.get(unit, ())
        return bool(chains) and chains[0].states_on_disk

    def _can_read(self, chain: Chain) -> bool:
        return chain.state is ChainState.IDLE and chain.has_moments

    def _complete(self, unit: int, accumulation: int) -> bool:
        return self._gradients.pages[unit].complete(self._parameters[unit], accumulation)
