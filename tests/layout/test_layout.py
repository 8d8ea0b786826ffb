import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from infinity.config import Precision
from infinity.cpu_adam import BLOCK
from infinity.errors import ConfigError
from infinity.layout.chunks import Chunk, ModelLayout, Piece, UnitLayout, build, page_bytes, region_sizes
from infinity.layout.units import survey

WHOLE = 1 << 40


class Bag(nn.Module):
    """A module with parameters of the given shapes. frozen: indices of parameters that are not trained."""

    def __init__(self, shapes, frozen=(), dtype=torch.float32) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(f"p{index}", nn.Parameter(tensor, requires_grad=index not in frozen))


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)


def lay_out(model: nn.Module, precision: Precision, *, unit_bytes: int, chunk_elements: int) -> ModelLayout:
    surveyed = survey(model, precision)
    return build(surveyed, surveyed.group(unit_bytes), chunk_elements)


def chunks_of(unit: UnitLayout, region: int) -> list[Chunk]:
    return [chunk for chunk in unit.chunks if chunk.region == region]


def names(layout: ModelLayout) -> list[str]:
    return [unit.name for unit in layout.units]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * BLOCK) | st.sampled_from([BLOCK, 2 * BLOCK, 5 * BLOCK]), min_size=1),
    frozen=st.sets(st.integers(0, 10)),
    compute=st.sampled_from(["bf16", "fp32"]),
    keep=st.sampled_from([(), ("p*1",)]),
    blocks=st.integers(1, 4),
)
def test_every_element_has_one_place(sizes, frozen, compute, keep, blocks) -> None:
    model = Bag([(size,) for size in sizes], frozen)
    precision = Precision(compute=compute, keep=keep)
    (unit,) = lay_out(model, precision, unit_bytes=WHOLE, chunk_elements=blocks * BLOCK).units
    assert [parameter.numel for parameter in unit.parameters] == sizes
    end = 0
    for region in unit.regions:
        assert region.byte_offset % 4096 == 0
        assert region.byte_offset >= end
        end = region.byte_offset + region.elements * region.dtype.itemsize
    assert unit.nbytes % 4096 == 0
    assert unit.nbytes >= end
    # Parameters of a region lie one after the other, on multiples of 256 bytes: the large ones, then others.
    for number, region in enumerate(unit.regions):
        end = 0
        for parameter in sorted(unit.parameters, key=lambda each: each.numel < BLOCK):
            if parameter.region == number and parameter.numel:
                assert (parameter.dtype, parameter.trainable) == (region.dtype, region.trainable)
                assert parameter.offset * region.dtype.itemsize % 256 == 0
                assert parameter.offset >= end
                end = parameter.offset + parameter.numel
        assert end <= region.elements
    # Chunks follow one another; all but a region's last have one length.
    for number, region in enumerate(unit.regions):
        chunks = chunks_of(unit, number)
        assert sum(chunk.count for chunk in chunks) == (region.elements if region.trainable else 0)
        for index, chunk in enumerate(chunks):
            assert chunk.start == index * blocks * BLOCK
            assert chunk.pieces
    # Pieces cover each trainable parameter once, in order, cut at multiples of BLOCK.
    covered = [0] * len(sizes)
    for chunk in unit.chunks:
        for piece in chunk.pieces:
            parameter = unit.parameters[piece.parameter]
            assert piece.start == covered[piece.parameter]
            assert piece.start % BLOCK == 0
            assert piece.count > 0
            assert piece.offset + piece.count <= chunk.count
            assert chunk.start + piece.offset == parameter.offset + piece.start
            covered[piece.parameter] += piece.count
    trained = [size if index not in frozen else 0 for index, size in enumerate(sizes)]
    assert covered == trained
    surveyed = survey(model, precision)
    assert page_bytes(region_sizes(surveyed.parameters)) == unit.nbytes


