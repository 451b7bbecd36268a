"""What is read off rows of logits: the greedy choice, its gap and the ranked logprobs, all in float64."""

from typing import NamedTuple

import numpy as np

from harness.engines.protocol import Prompts, Scored
from variants.errors import UsageError


class Choice(NamedTuple):
    """A greedy token, its lead over the second in nats (NaN where unknown), and whether every logit was finite."""

    token: int
    gap_nats: float
    finite: bool


def greedy(row: np.ndarray) -> Choice:
    """The lowest id among the largest logits of `row` [V].

    A row that holds a NaN or an infinity is flagged; its token is the lowest id of the largest number in it (0 where
    there is none) and its gap is unknown.
    """
    row = row.astype(np.float64)
    if not np.isfinite(row).all():
        return Choice(int(np.argmax(np.where(np.isnan(row), -np.inf, row))), np.nan, False)
    token = int(np.argmax(row))
    first = row[token]
    row[token] = -np.inf
    return Choice(token, float(first - row.max()) if row.size > 1 else np.nan, True)


def log_softmax(row: np.ndarray) -> np.ndarray:
    """Natural log-softmax of `row` [V], summed in float64; all NaN where a logit is not finite."""
    row = row.astype(np.float64)
    if not np.isfinite(row).all():
        return np.full_like(row, np.nan)
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def ranked(logprobs: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The `k` largest of `logprobs` [V], ids int64 [k] and values [k] in decreasing order, ties to the lower id.

    Ids are -1 and values NaN where the row holds a NaN. Raises UsageError unless 1 <= k <= V.
    """
    if not 1 <= k <= logprobs.size:
        raise UsageError(f"top_k: got {k}, expected 1 to {logprobs.size} (the vocabulary)")
    if np.isnan(logprobs).any():
        return np.full(k, -1), np.full(k, np.nan)
    least = np.partition(logprobs, -k)[-k]
    candidates = np.flatnonzero(logprobs >= least)  # ids ascending, so that a stable sort keeps the lower first
    ids = candidates[np.argsort(-logprobs[candidates], kind="stable")[:k]]
    return ids, logprobs[ids]


class ScoreTable:
    """The arrays of `Scored`, filled row by row of logits; past a row's end ids are -1 and values NaN."""

    def __init__(
        self, continuations: Prompts, vocab_size: int, *, top_k: int, logits_dtype: type[np.floating] | None = None
    ) -> None:
        """logits_dtype: storage of the full logits, None to drop them. Raises UsageError unless 1 <= top_k <= V."""
        if not 1 <= top_k <= vocab_size:
            raise UsageError(f"top_k: got {top_k}, expected 1 to {vocab_size} (the vocabulary)")
        shape = (len(continuations), max(map(len, continuations)))
        self._continuations = continuations
        self._token_logprobs = np.full(shape, np.nan)
        self._top_ids = np.full((*shape, top_k), -1, dtype=np.int32)
        self._top_logprobs = np.full((*shape, top_k), np.nan)
        self._finite = np.ones(shape, dtype=bool)
        self._logits = None if logits_dtype is None else np.full((*shape, vocab_size), np.nan, dtype=logits_dtype)

    def put(self, index: int, step: int, logits: np.ndarray) -> None:
        """Enter `logits` [V], those that token `step` of continuation `index` was forced against."""
        logprobs = log_softmax(logits)
        self._token_logprobs[index, step] = logprobs[self._continuations[index][step]]
        top_k = self._top_ids.shape[-1]
        self._top_ids[index, step], self._top_logprobs[index, step] = ranked(logprobs, top_k)
        self._finite[index, step] = np.isfinite(logits).all()
        if self._logits is not None:
            self._logits[index, step] = logits

    def scored(self, forced: str) -> Scored:
        return Scored(
            token_logprobs=self._token_logprobs,
            top_ids=self._top_ids,
            top_logprobs=self._top_logprobs,
            finite=self._finite,
            forced=forced,
            logits=self._logits,
        )
