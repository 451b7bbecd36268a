"""The ledger: one strict-JSON file a run, written once, so that branches that add runs merge without conflict.

    ledger = Ledger(Path("results/ledger"))
    with ledger.begin({"experiment": "gate", "variant": "f32"}) as run:
        run.add({"golden_hash": golden.hash})
        run.finish({"agreement": agreement})

While a run is in flight a marker file stands in for its row; one left by a process that is gone is read as `crashed`.
A run that ends by an exception, an interruption too, leaves a row that says so, with all that was known by then.
"""

import os
import re
import secrets
import time
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from harness import strict_json
from harness.failure import INTERRUPTIONS, one_line, traceback_text
from harness.ledger_pack import packed
from harness.ledger_read import MARKER, ROW, Listing, read_folder
from harness.ledger_schema import SCHEMA, Status, merged, shaped
from harness.liveness import this_process
from variants.errors import DeviceError, NeartieError

if TYPE_CHECKING:
    import pandas as pd

NAME_CHARS = 64  # of the variant, in a file name
OWN_FIELDS = {"schema", "run_id", "time_utc", "nulls"}


class Ledger:
    """A folder of run records, made when the first run begins; `ledger_schema.FIELDS` is the shape of a row."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def begin(self, record: Mapping[str, object]) -> "Run":
        """Announce a run, before its work: writes the marker with what `record` already says.

        Raises DeviceError, naming the folder, when nothing can be written there; NeartieError for a record that does
        not fit the schema.
        """
        now = datetime.now(UTC)
        run = Run(self, secrets.token_hex(6), now, record)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.root, error) from error
        # A marker outlives its process, which is all it is for; that it outlives the machine is not worth two waits.
        write_once(run.marker, strict_json.dumps({"process": this_process(), "row": packed(run.row())}), synced=False)
        return run

    def finish(self, run: "Run", record: Mapping[str, object]) -> dict:
        """Write the row of `run`, then remove its marker; returns the row. See `Run.finish`."""
        return run.finish(record)

    def read(self) -> Listing:
        """Rows, runs in flight and unreadable files; see `ledger_read.read_folder` for the errors."""
        return read_folder(self.root)

    def rows(self) -> list[dict]:
        """Every finished or crashed run in order of time; warns, a line each, of files that are no rows."""
        listing = self.read()
        for file in listing.unreadable:
            warnings.warn(f"ledger file {file.file} skipped: {file.reason}", stacklevel=2)
        return list(listing.rows)

    def frame(self) -> "pd.DataFrame":
        """The rows as a pandas frame with flat, typed columns; see `ledger_view.frame`."""
        from harness.ledger_view import frame  # pandas is slow to import, and writers do not need it

        return frame(self.rows())


class Run:
    """A run in flight, made by `Ledger.begin`; leaves exactly one row, whatever happens short of losing the process."""

    def __init__(self, ledger: Ledger, run_id: str, began: datetime, record: Mapping[str, object]) -> None:
        stamp = began.strftime("%Y%m%dT%H%M%S.%fZ")
        variant = re.sub(r"[^A-Za-z0-9_.+=-]", "_", str(record.get("variant") or "none"))[:NAME_CHARS]
        self.run_id = run_id
        self.path = ledger.root / f"{stamp}-{variant}-{run_id}{ROW}"
        self.marker = self.path.with_suffix(MARKER)
        self._time_utc = began.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._began_s = time.perf_counter()
        self._record: dict[str, object] = {}
        self._nulls: dict[str, str] = {}
        self.add(record)

    def add(self, record: Mapping[str, object]) -> None:
        """Record more about the run, so that a failure later still tells it; maps join name by name.

        Raises NeartieError for a name or a type that is not the schema's, and for a field that the ledger itself fills.
        """
        taken = sorted(OWN_FIELDS & record.keys())
        if taken:
            raise NeartieError(f"record gives {', '.join(taken)}; the ledger fills these itself")
        addition, nulls = strict_json.encode(record)
        assert isinstance(addition, dict)
        status = addition.get("status")
        if status not in (None, *Status.__members__):
            raise NeartieError(f"record status is {status!r}, expected one of {', '.join(Status.__members__)}")
        shaped(addition)
        kept = {pointer: why for pointer, why in self._nulls.items() if not strict_json.reaches(addition, pointer)}
        self._nulls = kept | nulls
        self._record = merged(self._record, addition)

    def row(self) -> dict:
        """The row as far as it is known; `status` is null until the run has one."""
        own = {"schema": SCHEMA, "run_id": self.run_id, "time_utc": self._time_utc, "nulls": self._nulls}
        return shaped({**self._record, **own})

    def finish(self, record: Mapping[str, object] | None = None) -> dict:
        """Write the row and remove the marker; returns the row as readers see it.

        `status` is `ok` and `wall_s` the time since `begin` unless the record says otherwise. Raises NeartieError for
        a record that does not fit (nothing is written), DeviceError when the folder can no longer be written.
        """
        assert not self.path.exists(), f"run {self.run_id} already has its row"
        self.add(record or {})
        row = self.row()
        row["status"] = row["status"] or Status.ok.name
        row["wall_s"] = time.perf_counter() - self._began_s if row["wall_s"] is None else row["wall_s"]
        write_once(self.path, strict_json.dumps(packed(row)))
        self.marker.unlink(missing_ok=True)
        return row

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path.exists():
            self.marker.unlink(missing_ok=True)
        elif error is None:
            self.finish({"status": Status.failed, "error": "the run ended without a result"})
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        reason = {"reason": "interrupted"} if isinstance(error, INTERRUPTIONS) else {}
        detail = {"traceback": traceback_text(error), **reason}
        try:
            self.finish({"status": Status.failed, "error": one_line(error), "detail": detail})
        except DeviceError as second:  # the first error is the one to raise; the marker still tells of the run
            error.add_note(str(second))


def write_once(path: Path, payload: bytes, *, synced: bool = True) -> None:
    """Put a new file in place as `replace_whole` does."""
    assert not path.exists(), f"{path.name} exists and is never rewritten"
    replace_whole(path, payload, synced=synced)


def replace_whole(path: Path, payload: bytes, *, synced: bool = True) -> None:
    """Put a file in place whole or not at all, and if `synced` on the disk, by a temporary name in the same folder.

    Raises DeviceError, naming the folder, when that fails; leaves nothing behind then.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(payload)
                file.flush()
                if synced:
                    os.fsync(file.fileno())
            os.rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        if synced:
            _sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(folder: Path, error: OSError) -> DeviceError:
    reason = error.strerror or str(error)
    return DeviceError(f"ledger folder {folder} cannot be written ({reason}); make it writable or name another one")
