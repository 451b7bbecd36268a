"""The rules that the power experiment judges side by side: ours, and those in use elsewhere, each on the same runs.

A rule gives a score (larger is more suspicious, for the area under the curve) and whether it raises an alarm at the
threshold that it is used with. Rules on logits compare with the float64 oracle, the kindest reference there is for
them; between two real engines their false alarms are higher.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.significance import Interval

BAND_NATS = 0.5
TOP_K = 5
KL_NATS = 0.01
TOP1_SHARE = 0.99
COSINE = 0.99
BHATTACHARYYA = 0.99
RELATIVE = 1e-3
OF_128 = 122
INTERVAL_P = 0.05


@dataclass(frozen=True)
class Judgement:
    """flagged is None where the rule cannot say anything of this run."""

    score: float
    flagged: bool | None
    site: str | None = None
    layer: int | None = None


UNKNOWN = Judgement(float("nan"), None)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What one run left for the rules.

    logits, oracle, other: float64 [P, V], teacher-forced: the candidate's, the oracle's, and those of a correct engine
    of the same formats with other orders of sums. instruments: judgements of ladder, local replay and envelope.
    matched: tokens of the gate that a free run matched, of total; expected: the interval for it; expected_p: how
    surprising so low a score is. finite: whether every logit is.
    """

    logits: Tensor
    oracle: Tensor
    other: Tensor
    instruments: dict[str, Judgement]
    matched: int | None = None
    total: int = 128
    expected: Interval | None = None
    expected_p: float = float("nan")

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.logits).all())


def _per_position(measure: Callable[[Tensor, Tensor], Tensor], threshold: float) -> Callable[[Observed], Judgement]:
    """A rule that alarms when some position's measure is over a threshold, or a logit is not finite."""

    def judge(o: Observed) -> Judgement:
        if not o.finite:
            return Judgement(float("inf"), True)
        worst = float(measure(o.logits, o.oracle).max())
        return Judgement(worst, worst > threshold)

    return judge


def _on_average(measure: Callable[[Tensor, Tensor], Tensor], threshold: float) -> Callable[[Observed], Judgement]:
    def judge(o: Observed) -> Judgement:
        if not o.finite:
            return Judgement(float("inf"), True)
        mean = float(measure(o.logits, o.oracle).mean())
        return Judgement(mean, mean > threshold)

    return judge


def behind(x: Tensor, right: Tensor) -> Tensor:
    """How far the candidate's token is behind the reference's best, in nats of the reference: [P]."""
    return right.amax(-1) - right.gather(-1, x.argmax(-1, keepdim=True))[:, 0]


def rank(x: Tensor, right: Tensor) -> Tensor:
    """Rank of the candidate's token in the reference, 1 for its best: [P]."""
    return (right > right.gather(-1, x.argmax(-1, keepdim=True))).sum(-1) + 1


def divergence(x: Tensor, right: Tensor) -> Tensor:
    """KL(reference || candidate) in nats: [P]."""
    p, q = right.log_softmax(-1), x.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def disagree(x: Tensor, right: Tensor) -> Tensor:
    return (x.argmax(-1) != right.argmax(-1)).double()


def off_cosine(x: Tensor, right: Tensor) -> Tensor:
    return 1 - torch.nn.functional.cosine_similarity(x, right, dim=-1)


def relative(x: Tensor, right: Tensor) -> Tensor:
    return (x - right).norm(dim=-1) / right.norm(dim=-1)


def sigma_or_bhattacharyya(o: Observed) -> Judgement:
    """Errors of the candidate and of a correct engine as normal distributions: passes when the candidate's spread is
    no larger or the two overlap by 0.99."""
    if not o.finite:
        return Judgement(float("inf"), True)
    mine, theirs = (o.logits - o.oracle).flatten(), (o.other - o.oracle).flatten()
    a, b, apart = float(mine.var()), float(theirs.var()), float(mine.mean() - theirs.mean())
    if a <= b:
        return Judgement((a / b) ** 0.5 if b else 0.0, False)
    overlap = (2 * (a * b) ** 0.5 / (a + b)) ** 0.5 * math.exp(-(apart**2) / (4 * (a + b)))
    return Judgement((a / b) ** 0.5 if b else math.inf, overlap < BHATTACHARYYA)


def all_tokens(o: Observed) -> Judgement:
    return UNKNOWN if o.matched is None else Judgement(float(o.total - o.matched), o.matched < o.total)


def most_tokens(o: Observed) -> Judgement:
    return UNKNOWN if o.matched is None else Judgement(float(o.total - o.matched), o.matched < OF_128 / 128 * o.total)


def expected_score(o: Observed) -> Judgement:
    """Alarms when the score lies outside the 95 % interval of a correct run of the same recipe."""
    if o.matched is None or o.expected is None:
        return UNKNOWN
    return Judgement(-math.log10(max(o.expected_p, 1e-300)), o.matched not in o.expected)


def instrument(name: str) -> Callable[[Observed], Judgement]:
    return lambda o: o.instruments[name]


def any_of(*names: str) -> Callable[[Observed], Judgement]:
    """Alarms when one of these instruments does; the first that does says where."""

    def judge(o: Observed) -> Judgement:
        found = [o.instruments[n] for n in names if o.instruments[n].flagged is not None]
        if not found:
            return UNKNOWN
        hits = [j for j in found if j.flagged]
        best = hits[0] if hits else found[0]
        return Judgement(max(j.score for j in found), bool(hits), best.site, best.layer)

    return judge


@dataclass(frozen=True)
class Rule:
    """A rule, what it is called in a table, and the runs of the battery that it takes: of the candidate, of others."""

    title: str
    judge: Callable[[Observed], Judgement]
    runs: str
    ours: bool = False


# Instruments in the order in which they name a place: the one that sees least noise first.
LOCATING = ("replay_f64", "replay_f32", "replay", "ladder")
RULES: dict[str, Rule] = {
    "ladder_replay": Rule("ladder + local replay", any_of(*LOCATING), "11", ours=True),
    "replay_f64": Rule("local replay at f64", instrument("replay_f64"), "2", ours=True),
    "replay_f32": Rule("local replay at f32", instrument("replay_f32"), "2", ours=True),
    "replay": Rule("local replay as it runs", instrument("replay"), "2", ours=True),
    "ladder": Rule("precision ladder (f32, f64)", instrument("ladder"), "5", ours=True),
    "envelope": Rule("envelope (one precision)", instrument("envelope"), "1 + 9", ours=True),
    "expected": Rule("expected score (tokens only)", expected_score, "1 free + 8 once", ours=True),
    "all_128": Rule("128/128 tokens", all_tokens, "1 free"),
    "most_122": Rule("at least 122/128 tokens", most_tokens, "1 free"),
    "band": Rule("0.5 nat band", _per_position(behind, BAND_NATS), "2"),
    "top5": Rule("token in the top 5", _per_position(lambda x, r: rank(x, r).double(), TOP_K), "2"),
    "kl": Rule("mean KL under 0.01 nat", _on_average(divergence, KL_NATS), "2"),
    "top1": Rule("top-1 agreement 99 %", _on_average(disagree, 1 - TOP1_SHARE), "2"),
    "cosine": Rule("cosine of logits 0.99", _per_position(off_cosine, 1 - COSINE), "2"),
    "sigma": Rule("sigma ratio 1 or Bhattacharyya 0.99", sigma_or_bhattacharyya, "3"),
    "relative": Rule("relative error 1e-3", _per_position(relative, RELATIVE), "2"),
}


def judge_all(observed: Observed) -> dict[str, Judgement]:
    return {name: rule.judge(observed) for name, rule in RULES.items()}
