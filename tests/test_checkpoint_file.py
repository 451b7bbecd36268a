"""A safetensors header is believed only where it accounts for every byte of the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from variants.checkpoint_file import read_header
from variants.errors import InputError

FIRST = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
SECOND = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def written(directory: Path, header: Any, *, data_bytes: int = 32) -> Path:
    raw = json.dumps(header).encode()
    file = directory / "w.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data_bytes))
    return file


def test_tensors_come_in_file_order(tmp_path: Path) -> None:
    """The header's own order does not matter: tensors are listed as their bytes lie, metadata is none of them."""
    file = read_header(written(tmp_path, {"b": SECOND, "__metadata__": {"format": "pt"}, "a": FIRST}))
    assert [(tensor.name, tensor.shape, tensor.start, tensor.stop) for tensor in file.tensors] == [
        ("a", (2, 3), 0, 24),
        ("b", (4,), 24, 32),
    ]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({**SECOND, "data_offsets": [26, 34]}, "b starts at byte 26 of the data, expected 24"),
        ({**SECOND, "data_offsets": [20, 28]}, "b starts at byte 20 of the data, expected 24"),
        ({**SECOND, "data_offsets": [-8, 0]}, "b starts at byte -8 of the data, expected 0"),
        ({**SECOND, "data_offsets": [24, 30]}, r"b spans 6 bytes, BF16 \[4\] needs 8"),
        ({**SECOND, "data_offsets": [24]}, "b is described by"),
        ({**SECOND, "data_offsets": [24.0, 32.0]}, "b is described by"),
        ({**SECOND, "shape": [0]}, "b has shape"),
        ({**SECOND, "shape": [-2, -2]}, "b has shape"),
        ({**SECOND, "shape": ["4"]}, "b has shape"),
        ({**SECOND, "dtype": "F8_E5M2"}, "b is F8_E5M2, expected one of"),
        ({**SECOND, "dtype": 4}, "b is described by"),
        ({"dtype": "BF16", "shape": [4]}, "b is described by"),
        (None, "b is described by"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused_by_tensor(tmp_path: Path, second: Any, reason: str) -> None:
    """Holes, overlaps, sizes that contradict the shape and malformed entries name the file and the tensor."""
    with pytest.raises(InputError, match=rf"w\.safetensors: tensor {reason}"):
        read_header(written(tmp_path, {"a": FIRST, "b": second}, data_bytes=40))


@pytest.mark.parametrize("header", [[], {}, {"__metadata__": {}}])
def test_a_header_without_tensors_is_refused(tmp_path: Path, header: Any) -> None:
    """A header that is no object or lists nothing is an input error, whatever follows it."""
    with pytest.raises(InputError, match=r"w\.safetensors: "):
        read_header(written(tmp_path, header))


@pytest.mark.parametrize("raw", [b"", b"1234567", (1 << 60).to_bytes(8, "little") + b"{}"])
def test_a_file_too_short_for_its_header_is_refused_before_it_is_read(tmp_path: Path, raw: bytes) -> None:
    """A length beyond the file's end is refused without an allocation of that size."""
    file = tmp_path / "w.safetensors"
    file.write_bytes(raw)
    with pytest.raises(InputError, match="do not hold a safetensors header"):
        read_header(file)
