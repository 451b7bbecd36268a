"""Repeat loops: a greedy run that ends by saying the same tokens over and over."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.golden_data import ENDED

# Three times is a loop, twice is prose; under eight tokens a rhyme or an indent would count.
MIN_REPEATS = 3
MIN_LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The tail of a row from `start` on repeats every `period` tokens; `length` tokens take part."""

    start: int
    period: int
    length: int


@dataclass(frozen=True, kw_only=True)
class RowLoop:
    """A candidate's loop on one prompt, beside the golden's own on that prompt (None where it does not loop)."""

    prompt: int
    candidate: Loop
    golden: Loop | None

    def __str__(self) -> str:
        said = f"prompt {self.prompt}: repeats every {self.candidate.period} tokens from {self.candidate.start}"
        if self.golden is None:
            return f"{said}; the golden does not loop"
        return f"{said}; so does the golden, every {self.golden.period} from {self.golden.start}"


def find_loop(tokens: Sequence[int] | np.ndarray) -> Loop | None:
    """The loop of least period that a row [T] (cut at -1) ends in, from the first token that takes part.

    A loop holds at least MIN_REPEATS whole periods and MIN_LENGTH tokens.
    """
    row = np.asarray(tokens)
    ended = np.flatnonzero(row == ENDED)
    row = row[: ended[0]] if ended.size else row
    for period in range(1, len(row) // MIN_REPEATS + 1):
        broken = np.flatnonzero(row[period:] != row[:-period])
        start = int(broken[-1]) + 1 if broken.size else 0
        length = len(row) - start
        if length >= max(MIN_LENGTH, MIN_REPEATS * period):
            return Loop(start=start, period=period, length=length)
    return None


def find_loops(golden_tokens: np.ndarray, candidate_tokens: np.ndarray) -> tuple[RowLoop, ...]:
    """The candidate's loops, row by row of tokens [N, T], each with the golden's own."""
    assert golden_tokens.shape == candidate_tokens.shape
    loops = []
    for prompt, (golden, candidate) in enumerate(zip(golden_tokens, candidate_tokens, strict=True)):
        if (loop := find_loop(candidate)) is not None:
            loops.append(RowLoop(prompt=prompt, candidate=loop, golden=find_loop(golden)))
    return tuple(loops)
