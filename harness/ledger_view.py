"""Ledger rows for people and tools: lists, one row by its id, frames, exports, differences and comparisons.

Everything here takes rows as `Ledger.rows` gives them and returns plain data or a pandas frame; nothing prints.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.ledger_schema import EXTENSIBLE, Status, columns
from harness.strict_json import child
from variants.errors import DeviceError, InputError, UsageError

if TYPE_CHECKING:
    import pandas as pd

    from harness.ledger import Ledger

PUBLISHED = Path(__file__).resolve().parents[1] / "results" / "published.csv"
PANDAS_TYPES = {int: "Int64", float: "float64", bool: "boolean"}  # all else is text, JSON where it is no string
COMPARED = ("battery_hash", "golden_hash", "model_hash")
IDENTITY = ("run_id", "time_utc")


def list_rows(ledger: "Ledger", *, limit: int | None = None, published: bool = False) -> dict[str, list[dict]]:
    """The newest `limit` rows in order of time, with runs in flight and unreadable files beside them.

    Keys: rows, running, unreadable (file, reason) and, if asked for, published: an illustration from another model,
    never compared with the rows. Raises UsageError for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}, expected 1 or more; leave it out to list all")
    listing = ledger.read()
    shown = {
        "rows": list(listing.rows[-limit:] if limit else listing.rows),
        "running": list(listing.running),
        "unreadable": [{"file": file.file, "reason": file.reason} for file in listing.unreadable],
    }
    return shown | {"published": published_rows()} if published else shown


def show_row(ledger: "Ledger", prefix: str) -> dict:
    """The one row whose run id begins with `prefix`; raises UsageError when none or more than one does."""
    found = [row for row in ledger.rows() if row["run_id"].startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"no run id begins with {prefix!r} in {ledger.root}; list the ledger to see them")
    ids = ", ".join(row["run_id"] for row in found[:5]) + (", ..." if len(found) > 5 else "")
    raise UsageError(f"{len(found)} run ids begin with {prefix!r} ({ids}); give more of it")


def value_at(row: Mapping, column: str) -> object:
    """The value of a flat column (`decode_tok_s.median`), NaN and infinities as the floats that they were."""
    value: object = row
    pointer = ""
    for key in column.split("."):
        assert isinstance(value, Mapping)
        value, pointer = value.get(key), child(pointer, key)
    reason = (row.get("nulls") or {}).get(pointer)
    return value if reason is None else float(reason)


def mean_of(rows: Sequence[Mapping], column: str) -> float | None:
    """The mean of a column over the rows that have a value; a NaN makes it NaN, and no value at all gives None."""
    values = [float(value) for row in rows if isinstance(value := value_at(row, column), (int, float))]
    return sum(values) / len(values) if values else None


def frame(rows: Sequence[Mapping]) -> "pd.DataFrame":
    """Rows as a frame with flat names (`agreement.matched`), the same columns and types whatever the rows hold.

    Int64, boolean, float64 and string; maps and lists as JSON text. A float that was NaN and one that is unknown are
    both NaN here: the column `nulls` tells them apart, `mean_of` takes account of it. Extra environment names follow.
    """
    import pandas as pd

    typed = dict(columns())
    for name in EXTENSIBLE:
        extra = sorted({key for row in rows for key in row[name]} - {c.removeprefix(f"{name}.") for c in typed})
        typed |= {f"{name}.{key}": object for key in extra if "." not in key}
    return pd.DataFrame({name: _series([value_at(row, name) for row in rows], kind) for name, kind in typed.items()})


def _series(values: list, kind: type) -> "pd.Series":
    import pandas as pd

    if kind in PANDAS_TYPES:
        return pd.Series(values, dtype=PANDAS_TYPES[kind])
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pd.Series(texts, dtype="string")


