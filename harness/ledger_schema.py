"""The shape of a ledger row: fixed names, one type each, the same for a run that succeeded and one that failed.

A row written under an older schema is read by name and brought forward. The number rises when a field changes its
meaning or its form in the file; a field that is merely new needs no new number, since a missing field reads as null.

    1  the whole form in the file
    2  the short form in the file (`ledger_pack`); no field means anything else than it did
"""

from collections.abc import Iterator, Mapping
from enum import Enum

from harness.strict_json import child
from variants.errors import NeartieError

SCHEMA = 2

ANY = object  # any JSON value
RATE = {"median": float, "low": float, "high": float, "steps": int, "cv": float}

FIELDS: dict[str, object] = {
    "schema": int,
    "run_id": str,
    "time_utc": str,
    "status": str,
    "experiment": str,
    "engine": str,
    "variant": str,
    "variant_hash": str,
    "recipe": {"declared": ANY, "observed": ANY},
    "golden": str,
    "golden_hash": str,
    "bar": str,
    "model": str,
    "model_hash": str,
    "battery_hash": str,
    "agreement": {
        "matched": int,
        "total": int,
        "exact_prompts": int,
        "prompts": int,
        "first_divergence": list,
        "bar_met": bool,
    },
    "teacher_forced": {"matched": int, "total": int},
    "expected": {"mean": float, "low": float, "high": float},
    "verdict": {"class": str, "reason": str, "site": str, "layer": int},
    "decode_tok_s": RATE,
    "prefill_tok_s": RATE,
    "peak_memory_bytes": int,
    "environment": {
        "git": str,
        "dirty": bool,
        "device": str,
        "driver": str,
        "python": str,
        "torch": str,
        "triton": str,
        "numpy": str,
        "cuda": str,
        "cpu": str,
        "cpu_capability": str,
        "threads": int,
        "deterministic": bool,
        "tf32": bool,
    },
    "seeds": ANY,
    "sweep": {"id": str, "job": int, "of": int, "words": list},
    "wall_s": float,
    "error": str,
    "detail": dict,
    "nulls": dict,
}
EXTENSIBLE = ("agreement", "teacher_forced", "expected", "verdict", "environment")  # may hold more than fixed names


class Status(Enum):
    """How a run ended. `invalid`: it ran, but its result is not to be used. `crashed`: its process is gone."""

    ok = "ok"
    failed = "failed"
    crashed = "crashed"
    invalid = "invalid"


def shaped(record: Mapping[str, object]) -> dict[str, object]:
    """Give a record the shape of a row: every fixed field there, null where unknown.

    Raises NeartieError for a name that the schema does not have (it belongs under `detail`) or a wrong type.
    """
    unknown: dict[str, object] = {}
    try:
        row = fill(FIELDS, record, "", unknown)
    except ValueError as error:
        raise NeartieError(f"record {error}") from error
    if unknown:
        raise NeartieError(f"record has no field {', '.join(sorted(unknown))}; put it under `detail`")
    return row


def fill(
    fields: Mapping[str, object], record: Mapping[str, object], pointer: str, unknown: dict[str, object]
) -> dict[str, object]:
    """Every field of `fields` from `record`, null where it has none; what has no field goes to `unknown`, by pointer.

    Raises ValueError for a wrong type.
    """
    row = {name: _field(kind, record.get(name), child(pointer, name), unknown) for name, kind in fields.items()}
    for name in record.keys() - fields.keys():
        if pointer.removeprefix("/") in EXTENSIBLE:
            row[name] = record[name]
        else:
            unknown[child(pointer, name)] = record[name]
    return row


def _field(kind: object, value: object, pointer: str, unknown: dict[str, object]) -> object:
    if isinstance(kind, Mapping):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"field {pointer} is {value!r}, expected a map")
        return fill(kind, value or {}, pointer, unknown)
    if value is None or kind is ANY:
        return value
    assert isinstance(kind, type)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"field {pointer} is {value!r}, expected {kind.__name__}")
    return value


def merged(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    """`first` with what `second` says: maps join name by name, anything else in `second` wins."""
    result = dict(first)
    for name, value in second.items():
        here = result.get(name)
        result[name] = merged(here, value) if isinstance(here, Mapping) and isinstance(value, Mapping) else value
    return result


def columns(fields: Mapping[str, object] = FIELDS, prefix: str = "") -> Iterator[tuple[str, type]]:
    """The flat column names of a row in order (`agreement.matched`) and the Python type of each."""
    for name, kind in fields.items():
        if isinstance(kind, Mapping):
            yield from columns(kind, f"{prefix}{name}.")
        else:
            assert isinstance(kind, type)
            yield f"{prefix}{name}", kind
