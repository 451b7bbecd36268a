"""Safetensors files: the header checked against the file's length, then each tensor streamed once, in file order.

A file is a little-endian u64 (length of the header), a JSON header and the tensors' bytes without holes. The library's
own reader maps whole files and does not name the tensor that a short file cuts, hence this one.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from variants.checkpoint_config import read_json_object
from variants.errors import InputError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_CHUNK_BYTES = 16 << 20


class Digest(Protocol):
    """What hashlib's objects offer: bytes in, a hexadecimal digest out."""

    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the header describes it; `start` and `stop` are bytes counted from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class WeightsFile:
    """One checked safetensors file; `tensors` are in file order and fill it from `data_start` to its end."""

    path: Path
    data_start: int
    tensors: tuple[StoredTensor, ...]


def find_weights(directory: Path) -> tuple[WeightsFile, ...]:
    """Find and check every weights file of a checkpoint directory without reading a weight; sorted by file name.

    Raises InputError for files and an index that do not name each other, and for whatever `read_header` refuses.
    """
    index = directory / INDEX_NAME
    shards = _indexed_shards(index) if index.exists() else {SINGLE_NAME: None}
    found = {file.name for file in directory.glob("*.safetensors") if file.is_file()}
    if not index.exists() and SINGLE_NAME not in found:
        raise InputError(
            f"{directory}: neither {SINGLE_NAME} nor {INDEX_NAME} is there; expected a checkpoint directory"
        )
    for name in sorted(shards.keys() - found):
        first = next(iter(shards[name] or ()), None)
        raise InputError(f"{directory / name}: shard is missing; {INDEX_NAME} puts {first} in it. Fetch it again")
    for name in sorted(found - shards.keys()):
        stated = f"not named in {INDEX_NAME}" if index.exists() else f"beside {SINGLE_NAME} without an index"
        raise InputError(f"{directory / name}: weights file {stated}; remove it or restore the index")
    files = tuple(read_header(directory / name) for name in sorted(shards))
    for file in files:
        _check_index(file, shards[file.path.name])
    return files


def _indexed_shards(index: Path) -> dict[str, list[str]]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: weight_map is missing or empty; restore the index")
    shards: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{index}: {tensor} is in {name!r}, expected a safetensors file of the same directory")
        shards.setdefault(name, []).append(tensor)
    return shards


def _check_index(file: WeightsFile, indexed: list[str] | None) -> None:
    """Refuse the first tensor that only one of a shard and the index knows; `indexed` is None without an index."""
    if indexed is None:
        return
    stored = [tensor.name for tensor in file.tensors]
    absent, extra = set(indexed) - set(stored), set(stored) - set(indexed)
    if absent:
        first = next(name for name in indexed if name in absent)
        raise InputError(f"{file.path}: tensor {first} is missing, {INDEX_NAME} says it is in this shard")
    if extra:
        first = next(name for name in stored if name in extra)
        raise InputError(f"{file.path}: unexpected tensor {first}, {INDEX_NAME} does not put it in this shard")


def read_header(path: Path) -> WeightsFile:
    """Read and check one file's header: dtypes, shapes, offsets without holes, and the file's exact length.

    Raises InputError naming the file and the first tensor concerned.
    """
    try:
        with path.open("rb") as source:
            file_bytes = os.fstat(source.fileno()).st_size
            data_start = 8 + int.from_bytes(source.read(8), "little")
            if file_bytes < 8 or data_start > file_bytes or data_start > _MAX_HEADER_BYTES:
                raise InputError(
                    f"{path}: {file_bytes} bytes do not hold a safetensors header: truncated, or another format"
                )
            header = json.loads(source.read(data_start - 8))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the safetensors header is not JSON ({error}); fetch the file again") from error
    if not isinstance(header, dict):
        raise InputError(f"{path}: the safetensors header is not an object; fetch the file again")
    described = [_stored_tensor(path, name, entry) for name, entry in header.items() if name != "__metadata__"]
    file = WeightsFile(path, data_start, tuple(sorted(described, key=lambda tensor: tensor.start)))
    _check_length(file, file_bytes - data_start)
    return file


