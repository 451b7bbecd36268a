"""A verdict from outside alone: tokens, whatever logprobs both sides gave, and the reference forced on the candidate.

No oracle and no look inside. Where more prompts part than noise turns (`harness.too_many`) it is no rounding: DEFECT,
or another question. At a first divergence both sides stand on one prefix, so their margins between the two
tokens may be compared: the shift between them is held against the noise that the same two sides show at the places they
share, or, where logprobs are missing on a side, against a noise that the user names. Confidence is always low.

A recorded gap of 0 says that the reference, forced onto that prefix, takes the candidate's token itself, or that it was
not measured: such a place tells nothing. The other divergences decide; without any the run cannot be told.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.agreement import Agreement
from harness.divergence import Cause
from harness.engines.protocol import Generation
from harness.gaps import cannot_discriminate
from harness.golden_data import ENDED, Golden
from harness.question_hints import hint
from harness.significance import upper_t
from harness.too_many import parted
from harness.verdict import RunClass, Verdict, end_findings

ALPHA = 1e-3  # family-wise, over the divergences
FEWEST_PLACES = 8
WITHIN = 0.6827  # the share of a normal distribution that one standard deviation holds
ASSUMED_NOISE_NATS = 0.125  # one step of bf16 logits between 16 and 32
ZERO_GAP = "recorded gap 0: the reference takes this token itself here, or it was not measured; no evidence of a tie"
MANY = 10_000  # degrees of freedom of a noise that is named, not measured


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Standard deviation in nats of the shift between two sides' margins; places: measured over, 0 for named."""

    sigma: float
    places: int
    said: str


@dataclass(frozen=True, kw_only=True)
class SeenDivergence:
    """A first divergence as both sides show it. margins in nats: golden's token over the candidate's; None: unknown.

    shift: the least that fits what is known. p: of so large a shift under the noise, None where nothing is known.
    """

    prompt: int
    position: int
    golden_token: int
    token: int
    golden_margin: float | None
    candidate_margin: float | None
    shift: float | None
    sigma: float
    cause: Cause | None
    p: float | None
    note: str = ""

    @property
    def reason(self) -> str:
        """One line: place, tokens, margins, sigmas, cause."""
        golden = "unknown" if self.golden_margin is None else f"{self.golden_margin:+.3g} nat"
        own = "unknown" if self.candidate_margin is None else f"{self.candidate_margin:+.3g}"
        line = f"p{self.prompt}[{self.position}]: {self.golden_token} vs {self.token}, golden's margin {golden}, "
        line += f"candidate's {own}"
        if self.shift is not None and self.sigma > 0:
            line += f", {self.shift / self.sigma:.1f} sigma"
        cause = self.cause.value if self.cause else "cannot be told"
        return f"{line}: {cause}" + (f" ({self.note})" if self.note else "")

    def record(self) -> dict[str, object]:
        seen = {k: v for k, v in vars(self).items() if k not in ("cause", "golden_token", "token")}
        return {
            **seen,
            "golden": self.golden_token,
            "candidate": self.token,
            "class": self.cause.value if self.cause else None,
            "reason": self.reason,
        }


def judge_tokens(golden: Golden, generation: Generation, agreement: Agreement, *, noise: float | None) -> Verdict:
    """Weigh a run's first divergences. noise: standard deviation in nats to take where it cannot be measured."""
    measured = noise_of(golden, generation, agreement)
    taken = measured or Noise(
        sigma=ASSUMED_NOISE_NATS if noise is None else noise,
        places=0,
        said=f"assumed {ASSUMED_NOISE_NATS} nat, a step of bf16 logits; name yours with noise=NATS"
        if noise is None
        else f"noise={noise:g} nat as named",
    )
    found = [d for d in agreement.first_divergence if ENDED not in (d.golden_id, d.candidate_id)]
    seen = [_judged(golden, generation, d.prompt, d.position, taken, len(found)) for d in found]
    margins = [d.golden_margin for d in seen if d.golden_margin is not None and np.isfinite(d.golden_margin)]
    figures: dict[str, object] = {
        "noise_nats": taken.sigma,
        "noise_places": taken.places,
        "max_margin_nats": max(margins, default=None),
    }
    run_class, reason = _class(golden, agreement, seen, taken)
    return Verdict(
        run_class=run_class,
        reason=reason,
        confidence="high" if run_class in (RunClass.passed, RunClass.invalid) else "low",
        findings=tuple(end_findings(agreement)),
        divergences=tuple(seen),
        instruments=("tokens",),
        figures=figures,
    )


def noise_of(golden: Golden, generation: Generation, agreement: Agreement) -> Noise | None:
    """Measured at the places before each row's first divergence, where both sides ranked the golden's first two."""
    if golden.top_ids is None or golden.top_logprobs is None or golden.top_ids.shape[-1] < 2:
        return None
    if generation.top_ids is None or generation.top_logprobs is None:
        return None
    shifts: list[float] = []
    for row in agreement.per_prompt:
        for t in range(min(row.prefix, golden.tokens.shape[2])):
            pair = golden.top_ids[row.prompt, t, :2]
            theirs = _margin(golden.top_ids[row.prompt, t], golden.top_logprobs[row.prompt, t], *pair)
            own = _margin(generation.top_ids[row.prompt, t], generation.top_logprobs[row.prompt, t], *pair)
            if theirs is not None and own is not None:
                shifts.append(own - theirs)
    if len(shifts) < FEWEST_PLACES:
        return None
    # The half-width that holds 68 %: one exchange of experts must not pass for everybody's noise.
    sigma = float(np.quantile(np.abs(shifts), WITHIN))
    return Noise(sigma=sigma, places=len(shifts), said=f"{sigma:.3g} nat, measured at {len(shifts)} shared places")


