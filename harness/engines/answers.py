"""Answers of a remote engine as the arrays of the protocol: what was not said stays unknown."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.engines.completion import Answer, IdOf, Ranked, entries_of, only_choice, rank
from harness.engines.protocol import Generation, Prompts, Scored
from variants.errors import EngineError


def generation_of(answers: Sequence[Answer], prompts: Prompts, max_tokens: int, *, top_k: int) -> Generation:
    """One row an answer, -1 after its end. Times are NaN and () unless every answer was watched token by token."""
    shape = (len(answers), max_tokens)
    tokens, gaps = np.full(shape, -1, np.int32), np.full(shape, np.nan)
    finite = np.ones(shape, bool)
    known = bool(top_k) and all(a.ranked and all(a.ranked) for a in answers)
    top_ids, top_logprobs = np.full((*shape, top_k), -1, np.int32), np.full((*shape, top_k), np.nan)
    for n, answer in enumerate(answers):
        said = len(answer.tokens)
        tokens[n, :said] = answer.tokens
        gaps[n, : len(answer.gaps)] = [np.nan if g is None else g for g in answer.gaps]
        for t, row in enumerate(answer.ranked):
            finite[n, t] = not any(np.isnan(v) for _, v in row)
            _put(top_ids[n, t], top_logprobs[n, t], row)
    timed = all(len(a.seconds) == len(a.tokens) for a in answers)
    return Generation(
        tokens=tokens,
        finite=finite,
        gaps=gaps,
        prefill_s=np.array([a.seconds[0] if timed else np.nan for a in answers]),
        prefill_tokens=np.array([len(p) for p in prompts]),
        decode_s=tuple(np.maximum(np.diff(a.seconds), 1e-9) for a in answers) if timed else (),
        finish=tuple(a.finish for a in answers),
        prompt_ids=[a.prompt_ids for a in answers if a.prompt_ids] if all(a.prompt_ids for a in answers) else None,
        top_ids=top_ids if known else None,
        top_logprobs=top_logprobs if known else None,
        sampling=dict(next((a.settings for a in answers if a.settings), {})),
        notes=tuple(dict.fromkeys(note for a in answers for note in a.notes)),
    )


def _put(ids: np.ndarray, values: np.ndarray, row: Ranked) -> None:
    kept = row[: len(ids)]
    ids[: len(kept)], values[: len(kept)] = [i for i, _ in kept], [v for _, v in kept]


def prompt_scores(rows: Sequence[Sequence[Mapping[int, float]]], continuations: Prompts, top_k: int) -> Scored:
    """Maps (id -> logprob) of every forced token as `Scored`, forced in a single pass."""
    shape = (len(rows), max(len(c) for c in continuations))
    token_logprobs, finite = np.full(shape, np.nan), np.ones(shape, bool)
    top_ids, top_logprobs = np.full((*shape, top_k), -1, np.int32), np.full((*shape, top_k), np.nan)
    for n, (row, forced) in enumerate(zip(rows, continuations, strict=True)):
        for t, (found, token) in enumerate(zip(row, forced, strict=True)):
            token_logprobs[n, t] = found.get(int(token), np.nan)
            finite[n, t] = not any(np.isnan(v) for v in found.values())
            _put(top_ids[n, t], top_logprobs[n, t], rank(found.items()))
    return Scored(
        token_logprobs=token_logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finite=finite,
        forced="single_pass",
    )


def answers_of_prompt(
    body: Mapping[str, Any], length: int, forced: int, id_of: IdOf | None, where: str
) -> list[dict[int, float]]:
    """(id -> logprob) of the last `forced` of `length` prompt ids: vLLM's prompt_logprobs, or an echo's logprobs.

    Raises EngineError where the server gives none.
    """
    choice = only_choice(body, where)
    given = choice.get("prompt_logprobs")
    if isinstance(given, list):
        rows = [{int(i): float(e["logprob"]) for i, e in (row or {}).items()} for row in given]
    else:
        logprobs = choice.get("logprobs") or {}
        rows = [dict(entries_of(row or {}, id_of, False)[0]) for row in logprobs.get("top_logprobs") or []]
    if len(rows) < length:
        raise EngineError(f"{where}: logprobs for {len(rows)} of {length} prompt ids; the server does not echo them")
    return rows[length - forced : length]
