"""The file of finished cells: one line a cell, appended as it ends, so that a stopped experiment goes on where it was.

A file is of one checkpoint, one pair of goldens and one state of the instruments; another's is refused, not mixed.
"""

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path

from harness.calibration import shipped_calibration
from harness.golden import load_golden
from harness.power_cells import Cell
from harness.power_rules import RULES, Judgement
from variants.errors import DeviceError, UsageError

PLACED = ("ladder_replay", "replay_f64", "replay_f32", "replay", "ladder", "envelope")
INSTRUMENTS = (
    "benign_null", "calibration", "envelope", "expected", "forced_errors", "forced_values", "inspect", "ladder",
    "local_replay", "lockstep", "op_error", "oracle", "power", "power_cells", "power_rules", "power_watch", "probes",
    "rounding_noise", "significance",
)  # fmt: skip
CELL = ("key", "setting", "subject", "defect", "family", "severity", "spread", "battery", "seed")
TRUTH = ("want_sites", "want_layer", "exercised", "effect", "seconds")
JUDGED = tuple(f"{rule}_{part}" for rule in RULES for part in ("score", "flag"))
FOUND = tuple(f"{rule}_{part}" for rule in PLACED for part in ("site", "layer"))
COLUMNS = (*CELL, *TRUTH, *JUDGED, *FOUND)

Row = dict[str, str]


@cache
def setting(model_sha256: str) -> str:
    """Names all that every cell of a file must share: weights, goldens, calibration, and the code that ran and judged.

    The code is that of the forward (kernels left out, none runs here) and of the instruments: a cell of one that has
    changed since says nothing of the one that is there.
    """
    shared = {
        "model": model_sha256,
        "goldens": {name: load_golden(name).hash for name in ("gate", "wide")},
        "calibration": shipped_calibration(model_sha256).hash,
        "code": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(_sources())},
    }
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:12]


def _sources() -> Iterator[Path]:
    root = Path(__file__).resolve().parents[1]
    yield from (p for p in (root / "variants").rglob("*.py") if not p.stem.endswith("_triton"))
    yield from (root / "harness" / f"{name}.py" for name in INSTRUMENTS)


def row_of(cell: Cell, judged: dict[str, Judgement], **truth: object) -> Row:
    """A line of the file; truth: setting, family, want_sites, want_layer, exercised, effect, seconds."""
    row = dict.fromkeys(COLUMNS, "") | {"key": cell.key, "battery": cell.battery.name}
    row |= {k: str(v) for k, v in asdict(cell).items() if k in CELL and k != "battery"}
    row |= {name: _text(value) for name, value in truth.items()}
    for rule, j in judged.items():
        row |= {f"{rule}_score": f"{float(j.score):.4g}", f"{rule}_flag": _text(j.flagged)}
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
            f"{path} is of setting {other.pop()}, this is {expected_setting}: other code or inputs; name another out="
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