def _margin(ids: np.ndarray, values: np.ndarray, first: int, second: int) -> float | None:
    """Logprob of `first` minus that of `second`, None where either is not in the list."""
    one, other = values[ids == first], values[ids == second]
    if not (one.size and other.size):
        return None
    margin = float(one[0]) - float(other[0])
    return margin if np.isfinite(margin) else None


def _judged(golden: Golden, generation: Generation, n: int, t: int, noise: Noise, total: int) -> SeenDivergence:
    a, b = int(golden.tokens[0, n, t]), int(generation.tokens[n, t])
    theirs, at_least, note = _golden_margin(golden, generation, n, t)
    own = None
    if generation.top_ids is not None and generation.top_logprobs is not None:
        own = _margin(generation.top_ids[n, t], generation.top_logprobs[n, t], a, b)
    known = theirs if theirs is not None else at_least
    shift = None if known is None else max(known - min(own or 0.0, 0.0), 0.0)
    p, cause = None, None
    if shift is not None:
        z = shift / noise.sigma if noise.sigma > 0 else (0.0 if shift == 0 else float("inf"))
        p = min(1.0, 2 * float(upper_t(z, noise.places or MANY))) if np.isfinite(z) else 0.0
        tie = theirs == 0.0 or own == 0.0
        cause = Cause.suspect if p < ALPHA / max(total, 1) else Cause.tie if tie else Cause.rounding
    return SeenDivergence(
        prompt=n, position=t, golden_token=a, token=b, golden_margin=theirs, candidate_margin=own, shift=shift,
        sigma=noise.sigma, cause=cause, p=p, note=note,
    )  # fmt: skip


def _golden_margin(golden: Golden, generation: Generation, n: int, t: int) -> tuple[float | None, float | None, str]:
    """The golden's margin over the candidate's token, else what it is at least, and what to say of it."""
    if golden.top_ids is not None and golden.top_logprobs is not None:
        ids, values = golden.top_ids[n, t], golden.top_logprobs[n, t]
        margin = _margin(ids, values, int(golden.tokens[0, n, t]), int(generation.tokens[n, t]))
        if margin is not None:
            return margin, None, ""
        least = float(values[0]) - float(values[-1])
        return None, least, f"outside the golden's list: margin at least {least:.3g} nat"
    recorded = golden.recorded
    upto = slice(None, t + 1)
    if recorded is None or not np.array_equal(recorded.tokens[n, upto], generation.tokens[n, upto]):
        return None, None, "the golden has no logprobs"
    gap = float(recorded.gap_nats[n, t])
    if gap == 0.0:
        return None, None, ZERO_GAP
    if np.isnan(gap):
        return None, None, "no gap was recorded here"
    if np.isinf(gap):
        return None, float("inf"), "outside the list of the reference, forced onto this prefix"
    return gap, None, "by the reference, forced onto this prefix"


def _class(golden: Golden, agreement: Agreement, seen: Sequence[SeenDivergence], noise: Noise) -> tuple[RunClass, str]:
    if agreement.not_finite:
        return RunClass.invalid, agreement.not_finite
    if agreement.bar_met or agreement.matched == agreement.total:
        return RunClass.passed, _passed(agreement)
    if ends := end_findings(agreement):
        return RunClass.invalid, ends[0].reason
    question = hint(golden, agreement)
    # A noise beyond what bf16 does is the candidate's own fault: it may not excuse it.
    sound = min(noise.sigma, ASSUMED_NOISE_NATS) if noise.places else noise.sigma
    count = parted(golden, agreement, sound)
    if count is not None and count.p < ALPHA:
        worst = max(seen, key=lambda d: d.shift or 0.0, default=None)
        most = "" if worst is None else f"; the farthest: {worst.reason}"
        return RunClass.defect, f"{count}{question}{most}"
    if weak := cannot_discriminate(golden, sound):
        return RunClass.invalid, weak
    bad = [d for d in seen if d.cause is Cause.suspect]
    if bad:
        worst = max(bad, key=lambda d: d.shift or 0.0)
        more = "a change of routing or a defect, which tokens alone do not tell apart"
        where = f"beyond it in {len(bad)} of {agreement.prompts} prompts"
        return RunClass.suspect, f"{worst.reason}; noise {noise.said}; {where}: {question[2:] or more}"
    if sound < noise.sigma and (weak := cannot_discriminate(golden, noise.sigma)):
        told = f"the two differ by {noise.said}, a step of bf16 logits is {ASSUMED_NOISE_NATS}"
        return RunClass.suspect, f"{told}: too much for rounding{question}"
    told = [d for d in seen if d.cause is not None]
    unknown = [d for d in seen if d.cause is None and (d.note != ZERO_GAP or not told)]
    if unknown:
        return RunClass.invalid, f"cannot be told from tokens alone: {unknown[0].reason}"
    worst = min(told, key=lambda d: 1.0 if d.p is None else d.p)
    zeros = len(seen) - len(told)
    count = f"{len(told)} of {len(seen)}" if zeros else f"all {len(seen)}"
    rest = f"; {zeros} with a recorded gap of 0 cannot be told" if zeros else ""
    return RunClass.rounding, f"{count} first divergences are within noise ({noise.said}); {worst.reason}{rest}"


def _passed(agreement: Agreement) -> str:
    """What passed: every token of run 0, or a bar of K runs that differ."""
    count = f"{agreement.matched}/{agreement.total}"
    if agreement.matched == agreement.total:
        once = "" if agreement.bar_met else " (K = 1: the reference was not held against itself)"
        return f"{count}: the tokens agree{once}"
    return f"the bar is met: every row is one of the reference's own, {count} with its run 0"
