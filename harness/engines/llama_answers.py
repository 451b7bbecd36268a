"""What llama.cpp's native `/completion` is asked and what it answers, as the arrays of the protocol."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.engines.protocol import Generation, Prompts
from variants.errors import EngineError, InputError

# Every setting that a server may have another default for is sent.
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "samplers": ["temperature"],
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "logit_bias": [],
    "grammar": "",
    "return_tokens": True,
}
_ID = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True, kw_only=True)
class LlamaAnswer:
    """One finished request. ranked: (id, logprob) in decreasing order, ties to the lower id, one list a token.

    prompt_ids: where the server's vocabulary writes ids as text. prefill_s, step_s: seconds of the prompt, and of a
    later token on the mean. prefilled: prompt tokens that it really ran, the others came from its cache.
    """

    tokens: tuple[int, ...]
    ranked: tuple[tuple[tuple[int, float], ...], ...]
    finish: str
    prompt_ids: tuple[int, ...] | None
    prefilled: int
    prefill_s: float
    step_s: float
    settings: Mapping[str, Any]


def request(prompt: Sequence[int], tokens: int, *, top_k: int, cached: bool = False, slot: int = -1) -> dict[str, Any]:
    """Greedy tokens after `prompt`. cached: a prefix that the slot holds already is not run again."""
    body = {"prompt": [int(i) for i in prompt], "n_predict": tokens, "n_probs": top_k, **GREEDY}
    return body | {"cache_prompt": cached} | ({} if slot < 0 else {"id_slot": slot})


def read(body: Mapping[str, Any], prompt: Sequence[int], where: str) -> LlamaAnswer:
    """Raises EngineError for an answer that lacks what it needs, InputError where other prompt ids were run."""
    try:
        tokens = tuple(int(i) for i in body["tokens"])
        rows = [_ranked(entry["top_logprobs"]) for entry in body.get("completion_probabilities", ())]
        timings, settings = body["timings"], dict(body["generation_settings"])
        evaluated, prefilled = int(body["tokens_evaluated"]), int(timings["prompt_n"])
        seconds = float(timings["prompt_ms"]) / 1e3, float(timings["predicted_ms"]) / 1e3
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{where}: the server's answer lacks {error}; it is no llama.cpp /completion") from error
    if evaluated != len(prompt):
        more = "it adds a BOS of its own" if evaluated == len(prompt) + 1 else "it cuts prompts"
        raise InputError(f"input mismatch: {where}: the server ran {evaluated} of {len(prompt)} prompt ids: {more}")
    if rows and len(rows) != len(tokens):
        raise EngineError(
            f"{where}: logprobs of {len(rows)} of {len(tokens)} tokens: the server held back tokens that are no whole "
            "character; convert with vocabulary=ids"
        )
    return LlamaAnswer(
        tokens=tokens,
        ranked=tuple(rows),
        finish={"limit": "length", "eos": "stop", "word": "stop"}.get(str(body.get("stop_type")), "unsaid"),
        prompt_ids=_echo(body.get("prompt")),
        prefilled=prefilled,
        prefill_s=seconds[0],
        step_s=seconds[1] / max(1, len(tokens) - 1),
        settings=settings,
    )


def _ranked(entries: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    pairs = [(int(e["id"]), math.nan if e["logprob"] is None else float(e["logprob"])) for e in entries]
    return tuple(sorted(pairs, key=lambda e: (-math.inf if math.isnan(e[1]) else -e[1], e[0])))


def _echo(text: object) -> tuple[int, ...] | None:
    """The ids that a vocabulary of ids wrote out, None for any other text."""
    found = _ID.findall(str(text))
    return tuple(map(int, found)) if found and "".join(f"[{i}]" for i in found) == text else None


def generation_of(
    answers: Sequence[LlamaAnswer], prompts: Prompts, max_tokens: int, *, top_k: int, batch: int
) -> Generation:
    """One row an answer, -1 past its end; a later step's seconds are the server's mean over that row (or batch)."""
    shape = (len(answers), max_tokens)
    tokens, finite, gaps = np.full(shape, -1, np.int32), np.ones(shape, bool), np.full(shape, np.nan)
    ids, values = np.full((*shape, top_k), -1, np.int32), np.full((*shape, top_k), np.nan)
    for n, answer in enumerate(answers):
        tokens[n, : len(answer.tokens)] = answer.tokens
        for t, row in enumerate(answer.ranked):
            put(ids[n, t], values[n, t], row)
            finite[n, t] = bool(row) and all(math.isfinite(v) or v == -math.inf for _, v in row)
            gaps[n, t] = row[0][1] - row[1][1] if len(row) > 1 else np.nan
    groups = [answers[i : i + batch] for i in range(0, len(answers), batch)]
    echoed = [a.prompt_ids for a in answers if a.prompt_ids is not None]
    return Generation(
        tokens=tokens,
        finite=finite,
        gaps=gaps,
        prefill_s=np.array([a.prefill_s for a in answers]),
        prefill_tokens=np.array([len(p) for p in prompts]),
        decode_s=tuple(
            np.full(max(len(a.tokens) for a in group) - 1, max(a.step_s for a in group)) for group in groups
        ),
        batch=batch,
        finish=tuple(a.finish for a in answers),
        prompt_ids=echoed if len(echoed) == len(answers) else None,
        top_ids=ids if top_k else None,
        top_logprobs=values if top_k else None,
        sampling=dict(answers[0].settings),
    )


def put(ids: np.ndarray, values: np.ndarray, row: Sequence[tuple[int, float]]) -> None:
    """Enter the first of a ranked list into `ids` and `values` [k]."""
    kept = row[: len(ids)]
    ids[: len(kept)], values[: len(kept)] = [i for i, _ in kept], [v for _, v in kept]