def test_packing_by_the_rule() -> None:
    model = Bag([(100,), (3 * BLOCK + 5,), (4000,), (200,), (10_000,)])
    layout = lay_out(model, Precision(), unit_bytes=WHOLE, chunk_elements=2 * BLOCK)
    (unit,) = layout.units
    # The two large parameters begin at blocks; 100 shares the last block of the second one, 4000 does not fit
    # there, and 200 does not fit behind it.
    starts = [parameter.offset for parameter in unit.parameters]
    assert starts == [4 * BLOCK + 10_112, 0, 7 * BLOCK, 8 * BLOCK, 4 * BLOCK]
    assert [chunk.count for chunk in unit.chunks] == [2 * BLOCK] * 4 + [200]


def test_a_region_per_dtype_and_training() -> None:
    model = Bag([(3,), (4,), (5,), (6,)], frozen={1})
    model.register_parameter("codes", nn.Parameter(torch.zeros(7, dtype=torch.int64), requires_grad=False))
    layout = lay_out(model, Precision(keep=("p2",)), unit_bytes=WHOLE, chunk_elements=BLOCK)
    (unit,) = layout.units
    found = [(region.dtype, region.trainable) for region in unit.regions]
    assert found == [
        (torch.bfloat16, True),
        (torch.bfloat16, False),
        (torch.float32, True),
        (torch.int64, False),
    ]
    assert [parameter.region for parameter in unit.parameters] == [0, 1, 2, 0, 3]
    assert {chunk.region for chunk in unit.chunks} == {0, 2}


def test_scalars_and_empty_parameters_and_strides() -> None:
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(2.0))
    model.empty = nn.Parameter(torch.empty(0, 4))
    weight = torch.empty(8, 3, 2, 2).to(memory_format=torch.channels_last)
    model.conv = nn.Parameter(weight)
    model.turned = nn.Parameter(torch.empty(5, 4).t())
    layout = lay_out(model, Precision(), unit_bytes=WHOLE, chunk_elements=BLOCK)
    (unit,) = layout.units
    assert [parameter.shape for parameter in unit.parameters] == [(), (0, 4), (8, 3, 2, 2), (4, 5)]
    assert [parameter.stride for parameter in unit.parameters] == [(), (4, 1), weight.stride(), (1, 4)]
    assert {piece.parameter for chunk in unit.chunks for piece in chunk.pieces} == {0, 2, 3}


def test_only_empty_parameters_still_have_a_page() -> None:
    (unit,) = lay_out(Bag([(0,)]), Precision(), unit_bytes=1, chunk_elements=BLOCK).units
    assert unit.nbytes == 4096
    assert unit.chunks == ()


def test_units_descend_until_they_fit_and_blocks_are_cut_alike() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(100, 64)
    model.layers = nn.ModuleList([Block(), Block(), Block(96), nn.LayerNorm(64)])
    model.scale = nn.Parameter(torch.ones(3))
    block = 2 * (64 * 64 + 64) * 4
    precision = Precision(compute="fp32")

    def at(unit_bytes: int) -> list[str]:
        return names(lay_out(model, precision, unit_bytes=unit_bytes, chunk_elements=BLOCK))

    assert at(WHOLE) == [""]
    # The third block is too large, so all blocks are cut; the norm is not of their kind.
    cut = [f"layers.{index}.{linear}" for index in range(3) for linear in ("first", "second")]
    assert at(block) == ["", "embed", *cut, "layers.3"]
    assert at(3 * block) == ["", "embed", "layers.0", "layers.1", "layers.2", "layers.3"]
    assert at(1) == at(block)


def test_attention_is_never_cut_and_experts_always_are() -> None:
    model = nn.Module()
    model.attention = nn.MultiheadAttention(64, 4)
    model.moe = nn.Module()
    model.moe.router = nn.Linear(8, 2)
    model.moe.experts = nn.ModuleList([Block(), Block()])
    layout = lay_out(model, Precision(), unit_bytes=WHOLE, chunk_elements=BLOCK)
    assert names(layout) == ["attention", "moe.router", "moe.experts.0", "moe.experts.1"]
    layout = lay_out(model, Precision(), unit_bytes=1, chunk_elements=BLOCK)
    assert names(layout)[0] == "attention"
    assert layout.module_units["attention.out_proj"] == layout.module_units["attention"] == (0,)


