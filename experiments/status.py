"""`neartie status`: what runs now, what ended last, what crashed, and whether there is space for more."""

import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.words import Flags
from harness import strict_json
from harness.config import Config
from harness.ledger_read import MARKER, ROW, files, read_folder
from harness.ledger_schema import Status
from harness.text_table import text_table

LAST = 5
HEAD = ("run", "started (UTC)", "experiment", "variant", "golden")


def run(config: Config, flags: Flags) -> int:
    """Print the state of the ledger under `config.results`; reads the markers and the newest rows alone."""
    root = Path(config.results) / "ledger"
    rows, markers = files(root, ROW), files(root, MARKER)
    listing = read_folder(root, only={path.stem for path in (*markers, *rows[-LAST:])})
    crashed = [row for row in listing.rows if row["status"] == Status.crashed.name]
    ended = [row for row in listing.rows if row["status"] != Status.crashed.name]
    there = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    document = {
        "ledger": str(root),
        "rows": len(rows),
        "free_bytes": shutil.disk_usage(there).free,
        "running": [_told(row) for row in listing.running],
        "crashed": [_told(row) for row in crashed],
        "last": [_told(row) for row in ended],
        "unreadable": [{"file": file.file, "reason": file.reason} for file in listing.unreadable],
    }
    print(json.dumps(strict_json.encode(document)[0]) if flags.json else _text(document))
    return 0


def _told(row: dict[str, Any]) -> dict[str, Any]:
    names = ("run_id", "time_utc", "status", "experiment", "variant", "golden", "error")
    return {name: row[name] for name in names} | {"sweep": row["sweep"]["id"], "job": row["sweep"]["job"]}


def _text(told: dict[str, Any]) -> str:
    parts = [f"{told['ledger']}: {told['rows']} rows, {told['free_bytes'] / 2**30:.1f} GiB free"]
    now = datetime.now(UTC)
    running = [[*_cells(row), _since(row, now)] for row in told["running"]]
    parts.append(text_table((*HEAD, "for"), running) if running else "nothing runs on this machine")
    if told["crashed"]:
        parts += [f"crashed, {len(told['crashed'])}:", text_table(HEAD, [_cells(row) for row in told["crashed"]])]
        if sweeps := sorted({row["sweep"] for row in told["crashed"] if row["sweep"]}):
            parts.append(f"of sweeps {', '.join(sweeps)}: the same command with resume=true runs what is missing")
    if told["last"]:
        last = [[*_cells(row), row["status"], row["error"] or ""] for row in told["last"]]
        parts += ["ended last:", text_table((*HEAD, "status", "error"), last)]
    parts += [f"not a row: {file['file']}: {file['reason']}" for file in told["unreadable"]]
    return "\n".join(parts)


def _cells(row: dict[str, Any]) -> list[object]:
    return [row["run_id"], row["time_utc"][:19], row["experiment"], row["variant"], row["golden"]]


def _since(row: dict[str, Any], now: datetime) -> str:
    seconds = int((now - datetime.fromisoformat(row["time_utc"])).total_seconds())
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["status", *sys.argv[1:]]))
