"""Question before answer: is the candidate asked what the golden was asked, before any token is generated?

Whatever fails here is an input mismatch (InputError) and never a numerics verdict.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.engines.protocol import EngineInfo, Generation, Prompts
from harness.golden_data import ENDED, Golden
from harness.misplaced import misplaced
from harness.sampling import greedy_problems, normalize_sampling
from variants.errors import InputError


@dataclass(frozen=True, kw_only=True)
class PreGate:
    """What the pre-gate let pass with a remark. compare_text: False where the tokenizers differ, so ids alone count."""

    notes: tuple[str, ...]
    compare_text: bool


@dataclass(frozen=True, kw_only=True)
class TopGap:
    """The gap of a returned top list in nats, or why it is unknown and what it is at least."""

    nats: float | None
    at_least_nats: float | None = None
    note: str | None = None


def pregate(
    golden: Golden,
    info: EngineInfo,
    *,
    prompts: Prompts | None = None,
    vocab_size: int | None = None,
    bos_id: int | None = None,
) -> PreGate:
    """Checks sampling, prompt ids, vocabulary, tokenizer and model of a candidate against a golden.

    `prompts` are the ids that the candidate will really run (an engine that tokenizes text itself returns them); None
    where it is handed the golden's. Raises InputError ("input mismatch", "not plain greedy"); differences that leave
    ids comparable come back as notes.
    """
    check_plain_greedy(golden)
    if info.sampling and (reasons := greedy_problems(normalize_sampling(info.sampling))):
        raise InputError(f"engine {info.name}: not plain greedy ({'; '.join(reasons)}); set it to argmax alone")
    if prompts is not None:
        check_prompts(golden, prompts, bos_id=bos_id)
    if vocab_size is not None:
        check_vocabulary(golden, vocab_size)
    check_length(golden, info)
    tokenizer = _hash_note("tokenizer", golden.provenance.get("tokenizer_sha256"), info.tokenizer_sha256)
    kind = _class_note(golden.provenance.get("tokenizer_class"), info.tokenizer_class)
    other = tokenizer or kind
    model = _hash_note("model", golden.provenance.get("model_sha256"), info.model_sha256)
    notes = (f"{other}: ids alone are compared, text was ignored" if other else None, model)
    return PreGate(notes=tuple(n for n in notes if n), compare_text=other is None)


def check_plain_greedy(golden: Golden) -> None:
    """Raises InputError unless the golden's effective sampling settings are argmax and nothing else."""
    if reasons := greedy_problems(golden.sampling):
        raise InputError(
            f"golden {golden.name}: not plain greedy ({'; '.join(reasons)}); capture it at temperature 0 without "
            'penalties, or record "generation_config": "ignored" if the engine did not read that file'
        )


def check_answers(golden: Golden, info: EngineInfo, generation: Generation, *, stop_at_eos: bool) -> None:
    """Raises InputError where what came back shows that another question was answered, before anything is scored.

    The ids that the engine says it ran, the settings that it says it used, a row that ended where it had to go on,
    tokens that lie in another place, and a token that is not the first of its own ranked list (a penalty or a sampler
    that nobody asked for).
    """
    if generation.prompt_ids is not None:
        check_prompts(golden, generation.prompt_ids)
    if generation.sampling and (reasons := greedy_problems(normalize_sampling(generation.sampling))):
        raise InputError(f"engine {info.name}: not plain greedy ({'; '.join(reasons)}); set it to argmax alone")
    for n, row in enumerate(generation.tokens):
        if not (row == ENDED).any():
            continue
        why = generation.finish[n] if generation.finish else None
        said = int((row != ENDED).sum())
        if why == "length":
            raise InputError(
                f"input mismatch at prompt {n}: the engine ended at {said} of {len(row)} tokens by its own length "
                "limit; raise it"
            )
        if not stop_at_eos:
            raise InputError(
                f"input mismatch at prompt {n}: the engine ended after {said} of {len(row)} tokens ({why or 'unsaid'}) "
                f"where golden {golden.name} goes on past EOS; let it ignore EOS"
            )
    if why := misplaced(golden, generation.tokens):
        raise InputError(f"input mismatch: {why}")
    if (place := _not_first(generation)) is not None:
        raise InputError(
            f"engine {info.name}: not plain greedy (prompt {place[0]}, token {place[1]} is not the first of its own "
            "logprobs); a penalty or a sampler is on: set it to argmax alone"
        )


