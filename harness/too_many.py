"""Whether more prompts part from a golden than rounding turns: counted against the golden's own gaps.

Two correct engines differ at each place by noise, and part where it is larger than the golden's gap there. So the gaps
say how many prompts part: the sum over the places at risk, those up to each first divergence, of the probability of so
large a noise. The shipped `wide` and llama.cpp in float32: 26.2 expected at the measured noise, 26 seen.
"""

from dataclasses import dataclass

import numpy as np
from scipy import special

from harness.agreement import Agreement
from harness.gaps import top2_gaps
from harness.golden_data import Golden

FEWEST = 4


@dataclass(frozen=True, kw_only=True)
class Parted:
    """seen: prompts that part. expected: of noise of `sigma` nats alone. p: Poisson probability of as many or more."""

    seen: int
    expected: float
    sigma: float

    @property
    def p(self) -> float:
        return float(special.gammainc(self.seen, self.expected))

    def __str__(self) -> str:
        noise = f"noise of {self.sigma:.3g} nat turns {self.expected:.1f}"
        return f"{self.seen} prompts part where {noise} (p {self.p:.1e}): too many for rounding"


def parted(golden: Golden, agreement: Agreement, sigma: float) -> Parted | None:
    """sigma: standard deviation in nats of the noise between the two sides' margins.

    None where the golden's gaps are unknown, or so few prompts part that a count says nothing: one may be an exchange
    of experts, which is larger than any noise and hits a correct run now and then.
    """
    gaps, seen = top2_gaps(golden), len(agreement.first_divergence)
    if gaps is None or np.isnan(gaps).all() or seen < FEWEST:
        return None
    at_risk = [gaps[row.prompt, : row.prefix + 1] for row in agreement.per_prompt]
    chance = np.nan_to_num(special.ndtr(-np.concatenate(at_risk) / sigma)) if sigma > 0 else np.zeros(1)
    return Parted(seen=seen, expected=float(chance.sum()), sigma=sigma)
