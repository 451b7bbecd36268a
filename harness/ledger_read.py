"""Reading a ledger folder: rows in time order, runs in flight, runs that crashed, and files that are no rows."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from harness import strict_json
from harness.ledger_forward import adopted
from harness.ledger_schema import SCHEMA, Status
from harness.liveness import is_running
from variants.errors import DeviceError, NeartieError

ROW, MARKER = ".json", ".running"


@dataclass(frozen=True)
class Unreadable:
    """A file of the ledger that holds no row, and why."""

    file: str
    reason: str


@dataclass(frozen=True)
class Listing:
    """What a ledger folder holds, in order of file name, which is order of time.

    rows: finished runs and, with status `crashed`, those whose process is gone. running: what is known so far of runs
    in flight. unreadable: torn or foreign files, none of which is in `rows`.
    """

    rows: tuple[dict, ...]
    running: tuple[dict, ...]
    unreadable: tuple[Unreadable, ...]


def read_folder(root: Path, *, newest: int = SCHEMA, since: str = "", only: Collection[str] | None = None) -> Listing:
    """Read every row and marker under `root`; a folder that is not there yet is an empty ledger.

    since: the first letters of a file name, `20261130T2138` say; earlier files are not looked at. only: the stems
    of the files to look at, None for all. Raises InputError for a row of a newer schema than `newest`, DeviceError for
    a folder that cannot be read.
    """
    rows: dict[str, dict] = {}
    running: dict[str, dict] = {}
    unreadable: list[Unreadable] = []
    # Markers first: a run that ends between the two listings is then found as a row, never missed.
    for path in [*files(root, MARKER), *files(root, ROW)]:
        if path.name < since or (only is not None and path.stem not in only):
            continue
        try:
            alive, row = _marker(path, newest) if path.suffix == MARKER else (False, read_row(path, newest=newest))
        except NeartieError:
            raise
        except FileNotFoundError:  # a marker that its run has just removed
            continue
        except (ValueError, OSError) as error:
            unreadable.append(Unreadable(path.name, str(error)))
            continue
        (running if alive else rows)[path.stem] = row
    live = tuple(running[stem] for stem in sorted(running.keys() - rows.keys()))
    return Listing(tuple(rows[stem] for stem in sorted(rows)), live, tuple(unreadable))


def read_row(path: Path, *, newest: int = SCHEMA) -> dict:
    """The row in one file; ValueError when it is torn, foreign, or was written for a run of another name."""
    row = adopted(strict_json.loads(path.read_bytes()), newest=newest)
    if not path.stem.endswith(f"-{row['run_id']}"):
        raise ValueError(f"holds run {row['run_id']}, which is not the run in its file name")
    return row


def _marker(path: Path, newest: int) -> tuple[bool, dict]:
    """Whether the run is still going, and its row: as far as it got, or `crashed`."""
    marker = strict_json.loads(path.read_bytes())
    row = marker.get("row")
    if not isinstance(row, dict):
        raise ValueError("holds no row of a run in flight")
    crashed = {"status": Status.crashed.name, "error": "its process ended, or runs on another machine, without a row"}
    alive = is_running(marker.get("process"))
    row = adopted(row | crashed, newest=newest)
    return alive, row | {"status": None, "error": None} if alive else row


def files(root: Path, suffix: str) -> list[Path]:
    """The ledger's files with that suffix in order of name; raises DeviceError for a folder that cannot be read."""
    try:
        return sorted(path for path in root.iterdir() if path.suffix == suffix and not path.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DeviceError(f"ledger folder {root} cannot be read ({error.strerror}); name a folder that can") from error
