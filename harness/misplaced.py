"""Tokens that are right and lie in the wrong place: shifted in their rows, rows in another order, the prompt echoed.

A file of tokens does not say how its writer counted. What is found here is an input mismatch and no arithmetic: only a
reading that explains most tokens, where the plain one explains at most a third as many, is told.
"""

import numpy as np

from harness.golden_data import ENDED, Golden

MOST = 0.5  # share of tokens that agree under another reading
TIMES = 3  # as many as under the plain one
FEWEST = 8  # tokens compared
ROWS = 3  # at least: a lone row that loops may be out of step by a single wrong token
SHIFTS = (1, -1, 2, -2, 3, -3)


def misplaced(golden: Golden, tokens: np.ndarray) -> str | None:
    """What a candidate's tokens [N, T] are instead of the answers to the golden's prompts; None where nothing fits."""
    reference = golden.tokens[0]
    if (echoed := _echoed(golden, tokens)) or len(reference) < ROWS:
        return echoed
    plain = _share(reference, tokens)
    return _shifted(reference, tokens, plain) or _shuffled(reference, tokens, plain)


def _share(reference: np.ndarray, tokens: np.ndarray) -> float:
    """Share of the places where both have a token that agree; 0 where these are too few to tell."""
    both = (reference != ENDED) & (tokens != ENDED)
    return float((reference == tokens)[both].mean()) if both.sum() >= FEWEST else 0.0


def _fits(share: float, plain: float) -> bool:
    return share >= MOST and share >= TIMES * plain


def _echoed(golden: Golden, tokens: np.ndarray) -> str | None:
    """Every row begins with its own prompt, and no row of the golden does; a BOS may be left out."""
    for skip in (0, 1):
        heads = [np.array(p[skip : skip + tokens.shape[1]]) for p in golden.prompts]
        if sum(map(len, heads)) < FEWEST or not all(map(len, heads)):
            continue
        if all(np.array_equal(row[: len(h)], h) for row, h in zip(tokens, heads, strict=True)):
            same = sum(np.array_equal(row[: len(h)], h) for row, h in zip(golden.tokens[0], heads, strict=True))
            return None if same else "each row begins with its prompt: leave the prompt out of the tokens"
    return None


def _shifted(reference: np.ndarray, tokens: np.ndarray, plain: float) -> str | None:
    t = reference.shape[1]
    for by in (s for s in SHIFTS if abs(s) < t):
        own = slice(max(-by, 0), t - max(by, 0))
        theirs = slice(max(by, 0), t - max(-by, 0))
        share = _share(reference[:, theirs], tokens[:, own])
        if _fits(share, plain):
            how = f"{by} too early: the first of each row are left out" if by > 0 else f"{-by} too late"
            return f"{share:.0%} of the tokens are the golden's, {how}"
    return None


def _shuffled(reference: np.ndarray, tokens: np.ndarray, plain: float) -> str | None:
    """Each row fits another prompt's answer, and no two the same."""
    both = (reference[None] != ENDED) & (tokens[:, None] != ENDED)
    equal = ((reference[None] == tokens[:, None]) & both).sum(-1)  # [row, prompt]
    best = equal.argmax(-1)
    if len(set(best.tolist())) < len(best):
        return None
    share = _share(reference[best], tokens)
    if not _fits(share, plain):
        return None
    row = int(np.flatnonzero(best != np.arange(len(best)))[0])
    return f"rows are in another order: row {row} answers prompt {best[row]}; record prompt_ids with the tokens"
