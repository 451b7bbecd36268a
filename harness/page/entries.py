"""Which runs a report shows: the newest of each arm that ran one golden, and the verdict on the same tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.golden_data import Golden
from harness.ledger_compact import table
from harness.ledger_read import read_row

Row = Mapping[str, Any]
SHOWN = ("gate", "verdict", "campaign")
LISTED = (
    "status", "experiment", "engine", "variant", "golden_hash", "model_hash", "environment_device", "agreement_matched",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One arm. run: its newest row. judged: the row that holds a verdict on the very tokens of `run`, None without.

    note: why a verdict that is on record is not shown.
    """

    run: Row
    judged: Row | None = None
    note: str = ""

    @property
    def label(self) -> str:
        return self.run["variant"] or self.run["engine"] or "none"

    @property
    def tokens(self) -> list[list[int]] | None:
        """The run's tokens [N][T], None for a run without."""
        return (self.run["detail"] or {}).get("tokens")

    @property
    def verdict(self) -> Row:
        """Class, reason and the rest; every field null where no verdict was asked for."""
        return (self.judged or self.run)["verdict"]

    @property
    def excess(self) -> dict[str, float]:
        """ln(error over what rounding explains) by place (`mlp_residual@3`), empty where it was not measured."""
        return _figures(self.verdict).get("excess_by_layer") or {}

    @property
    def expected(self) -> Row | None:
        """Mean and interval of the score that a correct run reaches, None where it was not measured."""
        found = (self.judged or self.run)["expected"]
        return found if found["mean"] is not None else None

    @property
    def noise_nats(self) -> float | None:
        return _figures(self.verdict).get("noise_nats")

    @property
    def sites(self) -> dict[str, dict[str, Any]]:
        """The declared recipe by site, empty for an engine that declares none."""
        return (self.run["recipe"]["declared"] or {}).get("sites") or {}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Entries, most agreement first, and what of the ledger is not among them: rows by reason, files that are none."""

    entries: tuple[Entry, ...]
    left_out: dict[str, int]
    unreadable: tuple[str, ...]


def _figures(verdict: Row) -> Row:
    return verdict.get("figures") or {}


def select(root: Path, golden: Golden, names: Iterable[str] = ()) -> Selection:
    """Read the ledger's newest row of each engine, variant, device and model that ran this golden.

    names: the variants to show, none for all. Rows of another golden or of another model than the golden was made of
    are counted and left out. Raw files are read of the rows that are shown alone. Raises as `ledger_compact.table`.
    """
    rows, unreadable = table(root, LISTED)
    made_of, wanted = golden.provenance.get("model_sha256"), set(names)
    newest: dict[tuple, dict[str, str]] = {}
    left: dict[str, int] = {}
    for row in rows.to_pylist():
        why = _why_not(row, golden.hash, made_of, wanted)
        if why:
            left[why] = left.get(why, 0) + 1
            continue
        arm = (row["engine"], row["variant"], row["environment_device"])
        kind = "run" if row["agreement_matched"] is not None else "failed"
        for name in (kind, "judged") if row["experiment"] == "verdict" and kind == "run" else (kind,):
            newest.setdefault(arm, {})[name] = row["file"]
    entries = [_entry(root, files) for files in newest.values()]
    return Selection(
        entries=tuple(sorted(entries, key=_order)),
        left_out=left,
        unreadable=tuple(f"{file.file}: {file.reason}" for file in unreadable),
    )


def _why_not(row: Row, golden_hash: str, made_of: str | None, wanted: set[str]) -> str:
    if row["experiment"] not in SHOWN:
        return "of other experiments than gate, verdict and campaign"
    if not row["file"].endswith(".json"):
        return "of processes that ended without a result"
    if row["golden_hash"] != golden_hash:
        return "of another golden, or of a part of it"
    if made_of is not None and row["model_hash"] not in (None, made_of):
        return "of another model"
    return "of variants that were not asked for" if wanted and row["variant"] not in wanted else ""


def _entry(root: Path, files: Mapping[str, str]) -> Entry:
    """The arm's newest row with a result, or the failure where there is none."""
    run = read_row(root / files.get("run", files.get("failed", "")))
    if "judged" not in files:
        return Entry(run=run)
    judged = read_row(root / files["judged"])
    if (judged["detail"] or {}).get("tokens") != (run["detail"] or {}).get("tokens"):
        return Entry(run=run, note=f"verdict {judged['run_id']} is of other tokens than this run's")
    if judged["variant_hash"] != run["variant_hash"]:
        return Entry(run=run, note=f"verdict {judged['run_id']} is of another arithmetic under this name")
    return Entry(run=run, judged=judged)


def _order(entry: Entry) -> tuple:
    matched = entry.run["agreement"]["matched"]
    return (matched is None, -(matched or 0), entry.label, entry.run["environment"]["device"] or "")
