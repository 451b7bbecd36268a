"""Where rows of recorded tokens end: padding after an end-of-sequence token told apart from tokens that were said."""

from collections.abc import Collection

import numpy as np

from harness.golden_data import ENDED, Golden

FEWEST = 3  # of the same id at the end of a lone row; of several rows two are enough


def end_ids(golden: Golden) -> frozenset[int]:
    """The ids that rows of a golden end on, of those that nothing ever follows: its end-of-sequence ids."""
    rows = golden.tokens.reshape(-1, golden.tokens.shape[-1])
    followed = set(np.unique(rows[:, :-1][rows[:, 1:] != ENDED]).tolist())
    lengths = (rows != ENDED).sum(-1)
    last = {int(row[n - 1]) for row, n in zip(rows, lengths, strict=True) if 0 < n < len(row)}
    return frozenset(last - followed)


def cut_after(tokens: np.ndarray, eos: int) -> np.ndarray:
    """Tokens [..., T] with -1 after the first `eos` of each row."""
    past = np.logical_or.accumulate(tokens == eos, axis=-1)
    past = np.concatenate([np.zeros_like(past[..., :1]), past[..., :-1]], -1)
    return np.where(past, ENDED, tokens)


def without_padding(tokens: np.ndarray, ends: Collection[int]) -> tuple[np.ndarray, tuple[int, ...]]:
    """A candidate's tokens [N, T] with -1 for the padding after an end-of-sequence id, and the rows that had any.

    Padding is one id, the same in every such row, from the end to the last place. Anything else was said after the
    end: then all rows stay as they are.
    """
    rows = {n: int(np.flatnonzero(here)[0]) + 1 for n, here in enumerate(np.isin(tokens, list(ends))) if here.any()}
    tails = {n: tokens[n, start:] for n, start in rows.items() if (tokens[n, start:] != ENDED).any()}
    fills = {int(i) for tail in tails.values() for i in np.unique(tail)}
    eos = {int(tokens[n, rows[n] - 1]) for n in tails}
    if not tails or not (len(fills) == 1 or fills == eos):
        return tokens, ()
    out = tokens.copy()
    for n in tails:
        out[n, rows[n] :] = ENDED
    return out, tuple(tails)


def repeated_end(tokens: np.ndarray) -> tuple[int, tuple[int, ...]] | None:
    """An id that looks like padding of rows [N, T]: it ends rows, several times over, and nothing ever follows it."""
    last = {int(i) for i in np.unique(tokens[:, -1])} - {ENDED}
    for found in sorted(last):
        inside = tokens == found
        if (inside[:, :-1] & (tokens[:, 1:] != found)).any():
            continue
        counts = inside.sum(-1)
        rows = tuple(int(n) for n in np.flatnonzero(counts > 1))
        if len(rows) > 1 or (rows and counts.max() >= FEWEST):
            return found, rows
    return None
