"""One divergence at a time: does rounding explain it, on the candidate's side and on the golden's?

Everything is teacher-forced on the golden's prefix. The oracle says what the margin between the two tokens is; each
side was seen to have another one; the distance between is held against the noise that its own arithmetic causes there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from harness.significance import upper_t

SAME = 1e-9  # nats: the order of float64 sums
FAR = 0.25  # nats between a candidate's token and the golden's, from which on a place is counted as far


class Cause(Enum):
    """What a divergence is."""

    tie = "tie"
    rounding = "rounding"
    routing = "rounding amplified by routing"
    suspect = "suspect"
    defect = "defect"
    golden_side = "defect on the golden's side"
    non_finite = "non-finite"


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one side shows at a place.

    margin: its logprob of the golden's token minus that of the candidate's, in nats. sigma: standard deviation of that
    margin under the side's rounding. least: the margin is not known, and is the one nearest to the oracle's that fits
    the token that the side chose.
    """

    margin: float
    sigma: float
    least: bool = False

    def shift(self, oracle: float) -> float:
        """How far the side's margin is from the oracle's, in nats; under SAME it counts as none."""
        shift = self.margin - oracle
        return shift if abs(shift) > SAME else 0.0

    def z(self, oracle: float) -> float:
        """The shift in units of sigma."""
        shift = abs(self.shift(oracle))
        return shift / self.sigma if self.sigma > 0 else (0.0 if shift == 0 else float("inf"))


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A place (prompt, position t) at which the candidate's token is not the golden's, and what explains it.

    margin: the oracle's, in nats: logprob of the golden's token minus that of the candidate's. p: the probability of a
    shift as large as the less likely side's, under rounding. evidence: the routing exchange, if one is the cause.
    ulps: the margin in units in the last place of the candidate's logits (`logits_format`), at the larger of the two.
    """

    prompt: int
    position: int
    golden_token: int
    token: int
    margin: float
    candidate: Side
    golden: Side
    cause: Cause
    p: float
    evidence: dict[str, object] = field(default_factory=dict)
    ulps: float | None = None
    logits_format: str = ""

    @property
    def reason(self) -> str:
        """One line: place, tokens, margin, sigmas, cause."""
        where = f"p{self.prompt}[{self.position}]: {self.golden_token} vs {self.token}"
        sides = [("candidate", self.candidate), ("golden", self.golden)]
        shown = [f"{n} {'at least ' if s.least else ''}{s.z(self.margin):.1f} sigma" for n, s in sides]
        size = "" if self.ulps is None else f" ({self.ulps:.2g} {self.logits_format} ulp)"
        line = f"{where}, oracle margin {self.margin:+.3g} nat{size}, {', '.join(shown)}: {self.cause.value}"
        if self.evidence:
            line += " (" + ", ".join(f"{k} {v}" for k, v in self.evidence.items()) + ")"
        return line

    def record(self) -> dict[str, object]:
        sides = {"candidate": self.candidate, "golden": self.golden}
        seen = {
            f"{n}_{k}": v
            for n, s in sides.items()
            for k, v in (
                ("margin_nats", s.margin),
                ("sigma_nats", s.sigma),
                ("z", s.z(self.margin)),
                ("at_least", s.least),
            )
        }
        own = {"prompt": self.prompt, "position": self.position, "golden": self.golden_token, "candidate": self.token}
        size = {"oracle_margin_nats": self.margin, "oracle_margin_ulp": self.ulps, "ulp_of": self.logits_format or None}
        rest = {"p": self.p, "class": self.cause.value, "evidence": self.evidence}
        return {**own, **seen, **size, **rest, "reason": self.reason}


def far(found: Sequence[Divergence]) -> dict[str, int]:
    """How many divergences of each class lie where the candidate puts its token more than FAR above the golden's."""
    causes = [d.cause for d in found if -d.candidate.margin > FAR]
    return {cause.value: causes.count(cause) for cause in Cause if cause in causes}


def side_p(side: Side, oracle: float, members: int) -> float:
    """Probability of the side's shift or a larger one under rounding.

    Student's t: sigma was estimated about the oracle from as many members.
    """
    return min(1.0, 2 * float(upper_t(side.z(oracle), members)))


def cause_of(candidate: Side, golden: Side, oracle: float, *, members: int, alpha: float) -> tuple[Cause, float]:
    """The cause before routing is looked at, and the smaller of the two sides' probabilities.

    A side whose two logits are equal makes a tie, if rounding explains how it came to that.
    alpha: the level below which a side's shift is not rounding; already corrected for the number of places.
    """
    p_candidate, p_golden = (side_p(s, oracle, members) for s in (candidate, golden))
    p = min(p_candidate, p_golden)
    if p < alpha:
        return (Cause.defect if p_candidate < alpha else Cause.golden_side), p
    exact = any(s.margin == 0 and not s.least for s in (candidate, golden))
    return (Cause.tie if exact else Cause.rounding), p


def golden_margin(ids: np.ndarray, logprobs: np.ndarray, golden: int, other: int) -> float | None:
    """The golden engine's own margin between two tokens, None where one of them is not in its recorded list."""
    found = {int(i): float(v) for i, v in zip(ids, logprobs, strict=True)}
    return found[golden] - found[other] if golden in found and other in found else None
