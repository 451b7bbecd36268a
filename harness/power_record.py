"""Which code a whole power run was made with, so that a reader of its cells is told what has changed since.

Cells of two states of the code are never mixed (`harness.power_rows`). Reading a finished run is another matter: it
stays what it was, and says of which code.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from harness import strict_json
from harness.power_rows import Row, read_rows, sources
from variants.errors import InputError

NAME = "code.json"
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class PowerRecord:
    """setting: of all cells (`harness.power_rows.setting`). files: the first 8 hex digits of each source's SHA-256."""

    setting: str
    files: dict[str, str]

    def changed(self) -> list[str]:
        """Sources that are not now as they were then, or not there, or new."""
        now = digests()
        return sorted(name for name in now.keys() | self.files.keys() if now.get(name) != self.files.get(name))


def digests() -> dict[str, str]:
    """`harness.power_rows.sources` as they lie here, by path from the project's folder."""
    return {p.relative_to(ROOT).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()[:8] for p in sorted(sources())}


def write_record(folder: Path, setting: str) -> None:
    """Beside the cells of a run that is whole."""
    document = {"setting": setting, "files": digests()}
    (folder / NAME).write_bytes(strict_json.dumps(document))


def read_record(folder: Path) -> PowerRecord | None:
    """None where no whole run lies there. Raises InputError for a file that is something else."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        document = strict_json.loads(path.read_bytes())
        files = document["files"]
        if not isinstance(files, dict):
            raise TypeError(f"files: got {type(files).__name__}")
        return PowerRecord(str(document["setting"]), files)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: not the record of a power run ({error}); restore it, or name another out="
        ) from error


def older_run(folder: Path, wanted: set[str]) -> tuple[list[Row], str] | None:
    """The cells of a whole run of other code, and a line that says so; None where this code's run can go on there."""
    record = read_record(folder)
    changed = [] if record is None else record.changed()
    if record is None or not changed:
        return None
    rows = [row for row in read_rows(folder / "cells.csv", record.setting) if row["key"] in wanted]
    if len(rows) < len(wanted):
        return None
    others = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    return rows, (
        f"as recorded; changed since: {', '.join(changed[:4])}{others}. out=DIR runs it again on this code "
        "(about an hour on 2 cores)"
    )