def export(ledger: "Ledger", path: str | Path) -> int:
    """Write every row to a .csv or .parquet file, failed and crashed ones too; returns how many.

    Raises UsageError for another suffix, DeviceError when the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in (".csv", ".parquet"):
        raise UsageError(f"export to {path.name}: got suffix {path.suffix!r}, expected .csv or .parquet")
    table = ledger.frame()
    try:
        if path.suffix == ".csv":
            table.to_csv(path, index=False)
        else:
            table.to_parquet(path, index=False)
    except OSError as error:
        raise DeviceError(f"export to {path} failed ({error.strerror or error}); name a file to write") from error
    return len(table)


def diff(a: Mapping, b: Mapping) -> list[dict]:
    """Every field in which two rows differ, the recipes' sites too: {field, a, b} in the order of the schema.

    Run id and time always differ and are left out; a list differs as a whole; null stands for a field one lacks.
    """
    left, right = (dict(_leaves({key: row[key] for key in row if key not in IDENTITY})) for row in (a, b))
    names = [*left, *(name for name in right if name not in left)]
    changed = [name for name in names if not _same(left.get(name), right.get(name))]
    return [{"field": ".".join(name), "a": left.get(name), "b": right.get(name)} for name in changed]


def _leaves(value: Mapping, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, (*path, key))
        else:
            yield (*path, key), item


def _same(a: object, b: object) -> bool:
    """Equal values of equal type: true is not 1, and an empty map is as good as none."""
    empty = ({}, None)
    return (a in empty and b in empty) or (type(a) is type(b) and a == b)


def compare(a: Mapping, b: Mapping) -> dict:
    """What changed from run `a` to run `b` of one model on one battery against one golden.

    Returns matched, teacher_forced and exact_prompts (b minus a), decode_speedup (b over a), each null where unknown,
    and same_arm: whether the observed recipes are equal (null if one was not observed). Raises UsageError with the
    reason when the rows do not compare: a hash differs or is unknown, or a run has no result.
    """
    for row in (a, b):
        if row["status"] != Status.ok.name:
            raise UsageError(f"run {row['run_id']} is {row['status']}, so there is no result to compare")
    for name in COMPARED:
        if a[name] is None or a[name] != b[name]:
            raise UsageError(f"runs {a['run_id']} and {b['run_id']} do not compare: {name} is {a[name]} and {b[name]}")
    arms = [row["recipe"]["observed"] for row in (a, b)]
    speeds = [value_at(row, "decode_tok_s.median") for row in (a, b)]
    return {
        "matched": _change(a, b, "agreement.matched"),
        "teacher_forced": _change(a, b, "teacher_forced.matched"),
        "exact_prompts": _change(a, b, "agreement.exact_prompts"),
        "decode_speedup": _ratio(*speeds),
        "same_arm": None if None in arms else arms[0] == arms[1],
    }


def _change(a: Mapping, b: Mapping, column: str) -> int | None:
    before, after = value_at(a, column), value_at(b, column)
    return after - before if isinstance(before, int) and isinstance(after, int) else None


def _ratio(before: object, after: object) -> float | None:
    if not isinstance(before, float) or not isinstance(after, float) or not before:
        return None
    return after / before if math.isfinite(before) and math.isfinite(after) else None


def published(path: Path = PUBLISHED) -> "pd.DataFrame":
    """The published campaign on the 48.9 B model: another model's scores, for illustration beside ours.

    Columns as in the file: numbers exact, a range in `matched_low` and `matched_high`, and the `source` of each row.
    Raises InputError when the file is not there.
    """
    import pandas as pd

    if not path.is_file():
        raise InputError(f"published rows {path} are not there; run from a checkout, which has results/{path.name}")
    counts = dict.fromkeys(("matched_low", "matched_high", "total"), "Int64")
    speeds = dict.fromkeys(("decode_tok_s", "first_tok_s"), "float64")
    table = pd.read_csv(path, dtype="string")
    return table.astype(counts | speeds)


def published_rows() -> list[dict]:
    """The published rows as plain data, null where a figure was not given."""
    table = published()
    plain = table.astype(object).where(table.notna(), None)
    return [{str(name): value for name, value in row.items()} for row in plain.to_dict("records")]
