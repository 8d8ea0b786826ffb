"""Tests of safetensors files and their indexes that are broken, ambiguous, or change while they are read.

Opening or reading them raises StorageError for bytes that cannot be used, and ConfigError for a dtype that
torch lacks and for a directory or an index that does not tell which file has a tensor.
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infinity.checkpoint.safetensors_files import open_weights
from infinity.errors import ConfigError, InfinityError, StorageError


def header(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def describe(**changes: Any) -> bytes:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return header(json.dumps({"a": tensor}).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        header(b"{}", 1 << 62),
        header(b"{}", 100),
        header(b"not json"),
        header(b'{"a": 1}'),
        header(b"\xff\xfe\xfd"),
        header(b"[" * 10_000),
        describe(),
        describe(shape=[3]) + bytes(8),
        describe(shape=[-2]) + bytes(8),
        describe(shape=[1 << 62, 1 << 62]) + bytes(8),
        describe(data_offsets=[8, 0]) + bytes(8),
        describe(data_offsets=[0, 1 << 40]) + bytes(8),
        describe(dtype="F31") + bytes(8),
        describe() + bytes(7),
        describe() + bytes(9),
    ],
    ids=str,
)
def test_a_file_that_is_not_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(StorageError) as caught:
        open_weights(tmp_path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": null}}',
    ],
    ids=lambda content: str(content[:30]),
)
def test_a_file_that_is_not_an_index(tmp_path: Path, content: bytes) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(StorageError, match="index"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("absent.safetensors", "missing"),
        ("../model.safetensors", "not a file beside it"),
        ("/etc/passwd", "not a file beside it"),
        ("..", "not a file beside it"),
        ("", "not a file beside it"),
        ("model.safetensors", "tensors that its files lack: b"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path: Path, file: str, said: str) -> None:
    directory = tmp_path / "inner"
    directory.mkdir()
    for where in (tmp_path, directory):
        save_file({"a": torch.ones(1)}, where / "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": file}}))
    with pytest.raises(ConfigError, match=said):
        open_weights(directory)


def test_places_without_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="holds no safetensors file"):
        open_weights(tmp_path)
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        open_weights(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="There is no"):
        open_weights(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="There is no"):
        open_weights(tmp_path / "pytorch_model.bin" / "below a file")
    with pytest.raises(InfinityError):
        open_weights("x" * 5000)


def test_ambiguous_directories(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"a is in one\.safetensors and in two\.safetensors"):
        open_weights(tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="several indexes"):
        open_weights(tmp_path)


def test_a_type_that_torch_lacks(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(describe(dtype="F8_E8M0", shape=[8]) + bytes(8))
    with pytest.raises(ConfigError, match="of type F8_E8M0"):
        open_weights(path).read("a")


@pytest.mark.parametrize("change", ["gone", "other", "truncated"])
def test_a_file_that_changes_meanwhile(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4)}, path)
    weights = open_weights(path)
    if change == "gone":
        path.unlink()
    elif change == "other":
        save_file({"a": torch.ones(5)}, path)
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InfinityError) as caught:
        weights.read("a")
    assert isinstance(caught.value, StorageError)
    assert caught.value.path == str(path)
