"""Tests of two nodes, each with a network and a disk of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import two_nodes
from ranked_cases import Case
from training_ranks import check_bits

WHY_NOT = two_nodes.missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
Nodes = list[Mapping[str, str]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes.two_nodes() as found:
        yield found


def test_two_nodes_have_the_bits_of_one_rank(nodes: Nodes, tmp_path: Path) -> None:
    cases = (
        Case("decoder", 3, accumulate=2, clip=0.05, home="nvme", compute="bf16"),
        Case("mlp", 2, home="host", states="int8"),
        Case("decoder", 1, together=True),
    )
    check_bits(cases, 2, tmp_path, nodes=nodes)


def test_ranks_that_change_nodes_go_on(nodes: Nodes, tmp_path: Path) -> None:
    cases = (Case("decoder", 3, home="nvme", compute="bf16", steps=4), Case("mlp", 1, steps=4))
    check_bits(cases, 2, tmp_path, function="training_on_other_nodes", nodes=nodes)