def _not_first(generation: Generation) -> tuple[int, int] | None:
    """The first place whose token has a lower logprob than the best in its own list, None where there is none."""
    if generation.top_ids is None or generation.top_logprobs is None:
        return None
    own = np.where(generation.top_ids == generation.tokens[..., None], generation.top_logprobs, -np.inf).max(-1)
    known = np.isfinite(generation.top_logprobs[..., 0]) & (generation.tokens != ENDED) & generation.finite
    below = np.argwhere(known & (own < generation.top_logprobs[..., 0]))
    return (int(below[0][0]), int(below[0][1])) if len(below) else None


def check_prompts(golden: Golden, prompts: Prompts, *, bos_id: int | None = None) -> None:
    """Raises InputError at the first prompt whose ids differ; `bos_id` unknown = the golden's own first id."""
    if len(prompts) != len(golden.prompts):
        raise InputError(
            f"input mismatch: the candidate has {len(prompts)} prompts, golden {golden.name} {len(golden.prompts)}"
        )
    for n, (expected, got) in enumerate(zip(golden.prompts, prompts, strict=True)):
        if why := prompt_mismatch(expected, got, bos_id=bos_id):
            raise InputError(f"input mismatch at prompt {n}: {why}; feed the golden's token ids")


def prompt_mismatch(expected: Sequence[int], got: Sequence[int], *, bos_id: int | None = None) -> str | None:
    """How a candidate's prompt ids differ from the golden's, in words; None where they are equal."""
    want, have = tuple(expected), tuple(got)
    if want == have:
        return None
    bos = want[0] if bos_id is None else bos_id
    if want[0] == bos and have == want[1:]:
        return f"candidate lacks BOS ({bos})"
    if have == (bos, *want):
        return f"double BOS ({bos})" if want[0] == bos else f"candidate adds a BOS ({bos}) that the golden lacks"
    if len(want) != len(have):
        return f"candidate has {len(have)} ids, the golden {len(want)}"
    first = next(i for i, (a, b) in enumerate(zip(want, have, strict=True)) if a != b)
    return f"candidate has id {have[first]} at {first}, the golden {want[first]}"


def check_length(golden: Golden, info: EngineInfo) -> None:
    """Raises InputError where a prompt and its answer do not fit the engine's greatest length."""
    longest = max(len(p) for p in golden.prompts) + golden.tokens.shape[2]
    if info.max_length is not None and longest > info.max_length:
        raise InputError(
            f"input mismatch: golden {golden.name} needs {longest} tokens, engine {info.name} has room for "
            f"{info.max_length}; raise its limit, or take fewer with max_tokens="
        )


def check_vocabulary(golden: Golden, vocab_size: int) -> None:
    """Raises InputError when the golden holds an id that a model of `vocab_size` ids cannot read or say."""
    largest = max(int(golden.tokens.max()), max(max(row) for row in golden.prompts))
    if largest >= vocab_size:
        raise InputError(
            f"input mismatch: golden {golden.name} holds id {largest}, the candidate's vocabulary ends at "
            f"{vocab_size - 1}: it was made with another tokenizer; choose a golden of this model"
        )


def gap_of_top_list(entries: Iterable[tuple[int | str, float]], requested: int, *, chosen: int | str) -> TopGap:
    """Top-1 minus top-2 of a server's top logprobs, or the reason why that list cannot say.

    `entries` are (key, logprob) pairs; keys are ids or, from servers that know no better, texts. Two ids may decode to
    one text and shadow each other, so a list of texts that came back short has no certain second place.
    """
    pairs = list(entries)
    distinct = len({key for key, _ in pairs})
    if distinct == 0:
        return TopGap(nats=None, note=f"{requested} requested, 0 returned")
    values = sorted((value for _, value in pairs), reverse=True)
    keys_are_text = any(isinstance(key, str) for key, _ in pairs)
    if distinct < requested:
        why = ": ambiguous strings, ask the server for token ids" if keys_are_text else ""
        return TopGap(nats=None, note=f"{requested} requested, {distinct} returned{why}")
    if chosen not in {key for key, _ in pairs}:
        least = values[0] - values[-1]
        return TopGap(nats=None, at_least_nats=least, note=f"chosen token not returned: unknown, at least {least:g}")
    return TopGap(nats=values[0] - values[1]) if len(values) > 1 else TopGap(nats=None, note="one entry, no gap")


def _class_note(golden: object, candidate: str | None) -> str | None:
    """A slow tokenizer and the fast one that a library made of it may share files and still cut text elsewhere."""
    if golden is None or candidate is None or golden == candidate:
        return None
    return f"tokenizer class differs (golden {golden}, candidate {candidate})"


def _hash_note(what: str, golden: object, candidate: str | None) -> str | None:
    if golden is None or candidate is None or golden == candidate:
        return None
    return f"{what} differs (golden {str(golden)[:12]}, candidate {candidate[:12]})"
