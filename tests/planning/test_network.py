"""Tests of what ranks receive from each other in a step, beside the volumes of the ZeRO paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planned_models import MiB, planned, stack
from torch import nn

from infinity.errors import ConfigError
from infinity.layout.shards import Share
from infinity.planning.machine_rates import MachineRates
from infinity.planning.network import link_rate, messages, network, rate_text
from infinity.planning.predict import Work


def model() -> nn.Module:
    return stack([64, 90, 130], set())


PSI = sum(each.numel() for each in model().parameters())


@pytest.mark.parametrize(("stage", "parameters", "gradients"), [(3, 4, 2), (2, 2, 2), (1, 2, 4), (0, 0, 8)])
def test_a_step_has_the_papers_volume(stage: int, parameters: int, gradients: int) -> None:
    """Bytes an element: 2 for values and shards in bf16, 4 for sums."""
    made = planned(model(), host=64 * MiB, share=Share(0, 4, stage))
    found = network(replace(made, resident_bytes=0), None, 1)
    assert (found.parameters, found.gradients) == (PSI * parameters * 3 // 4, PSI * gradients * 3 // 4)
    assert found.between_nodes == 0 and found.seconds is None


@pytest.mark.parametrize(("stage", "times"), [(3, 3), (2, 3), (1, 1), (0, 1)])
def test_micro_batches_bring_gradients_and_at_stage_3_parameters_again(stage: int, times: int) -> None:
    made = planned(model(), host=64 * MiB, share=Share(0, 2, stage))
    one, three = (network(replace(made, resident_bytes=0), None, count) for count in (1, 3))
    assert three.gradients == times * one.gradients
    assert three.parameters == (3 if stage == 3 else 1) * one.parameters


def test_pages_that_stay_resident_come_once() -> None:
    made = planned(model(), host=64 * MiB, share=Share(0, 2, 3))
    half = replace(made, resident_bytes=sum(unit.nbytes for unit in made.layout.units) // 2)
    assert [network(each, None, 3).parameters for each in (made, half)] == [PSI, pytest.approx(3.5 * PSI)]


def test_between_nodes_is_what_all_ranks_of_a_node_get_from_others() -> None:
    made = planned(model(), host=64 * MiB, share=Share(0, 4, 3, on_node=2), node_cache=0)
    found = network(made, 1000.0, 1)
    assert found.between_nodes == (found.parameters + found.gradients) * 2 * 2 // 3
    assert found.seconds == found.between_nodes / 1000
    assert "from other nodes" in found.text and found.text.endswith("s on the link")
    assert replace(found, measured=True).text.endswith("s on the link of 0.01Mbit, as measured")


def test_an_unknown_link_is_said_to_be_unknown() -> None:
    found = network(planned(model(), host=64 * MiB, share=Share(0, 4, 3, on_node=2)), None, 1)
    assert found.seconds is None
    assert "unknown seconds on the link" in found.text


def test_a_prediction_has_the_network_if_its_rate_is_known() -> None:
    rates = MachineRates(host_stream=1e9, flops={torch.float32: 1e9}, compute_memory=1e9)
    made = planned(
        model(), host=64 * MiB, share=Share(0, 4, 3, on_node=2), speeds=rates, work=Work({}, 10**6)
    )
    assert "without the network, whose rate is unknown" in str(made)
    known = replace(made, speeds=replace(rates, network=1e6))
    sent, guess = network(made, 1e6, 2), known.predict(2)
    assert guess is not None and guess.network == guess.least == pytest.approx(sent.seconds)
    assert guess.exchange == pytest.approx(2 * (sent.parameters + sent.gradients) / 1e9)
    assert "limited by network" in str(replace(known, prediction=guess))
    assert "without the network" not in str(known)


@pytest.mark.parametrize("rate", [12.5e6, 1.25e9, 117e6])
def test_a_rate_is_told_as_it_is_given(rate: float) -> None:
    assert link_rate(rate_text(rate)) == pytest.approx(rate)


@pytest.mark.parametrize(("stage", "gradients"), [(3, 4), (2, 4), (1, 8)])
def test_a_node_that_keeps_parameters_receives_them_once_a_step(stage: int, gradients: int) -> None:
    """Bytes an element, of which half comes from the other node: 2 for values, 2 or 4 of each rank for
    gradients.
    """
    made = planned(model(), host=64 * MiB, share=Share(0, 4, stage, on_node=2))
    found = network(replace(made, resident_bytes=0), None, 3)
    times = 3 if stage > 1 else 1
    assert found.between_nodes == PSI * (2 + times * gradients) // 2


def test_what_a_node_has_no_room_to_keep_comes_again() -> None:
    made = replace(planned(model(), host=64 * MiB, share=Share(0, 4, 3, on_node=2)), resident_bytes=0)
    half = replace(made, node_cache_bytes=made.node_cache_bytes // 2)
    whole, less = (network(each, None, 2).between_nodes for each in (made, half))
    assert less - whole == pytest.approx(PSI * 2 * 3 / 2 / 2, rel=1e-4)


def test_messages_of_a_step() -> None:
    """A weight of two blocks of 4096 elements, which ranks 0 and 1 own, and a bias, which rank 2 owns. A rank
    asks three others for their shards, and sends them gradients of three ranges.
    """
    made = planned(stack([64], set()), host=64 * MiB, share=Share(0, 4, 3, on_node=2))
    assert messages(made) == (4 * 3 * 2 + 3 * 3) / 4
    relays = 4 * 2  # and the other rank of the node asks for them
    assert messages(made, windows=True) == (4 * 2 + relays + 3 * (2 + 2)) / 4, "a node gets two shards once"
    assert messages(made, 2) == (4 * 3 * 2 + 2 * 3 * 3) / 4
    assert messages(replace(made, resident_bytes=0), 2) == (4 * 4 * 3 * 2 + 2 * 3 * 3) / 4
    # Shards of 8192 bytes come in two blocks.
    assert messages(replace(made, exchange_block_bytes=4096)) == (8 * 3 * 2 + 3 * 3) / 4


@pytest.mark.parametrize(("text", "rate"), [("8Gbit", 1e9), ("100 Mbit/s", 12.5e6), ("0.8kbps", 100.0)])
def test_rates(text: str, rate: float) -> None:
    assert link_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "fast", "1GB", "0Gbit", "-1Gbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError, match="is no rate"):
        link_rate(text)
