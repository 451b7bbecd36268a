"""A finished run in one file: tokens, and whatever else was kept with them.

`.npy` int [N, T]; `.i32` raw little-endian int32, N rows of equal length; `.csv` a row a prompt, or columns prompt,
position, token, or a column of lists; `.jsonl` an object a prompt; `.safetensors` and `.npz` arrays by name. Rows that
ended early are padded with -1. Beside `tokens` (or another name in `token_tables.SAID`) a file that has names may hold:
prompt_ids; gap_nats [N, T], the reference teacher-forced on these tokens, inf for outside its list, NaN for unknown;
top_ids and top_logprobs [N, T, k], ranked.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from harness.golden_data import ENDED, as_ids, check_ends
from harness.token_tables import PROMPTS, SAID, read_csv, read_jsonl
from variants.errors import InputError

MOST = 1e-3  # over 1, of a sum of probabilities: a bfloat16 logprob is off by as much


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
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # each format's reader raises what it likes
        line = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
        if "Object arrays" in line:
            line = "it holds Python objects, such as rows of unequal length: pad them with -1 and save int32"
        raise InputError(f"{path}: damaged or not a {path.suffix} of tokens ({line})") from error
    found = next((arrays[name] for name in SAID if name in arrays), None)
    if found is None:
        raise InputError(f"{path}: holds {', '.join(arrays) or 'nothing'}, expected one of {', '.join(SAID)}")
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
    _check_top(run, path)
    return run


def _check_top(run: TokenRun, path: Path) -> None:
    """Raises InputError where the ranked lists are no natural logprobs of the tokens that they name."""
    ids, values = run.top_ids, run.top_logprobs
    if ids is None and values is None:
        return
    if ids is None or values is None or ids.shape != values.shape or ids.ndim != 3:
        shapes = [None if a is None else list(a.shape) for a in (ids, values)]
        raise InputError(f"{path}: top_ids and top_logprobs come together, in one shape [N, T, k]; got {shapes}")
    there = (run.tokens != ENDED)[..., None] & (ids != ENDED) & np.isfinite(values)
    if (values[there] > 0).any():
        raise InputError(
            f"{path}: top_logprobs hold {values[there].max():g}, above 0: probabilities or logits, no logprobs"
        )
    total = np.where(there, np.exp(np.where(there, values, 0.0)), 0.0).sum(-1)
    if total.max() > 1 + MOST:
        raise InputError(
            f"{path}: at a place the probabilities of top_logprobs sum to {total.max():.4g}: no natural logprobs "
            "(log10, or logits?)"
        )


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


_READERS: dict[str, Callable[[bytes], dict[str, Any]]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".i32": _i32,
    ".csv": read_csv,
    ".jsonl": read_jsonl,
    ".safetensors": _safetensors,
}
