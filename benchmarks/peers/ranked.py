"""Ranked: turns of training on one of several ranks, run in the rank's own process (contender.py).

Nothing here imports infinity, because peers may have an interpreter without it.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from peers import nodes, rss, tcp
from peers.task import Batches, Contender


class RankedContender(Contender, Protocol):
    """A contender that can be one of several ranks."""

    rss_base: int
    """What `world.joined` returned in this process."""


def ranked_turn(contender: RankedContender, batches: Batches, *, lead: int, steps: int) -> dict[str, Any]:
    """Train `lead` untimed and then `steps` timed steps. Return the reply.

    The reply is a dict. "losses": of all steps, untimed ones first, of this rank's micro-batches. "seconds":
    of each timed step, from the end of the step before to its own. "sent_bytes": bytes that this process sent
    to other ranks in a timed step, on average. "link_bytes": bytes that its node has sent in a timed step, on
    average, 0 without nodes. "rss_built", "rss_steps": the peak RSS until the first timed
    step, and from there on, each above the RSS with which the process joined the others. "facts": what the
    contender tells about itself, after the timed steps; the entries "sent" and "crossed", if there are any,
    have bytes that it has counted so far, "sent" by their purpose, and become their number in a timed step.
    """
    losses = [contender.step(*batches.next()) for _ in range(lead)]
    built = rss.read("VmHWM") - contender.rss_base
    rss.restart_peak()
    # What is sent meanwhile for a slower rank is in the sockets' numbers then, and not in the facts alone.
    sockets, link, before = tcp.sent(), nodes.sent(), contender.facts()
    seconds: list[float] = []
    last = time.perf_counter()
    for _ in range(steps):
        losses.append(contender.step(*batches.next()))
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    link_bytes, facts = (nodes.sent() - link) // steps, contender.facts()
    sent_bytes = tcp.since(sockets) // steps
    if "sent" in facts:
        counted = before["sent"]
        facts["sent"] = {name: (n - counted.get(name, 0)) // steps for name, n in facts["sent"].items()}
        facts["crossed"] = (facts["crossed"] - before["crossed"]) // steps
    return {
        "losses": losses,
        "seconds": seconds,
        "sent_bytes": sent_bytes,
        "link_bytes": link_bytes,
        "rss_built": built,
        "rss_steps": rss.read("VmHWM") - contender.rss_base,
        "facts": facts,
    }
