"""Columns of plain text, for a terminal, a log and a README alike; ledger rows have their own in `harness.report`."""

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, two spaces apart; columns of numbers to the right; None is a dash."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *cells, strict=True)]
    right = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(_aligned(line, widths, right) for line in (header, rule, *cells))


def _aligned(line: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)]
    return "  ".join(cells).rstrip()
