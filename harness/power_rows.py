"""The file of finished cells: one line a cell, appended as it ends, so that a stopped experiment goes on where it was.

A file is of one checkpoint, one pair of goldens and one setting of the experiment; another's is refused, not mixed.
"""

import csv
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from harness import power_cells, power_rules
from harness.golden import load_golden
from harness.ladder import EXCESS
from harness.op_error import LIMIT
from harness.power_cells import Cell
from harness.power_rules import RULES, Judgement
from variants.errors import DeviceError, UsageError

PLACED = ("ladder_replay", "replay_f64", "replay_f32", "replay", "ladder", "envelope")
CELL = ("key", "setting", "subject", "defect", "family", "severity", "spread", "battery", "seed")
TRUTH = ("want_sites", "want_layer", "exercised", "seconds")
JUDGED = tuple(f"{rule}_{part}" for rule in RULES for part in ("score", "flag"))
FOUND = tuple(f"{rule}_{part}" for rule in PLACED for part in ("site", "layer"))
COLUMNS = (*CELL, *TRUTH, *JUDGED, *FOUND)

Row = dict[str, str]


def setting(model_sha256: str) -> str:
    """Names all that every cell of a file must share: weights, goldens, composition and thresholds."""
    shared = {
        "model": model_sha256,
        "goldens": {name: load_golden(name).hash for name in ("gate", "wide")},
        "carrier": power_cells.CARRIER,
        "tokens": power_cells.TOKENS,
        "limits": [LIMIT, EXCESS, power_rules.P_VALUE],
        "columns": COLUMNS,
    }
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:12]


def row_of(cell: Cell, judged: dict[str, Judgement], **truth: object) -> Row:
    """A line of the file; truth: setting, family, want_sites, want_layer, exercised, seconds."""
    row = dict.fromkeys(COLUMNS, "") | {"key": cell.key, "battery": cell.battery.name}
    row |= {k: str(v) for k, v in asdict(cell).items() if k in CELL and k != "battery"}
    row |= {name: _text(value) for name, value in truth.items()}
    for rule, j in judged.items():
        row |= {f"{rule}_score": repr(float(j.score)), f"{rule}_flag": _text(j.flagged)}
        if rule in PLACED:
            row |= {f"{rule}_site": _text(j.site), f"{rule}_layer": _text(j.layer)}
    return row


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else str(value)


def read_rows(path: Path, expected_setting: str) -> list[Row]:
    """Finished cells, none where there is no file; a last line that was torn off by a killed run is left out.

    Raises UsageError for a file of another setting or of other columns.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise UsageError(f"{path} was written with other rules or columns; name another folder with out=")
        rows = [row for row in reader if None not in row.values() and None not in row]
    other = {row["setting"] for row in rows} - {expected_setting}
    if other:
        raise UsageError(
            f"{path} is of setting {other.pop()}, this is {expected_setting}; name another folder with out="
        )
    return rows


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add lines at the end, after cutting off a torn one. Raises DeviceError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.is_file() or path.stat().st_size == 0
        if not fresh:
            whole = path.read_bytes()
            if not whole.endswith(b"\n"):
                path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise DeviceError(f"cannot write {path}: {error.strerror}; name another folder with out=") from error
