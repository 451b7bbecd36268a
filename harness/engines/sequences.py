"""Greedy decoding and teacher forcing over any library that runs one sequence with a cache, a pass at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from harness.engines.logits import ScoreTable, greedy
from harness.engines.protocol import Generation, Prompts, Scored
from variants.errors import EngineError, InputError, UsageError


class CachedSequence(Protocol):
    """A sequence and its cache; `new_shape`: the last pass was the first of its size in this engine."""

    new_shape: bool

    def advance(self, ids: list[int]) -> np.ndarray:
        """Run some ids; float64 [V], the logits after the last of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """How a library makes sequences. name: for messages. around: what each prompt runs inside."""

    name: str
    make: Callable[[], CachedSequence]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class _Row:
    """One greedy row while it grows; past its end tokens are -1 and gaps NaN."""

    tokens: np.ndarray
    gaps: np.ndarray
    finite: np.ndarray
    seconds: list[float] = field(default_factory=list)
    first_seen: list[int] = field(default_factory=list)


def decode_rows(sequences: Sequences, prompts: Prompts, max_tokens: int, *, eos: int | None = None) -> Generation:
    """Greedy tokens of each prompt, lowest id on ties; a row ends after `eos`, or never where it is None.

    A pass counts as first seen when none of as many new tokens over as many in all had run. Raises EngineError where
    the library fails.
    """
    if max_tokens < 1:
        raise UsageError(f"max_tokens: got {max_tokens}, expected 1 or more")
    rows = [_row(sequences, index, prompt, max_tokens, eos) for index, prompt in enumerate(prompts)]
    return Generation(
        tokens=np.stack([row.tokens for row in rows]),
        finite=np.stack([row.finite for row in rows]),
        gaps=np.stack([row.gaps for row in rows]),
        prefill_s=np.array([row.seconds[0] for row in rows]),
        prefill_tokens=np.array([len(prompt) for prompt in prompts]),
        decode_s=tuple(np.array(row.seconds[1:]) for row in rows),
        first_seen=tuple((index, step) for index, row in enumerate(rows) for step in row.first_seen),
    )


def _row(sequences: Sequences, index: int, prompt: Sequence[int], max_tokens: int, eos: int | None) -> _Row:
    row = _Row(np.full(max_tokens, -1, np.int32), np.full(max_tokens, np.nan), np.ones(max_tokens, bool))
    sequence, ids = sequences.make(), list(prompt)
    with as_engine_error(sequences, f"prompt {index}"):
        for step in range(max_tokens):
            begun = time.perf_counter()
            choice = greedy(sequence.advance(ids))
            row.seconds.append(time.perf_counter() - begun)
            row.tokens[step], row.gaps[step], row.finite[step] = choice
            if sequence.new_shape:
                row.first_seen.append(step - 1)
            if choice.token == eos:
                break
            ids = [choice.token]
    return row


def forced_scores(
    sequences: Sequences,
    prompts: Prompts,
    continuations: Prompts,
    *,
    vocab: int,
    top_k: int,
    logits_dtype: type[np.floating] | None = None,
) -> Scored:
    """Each prompt prefilled, then every token forced, one a pass. logits_dtype: of full logits, None to drop them."""
    table = ScoreTable(continuations, vocab, top_k=top_k, logits_dtype=logits_dtype)
    for index, (prompt, tokens) in enumerate(zip(prompts, continuations, strict=True)):
        with as_engine_error(sequences, f"prompt {index}"):
            for step, row in enumerate(forced_logits(sequences.make(), prompt, tokens)):
                table.put(index, step, row)
    return table.scored("decode")


def forced_logits(sequence: CachedSequence, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
    """float64 [V], those that each of `tokens` is forced against."""
    yield sequence.advance(list(prompt))
    for token in tokens[:-1]:
        yield sequence.advance([token])


def check_rows(rows: Prompts, vocab: int, *, what: str = "prompt") -> None:
    """Raises InputError for no rows, an empty one, or an id that the model does not have."""
    if not len(rows):
        raise InputError(f"got no {what}s, expected one or more")
    for index, ids in enumerate(rows):
        if not len(ids):
            raise InputError(f"{what} {index} is empty; expected one token or more")
        if not all(0 <= token < vocab for token in ids):
            raise InputError(f"{what} {index} holds an id outside 0..{vocab - 1}: another tokenizer made it")


def check_pairs(prompts: Prompts, continuations: Prompts, vocab: int) -> None:
    """`check_rows` of both; raises UsageError where they are not as many."""
    if len(prompts) != len(continuations):
        raise UsageError(f"score: got {len(continuations)} continuations for {len(prompts)} prompts")
    check_rows(prompts, vocab)
    check_rows(continuations, vocab, what="continuation")


@contextmanager
def as_engine_error(sequences: Sequences, where: str) -> Iterator[None]:
    """What the library raises while it runs becomes one line that names the prompt."""
    try:
        with sequences.around():
            yield
    except (InputError, UsageError, EngineError):
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EngineError(f"{sequences.name} failed in {where}: {line}") from error
