"""`neartie ledger`: list, show, compare, export and migrate the runs on record."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.words import Flags
from harness import ledger_view
from harness.config import Config
from harness.ledger import Ledger
from harness.ledger_migrate import migrate
from harness.ledger_schema import SCHEMA
from harness.report import published_table
from harness.report import text as rich_text
from harness.text_table import text_table

Row = dict[str, Any]


def run(config: Config, flags: Flags) -> int:
    """Do what the action says with the ledger under `config.results`."""
    ledger = Ledger(Path(config.results) / "ledger")
    document, text = ACTIONS[flags.action](ledger, flags)
    print(json.dumps(document) if flags.json else text)
    return 0


def _list(ledger: Ledger, flags: Flags) -> tuple[object, str]:
    listed = ledger_view.list_rows(ledger, published="published" in flags.values)
    rows = [_columns(row) for row in (*listed["rows"], *(r | {"status": "running"} for r in listed["running"]))]
    parts = [text_table(COLUMNS, rows) if rows else f"no runs in {ledger.root} yet"]
    parts += [f"not a row: {file['file']}: {file['reason']}" for file in listed["unreadable"]]
    if published := listed.get("published"):
        parts += ["", rich_text(published_table(published)), f"source: {published[0]['source']}"]
    return listed, "\n".join(line.rstrip() for part in parts for line in part.split("\n"))


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
        None if speed is None else round(speed, 1),
        _short(row["verdict"]["class"] or row["error"] or ""),
    ]


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
}


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["ledger", *sys.argv[1:]]))
