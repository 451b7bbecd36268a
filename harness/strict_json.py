"""Strict JSON for records: exact floats, no NaN token, and a reason beside every null that stands for one.

JSON has no NaN and no infinity, and Python's writer emits them all the same, which strict readers refuse. Here such a
value becomes null and its JSON pointer (RFC 6901) goes into a map beside it: "nan", "inf" or "-inf".
"""

import dataclasses
import json
import marshal
import math
import re
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np

from variants.errors import NeartieError

INT_RANGE = range(-(2**63), 2**64)  # what the integer types of JSON readers and of Parquet can hold
LONG = re.compile(r"[\[ ]-?[0-9]{19,}[,\]}]")  # what an integer beyond that range looks like among others


def child(pointer: str, key: str | int) -> str:
    """The JSON pointer of `key` below `pointer`, escaped as RFC 6901 says."""
    return f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}"


def steps(pointer: str) -> list[str]:
    """The keys of a JSON pointer, unescaped: "/a/b~1c" is ["a", "b/c"]."""
    return [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]


def reaches(value: object, pointer: str) -> bool:
    """Whether `value` says something at `pointer`, or replaces what would hold it."""
    for key in steps(pointer):
        if not isinstance(value, dict):
            return True
        if key not in value:
            return False
        value = value[key]
    return True


def encode(value: object) -> tuple[object, dict[str, str]]:
    """Turn a value into plain JSON types, and say which nulls stand for a NaN or an infinity.

    Takes None, bool, int (64 bits), float, str, Enum (by member name), Path, dataclasses, mappings with str or Enum
    keys, lists and tuples, and NumPy and torch scalars and arrays. Floats of any width become the equal float64.
    Raises NeartieError, naming the place, for every other type: a record never holds a guess at what was meant.
    """
    nulls: dict[str, str] = {}
    plain = _copied(value)
    return (_encode(value, "", nulls) if plain is None else plain), nulls


def _copied(value: object) -> object:
    """A copy of a value that is plain JSON already, made by C code alone, a tenth of the time; None for any other.

    `marshal` takes Python's own types and none of their subclasses (an Enum of texts, NumPy's float64); equality with
    the copy refuses what `json` would change in silence: tuples, and keys that are no text.
    """
    try:
        marshal.dumps(value)  # pyright: ignore[reportArgumentType]
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        copy = json.loads(text.encode("utf-8"))
    except (ValueError, TypeError, RecursionError):  # `_encode` says what is wrong, and where
        return None
    return copy if copy == value and not LONG.search(f"[{text}]") else None


def _encode(value: object, pointer: str, nulls: dict[str, str]) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (str, PurePath)):
        return _text(str(value), pointer)
    if isinstance(value, int):
        return _integer(int(value), pointer)
    if isinstance(value, float):
        return _float(float(value), pointer, nulls)
    if isinstance(value, Mapping):
        whole = _copied(value) if pointer.count("/") == 1 else None  # the fields of a record, each by itself
        return _mapping(value.items(), pointer, nulls) if whole is None else whole
    if isinstance(value, (list, tuple)):
        return [v if _plain(v) else _encode(v, child(pointer, i), nulls) for i, v in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return _mapping(fields, pointer, nulls)
    return _encode(_unboxed(value, pointer), pointer, nulls)


def _plain(value: object) -> bool:
    """Whether a value is written as it is, told by exact types alone: most of a record is, and needs no pointer."""
    kind = type(value)
    if kind is str:
        return value.isascii()  # pyright: ignore[reportAttributeAccessIssue]
    return value is None or kind is bool or (kind is int and value in INT_RANGE)


def _unboxed(value: object, pointer: str) -> object:
    """A NumPy or torch value as Python numbers and lists; torch is looked up, never imported."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor: Any = value
        return tensor.detach().cpu().tolist()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return value.tolist()
    raise NeartieError(
        f"record field {pointer or '/'} has type {type(value).__module__}.{type(value).__qualname__}; expected "
        f"numbers, text, enums, paths, dataclasses, maps or lists; convert it before it is recorded"
    )


def _mapping(items: Iterable[tuple[object, object]], pointer: str, nulls: dict[str, str]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for key, item in items:
        name = key.name if isinstance(key, Enum) else key
        if not isinstance(name, str) or name in plain:
            raise NeartieError(f"record field {pointer or '/'} has key {key!r}; expected distinct text or enum keys")
        plain[_text(name, pointer)] = item if _plain(item) else _encode(item, child(pointer, name), nulls)
    return plain


def _text(value: str, pointer: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise NeartieError(f"record field {pointer or '/'} is not valid Unicode text: {error.reason}") from error
    return value


def _integer(value: int, pointer: str) -> int:
    if value not in INT_RANGE:
        raise NeartieError(f"record field {pointer or '/'} is {value}, which no 64-bit integer holds")
    return value


def _float(value: float, pointer: str, nulls: dict[str, str]) -> float | None:
    if math.isfinite(value):
        return value
    nulls[pointer] = repr(value)  # "nan", "inf" or "-inf"
    return None


def dumps(row: object) -> bytes:
    """One line of strict UTF-8 JSON with a newline; floats are the shortest text that reads back bit for bit."""
    return (json.dumps(row, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n").encode("utf-8")


def loads(payload: bytes) -> dict[str, object]:
    """Read one strict JSON object; raises ValueError with the reason for anything else, NaN and repeated keys too."""
    try:
        row = json.loads(
            payload.decode("utf-8"),
            parse_constant=_no_constant,
            parse_float=_finite_float,
            object_pairs_hook=_distinct_keys,
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"holds a JSON {type(row).__name__}, expected an object")
    return row


def _no_constant(token: str) -> object:
    raise ValueError(f"{token} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond float64")
    return value


def _distinct_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key is there twice")
    return row
