"""Rows of an older schema written again in today's form, without a change that a reader could see.

The one place where a row's file is replaced: its name, its run and what readers get stay equal, else it is left alone.
"""

from dataclasses import dataclass
from pathlib import Path

from harness import strict_json
from harness.ledger import replace_whole
from harness.ledger_forward import adopted
from harness.ledger_pack import packed
from harness.ledger_read import ROW, files, read_row
from harness.ledger_schema import SCHEMA
from variants.errors import NeartieError


@dataclass(frozen=True, kw_only=True)
class Migration:
    """rows: how many files were written again. left: files that are no rows, or would read otherwise, and why."""

    rows: int
    bytes_before: int
    bytes_after: int
    left: tuple[tuple[str, str], ...]


def migrate(root: Path) -> Migration:
    """Write each row of an older schema under `root` again, whole or not at all; a second call finds nothing to do.

    Raises InputError for a row of a newer schema, DeviceError where the folder cannot be read or written.
    """
    sizes: list[tuple[int, int]] = []
    left: list[tuple[str, str]] = []
    for path in files(root, ROW):
        payload = path.read_bytes()
        try:
            row = read_row(path)
            if strict_json.loads(payload)["schema"] == SCHEMA:
                continue
        except NeartieError:
            raise
        except ValueError as error:
            left.append((path.name, str(error)))
            continue
        short = strict_json.dumps(packed(row))
        if adopted(strict_json.loads(short)) != row:
            left.append((path.name, "its short form reads as something else"))
            continue
        replace_whole(path, short)
        sizes.append((len(payload), len(short)))
    before, after = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
    return Migration(rows=len(sizes), bytes_before=before, bytes_after=after, left=tuple(left))
