"""Records as strict JSON: what goes in comes out, bit for bit, and what cannot is refused."""

import json
import math
import struct
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.strict_json import dumps, encode, loads
from variants.errors import NeartieError


class Colour(Enum):
    RED = "#f00"


@dataclass(frozen=True)
class Point:
    x: float
    colour: Colour


def test_floats_round_trip_bitwise():
    """Every float64 pattern that is finite reads back with the same 64 bits, -0.0 and subnormals too."""
    patterns = np.random.default_rng(0).integers(0, 2**64, 5000, dtype=np.uint64)
    floats = [f for f in patterns.view(np.float64).tolist() if math.isfinite(f)]
    floats += [-0.0, 5e-324, math.nextafter(1, 2)]
    plain, nulls = encode({"v": floats})
    back = loads(dumps(plain))["v"]
    assert isinstance(back, list)
    assert nulls == {}
    assert [struct.pack("<d", f) for f in back] == [struct.pack("<d", f) for f in floats]


def test_nan_and_infinity_become_null_with_a_reason():
    """P40: gap = NaN and kl = inf are null, each with its reason, and a strict parser reads the file."""
    plain, nulls = encode({"gap": math.nan, "kl": math.inf, "a/b": [1.0, -math.inf]})
    payload = dumps(plain)
    assert json.loads(payload, parse_constant=pytest.fail) == {"gap": None, "kl": None, "a/b": [1.0, None]}
    assert nulls == {"/gap": "nan", "/kl": "inf", "/a~1b/1": "-inf"}


def test_pythons_own_output_is_refused_by_the_reader():
    """P40: Python's default output of a NaN is not JSON, and the reader says so."""
    with pytest.raises(ValueError, match="NaN is not JSON"):
        loads(json.dumps({"gap": math.nan}).encode())


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "Expecting"),
        (b'{"a": 1}{"b": 2}', "Extra data"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": 1e999}', "beyond float64"),
        (b"[1]", "expected an object"),
        (b'{"a": "\xff"}', "utf-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_not_one_strict_object_is_refused(payload: bytes, reason: str):
    """A torn, doubled, foreign or hostile file is a ValueError with its reason, and nothing worse."""
    with pytest.raises(ValueError, match=reason):
        loads(payload)


def test_what_a_run_holds_is_encoded():
    """NumPy and torch scalars and arrays, enums, dataclasses and paths become plain values of the same worth."""
    record = {
        Colour.RED: Point(float(np.float32(0.1)), Colour.RED),
        "numpy": [
            np.float32(0.1),
            np.int64(3),
            np.bool_(True),
            np.arange(4, dtype=np.int32).reshape(2, 2),
            np.float64(0.5),
        ],
        "torch": [torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor([1, 2]), torch.tensor(False)],
        "path": Path("a,b=c d/e"),
        "seed": 2**64 - 1,
        "none": None,
        "tuple": (1, True, "text"),
    }
    plain, _ = encode(record)
    assert loads(dumps(plain)) == {
        "RED": {"x": float(np.float32(0.1)), "colour": "RED"},
        "numpy": [float(np.float32(0.1)), 3, True, [[0, 1], [2, 3]], 0.5],
        "torch": [1.5, [1, 2], False],
        "path": "a,b=c d/e",
        "seed": 2**64 - 1,
        "none": None,
        "tuple": [1, True, "text"],
    }


@pytest.mark.parametrize(
    "value",
    [{1}, b"x", 1j, object, np.complex64(1), np.longdouble(1), {1: 2}, 2**64, "\ud800", {"RED": 1, Colour.RED: 2}],
)
def test_unknown_values_are_refused_with_their_place(value: object):
    """A value that has no exact plain form is refused where it stands, never guessed at."""
    with pytest.raises(NeartieError, match="/detail/x"):
        encode({"detail": {"x": value}})
