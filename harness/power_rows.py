"""The file of finished cells: one line a cell, appended as it ends, so that a stopped experiment goes on where it was.

A file is of one checkpoint, one pair of goldens and one state of the instruments; another's is refused, not mixed. What
is whole is packed: `cells.csv.xz` holds the lines then, and a `cells.csv` beside it those that were added since.
"""

import csv
import hashlib
import io
import json
import lzma
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TextIO

from harness.calibration import shipped_calibration
from harness.golden import load_golden
from harness.power_cells import Cell
from harness.power_rules import RULES, Judgement
from variants.errors import DeviceError, InputError, UsageError

PLACED = ("ladder_replay", "replay_f64", "replay_f32", "replay", "ladder", "envelope")
INSTRUMENTS = (
    "benign_null", "calibration", "envelope", "expected", "forced_errors", "forced_values", "inspect", "ladder",
    "local_replay", "lockstep", "op_error", "oracle", "power", "power_cells", "power_rules", "power_watch", "probes",
    "product_error", "rounding_noise", "significance",
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
        "code": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(sources())},
    }
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:12]


def sources() -> Iterator[Path]:
    """The files that `setting` hashes: the forward's, kernels left out, and the instruments'."""
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


def packed(path: Path) -> Path:
    """Where the lines of a file of cells lie once they are packed."""
    return path.with_name(path.name + ".xz")


def read_rows(path: Path, expected_setting: str) -> list[Row]:
    """Finished cells, packed ones first, none where there is no file; a last line that a killed run tore is left out.

    Raises UsageError for a file of another setting or of other columns, InputError for a packed one that is damaged.
    """
    rows = [row for text in _texts(path) for row in _parsed(path, text)]
    other = {row["setting"] for row in rows} - {expected_setting}
    if other:
        raise UsageError(
            f"{path} is of setting {other.pop()}, this is {expected_setting}: other code or inputs; name another out="
        )
    return list({row["key"]: row for row in rows}.values())


def _texts(path: Path) -> Iterator[str]:
    if packed(path).is_file():
        try:
            yield lzma.decompress(packed(path).read_bytes()).decode("utf-8")
        except (lzma.LZMAError, UnicodeDecodeError) as error:
            raise InputError(f"{packed(path)}: damaged ({error}); restore it, or name another out=") from error
    if path.is_file():
        yield path.read_text(encoding="utf-8")


def _parsed(path: Path, text: str) -> list[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise UsageError(f"{path} was written with other rules or columns; name another folder with out=")
    return [row for row in reader if None not in row.values() and None not in row]


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
            _write(file, rows, header=fresh)
    except OSError as error:
        raise _unwritable(path, error) from error


def pack_rows(path: Path, rows: Sequence[Row]) -> None:
    """Put all lines into the packed file, by key, and remove the plain one; killed between the two loses nothing."""
    text, unfinished = io.StringIO(newline=""), packed(path).with_suffix(".tmp")
    _write(text, sorted(rows, key=lambda row: row["key"]), header=True)
    try:
        unfinished.write_bytes(lzma.compress(text.getvalue().encode("utf-8"), preset=9 | lzma.PRESET_EXTREME))
        os.replace(unfinished, packed(path))
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(file: TextIO, rows: Iterable[Row], *, header: bool) -> None:
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)


def _unwritable(path: Path, error: OSError) -> DeviceError:
    return DeviceError(f"cannot write {path}: {error.strerror}; name another folder with out=")
