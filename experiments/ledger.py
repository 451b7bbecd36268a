"""`neartie ledger`: list, show, compare, export and migrate the runs on record."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments.words import Flags
from harness import ledger_view, strict_json
from harness.config import Config
from harness.ledger import Ledger
from harness.ledger_compact import NAME, compact, table
from harness.ledger_migrate import migrate
from harness.ledger_query import frontier, history, named, query
from harness.ledger_schema import SCHEMA
from harness.report import published_table
from harness.report import text as rich_text
from harness.text_table import text_table

Row = dict[str, Any]


def run(config: Config, flags: Flags) -> int:
    """Do what the action says with the ledger under `config.results`; history's variant=V is the config's label."""
    ledger = Ledger(Path(config.results) / "ledger")
    if flags.action == "history":
        flags = replace(flags, words=(config.label,))
    document, text = ACTIONS[flags.action](ledger, flags)
    print(json.dumps(document) if flags.json else text)
    return 0


def _list(ledger: Ledger, flags: Flags) -> tuple[object, str]:
    if (ledger.root / NAME).is_file() and not flags.json:
        return None, _long_list(ledger)
    listed = ledger_view.list_rows(ledger, published="published" in flags.values)
    rows = [_columns(row) for row in (*listed["rows"], *(r | {"status": "running"} for r in listed["running"]))]
    parts = [text_table(COLUMNS, rows) if rows else f"no runs in {ledger.root} yet"]
    parts += [f"not a row: {file['file']}: {file['reason']}" for file in listed["unreadable"]]
    if published := listed.get("published"):
        parts += ["", rich_text(published_table(published)), f"source: {published[0]['source']}"]
    return listed, "\n".join(line.rstrip() for part in parts for line in part.split("\n"))


LIST_ROWS = 1000
LISTED = (
    "run_id", "time_utc", "status", "experiment", "variant", "golden", "agreement_matched", "agreement_total",
    "decode_tok_s_median", "verdict_class", "error",
)  # fmt: skip
COLUMNS = ("run", "time (UTC)", "status", "experiment", "variant", "golden", "agree", "tok/s", "verdict")


def _columns(row: Row) -> list[object]:
    agreement, speed = row["agreement"], row["decode_tok_s"]["median"]
    agree = "-" if agreement["matched"] is None else f"{agreement['matched']}/{agreement['total']}"
    return [
        row["run_id"],
        row["time_utc"][:19],
        row["status"],
        row["experiment"],
        row["variant"],
        row["golden"],
        agree,
        _tenth(speed),
        _short(row["verdict"]["class"] or row["error"] or ""),
    ]


def _long_list(ledger: Ledger) -> str:
    """The newest rows of a ledger that was compacted, without reading each file."""
    rows, unreadable = table(ledger.root, LISTED)
    earlier = max(rows.num_rows - LIST_ROWS, 0)
    cells = [_listed(*(row[name] for name in LISTED)) for row in rows.slice(earlier).to_pylist()]
    more = [f"{earlier} earlier runs are not shown; `ledger query` reads all"] if earlier else []
    lines = [*more, text_table(COLUMNS, cells), *(f"not a row: {file.file}: {file.reason}" for file in unreadable)]
    return "\n".join(line.rstrip() for part in lines for line in part.split("\n"))


def _listed(run: str, time: str, *cells: Any) -> list[object]:
    *named, matched, total, speed, verdict, error = cells
    agree = "-" if matched is None else f"{matched}/{total}"
    return [run, time[:19], *named, agree, _tenth(speed), _short(verdict or error or "")]


def _tenth(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _compact(ledger: Ledger, flags: Flags) -> tuple[object, str]:
    done = compact(ledger.root, verify=True)
    lines = [f"{done.path}: {done.rows} rows, {done.added} of them new; the raw files stay"]
    lines += [f"made again, for its raw file has changed: {name}" for name in done.wrong]
    return asdict(done), "\n".join([*lines, *(f"not a row: {file.file}: {file.reason}" for file in done.unreadable)])


def _query(ledger: Ledger, flags: Flags) -> tuple[object, str]:
    names, rows = query(ledger.root, flags.words[0])
    document = [dict(zip(names, row, strict=True)) for row in rows]
    return strict_json.encode(document)[0], text_table(tuple(names), [list(row) for row in rows])


def _frontier(ledger: Ledger, flags: Flags) -> tuple[object, str]:
    rows = frontier(ledger.root)
    names = ("variant", "golden", "environment_device", "agreement_matched", "agreement_total", "decode_tok_s_median")
    heads = ("variant", "golden", "device", "matched", "of", "tok/s", "best")
    return rows, text_table(
        heads, [[*c, "*" if r["best"] else ""] for c, r in zip(named(rows, names), rows, strict=True)]
    )


def _history(ledger: Ledger, flags: Flags) -> tuple[object, str]:
    rows = history(ledger.root, flags.words[0])
    names = ("time_utc", "status", "golden", "environment_device", "agreement_matched", "change", "decode_tok_s_median")
    heads = ("time (UTC)", "status", "golden", "device", "matched", "change", "tok/s")
    return rows, text_table(heads, [[cells[0][:19], *cells[1:]] for cells in named(rows, names)])


def _show(ledger: Ledger, flags: Flags) -> tuple[object, str]:
    row = ledger_view.show_row(ledger, flags.words[0])
    return row, json.dumps(row, indent=1)


def _diff(ledger: Ledger, flags: Flags) -> tuple[object, str]:
    a, b = (ledger_view.show_row(ledger, word) for word in flags.words)
    change, fields = ledger_view.compare(a, b), ledger_view.diff(a, b)
    lines = [f"{name}: {'unknown' if value is None else value}" for name, value in change.items()]
    rows = [[f["field"], _short(f["a"]), _short(f["b"])] for f in fields]
    text = "\n".join([*lines, "", text_table(("field", a["run_id"], b["run_id"]), rows)])
    return {"change": change, "fields": fields}, text


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def _export(ledger: Ledger, flags: Flags) -> tuple[object, str]:
    path = flags.words[0]
    count = ledger_view.export(ledger, path)
    return {"path": path, "rows": count}, f"{path}: {count} rows"


def _migrate(ledger: Ledger, flags: Flags) -> tuple[object, str]:
    done = migrate(ledger.root)
    text = f"{done.rows} rows written again as schema {SCHEMA}: {done.bytes_before} bytes are now {done.bytes_after}"
    return asdict(done), "\n".join([text, *(f"left: {name}: {why}" for name, why in done.left)])


ACTIONS: dict[str, Callable[[Ledger, Flags], tuple[object, str]]] = {
    "list": _list,
    "show": _show,
    "diff": _diff,
    "export": _export,
    "migrate": _migrate,
    "compact": _compact,
    "query": _query,
    "frontier": _frontier,
    "history": _history,
}


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["ledger", *sys.argv[1:]]))
