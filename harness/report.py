"""Ledger rows as compact terminal tables; the one place that decides how a figure is written for a reader."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.ledger_schema import Status

if TYPE_CHECKING:
    import pandas as pd

UNKNOWN = "-"
WIDTH = 120


def gate_table(rows: Sequence[Mapping], *, title: str | None = None) -> Table:
    """One line a run: tokens that agree, exact prompts, the earliest divergence, speeds, bar and verdict."""
    table = _table(["variant", "agree", "exact", "diverges", "prefill tok/s", "decode tok/s", "bar", "verdict"], title)
    for row in rows:
        cells = (
            row["variant"] or UNKNOWN,
            _of(row["agreement"]["matched"], row["agreement"]["total"]),
            _of(row["agreement"]["exact_prompts"], row["agreement"]["prompts"]),
            _diverges(row["agreement"]["first_divergence"]),
            _number(row["prefill_tok_s"]["median"]),
            _rate(row["decode_tok_s"]),
            _bar(row),
            _verdict(row),
        )
        _add(table, cells)
    return table


def published_table(rows: Sequence[Mapping]) -> Table:
    """The published campaign, another model's scores, under a title that says so."""
    table = _table(
        ["variant", "agree", "decode tok/s", "execution", "finding"], "Published, another model: illustration"
    )
    for row in rows:
        low, high = row["matched_low"], row["matched_high"]
        matched = str(low) if low == high else f"{low} to {high}"
        speed = _number(row["decode_tok_s"])
        _add(table, (row["variant"], f"{matched}/{row['total']}", speed, row["execution"], row["finding"] or ""))
    return table


def frame_table(frame: "pd.DataFrame", columns: Sequence[str], *, title: str | None = None) -> Table:
    """Any columns of a frame as `Ledger.frame` makes it, in the order named; missing values as a dash."""
    table = _table(list(columns), title)
    for values in frame[list(columns)].astype(object).where(frame[list(columns)].notna(), None).itertuples(index=False):
        _add(table, [_number(v) if isinstance(v, float) else UNKNOWN if v is None else str(v) for v in values])
    return table


def text(table: Table, *, width: int = WIDTH) -> str:
    """The table as plain text no wider than `width` columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _table(columns: Sequence[str], title: str | None) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        right = name in ("agree", "exact") or name.endswith("tok/s")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def _add(table: Table, cells: Sequence[str]) -> None:
    table.add_row(*(Text(cell) for cell in cells))  # as Text, lest "[...]" in a message be taken for markup


def _of(part: int | None, whole: int | None) -> str:
    return UNKNOWN if part is None or whole is None else f"{part}/{whole}"


def _number(value: float | None) -> str:
    """Four significant digits, as much as a rate on a shared machine can mean."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _rate(rate: Mapping) -> str:
    """The median, and the coefficient of variation where there is one."""
    cv = rate["cv"]
    return _number(rate["median"]) + ("" if cv is None else f" ±{100 * cv:.0f}%")


def _diverges(divergences: Sequence[Mapping] | None) -> str:
    """The earliest divergence as prompt and position, and how many more prompts diverge."""
    if divergences is None:
        return UNKNOWN
    if not divergences:
        return "nowhere"
    first = min(divergences, key=lambda entry: (entry["position"], entry["prompt"]))
    more = f" +{len(divergences) - 1}" if len(divergences) > 1 else ""
    return f"p{first['prompt']} @ {first['position']}{more}"


def _bar(row: Mapping) -> str:
    met = {True: " met", False: " missed"}.get(row["agreement"].get("bar_met"), "")
    return f"{row['bar']}{met}" if row["bar"] else UNKNOWN


def _verdict(row: Mapping) -> str:
    if row["status"] not in (None, Status.ok.name):
        return f"{row['status']}: {row['error'] or row['verdict']['reason'] or 'no reason given'}"
    return row["verdict"]["class"] or UNKNOWN
