"""Runs of tokens in text files: JSON lines and CSV, in the shapes that engines and spreadsheets write."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.golden_data import ENDED
from variants.errors import InputError

SAID = (
    "tokens",
    "token_ids",
    "ids",
    "output_ids",
    "our_ids",
    "output_token_ids",
    "generated_ids",
    "generated_token_ids",
)
PROMPTS = ("prompt_ids", "prompt_token_ids")
GAPS, TOPS = ("gap_nats",), ("top_ids", "top_logprobs")
TEXTS = ("text", "texts", "output", "completion", "response", "content", "generated_text")
PLACES = {
    "prompt": ("prompt", "prompt_index", "prompt_id", "row", "sample"),
    "position": ("position", "pos", "step", "index"),
    "token": ("token", "token_id", "id", "our_id"),
}
LEAST_INDEX = 3  # rows that count 0, 1, 2 are an index, two may be tokens


def padded(rows: Sequence[Sequence[Any]], fill: float) -> list[list[Any]]:
    """Rows of one length."""
    longest = max((len(row) for row in rows), default=0)
    return [[*row, *[fill] * (longest - len(row))] for row in rows]


def read_jsonl(content: bytes) -> dict[str, Any]:
    """Columns by name, of one object a line (or a list of ids a line); rows of unequal length are padded.

    Raises InputError where a line lacks what another has, or where the file holds texts and no ids.
    """
    lines = content.decode("utf-8-sig").splitlines()
    entries = [json.loads(line) for line in lines if line.strip()]
    entries = [{"tokens": entry} if isinstance(entry, list) else entry for entry in entries]
    if not all(isinstance(entry, dict) for entry in entries):
        raise InputError("expected an object or a list of ids a line")
    known = (*SAID, *PROMPTS, *GAPS, *TOPS)
    names = {name for entry in entries for name in entry if name in known}
    _check_ids(sorted({name for entry in entries for name in entry}))
    absent = [n for n, entry in enumerate(entries, 1) for name in names if name not in entry]
    if absent:
        raise InputError(f"line {absent[0]}: lacks one of {', '.join(sorted(names))}")
    return {name: _column(name, [entry[name] for entry in entries]) for name in names}


def _column(name: str, rows: list[Any]) -> Any:
    if name in TOPS:
        fill = ENDED if name == "top_ids" else float("nan")
        depth = max((len(place) for row in rows for place in row), default=0)
        rows = [[[*place, *[fill] * (depth - len(place))] for place in row] for row in rows]
        return [[[_number(v) for v in place] for place in row] for row in padded(rows, [fill] * depth)]  # type: ignore[arg-type]
    return [[_number(v) for v in row] for row in padded(rows, float("nan") if name in GAPS else ENDED)]


def _number(value: Any) -> Any:
    return float("nan") if value is None else value


def _check_ids(names: Sequence[str]) -> None:
    """Raises InputError for a file whose columns hold texts alone, or nothing that is known."""
    if set(names) & set(SAID):
        return
    texts = [name for name in names if name in TEXTS]
    what = f"it holds {', '.join(names) or 'nothing'}"
    if texts:
        raise InputError(
            f"{what}: text alone cannot be compared, since a tokenizer may cut it elsewhere; write the ids that the "
            "engine said, as token_ids"
        )
    raise InputError(f"{what}, expected one of {', '.join(SAID)}")


def read_csv(content: bytes) -> dict[str, Any]:
    """Tokens of a row a prompt; of a place a row (prompt, position, token); or of lists in a named column."""
    lines = content.decode("utf-8-sig")
    first = lines.partition("\n")[0]
    between = next((c for c in ",;\t" if c in first), ",")
    csv.field_size_limit(2**31 - 1)
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(lines), delimiter=between)]
    rows = [row for row in rows if any(row)]
    if not rows:
        raise InputError("it is empty")
    head = [cell.lower() for cell in rows[0]]
    columns = {place: next((head.index(n) for n in names if n in head), None) for place, names in PLACES.items()}
    if all(at is not None for at in columns.values()):
        return _places(rows[1:], columns, head)  # type: ignore[arg-type]
    if set(head) & {*SAID, *TEXTS}:
        _check_ids(head)
        return _lists(rows[1:], head)
    return {"tokens": _wide(rows)}


def _lists(rows: list[list[str]], head: list[str]) -> dict[str, Any]:
    """Cells such as "[3, 4]" or "3 4" in the columns that hold ids."""
    found = {}
    for name in (n for n in head if n in (*SAID, *PROMPTS)):
        cells = [row[head.index(name)].strip("[]()").replace(",", " ").split() for row in rows]
        found[name] = padded([[int(cell) for cell in row] for row in cells], ENDED)
    return found


def _wide(rows: list[list[str]]) -> list[list[int]]:
    """A row a prompt; a heading and empty cells at a row's end are no tokens."""
    counts = [str(i) for i in range(len(rows[0]))]
    headings = (counts, ["", *counts[:-1]])
    if not any(_is_number(cell) for cell in rows[0]) or (rows[0] in headings and len(counts) > 1):
        rows = rows[1:]
    while rows and all(not row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    firsts = [row[0] for row in rows]
    if len(rows) >= LEAST_INDEX and firsts in ([str(i + start) for i in range(len(rows))] for start in (0, 1)):
        raise InputError(
            f"its first column counts {firsts[0]}, {firsts[1]}, {firsts[2]}, ...: an index, no tokens; save the file "
            "without it"
        )
    return padded([[_cell(cell) for cell in row] for row in rows], ENDED)


def _is_number(cell: str) -> bool:
    return cell.lstrip("-").replace(".", "", 1).isdigit()


def _cell(cell: str) -> int:
    """A token; spreadsheets write 7.0 for 7 where a column has gaps, and nothing past a row's end."""
    if not cell or cell.lower() == "nan":
        return ENDED
    value = float(cell) if "." in cell else int(cell)
    if value != int(value):
        raise InputError(f"{cell} is no token id")
    return int(value)


def _places(rows: list[list[str]], at: dict[str, int], head: list[str]) -> dict[str, Any]:
    places = [(int(r[at["prompt"]]), int(r[at["position"]]), _cell(r[at["token"]])) for r in rows]
    if not places:
        raise InputError("it has a heading and no row")
    prompts, positions = {n for n, _, _ in places}, {t for _, t, _ in places}
    for name, there in (("prompt", prompts), ("position", positions)):
        if there != set(range(len(there))):
            missing = next(i for i in range(max(there) + 2) if i not in there)
            raise InputError(
                f"it has no {name} {missing}; they count from 0 without a gap, here {min(there)} to {max(there)}"
            )
    if len({(n, t) for n, t, _ in places}) < len(places):
        raise InputError(f"it has {len(places)} rows, and some name the same prompt and position")
    shape = (len(prompts), len(positions))
    tokens, gaps = np.full(shape, ENDED, np.int64), np.full(shape, np.nan)
    for row, (n, t, token) in zip(rows, places, strict=True):
        tokens[n, t] = token
        if "gap_nats" in head and row[head.index("gap_nats")]:
            gaps[n, t] = float(row[head.index("gap_nats")])
    return {"tokens": tokens} | ({"gap_nats": gaps} if "gap_nats" in head else {})
