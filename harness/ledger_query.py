"""Questions to a whole ledger: SQL over its rows, the frontier of agreement against speed, one variant's history."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.ledger_compact import NAME, is_whole, table
from variants.errors import DeviceError, UsageError

COMPARED = ("battery_hash", "golden_hash", "model_hash", "environment_device")
FIGURES = ("variant", "golden", "agreement_matched", "agreement_total", "decode_tok_s_median", "time_utc", "run_id")
HISTORY = (*FIGURES, "status", "error", "verdict_class", "environment_git", "environment_torch")
Row = dict[str, Any]
Rows = list[Row]


def query(root: Path, sql: str) -> tuple[list[str], list[tuple]]:
    """Names and rows that a SELECT over the table `runs` gives; columns as `ledger_compact` says.

    Raises DeviceError without DuckDB, UsageError for SQL that it refuses.
    """
    try:
        import duckdb
    except ImportError as error:
        raise DeviceError("ledger query needs DuckDB; pip install 'neartie[query]'") from error
    with duckdb.connect(config={"enable_external_access": "true"}) as connection:
        if is_whole(root):  # DuckDB reads of it the columns that the question needs
            connection.from_parquet(str(root / NAME)).create_view("runs")
        else:
            connection.register("runs", table(root)[0])
        try:
            found = connection.execute(sql)
            return [name for name, *_ in found.description or ()], found.fetchall()
        except duckdb.Error as error:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"SQL refused: {reason}; the table is `runs`, its columns are in `describe runs`"
            ) from error


def frontier(root: Path) -> Rows:
    """The newest gate of each variant, most agreement first, in groups that compare; `best` where none beats it twice.

    A group has one battery, golden, model and device: rows of two groups are never held against each other.
    """
    columns = _columns(root, (*FIGURES, *COMPARED, "status", "experiment"))
    newest: dict[tuple, int] = {}
    told = ("status", "experiment", "agreement_matched", "decode_tok_s_median", *COMPARED, "variant")
    for i, (status, experiment, matched, speed, *key) in enumerate(zip(*(columns[n] for n in told), strict=True)):
        if status == "ok" and experiment == "gate" and matched is not None and speed is not None:
            newest[tuple(key)] = i
    groups: dict[tuple, Rows] = {}
    for key, i in newest.items():
        groups.setdefault(key[:-1], []).append(_row(columns, i))
    out: Rows = []
    for rows in groups.values():
        rows.sort(key=lambda row: (-row["agreement_matched"], -row["decode_tok_s_median"], row["variant"]))
        fastest = 0.0
        for row in rows:
            best = row["decode_tok_s_median"] > fastest
            fastest = max(fastest, row["decode_tok_s_median"])
            out.append({name: row[name] for name in (*FIGURES, "environment_device")} | {"best": best})
    return out


def _columns(root: Path, names: Sequence[str]) -> dict[str, list]:
    """Every row's values by column; a map a row takes far longer to make."""
    rows, _ = table(root, names)
    return {name: rows.column(name).to_pylist() for name in dict.fromkeys(names)}


def _row(columns: dict[str, list], i: int) -> Row:
    return {name: values[i] for name, values in columns.items()}


def history(root: Path, variant: str) -> Rows:
    """Every run of a variant in order of time; `change` is in matched tokens since its last run that compares.

    Raises UsageError where there is none.
    """
    last: dict[tuple, int] = {}
    out: Rows = []
    columns = _columns(root, (*HISTORY, *COMPARED))
    for row in (_row(columns, i) for i, name in enumerate(columns["variant"]) if name == variant):
        key = tuple(row[name] for name in COMPARED)
        matched, before = row["agreement_matched"], last.get(key)
        change = matched - before if row["status"] == "ok" and None not in (matched, before) else None
        if row["status"] == "ok" and matched is not None:
            last[key] = matched
        out.append({name: row[name] for name in (*HISTORY, "environment_device")} | {"change": change})
    if not out:
        raise UsageError(f"no run of variant {variant!r} is in {root}; `neartie ledger list` shows what there is")
    return out


def named(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[Any]]:
    """Rows as lists in the order of `names`, floats to a tenth."""
    return [[round(v, 1) if isinstance(v := row[name], float) else v for name in names] for row in rows]