def _stored_tensor(path: Path, name: str, entry: Any) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise InputError(f"{path}: tensor {name} is described by {entry!r}, expected dtype, shape and data_offsets")
    if dtype not in DTYPES:
        raise InputError(f"{path}: tensor {name} is {dtype}, expected one of {', '.join(DTYPES)}: dequantise it first")
    if any(type(size) is not int or size < 1 for size in shape):
        raise InputError(f"{path}: tensor {name} has shape {shape}, expected positive sizes")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if stop - start != needed:
        raise InputError(f"{path}: tensor {name} spans {stop - start} bytes, {dtype} {shape} needs {needed}")
    return StoredTensor(name, DTYPES[dtype], tuple(shape), start, stop)


def _check_length(file: WeightsFile, data_bytes: int) -> None:
    if not file.tensors:
        raise InputError(f"{file.path}: holds no tensor; fetch the file again")
    end = 0
    for tensor in file.tensors:
        if tensor.start != end:
            raise InputError(
                f"{file.path}: tensor {tensor.name} starts at byte {tensor.start} of the data, expected {end}"
            )
        end = tensor.stop
        if end > data_bytes:
            total = file.tensors[-1].stop
            raise InputError(
                f"{file.path}: truncated, {total - data_bytes} of {total} data bytes are missing; "
                f"the first tensor cut is {tensor.name}. Fetch the file again"
            )
    if end < data_bytes:
        raise InputError(
            f"{file.path}: {data_bytes - end} trailing bytes after the last tensor, {file.tensors[-1].name}; "
            "they belong to no tensor. Fetch the file again"
        )


def staging_for(device: torch.device) -> Tensor:
    """A host buffer through which bytes reach another device, page-locked for CUDA.

    One serves many files: a buffer for each tensor would leave holes in the heap, up to most of the model's size.
    """
    return torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")


def stream_tensors(
    file: WeightsFile, *, place: Callable[[StoredTensor], Tensor], digest: Digest, staging: Tensor | None = None
) -> Iterator[tuple[StoredTensor, Tensor]]:
    """Fill what `place` gives for each tensor, in file order; `digest` sees the file's bytes, all and once.

    place: a contiguous tensor of the stored shape and dtype. staging: None where all are on the host. Raises InputError
    naming the tensor for NaN or infinite weights, and for a file that shrank meanwhile.
    """
    with file.path.open("rb") as source:
        digest.update(source.read(file.data_start))
        for stored in file.tensors:
            tensor = place(stored)
            non_finite = _fill(tensor, source, digest=digest, staging=staging)
            if non_finite:
                raise InputError(
                    f"{file.path}: tensor {stored.name} holds {non_finite} NaN or infinite values "
                    f"among {tensor.numel()}; no forward can use it"
                )
            yield stored, tensor


def _fill(tensor: Tensor, source: BufferedReader, *, digest: Digest, staging: Tensor | None) -> int:
    """Read a tensor's bytes from where the source stands; return how many of its values are not finite."""
    non_finite = 0
    for target in tensor.view(-1).split(_CHUNK_BYTES // tensor.dtype.itemsize):
        piece = target if staging is None else staging[: target.nbytes].view(tensor.dtype)
        raw = piece.view(torch.uint8).numpy().data
        if source.readinto(raw) != len(raw):
            raise InputError(f"{source.name}: the file shrank while it was read; fetch it again")
        digest.update(raw)
        if staging is not None:
            target.copy_(piece)  # returns when the bytes are there, so the buffer is free again
        non_finite += _count_non_finite(target if target.is_cuda else piece)
    if staging is not None and hasattr(os, "posix_fadvise"):
        # Where host and device share one memory, cached file pages would stand beside the weights.
        os.posix_fadvise(source.fileno(), 0, source.tell(), os.POSIX_FADV_DONTNEED)
    return non_finite


def _count_non_finite(values: Tensor) -> int:
    low, high = torch.aminmax(values)  # NaN propagates; no temporary, unlike isfinite
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return 0
    return int((~torch.isfinite(values)).sum().item())
