"""The campaign's table: what was published beside what is on record here, on the CPU and on a GPU."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.ledger_schema import Status

Row = Mapping[str, Any]
KERNELS = ("_triton",)  # a variant of the same name in kernels stands for the same published row
HEADER = ("variant", "published", "tok/s", "CPU", "tok/s", "GPU", "tok/s", "wide", "wide forced", "repeats")
ILLUSTRATION = "published: another model on another machine, an illustration and never compared as a row"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One variant: its published row, the newest gate on each device, the newest wide run, on a GPU if there is one."""

    variant: str
    published: Row | None
    cpu: Row | None
    gpu: Row | None
    wide: Row | None

    def cells(self) -> list[object]:
        published = (
            _published_score(self.published),
            _speed(None if self.published is None else self.published["decode_tok_s"]),
        )
        own = [cell for row in (self.cpu, self.gpu) for cell in (_score(row, "agreement"), _rate(row))]
        wide = [_score(self.wide, name) for name in ("agreement", "teacher_forced")]
        return [self.variant, *published, *own, *wide, _repeats(self.gpu or self.cpu)]

    def as_dict(self) -> dict[str, object]:
        names = ("published", "cpu", "gpu", "wide")
        ids = {n: row["run_id"] for n in names[1:] if (row := getattr(self, n)) is not None}
        return {"variant": self.variant, "published": self.published and self.published["variant"], "runs": ids}


def entries(
    variants: Sequence[str], rows: Iterable[Row], published: Iterable[Row], batteries: Sequence[str]
) -> list[Entry]:
    """One entry for each variant in the order given.

    rows: of one model, in order of time. batteries: hashes of the gate's battery and the wide one; other rows, and
    those without a result, are left out. A wide run in batches bears the variant's name and how many rows ran together.
    """
    known = {row["variant"]: row for row in published}
    newest: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["status"] != Status.ok.name or row["battery_hash"] not in batteries:
            continue
        name, device = row["variant"] or "", _device(row)
        if row["battery_hash"] == batteries[0]:
            newest[(name, device)] = row
            continue
        at = (name.split("+execution.batch=")[0], "wide")
        if device == "gpu" or at not in newest or _device(newest[at]) == "cpu":
            newest[at] = row
    return [
        Entry(
            variant=name,
            published=known.get(_published_name(name)),
            cpu=newest.get((name, "cpu")),
            gpu=newest.get((name, "gpu")),
            wide=newest.get((name, "wide")),
        )
        for name in variants
    ]


def _device(row: Row) -> str:
    return "cpu" if row["environment"]["device"] == "cpu" else "gpu"


def _published_name(variant: str) -> str:
    for suffix in KERNELS:
        variant = variant.removesuffix(suffix)
    return variant


def _published_score(row: Row | None) -> str | None:
    if row is None:
        return None
    low, high = row["matched_low"], row["matched_high"]
    return f"{low}/{row['total']}" if low == high else f"{low} to {high}/{row['total']}"


def _score(row: Row | None, name: str) -> str | None:
    if row is None or row[name]["matched"] is None:
        return None
    return f"{row[name]['matched']}/{row[name]['total']}"


def _rate(row: Row | None) -> str | None:
    return None if row is None else _speed(row["decode_tok_s"]["median"])


def _speed(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _repeats(row: Row | None) -> str | None:
    """Whether the repeats of a gate had the same tokens and the same gaps, bit for bit."""
    repeats = ((row or {}).get("detail") or {}).get("repeats")
    if not repeats:
        return None
    return f"{repeats['runs']} same" if repeats["identical"] else f"{repeats['runs']} DIFFER"
