"""A stored row of any schema so far, brought forward to today's; a newer one is refused."""

from collections.abc import Mapping
from typing import Any

from harness.ledger_pack import unpacked
from harness.ledger_schema import FIELDS, SCHEMA, Status, fill, merged
from variants.errors import InputError

PACKED_SINCE = 2


def adopted(raw: Mapping[str, object], *, newest: int = SCHEMA) -> dict[str, Any]:
    """Read a stored row of this schema or an older one by name, as a row of this schema in the whole form.

    Names unknown today move to `detail["unmapped"]`.

    Raises InputError for a row of a newer schema than `newest` (it may mean something else), ValueError for one that
    is no row.
    """
    number = raw.get("schema")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"schema is {number!r}, expected a whole number from 1 up")
    if number > newest:
        raise InputError(
            f"ledger row {raw.get('run_id')} has schema {number}, this reader knows up to {newest}; update neartie"
        )
    unknown: dict[str, object] = {}
    row: dict[str, Any] = fill(FIELDS, unpacked(raw) if number >= PACKED_SINCE else raw, "", unknown)
    row |= {"schema": SCHEMA, "nulls": row["nulls"] or {}}
    if row["status"] not in Status.__members__ or not row["run_id"] or not row["time_utc"]:
        raise ValueError(f"is no row: status {row['status']!r}, run_id {row['run_id']!r}, time {row['time_utc']!r}")
    if unknown:
        row["detail"] = merged(row["detail"] or {}, {"unmapped": unknown})
    return row
