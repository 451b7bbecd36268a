"""A large ledger read quickly: its rows, flat, in one Parquet file beside the raw files, which stay the truth.

The Parquet file is made from the raw files and holds the SHA-256 of each; it is no part of a merge, and who loses it
loses nothing. What it does not hold yet is read from the raw files, and what has gone from the folder is left out, by
name: a row is never rewritten. `compact` also looks at sizes, and if told to at every byte. Columns are those of
`Ledger.frame` with `_` for `.`, less recipes and `detail`, which raw files alone hold, and `file`, `bytes`, `sha256`.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.ledger_read import MARKER, ROW, Unreadable, read_folder, read_row
from harness.ledger_schema import SCHEMA, Status
from variants.errors import DeviceError, InputError, NeartieError

if TYPE_CHECKING:
    import pyarrow as pa

NAME = ".compact.parquet"
META = b"neartie_schema"
OWN = ("file", "bytes", "sha256")
LEFT_OUT: dict[str, Any] = {"recipe": {"declared": None, "observed": None}, "detail": None}
CHUNK = 1000


@dataclass(frozen=True)
class Compaction:
    """rows: in the Parquet file. added: read from raw files for it. wrong: rows that were not their raw file's."""

    path: str
    rows: int
    added: int
    unreadable: tuple[Unreadable, ...]
    wrong: tuple[str, ...]


def table(root: Path, columns: Sequence[str] | None = None) -> tuple["pa.Table", tuple[Unreadable, ...]]:
    """Every row under `root` in order of file name, crashed ones too, and the files that are none.

    columns: of those named above; None for all. Raises as `ledger_read.read_folder`, and InputError for a Parquet file
    of a newer schema.
    """
    import pyarrow as pa

    names, crashed = _names(root)
    old = _stored(root, names, columns)
    fresh = names - set(old.column("file").to_pylist()) if old.num_rows < len(names) else set()  # all of it is there
    if old.num_rows and not fresh and not crashed:  # then pandas, which is slow to import, is not needed
        return old, ()
    new, unreadable = _fresh(root, sorted(fresh))
    new = pa.concat_tables([new, _crashed(root, crashed)], promote_options="permissive")
    if columns is not None:
        new = new.select([name for name in (*columns, "file") if name in new.column_names])
    whole = pa.concat_tables([old, new], promote_options="permissive") if old.num_rows else new
    return whole.sort_by("file") if new.num_rows else whole, unreadable


def is_whole(root: Path) -> bool:
    """Whether the Parquet file holds every row that `table` would give, and no other."""
    names, crashed = _names(root)
    if not names or crashed or _rows_in(root / NAME) != len(names):
        return False
    return _stored(root, names, ()).num_rows == len(names)


def compact(root: Path, *, verify: bool = False) -> Compaction:
    """Bring the Parquet file up to date, and with `verify` hold each of its rows against its raw file, by hash.

    A second call writes nothing. Raises DeviceError where the folder cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names, _ = _names(root)
    old = _of_same_size(root, _stored(root, names, None))
    wrong = _wrong(root, old) if verify else ()
    if wrong:
        old = old.filter(pa.array([name not in wrong for name in old.column("file").to_pylist()]))
    fresh = sorted(names - set(old.column("file").to_pylist()))
    new, unreadable = _fresh(root, fresh)
    whole = pa.concat_tables([old, new], promote_options="permissive").sort_by("file") if old.num_rows else new
    path = root / NAME
    if new.num_rows or _rows_in(path) != whole.num_rows:
        whole = whole.replace_schema_metadata({META: str(SCHEMA).encode()})
        temporary = root / f"{NAME}.{os.getpid()}.tmp"
        try:
            pq.write_table(whole, temporary, compression="zstd")
            if _rows_read(temporary) != whole.num_rows:
                raise DeviceError(f"{path} does not read back as it was written; check the disk")
            os.replace(temporary, path)
        except OSError as error:
            raise DeviceError(f"{path} cannot be written ({error.strerror or error}); free space there") from error
        finally:
            temporary.unlink(missing_ok=True)
    return Compaction(str(path), whole.num_rows, new.num_rows, unreadable, tuple(wrong))


def _names(root: Path) -> tuple[set[str], list[str]]:
    """The names of the rows, and of the markers, by one look at the folder."""
    try:
        names = [name for name in os.listdir(root) if not name.startswith(".")]
    except FileNotFoundError:
        return set(), []
    except OSError as error:
        raise DeviceError(f"ledger folder {root} cannot be read ({error.strerror}); name a folder that can") from error
    return {n for n in names if n.endswith(ROW)}, [n for n in names if n.endswith(MARKER)]


def _stored(root: Path, names: set[str], columns: Sequence[str] | None) -> "pa.Table":
    """What the Parquet file holds of the files that are still there; nothing of one of another schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = root / NAME
    if not path.is_file():
        return pa.table({"file": pa.array([], pa.string()), "bytes": pa.array([], pa.int64())})
    try:
        # By the file's own reader: `read_table` goes by way of pyarrow.dataset, which imports pandas.
        with pq.ParquetFile(path) as stored:
            schema = stored.schema_arrow
            number = int((schema.metadata or {}).get(META, b"0"))
            asked = schema.names if columns is None else dict.fromkeys((*columns, "file"))
            found = stored.read(columns=[name for name in asked if name in schema.names])
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); remove it, it is made again from the rows") from error
    if number > SCHEMA:
        raise InputError(f"{path} has schema {number}, this reader knows up to {SCHEMA}; update neartie")
    kept = found.column("file").to_pylist()
    if number == SCHEMA and not names.issuperset(kept):
        found = found.filter(pa.array([name in names for name in kept]))
    return found if number == SCHEMA else found.slice(0, 0)


