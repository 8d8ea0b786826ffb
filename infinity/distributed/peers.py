"""Peers: the other ranks as one runtime uses them, from the moment when its components exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from infinity.distributed.communicator import Communicator
from infinity.distributed.conductor import Conductor
from infinity.distributed.contributions import Contributions
from infinity.distributed.message import Message
from infinity.distributed.page_service import PageService
from infinity.distributed.ranked_step import RankedStep
from infinity.distributed.remote_parts import RemoteParts
from infinity.distributed.whole_gradients import WholeGradients
from infinity.gradients.gradients import Gradients
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.health import Health
from infinity.pages.optimizer_page import StatePage
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.remote import RemotePages
from infinity.pages.store import Store
from infinity.prefetch.engine import PrefetchEngine


class Peers:
    """Serves the other ranks from construction until `close`, and takes this rank's steps with them."""

    def __init__(
        self,
        communicator: Communicator,
        remote: RemotePages,
        *,
        pages: Sequence[ParameterPage],
        states: Mapping[int, StatePage],
        engine: PrefetchEngine,
        gradients: Gradients | None,
        scheduler: UpdateScheduler | None,
        store: Store,
        health: Health,
        drive: Callable[[int], None],
        early: Sequence[tuple[int, Message]],
    ) -> None:
        """remote: brings parts of pages that other ranks own. drive: completes what a commit lacks. early:
        what other ranks have said to this runtime before it was made.
        """
        assert isinstance(remote, RemoteParts) and store.exchange is not None
        self.communicator = communicator
        self.remote = remote
        wire, lock, share = communicator.wire, communicator.lock, communicator.share
        service = PageService(
            wire,
            remote,
            pages=pages,
            states=states,
            gradients=gradients,
            scheduler=scheduler,
            store=store,
            room=store.exchange[0],
            lock=lock,
            health=health,
        )
        self.step: RankedStep | None = None
        """What a training step does with the other ranks; None for inference."""
        contributions = None
        if gradients is not None and scheduler is not None:
            whole = None
            if share.whole_gradients:
                whole = WholeGradients(share, gradients, scheduler, remote)
            else:
                contributions = Contributions(
                    wire,
                    share,
                    gradients=gradients,
                    scheduler=scheduler,
                    room=store.exchange[1],
                    most_waiting=store.plan.waiting_bytes,
                    lock=lock,
                )
            self.step = RankedStep(
                share,
                wire,
                ballots=communicator.ballots,
                contributions=contributions,
                whole=whole,
                service=service,
                remote=remote,
                engine=engine,
                gradients=gradients,
                lock=lock,
            )
        self._conductor = Conductor(
            wire,
            service=service,
            contributions=contributions,
            step=self.step,
            drive=drive,
            liveness=communicator.liveness,
            cache=remote.cache,
            lock=lock,
            early=early,
        )
        self._conductor.start()

    def leave(self) -> None:
        """Do what `Communicator.leave` does."""
        self.communicator.leave()

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one ends with an error, so that none waits for it."""
        self.communicator.fail(error)

    def close(self) -> None:
        """End the threads that serve other ranks, and the connection to these."""
        with self.communicator.lock.released():  # the threads may wait for it
            self._conductor.stop()
        self.communicator.close()