def test_tied_parameters_are_laid_out_once() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(10, 4)
    model.inner = Block(4)
    model.again = model.inner
    model.head = nn.Linear(4, 10)
    model.head.weight = model.embed.weight
    layout = lay_out(model, Precision(), unit_bytes=1, chunk_elements=BLOCK)
    assert layout.units[0].parameters[0].names == ("embed.weight", "head.weight")
    assert layout.units[1].parameters[1].names == ("inner.first.bias", "again.first.bias")
    assert names(layout) == ["embed", "inner.first", "inner.second", "head"]
    assert layout.module_units["head"] == (0, 3)


def overlapping(device: str) -> nn.Module:
    model = nn.Module()
    base = torch.empty(16, device=device)
    model.whole = nn.Parameter(base)
    model.part = nn.Parameter(base[8:])
    return model


def holding(tensor: torch.Tensor, *, trained: bool = True) -> nn.Module:
    model = nn.Module()
    model.culprit = nn.Parameter(tensor, requires_grad=trained)
    return model


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: overlapping("cpu"), ("whole", "part")),
        (lambda: overlapping("meta"), ("whole", "part")),
        (lambda: holding(torch.empty(1).expand(4)), ("culprit",)),
        (lambda: holding(torch.empty(4, 4)[:, :2]), ("culprit",)),
        (lambda: holding(torch.zeros(4, 4).to_sparse()), ("culprit",)),
        (lambda: holding(torch.zeros(4, dtype=torch.complex64)), ("culprit",)),
        (lambda: nn.Sequential(nn.LazyLinear(4)), ("0.weight",)),
        (lambda: nn.Sequential(nn.ReLU()), ("no parameters",)),
    ],
)
def test_what_cannot_live_in_a_page_is_refused_by_name(build, names) -> None:
    with pytest.raises(ConfigError) as error:
        lay_out(build(), Precision(), unit_bytes=WHOLE, chunk_elements=BLOCK)
    assert all(name in error.value.cause for name in names)
    assert error.value.cure


def test_a_parameter_class_of_its_own_is_refused() -> None:
    class Own(nn.Parameter):
        pass

    model = nn.Module()
    model.register_parameter("mine", Own(torch.zeros(3)))
    with pytest.raises(ConfigError, match=r"mine.*Own"):
        lay_out(model, Precision(), unit_bytes=WHOLE, chunk_elements=BLOCK)


def test_neighbours_in_one_storage_do_not_overlap() -> None:
    model = nn.Module()
    base = torch.empty(16)
    model.low, model.high = nn.Parameter(base[:8]), nn.Parameter(base[8:])
    model.frozen = nn.Parameter(torch.zeros(4, dtype=torch.complex64), requires_grad=False)
    assert len(lay_out(model, Precision(), unit_bytes=WHOLE, chunk_elements=BLOCK).units) == 1


@pytest.mark.parametrize("elements", [0, -BLOCK, BLOCK + 1])
def test_chunks_are_whole_blocks(elements: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096"):
        lay_out(Bag([(3,)]), Precision(), unit_bytes=WHOLE, chunk_elements=elements)


def test_placement_in_a_parameter_does_not_follow_the_unit() -> None:
    model = nn.Sequential(*(nn.Linear(70, 70) for _ in range(4)))
    cuts = []
    for unit_bytes, blocks in itertools.product((1, WHOLE), (1, 2)):
        layout = lay_out(model, Precision(), unit_bytes=unit_bytes, chunk_elements=blocks * BLOCK)
        cuts.append(
            {piece.start % BLOCK for unit in layout.units for chunk in unit.chunks for piece in chunk.pieces}
        )
    assert cuts == [{0}] * 4


def test_the_parts_of_a_piece_follow_one_another() -> None:
    piece = Piece(parameter=3, start=8192, offset=640, count=10_000)
    parts = list(piece.parts(4096))
    assert [(part.start, part.offset, part.count) for part in parts] == [
        (8192, 640, 4096),
        (12288, 4736, 4096),
        (16384, 8832, 1808),
    ]
    assert {part.parameter for part in parts} == {3}
    assert list(piece.parts(1 << 20)) == [piece]