def _of_same_size(root: Path, stored: "pa.Table") -> "pa.Table":
    """Those rows whose raw file has the size that it had."""
    import pyarrow as pa

    pairs = zip(stored.column("file").to_pylist(), stored.column("bytes").to_pylist(), strict=True)
    return stored.filter(pa.array([(root / name).stat().st_size == size for name, size in pairs], pa.bool_()))


def _fresh(root: Path, names: Sequence[str]) -> tuple["pa.Table", tuple[Unreadable, ...]]:
    """The rows of raw files, a thousand at a time, since a whole row takes far more memory than its columns."""
    import pyarrow as pa

    parts = [_part(root, names[at : at + CHUNK]) for at in range(0, max(len(names), 1), CHUNK)]
    whole = pa.concat_tables([rows for rows, _ in parts], promote_options="permissive")
    return whole, tuple(file for _, unreadable in parts for file in unreadable)


def _part(root: Path, names: Sequence[str]) -> tuple["pa.Table", list[Unreadable]]:
    rows: list[dict] = []
    own: dict[str, list[Any]] = {name: [] for name in OWN}
    unreadable: list[Unreadable] = []
    for name in names:
        try:
            payload = (root / name).read_bytes()
            rows.append(read_row(root / name) | LEFT_OUT)
        except NeartieError:
            raise
        except (ValueError, OSError) as error:
            unreadable.append(Unreadable(name, str(error)))
            continue
        for column, value in zip(OWN, (name, len(payload), hashlib.sha256(payload).hexdigest()), strict=True):
            own[column].append(value)
    return _flat(rows, own), unreadable


def _crashed(root: Path, markers: Sequence[str]) -> "pa.Table":
    """Runs whose process is gone: their markers alone tell of them, so no Parquet file holds them."""
    if not markers:
        return _flat([], {name: [] for name in OWN})
    listing = read_folder(root, only={name.removesuffix(MARKER) for name in markers})
    rows = [row for row in listing.rows if row["status"] == Status.crashed.name]
    own = {"file": [f"{row['time_utc'].replace('-', '').replace(':', '')}-{row['run_id']}{MARKER}" for row in rows]}
    return _flat(rows, {**own, "bytes": [0] * len(rows), "sha256": [""] * len(rows)})


def _flat(rows: Sequence[dict], own: dict[str, list]) -> "pa.Table":
    import pyarrow as pa

    from harness.ledger_view import frame

    flat = pa.Table.from_pandas(frame(rows), preserve_index=False).replace_schema_metadata(None)
    flat = flat.drop_columns(["recipe.declared", "recipe.observed", "detail"])
    flat = flat.rename_columns([name.replace(".", "_") for name in flat.column_names])
    kinds = {"file": pa.string(), "bytes": pa.int64(), "sha256": pa.string()}
    for name, kind in kinds.items():
        flat = flat.append_column(name, pa.array(own[name], kind))
    return flat


def _wrong(root: Path, old: "pa.Table") -> tuple[str, ...]:
    """The files whose bytes are no longer those that the Parquet file was made of."""
    pairs = zip(old.column("file").to_pylist(), old.column("sha256").to_pylist(), strict=True) if old.num_rows else ()
    return tuple(name for name, digest in pairs if hashlib.sha256((root / name).read_bytes()).hexdigest() != digest)


def _rows_read(path: Path) -> int:
    """How many rows every column gives when all of the file is read, a part at a time."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as stored:
        return sum(batch.num_rows for batch in stored.iter_batches(CHUNK))


def _rows_in(path: Path) -> int | None:
    import pyarrow.parquet as pq

    return pq.read_metadata(path).num_rows if path.is_file() else None
