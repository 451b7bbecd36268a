"""A finished run in one file: tokens, and whatever else was kept with them.

`.npy` int [N, T]; `.i32` raw little-endian int32, N rows of equal length; `.csv` a row a prompt, or columns prompt,
position, token; `.jsonl` an object a prompt; `.safetensors` and `.npz` arrays by name. Rows that ended early are padded
with -1. Beside `tokens` (or token_ids, ids, output_ids) a file that has names may hold: prompt_ids; gap_nats [N, T],
the reference teacher-forced on these tokens, inf for outside its list, NaN for unknown; top_ids and top_logprobs
[N, T, k], ranked.
"""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from harness.golden_data import ENDED, as_ids, check_ends
from variants.errors import InputError

TOKENS = ("tokens", "token_ids", "ids", "output_ids", "our_ids")
PROMPTS = ("prompt_ids", "prompt_token_ids")


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRun:
    """tokens: int32 [N, T], or [N * T] of a file that does not say N. prompts: None where the file holds none."""

    name: str
    digest: str
    tokens: np.ndarray
    prompts: tuple[tuple[int, ...], ...] | None = None
    gap_nats: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def rows(self, count: int) -> np.ndarray:
        """Tokens [count, T]. Raises InputError where the file holds another number of rows."""
        if self.tokens.ndim == 2 and len(self.tokens) >= count:
            return self.tokens
        if self.tokens.ndim == 1 and self.tokens.size % count == 0:
            return self.tokens.reshape(count, -1)
        raise InputError(f"{self.name}: holds {self.tokens.size} tokens, which are not {count} rows")


def is_token_file(path: Path) -> bool:
    """Whether this is a file of tokens by its suffix (a NAME.json or NAME.npz with its other half is a golden)."""
    return path.suffix in _READERS and not (path.suffix == ".npz" and path.with_suffix(".json").is_file())


def read_run(path: str | Path) -> TokenRun:
    """The run in a file. Raises InputError, naming the file, for one that cannot be read or contradicts itself."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    try:
        arrays = _READERS[path.suffix](content)
    except InputError:
        raise
    except Exception as error:  # each format's reader raises what it likes
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{path}: damaged or not a {path.suffix} of tokens ({line})") from error
    found = next((arrays[name] for name in TOKENS if name in arrays), None)
    if found is None:
        raise InputError(f"{path}: holds {', '.join(arrays) or 'nothing'}, expected one of {', '.join(TOKENS)}")
    tokens = as_ids(np.asarray(found), f"{path}: tokens")
    if tokens.ndim not in (1, 2) or not tokens.size:
        raise InputError(f"{path}: tokens have shape {list(tokens.shape)}, expected [prompts, tokens]")
    if tokens.ndim == 2:
        check_ends(tokens, f"{path}: prompt")
    run = TokenRun(
        name=str(path),
        digest=sha256(content).hexdigest(),
        tokens=tokens,
        prompts=_prompts(arrays, len(tokens), path),
        gap_nats=_beside(arrays, "gap_nats", tokens, path),
        top_ids=_beside(arrays, "top_ids", tokens, path),
        top_logprobs=_beside(arrays, "top_logprobs", tokens, path),
    )
    if run.gap_nats is not None and (run.gap_nats < 0).any():
        raise InputError(f"{path}: gap_nats below 0; a gap is the reference's best logprob minus this token's")
    return run


def _beside(arrays: Mapping[str, Any], name: str, tokens: np.ndarray, path: Path) -> np.ndarray | None:
    if arrays.get(name) is None:
        return None
    values = np.asarray(arrays[name])
    if values.shape[:2] != tokens.shape or (name == "gap_nats" and values.ndim != 2):
        raise InputError(f"{path}: {name} have shape {list(values.shape)}, the tokens {list(tokens.shape)}")
    return as_ids(values, f"{path}: {name}") if name == "top_ids" else values.astype(np.float64)


def _prompts(arrays: Mapping[str, Any], count: int, path: Path) -> tuple[tuple[int, ...], ...] | None:
    given = next((arrays[name] for name in PROMPTS if arrays.get(name) is not None), None)
    if given is None:
        return None
    rows = tuple(tuple(int(i) for i in row if int(i) != ENDED) for row in given)
    if len(rows) != count or not all(rows):
        raise InputError(f"{path}: {len(rows)} prompts for {count} rows of tokens, or an empty one")
    return rows


def padded(rows: Sequence[Sequence[Any]], fill: float) -> list[list[Any]]:
    """Rows of one length."""
    longest = max((len(row) for row in rows), default=0)
    return [[*row, *[fill] * (longest - len(row))] for row in rows]


def _npy(content: bytes) -> dict[str, Any]:
    return {"tokens": np.load(io.BytesIO(content), allow_pickle=False)}


def _npz(content: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _i32(content: bytes) -> dict[str, Any]:
    return {"tokens": np.frombuffer(content, dtype="<i4")}


def _safetensors(content: bytes) -> dict[str, Any]:
    from safetensors.numpy import load

    return dict(load(content))


def _jsonl(content: bytes) -> dict[str, Any]:
    """Keys of the first object name the columns; rows of unequal length are padded."""
    entries = [json.loads(line) for line in content.decode("utf-8").splitlines() if line.strip()]
    names = {name for entry in entries for name in entry if name in (*TOKENS, *PROMPTS, "gap_nats")}
    absent = [n for n, entry in enumerate(entries, 1) for name in names if name not in entry]
    if absent:
        raise InputError(f"line {absent[0]}: lacks one of {', '.join(sorted(names))}")
    fills = dict.fromkeys((*TOKENS, *PROMPTS), ENDED) | {"gap_nats": float("nan")}
    columns = {name: [entry[name] for entry in entries] for name in names}
    return {
        name: [[float("nan") if v is None else v for v in row] for row in padded(rows, fills[name])]
        for name, rows in columns.items()
    }


def _csv(content: bytes) -> dict[str, Any]:
    rows = [row for row in csv.reader(io.StringIO(content.decode("utf-8"))) if row]
    head = [cell.strip() for cell in rows[0]]
    if not {"prompt", "position", "token"} <= set(head):
        return {"tokens": padded([[int(cell) for cell in row] for row in rows], ENDED)}
    at = {name: head.index(name) for name in ("prompt", "position", "token")}
    places = [(int(r[at["prompt"]]), int(r[at["position"]]), int(r[at["token"]])) for r in rows[1:]]
    shape = (max(n for n, _, _ in places) + 1, max(t for _, t, _ in places) + 1)
    tokens, gaps = np.full(shape, ENDED, np.int64), np.full(shape, np.nan)
    for row, (n, t, token) in zip(rows[1:], places, strict=True):
        tokens[n, t] = token
        if "gap_nats" in head and row[head.index("gap_nats")].strip():
            gaps[n, t] = float(row[head.index("gap_nats")])
    return {"tokens": tokens} | ({"gap_nats": gaps} if "gap_nats" in head else {})


_READERS: dict[str, Callable[[bytes], dict[str, Any]]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".i32": _i32,
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".safetensors": _safetensors,
}
