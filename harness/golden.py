"""Goldens: what a reference engine said, found by name or path, shown and verified."""

from pathlib import Path
from typing import Any

import numpy as np

from harness.gaps import exact_ties, top2_gaps
from harness.golden_data import ENDED, Bar, Golden, Recorded
from harness.golden_folder import export_golden, import_folder, is_token_folder
from harness.golden_io import read_golden, write_golden
from harness.nearest import did_you_mean
from harness.sampling import greedy_problems
from variants.errors import InputError

__all__ = [
    "ENDED",
    "Bar",
    "Golden",
    "Recorded",
    "export_golden",
    "golden_names",
    "import_folder",
    "load_golden",
    "show_golden",
    "top_problems",
    "verify_golden",
    "write_golden",
]

SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "goldens"


def load_golden(name_or_path: str | Path) -> Golden:
    """A shipped golden by name ("gate", "wide"), or one at NAME.json, NAME.npz or a folder of token files.

    Raises InputError when there is none, more than one, or when its files contradict each other.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return import_folder(path) if is_token_folder(path) else read_golden(_only_golden_in(path))
    if path.suffix in (".json", ".npz"):
        return read_golden(path)
    found = sorted(SHIPPED.glob(f"*/{path.name}.json"))
    if len(path.parts) != 1 or not found:
        names = golden_names()
        expected = f"a shipped name ({', '.join(names) or 'none'}), a NAME.json or a folder"
        near = did_you_mean(path.name, names) if len(path.parts) == 1 else ""
        raise InputError(f"no golden {str(name_or_path)!r}; expected {expected}{near}")
    if len(found) > 1:
        raise InputError(f"golden {path.name!r} is ambiguous: {', '.join(p.parent.name for p in found)}; give the path")
    return read_golden(found[0])


def golden_names() -> tuple[str, ...]:
    """Names of the shipped goldens."""
    return tuple(sorted({p.stem for p in SHIPPED.glob("*/*.json") if p.with_suffix(".npz").is_file()}))


def show_golden(golden: Golden) -> dict[str, Any]:
    """What a golden is and can demand: sizes, hashes, bar, ties, smallest gap, sampling, provenance; JSON-plain."""
    k, n, t = golden.tokens.shape
    gaps = top2_gaps(golden)
    apart = gaps[gaps > 0.0] if gaps is not None else np.empty(0)
    return {
        "name": golden.name,
        "path": str(golden.path) if golden.path else None,
        "hash": golden.hash,
        "battery_hash": golden.battery_hash,
        "bar": golden.bar.value,
        "runs": k,
        "prompts": n,
        "tokens_per_prompt": t,
        "tokens": int((golden.tokens[0] != ENDED).sum()),
        "ended_early": int((golden.tokens[0] == ENDED).any(axis=-1).sum()),
        "logprobs": golden.top_ids.shape[-1] if golden.top_ids is not None else 0,
        "exact_ties": exact_ties(golden),
        "smallest_gap_nats": float(apart.min()) if apart.size else None,
        "plain_greedy": golden.plain_greedy,
        "not_plain_greedy_because": greedy_problems(golden.sampling),
        "recorded_candidate": golden.recorded is not None,
        "sampling": dict(golden.sampling),
        "provenance": dict(golden.provenance),
    }


def verify_golden(path: str | Path) -> list[str]:
    """Everything that is wrong with a golden, one line each; empty when it can be trusted as far as it goes."""
    try:
        golden = load_golden(path)
    except InputError as error:
        return [str(error)]
    return [f"not plain greedy: {reason}" for reason in greedy_problems(golden.sampling)] + top_problems(golden)


def top_problems(golden: Golden) -> list[str]:
    """Where run 0 and its recorded top logprobs contradict each other, one line each; empty without logprobs."""
    if golden.top_ids is None or golden.top_logprobs is None:
        return []
    tokens, ids, values = golden.tokens[0], golden.top_ids, golden.top_logprobs
    there = tokens != ENDED
    tied = values == values[..., :1]
    lowest = np.where(tied, ids, np.iinfo(np.int32).max).min(axis=-1)
    # float32 log-softmax sums to 1 within its own rounding.
    total = np.exp(values.astype(np.float64)).sum(axis=-1)
    checks = {
        "logprob is NaN, infinite or above 0": ~(np.isfinite(values) & (values <= 0.0)).all(axis=-1),
        "top logprobs are not in decreasing order": (np.diff(values, axis=-1) > 0.0).any(axis=-1),
        "top probabilities sum to more than 1": total > 1.0 + 1e-5,
        "an id is listed twice": (np.diff(np.sort(ids, axis=-1), axis=-1) == 0).any(axis=-1),
        "token is not the lowest id among the highest logprobs": tokens != lowest,
    }
    return [_at(message, bad & there) for message, bad in checks.items() if (bad & there).any()]


def _at(message: str, bad: np.ndarray) -> str:
    prompt, position = (int(i) for i in np.argwhere(bad)[0])
    return f"{message}: {int(bad.sum())} positions, first at prompt {prompt}, position {position}"


def _only_golden_in(folder: Path) -> Path:
    found = sorted(p for p in folder.glob("*.json") if p.with_suffix(".npz").is_file())
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "none"
        raise InputError(f"{folder}: expected token files or one NAME.json with its NAME.npz, found {names}")
    return found[0]
