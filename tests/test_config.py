import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import Budget, Precision, format_size, parse_size
from infinity.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (12345, 12345),
        ("4096", 4096),
        ("1B", 1),
        ("20GiB", 20 << 30),
        (" 1.5 TiB ", 3 << 39),
        ("0.5kib", 512),
        ("2PiB", 2 << 50),
        (f"{(1 << 60) + 1}B", (1 << 60) + 1),
    ],
)
def test_sizes_are_read(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "bad", ["", "GiB", "20GB", "20G", "-1GiB", "1e9", "1,5GiB", -1, True, 1.5, None, "9" * 400 + ".5GiB"]
)
def test_what_is_no_size_is_refused_by_name(bad: object) -> None:
    with pytest.raises(ConfigError, match="host budget") as error:
        parse_size(bad, what="host budget")  # type: ignore[arg-type]
    assert "20GiB" in error.value.cure


@given(st.integers(0, 1 << 60))
def test_formatted_sizes_read_back_within_three_digits(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= 0.005 * nbytes + 1


def test_budget_resolves_bytes_and_directories(tmp_path) -> None:
    budget = Budget(device="1GiB", nvme={tmp_path / "x" / "..": "4KiB"})
    assert budget.device_bytes == 1 << 30
    assert budget.host_bytes is None
    assert budget.nvme_bytes == {str(tmp_path): 4096}


@pytest.mark.parametrize(
    "bad",
    [{"device": 0}, {"host": "0GiB"}, {"nvme": {}}, {"nvme": {"/a": 0}}, {"nvme": "/a"}, {"nvme": {5: 1}}],
)
def test_budgets_that_cannot_be_meant_are_refused(bad: dict) -> None:
    with pytest.raises(ConfigError):
        Budget(**bad)


def test_a_directory_named_twice_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="twice"):
        Budget(nvme={str(tmp_path): 1, f"{tmp_path}/": 1})


def test_precision_names_the_dtype_of_every_page() -> None:
    precision = Precision(compute="fp16", keep=["*.norm.*", "router"])
    assert precision.compute_dtype is torch.float16
    assert precision.dtype_of("layers.0.norm.weight", torch.bfloat16) is torch.float32
    assert precision.dtype_of("router", torch.float64) is torch.float32
    assert precision.dtype_of("Router", torch.float64) is torch.float16
    assert precision.dtype_of("router", torch.int64) is torch.int64
    assert precision.accumulate_dtype(torch.float16) is torch.float32


def test_inputs_are_kept_or_cast_or_named() -> None:
    assert Precision().inputs == "keep"
    assert Precision(inputs="cast").inputs == "cast"
    assert Precision(inputs=["pixel_*"]).inputs == ("pixel_*",)


def test_accumulation_in_the_compute_dtype_follows_the_parameter() -> None:
    precision = Precision(accumulate="compute")
    assert precision.accumulate_dtype(torch.bfloat16) is torch.bfloat16
    assert precision.accumulate_dtype(torch.float32) is torch.float32


def test_the_only_gradient_of_a_step_rests_as_it_comes() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert Precision().gradient_dtype(dtype, 1) is dtype
        for accumulation in (None, 2):
            assert Precision().gradient_dtype(dtype, accumulation) is torch.float32
            assert Precision(accumulate="compute").gradient_dtype(dtype, accumulation) is dtype


@pytest.mark.parametrize(
    "bad",
    [
        {"compute": "fp8"},
        {"compute": None},
        {"compute": ["bf16"]},
        {"states": "int4"},
        {"states": "fp64"},
        {"accumulate": "bf16"},
        {"keep": "*.norm.*"},
        {"keep": ("",)},
        {"keep": (3,)},
        {"inputs": "round"},
        {"inputs": None},
        {"inputs": ()},
        {"inputs": ("",)},
        {"inputs": {"x": 1}},
    ],
)
def test_precisions_that_cannot_be_had_are_refused(bad: dict) -> None:
    with pytest.raises(ConfigError):
        Precision(**bad)
