"""Golden bytes: a small commit gives exactly the bytes that docs/file-format.md describes.

If a test here fails, files that were written before can no longer be read: give the format a new version.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import torch
from manifests import small

from infinity.checkpoint.codec import KINDS
from infinity.checkpoint.commit_files import read, write
from infinity.checkpoint.manifest import FORMAT
from infinity.checkpoint.tensor_files import TORCH_DTYPES
from infinity.checksum import crc32c
from infinity.system.disk_files import DiskFiles

FIRST_LINE = b"infinity-commit 6 1849 1ec5ab8b\n"
BODY = (
    rb'{"data":{"nbytes":342,"crc32c":2247506458},"generation":7,"created":"2026-01-02T03:04:05Z","versions":{"'
    rb'infinity":"0.1","torch":"2.13","python":"3.11"},"isa":"scalar","threads":2,"volume":{"stripe_bytes":8192'
    rb',"slabs":[{"uuid":"0123456789abcdef0123456789abcdef","nbytes":131072,"weight":2},{"uuid":"ffffffffffffff'
    rb'ffffffffffffffffff","nbytes":65536,"weight":1}]},"codecs":{"moments":1,"rounding":1},"chunk_elements":81'
    rb'92,"rule":{"name":"SGD","moments":["momentum_buffer"],"states":"int8","averaged":null},"precision":{"com'
    rb'pute":"bf16","states":"int8","keep":["*.scale"],"accumulate":"fp32"},"units":[{"name":"block","parameter'
    rb's":["block.weight","block.scale"]}],"parameters":[{"names":["block.weight","head.weight"],"shape":[2,460'
    rb'0],"stride":[1,2],"dtype":"bfloat16","trainable":true,"step":41,"moments":true,"edited":false,"ranges":['
    rb'[0,8192,{"values":[24576,0],"remainder":[49152,2],"momentum_buffer":[65536,4],"momentum_buffer.scale":[7'
    rb'3728,6]}],[8192,1008,{"values":[0,8],"remainder":[90112,9],"momentum_buffer":[106496,10],"momentum_buffe'
    rb'r.scale":[114688,11]}]]},{"names":["block.scale"],"shape":[3],"stride":[1],"dtype":"float32","trainable"'
    rb':false,"step":0,"moments":false,"edited":true,"ranges":[[0,3,{"values":[20480,12]}]]}],"run":{"param_gro'
    rb'ups":[{"options":{"lr":0.1,"betas":{"$tuple":[0.9,0.999]},"name":"\u00e9"},"params":["block.weight"]},{"'
    rb'options":{"lr":1e-05},"params":[]}],"buffers":{"block.running":{"$tensor":["float32",[2],[1],"0"]}},"ext'
    rb'ra_state":{"block":{"calls":5}},"loss_scale":{"value":65536.0,"good_steps":12},"rng":{"torch":{"$tensor"'
    rb':["uint8",[4],[1],"1"]},"cuda":[]},"state":{"$dict":[["epoch",3],["best",{"$float":"000000000000f07f"}],'
    rb'["order",{"$tuple":[2,0,1]}],["weights",{"$tensor":["bfloat16",[3],[1],"2"]}],[{"$bytes":"726177"},{"$se'
    rb't":[1.5,null]}]]},"identity":{"text":{"$bytes":"0102"}}},"rank":0,"world_size":1}'
)
HEADER = (
    b'{"__metadata__":{"format":"pt"},"checksums":{"dtype":"U32","shape":[13],"data_offsets":[0,52]},"0":{'
    b'"dtype":"F32","shape":[2],"data_offsets":[52,60]},"2":{"dtype":"BF16","shape":[3],"data_offsets":[60'
    b',66]},"1":{"dtype":"U8","shape":[4],"data_offsets":[66,70]}}    '
)
TENSORS = bytes.fromhex(
    "4815ec2afffea6a77555566ac2be1ce705066415b2ed2e98ffca003048214abd7d1e3f9f736db6ec566bd1c69f9486d0ec0b"
    "3f3d0000803f000000c00000803f004000000000"
)
DATA = struct.pack("<Q", len(HEADER)) + HEADER + TENSORS
BLOCKS = [
    *(("values", "block.weight", 4096 * each) for each in range(2)),
    *(("remainder", "block.weight", 4096 * each) for each in range(2)),
    *(("momentum_buffer", "block.weight", 4096 * each) for each in range(2)),
    *(("momentum_buffer.scale", "block.weight", 4096 * each) for each in range(2)),
    *((array, "block.weight", 8192) for array in ("values", "remainder", "momentum_buffer")),
    ("momentum_buffer.scale", "block.weight", 8192),
    ("values", "block.scale", 0),
]
"""The array, parameter and first element of each block, in the order of the table."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "file-format.md"


def test_a_commit_has_these_bytes(tmp_path: Path) -> None:
    write(small(), tmp_path, DiskFiles())
    assert (tmp_path / "commit-7").read_bytes() == FIRST_LINE + BODY
    assert (tmp_path / "commit-7.safetensors").read_bytes() == DATA


def test_these_bytes_are_read(tmp_path: Path) -> None:
    (tmp_path / "commit-7").write_bytes(FIRST_LINE + BODY)
    (tmp_path / "commit-7.safetensors").write_bytes(DATA)
    found = read(tmp_path, 7, DiskFiles())
    commit = small()
    manifest, checksums, tensors = commit.manifest, commit.checksums, commit.tensors
    assert found.manifest == manifest
    assert found.checksums.tolist() == checksums.tolist()
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)


def test_the_checksum_is_the_one_of_the_document() -> None:
    assert crc32c(b"123456789") == 0xE3069283, "the check value of CRC-32C"
    assert crc32c(b"56789", crc32c(b"1234")) == 0xE3069283
    start, digits = FIRST_LINE[:-9], FIRST_LINE[-9:-1]
    assert crc32c(start + BODY) == int(digits, 16)
    assert int(start.split()[2]) == len(BODY)


def test_the_data_file_is_as_in_the_document() -> None:
    said = json.loads(HEADER)
    start, end = said["checksums"]["data_offsets"]
    assert said["checksums"] == {"dtype": "U32", "shape": [13], "data_offsets": [start, end]}
    table = struct.unpack("<13I", TENSORS[start:end])
    for index, (array, name, first) in enumerate(BLOCKS):
        text = f"7\n2026-01-02T03:04:05Z\n{array}\n{name}\n".encode()
        assert table[index] == index * 0x11111111 ^ crc32c(text + struct.pack("<Q", first))
    name, shape, _, stored = json.loads(BODY)["run"]["buffers"]["block.running"]["$tensor"]
    assert (name, said[stored]["dtype"], said[stored]["shape"]) == ("float32", "F32", shape)
    assert struct.unpack_from("<2f", TENSORS, said[stored]["data_offsets"][0]) == (1.0, -2.0)


def test_the_document_names_every_field_dtype_and_kind() -> None:
    text = DOCUMENT.read_text()
    named = set(re.findall(r"`\"?([$\w.]+)\"?`", text))
    fields = set(re.findall(r'"([a-z_]+)":', BODY.decode()))
    names_of_the_commit = {"block", "momentum_buffer", "lr", "betas", "calls", "text"}
    assert fields - names_of_the_commit <= named
    assert {f"${kind}" for kind in KINDS} <= named
    assert TORCH_DTYPES.keys() <= named
    assert f"version {FORMAT}" in text
