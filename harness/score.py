"""How far a candidate's greedy tokens agree with a golden: N/128, per prompt, and where each prompt first diverges.

Rules
- A place counts where run 0 of the golden or the candidate has a token. Past both ends (-1) nothing is counted; where
  only one of them has ended, the place counts as disagreement.
- Agreement is counted place by place against run 0, also after a divergence; the prefix length (tokens before the first
  divergence) is kept apart from it.
- A token that was chosen from non-finite logits never counts as agreement, whatever its id.
- The bar. UNMEASURED (K = 1) can be neither met nor missed: None. Otherwise a place is a *member* when some run of the
  golden has the candidate's tokens from the start of the row up to and including it, so a token is held against those
  runs alone that share its prefix; the bar is met when every place of every row is a member, that is, when each row
  equals one of the K runs. For STRICT this is equality with run 0 everywhere.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from harness.agreement import Agreement, Divergence, PromptAgreement
from harness.engines.protocol import Generation, Scored
from harness.gaps import gap_ulp, top2_gaps
from harness.golden_data import ENDED, Bar, Golden, as_ids, check_ends
from harness.loops import find_loops
from variants.errors import InputError, UsageError

__all__ = ["Agreement", "Divergence", "PromptAgreement", "score"]


def score(
    golden: Golden,
    generation: Generation,
    *,
    scored: Scored | None = None,
    logits_dtype: str | None = None,
    text: Callable[[int], str | None] | None = None,
) -> Agreement:
    """Agreement of a greedy run with a golden, by the rules of this module.

    `scored` (the candidate, teacher-forced on run 0) with full logits and their dtype ("bfloat16", ...) gives the
    candidate's gap in ULP. `text` decodes one id (`harness.token_text`). Raises InputError when the shapes differ or
    nothing can be compared, UsageError for full logits without their dtype.
    """
    reference = golden.tokens[0]
    candidate = _candidate_tokens(golden, generation)
    if scored is not None and scored.logits is not None and logits_dtype is None:
        raise UsageError("score: full logits need logits_dtype, the format in which they were chosen from")
    counted = (reference != ENDED) | (candidate != ENDED)
    # Past its end a row has no logits: what `finite` says there is not looked at.
    broken = ~generation.finite & (candidate != ENDED)
    agrees = (reference == candidate) & counted & ~broken
    if not counted.any():
        raise InputError(f"golden {golden.name}: nothing was compared; both sides hold no token")
    describe = partial(_divergence, golden, generation, scored=scored, logits_dtype=logits_dtype, text=text)
    rows = []
    for prompt in range(len(reference)):
        missed = np.flatnonzero(counted[prompt] & ~agrees[prompt])
        first = int(missed[0]) if missed.size else None
        rows.append(
            PromptAgreement(
                prompt=prompt,
                matched=int(agrees[prompt].sum()),
                total=int(counted[prompt].sum()),
                prefix=int(counted[prompt].sum()) if first is None else first,
                divergence=None if first is None else describe((prompt, first)),
            )
        )
    member = _members(golden.tokens, candidate, broken)
    return Agreement(
        per_prompt=tuple(rows),
        bar=golden.bar,
        bar_met=None if golden.bar is Bar.UNMEASURED else bool(member.all()),
        members=int(member.sum()),
        non_finite=tuple((int(n), int(t)) for n, t in np.argwhere(broken)),
        loops=find_loops(reference, candidate),
    )


def _candidate_tokens(golden: Golden, generation: Generation) -> np.ndarray:
    expected = golden.tokens.shape[1:]
    for field in ("tokens", "finite", "gaps"):
        shape = np.shape(getattr(generation, field))
        if shape != expected:
            raise InputError(
                f"golden {golden.name} has {expected[0]} prompts of {expected[1]} tokens, the candidate's {field} have "
                f"shape {list(shape)}; run the golden's own prompts for {expected[1]} tokens each"
            )
    tokens = as_ids(generation.tokens, "candidate tokens")
    check_ends(tokens, "candidate tokens: prompt")
    return tokens


def _members(runs: np.ndarray, candidate: np.ndarray, broken: np.ndarray) -> np.ndarray:
    """Bool [N, T]: some run [K, N, T] equals the candidate up to and including the place, all of it finite."""
    shared = np.logical_and.accumulate((runs == candidate) & ~broken, axis=-1)
    return np.asarray(shared.any(axis=0))


def _divergence(
    golden: Golden,
    generation: Generation,
    place: tuple[int, int],
    *,
    scored: Scored | None,
    logits_dtype: str | None,
    text: Callable[[int], str | None] | None,
) -> Divergence:
    ids = int(golden.tokens[0][place]), int(generation.tokens[place])
    kind = "ended" if ENDED in ids else "token" if generation.finite[place] else "non-finite"
    gaps = top2_gaps(golden)
    golden_gap = _known(gaps[place]) if gaps is not None else None
    margin, at_least = _margin(golden, generation, place)
    return Divergence(
        prompt=place[0],
        position=place[1],
        kind=kind,
        golden_id=ids[0],
        candidate_id=ids[1],
        golden_text=text(ids[0]) if text else None,
        candidate_text=text(ids[1]) if text else None,
        golden_gap_nats=golden_gap,
        golden_gap_ulp=0.0 if golden_gap == 0.0 else None,
        golden_margin_nats=margin,
        golden_margin_at_least_nats=at_least,
        candidate_gap_nats=_known(generation.gaps[place]),
        candidate_gap_ulp=_logit_gap_ulp(scored, place, logits_dtype),
    )


def _margin(golden: Golden, generation: Generation, place: tuple[int, int]) -> tuple[float | None, float | None]:
    """The golden's margin over the candidate's token at a first divergence, and its lower bound where unknown."""
    golden_id, candidate_id = int(golden.tokens[0][place]), int(generation.tokens[place])
    if ENDED in (golden_id, candidate_id):
        return None, None
    if golden.top_ids is None or golden.top_logprobs is None:
        return _recorded_margin(golden, generation, place), None
    ids, values = golden.top_ids[place], golden.top_logprobs[place].astype(np.float64)
    own, other = values[ids == golden_id], values[ids == candidate_id]
    if not own.size:
        return None, None
    if other.size:
        return _known(own[0] - other[0]), None
    return None, _known(own[0] - values[-1])


def _recorded_margin(golden: Golden, generation: Generation, place: tuple[int, int]) -> float | None:
    # A recorded gap belongs to the recorded candidate: it speaks for this one while their tokens are the same.
    prompt, position = place
    if golden.recorded is None:
        return None
    upto = slice(None, position + 1)
    if not np.array_equal(golden.recorded.tokens[prompt, upto], generation.tokens[prompt, upto]):
        return None
    # 0: the reference, forced, takes the candidate's token itself. Its margin the other way was not measured.
    return _known(golden.recorded.gap_nats[place]) or None


def _logit_gap_ulp(scored: Scored | None, place: tuple[int, int], dtype: str | None) -> float | None:
    if scored is None or scored.logits is None or dtype is None or place[1] >= scored.logits.shape[1]:
        return None
    logits = np.asarray(scored.logits[place], dtype=np.float64)
    if not np.isfinite(logits).all():
        return None
    second, first = np.partition(logits, -2)[-2:]
    return gap_ulp(float(first), float(second), dtype)


def _known(value: float) -> float | None:
    """A float, or None for NaN and infinity: a gap is a finite number or unknown."""
    return float(value) if np.isfinite(value) else None
