"""A sweep: many jobs under one identity, so that an interrupted one can be taken up again and is never mixed.

A sweep is known by its command and the words of its jobs, whatever order they were given in; each start of it has an id
of its own, written into every row. Taking it up again runs the jobs that have no result, and refuses where the golden,
the model or a job's settings are no longer those of the rows that are there.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from harness.ledger_read import Listing
from variants.errors import UsageError

DONE = ("ok", "invalid")  # a run that ended with a figure, wanted or not; failed and crashed ones are run again
INPUTS = ("golden_hash", "model_hash")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a row belongs: the sweep's id, the job's number from 0, how many there are, and the job's own words."""

    id: str
    job: int
    of: int
    words: tuple[str, ...]

    def record(self) -> dict[str, object]:
        return {"sweep": {"id": self.id, "job": self.job, "of": self.of, "words": list(self.words)}}


def identity(command: str, jobs: Sequence[Sequence[str]]) -> str:
    """12 hex digits of the SHA-256 of a command and its jobs' words: equal for the same sweep typed another way."""
    text = json.dumps([command, sorted(sorted(job) for job in jobs)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def new_id(of: str) -> str:
    """An id for one start of the sweep `of`; eight starts in one second have eight ids."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}-{of}"


def places(sweep_id: str, jobs: Sequence[Sequence[str]]) -> list[Place]:
    return [Place(id=sweep_id, job=i, of=len(jobs), words=tuple(job)) for i, job in enumerate(jobs)]


def newest(listing: Listing, of: str) -> str | None:
    """The id of the latest start of the sweep `of` that has a row or a run in flight."""
    rows = [*listing.rows, *listing.running]
    ids = [(row["time_utc"], row["sweep"]["id"]) for row in rows if (row["sweep"]["id"] or "").endswith(f"-{of}")]
    return max(ids)[1] if ids else None


def outcomes(listing: Listing, planned: Sequence[Place]) -> list[dict | None]:
    """The latest row of each job, a result before any failure; a job in flight has status null, one without a row None.

    Jobs are matched by their words, so that the order in which a sweep was typed does not matter.
    """
    found: dict[tuple[str, ...], dict] = {}
    ids = {place.id for place in planned}
    for row in (*listing.rows, *listing.running):
        if row["sweep"]["id"] in ids:
            words = tuple(sorted(row["sweep"]["words"] or ()))
            if words not in found or found[words]["status"] not in DONE:
                found[words] = row
    return [found.get(tuple(sorted(place.words))) for place in planned]


def refuse_changed(rows: Sequence[dict], now: Callable[[dict], Mapping[str, Any]]) -> None:
    """Raise UsageError where a row's inputs are not those that `now` finds for it: golden_hash, model_hash, settings.

    An input that a row or `now` does not know is not compared.
    """
    for row in rows:
        here = now(row)
        for name in INPUTS:
            if row[name] is not None and here.get(name) is not None and row[name] != here[name]:
                raise UsageError(_changed(row, name.replace("_", "'s "), row[name][:12], here[name][:12]))
        settings = (row["detail"] or {}).get("config")
        if settings is not None and here.get("config") is not None and settings != here["config"]:
            name = _first_difference(settings, here["config"])
            raise UsageError(_changed(row, f"setting {name}", _at(settings, name), _at(here["config"], name)))


def _changed(row: Mapping[str, Any], what: str, was: object, now: object) -> str:
    job = " ".join(row["sweep"]["words"])
    return (
        f"sweep {row['sweep']['id']} cannot be resumed: {what} of [{job}] was {was} and is now {now}; bring it back, "
        "or start anew without resume=true"
    )


def _first_difference(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> str:
    for name in (*a, *(name for name in b if name not in a)):
        if a.get(name) != b.get(name):
            both = isinstance(a.get(name), dict) and isinstance(b.get(name), dict)
            return _first_difference(a[name], b[name], f"{prefix}{name}.") if both else f"{prefix}{name}"
    return prefix.rstrip(".")


def _at(settings: Mapping[str, Any], name: str) -> object:
    value: Any = settings
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
