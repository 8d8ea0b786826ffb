"""Golden bytes: a small commit gives exactly the bytes that docs/file-format.md describes.

If a test here fails, files that were written before can no longer be read: give the format a new version.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from manifests import small

from infinity.checkpoint.array_values import DTYPES
from infinity.checkpoint.commit_files import read, write
from infinity.checkpoint.manifest import FORMAT
from infinity.checkpoint.values import KINDS
from infinity.checksum import crc32c
from infinity.system.disk_files import DiskFiles

FIRST_LINE = b"infinity-commit 2 2265 34d55246\n"
BODY = (
    rb'{"format":2,"data":{"nbytes":91,"crc32c":2250998399},"generation":7,'
    rb'"created":"2026-01-02T03:04:05Z","versions":{"infinity":"0.1","torch":"2.13","python":"3.11"},'
    rb'"isa":"scalar","threads":2,"volume":{"stripe_bytes":8192,'
    rb'"slabs":[{"uuid":"0123456789abcdef0123456789abcdef","nbytes":131072,"weight":2},'
    rb'{"uuid":"ffffffffffffffffffffffffffffffff","nbytes":65536,"weight":1}],"header_bytes":4096},'
    rb'"codecs":{"moments":1,"rounding":1},"chunk_elements":8192,"rule":{"name":"SGD",'
    rb'"moments":["momentum_buffer"],"states":"int8"},"precision":{"compute":"bf16","states":"int8",'
    rb'"keep":["*.scale"],"accumulate":"fp32"},"units":[{"name":"block","parameters":["block.weight",'
    rb'"block.scale"],"nbytes":24576,"state_bytes":40960,"parameter_places":[0,24576],'
    rb'"state_places":[49152,90112],"chunks":[[1,0,true],[0,1,true]],"frozen":[[20480,4096,20480]]}],'
    rb'"parameters":[{"names":["block.weight","head.weight"],"shape":[2,4600],"stride":[1,2],'
    rb'"dtype":"bfloat16","trainable":true,"numel":9200,"master":"split","step":41,"moments":true,'
    rb'"edited":false,"unit":0,"ranges":[[0,8192,{"values":[24576,16384,8192,0],"remainder":[49152,16384,'
    rb'8192,2],"momentum_buffer":[65536,8192,4096,4],"momentum_buffer.scale":[73728,128,64,6]}],[8192,'
    rb'1008,{"values":[0,2016,8192,8],"remainder":[90112,2016,8192,9],"momentum_buffer":[106496,1008,'
    rb'4096,10],"momentum_buffer.scale":[114688,16,64,11]}]]},{"names":["block.scale"],"shape":[3],'
    rb'"stride":[1],"dtype":"float32","trainable":false,"numel":3,"master":"none","step":0,'
    rb'"moments":false,"edited":true,"unit":0,"ranges":[[0,3,{"values":[20480,12,16384,12]}]]}],'
    rb'"param_groups":[{"options":{"dict":[["lr",0.1],["betas",{"tuple":[0.9,0.999]}],["name",'
    rb'"\u00e9"]]},"params":["block.weight"]},{"options":{"dict":[["lr",1e-05]]},"params":[]}],"rank":0,'
    rb'"world_size":1,"buffers":{"block.running":{"tensor":["float32",[2],[1],[0,8,2855727817]]}},'
    rb'"extra_state":{"block":{"dict":[["calls",5]]}},"loss_scale":{"value":65536.0,"good_steps":12},'
    rb'"rng":{"torch":{"tensor":["uint8",[4],[1],[8,4,1214729159]]},"cuda":[]},"state":{"dict":[["epoch",'
    rb'3],["best",{"float":"7ff0000000000000"}],["order",{"tuple":[2,0,1]}],["weights",'
    rb'{"tensor":["bfloat16",[3],[1],[12,6,2578871355]]}],[{"bytes":[18,3,1340373671]},{"set":[null,'
    rb'1.5]}]]},"identity":{"dict":[["text",{"bytes":[21,2,66625362]}]]}}'
)
DATA = bytes.fromhex(
    "494e4644415441310d000000000000004815ec2afffea6a77555566ac2be1ce705066415b2ed2e98ffca003048214abd"
    "7d1e3f9f736db6ec566bd1c69f9486d0ec0b3f3d0000803f000000c0000000000000803f00407261770102"
)
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
    write(*small(), tmp_path, DiskFiles())
    assert (tmp_path / "commit-7").read_bytes() == FIRST_LINE + BODY
    assert (tmp_path / "commit-7.data").read_bytes() == DATA


def test_these_bytes_are_read(tmp_path: Path) -> None:
    (tmp_path / "commit-7").write_bytes(FIRST_LINE + BODY)
    (tmp_path / "commit-7.data").write_bytes(DATA)
    found = read(tmp_path, 7, DiskFiles())
    manifest, checksums, blobs = small()
    assert found.manifest == manifest
    assert found.checksums.tolist() == checksums.tolist()
    assert found.blobs.content() == blobs.content()


def test_the_checksum_is_the_one_of_the_document() -> None:
    assert crc32c(b"123456789") == 0xE3069283, "the check value of CRC-32C"
    assert crc32c(b"56789", crc32c(b"1234")) == 0xE3069283
    start, digits = FIRST_LINE[:-9], FIRST_LINE[-9:-1]
    assert crc32c(start + BODY) == int(digits, 16)
    assert int(start.split()[2]) == len(BODY)


def test_the_data_file_is_as_in_the_document() -> None:
    magic, count = struct.unpack_from("<8sQ", DATA)
    assert (magic, count) == (b"INFDATA1", 13)
    table = struct.unpack_from("<13I", DATA, 16)
    for index, (array, name, first) in enumerate(BLOCKS):
        text = f"7\n2026-01-02T03:04:05Z\n{array}\n{name}\n".encode()
        assert table[index] == index * 0x11111111 ^ crc32c(text + struct.pack("<Q", first))
    assert struct.unpack_from("<2f", DATA, 16 + 4 * 13) == (1.0, -2.0), "the first blob"


def test_the_document_names_every_field_dtype_and_kind() -> None:
    text = DOCUMENT.read_text()
    named = set(re.findall(r"`\"?([\w.]+)\"?`", text))
    fields = set(re.findall(r'"([a-z_]+)":', BODY.decode()))
    names_of_the_commit = {"block", "momentum_buffer"}
    assert fields - names_of_the_commit <= named
    assert named >= KINDS
    assert DTYPES.keys() <= named
    assert f"version {FORMAT}" in text
