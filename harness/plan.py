"""How many prompts and tokens a battery needs before it can tell two variants apart.

Assumptions, all of them:
- At each place of the golden's path a variant's noise turns the token with the probability that `Noise.flips` gives for
  the oracle's lead there; the noise of different places, prompts and variants is independent. Two variants that share
  roundings err together, so their real difference varies less than is said here.
- Free-running: a row agrees until its first divergence and after it each token agrees with probability `rematch`.
- Teacher-forced: every place is judged on the golden's own prefix, so nothing cascades.
- Prompts of a larger battery are drawn like those of this one. A prompt is the unit: the test is a paired one over
  prompts, two-sided, and its size comes from the normal approximation with Guenther's correction for the t test.
- Past the golden's own tokens every place has the mean hazard of all places.
Source of the correction: W. C. Guenther, The American Statistician 35 (1981) 243.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from variants.errors import UsageError


@dataclass(frozen=True, eq=False)
class Moments:
    """A variant's score on each prompt: mean and variance [N] over draws of its noise, in tokens and tokens squared."""

    mean: np.ndarray
    variance: np.ndarray

    @property
    def total(self) -> float:
        return float(self.mean.sum())

    @property
    def sd(self) -> float:
        """Of the whole battery's score, with the prompts fixed."""
        return math.sqrt(self.variance.sum())


@dataclass(frozen=True, eq=False)
class Contrast:
    """A minus B on each prompt, paired: expected difference [N] in tokens, and its variance [N] over the noise."""

    difference: np.ndarray
    variance: np.ndarray

    @property
    def mean(self) -> float:
        """Tokens a prompt."""
        return float(self.difference.mean())

    @property
    def mean_error(self) -> float:
        """Standard error of `mean` as an estimate for prompts of this kind; NaN for a single prompt."""
        n = self.difference.size
        return float(np.std(self.difference, ddof=1) / math.sqrt(n)) if n > 1 else math.nan

    @property
    def prompt_variance(self) -> float:
        """Variance of one prompt's difference: the noise's, and that between prompts."""
        between = float(np.var(self.difference, ddof=1)) if self.difference.size > 1 else 0.0
        return float(self.variance.mean()) + between

    def prompts(self, *, power: float, alpha: float, difference: float | None = None) -> int | None:
        """Prompts with which a test of size `alpha` finds the difference with probability `power`.

        difference: tokens a prompt, instead of the one that the hazards give. None where it is zero: no number of
        prompts finds a difference that is not there.
        """
        effect = self.mean if difference is None else difference
        if effect == 0:
            return None
        z_alpha, z_power = quantiles(power=power, alpha=alpha)
        normal = (z_alpha + z_power) ** 2 * self.prompt_variance / effect**2
        return max(2, math.ceil(normal + z_alpha**2 / 2))


def free_running(flips: np.ndarray, *, rematch: float = 0.0) -> Moments:
    """Moments of a free-running score from the hazard of each place, flips [N, T], NaN past a row's end.

    The number of tokens before the first divergence has P(D >= t) = prod over s <= t of (1 - flips[s]); a constant
    hazard makes it geometric, cut at T.
    """
    check_rematch(rematch)
    moments = [_free_row(row[~np.isnan(row)], rematch) for row in flips]
    return Moments(*(np.array(x) for x in zip(*moments, strict=True)))


def _free_row(hazard: np.ndarray, rematch: float) -> tuple[float, float]:
    """Mean and variance of D + Binomial(T - D - 1, rematch), by the distribution of D itself."""
    reaches = np.concatenate([[1.0], np.cumprod(1 - hazard), [0.0]])
    p = reaches[:-1] - reaches[1:]
    prefix = np.arange(p.size)
    rest = np.maximum(hazard.size - prefix - 1, 0)
    given = prefix + rematch * rest
    mean = float(p @ given)
    return mean, float(p @ ((given - mean) ** 2 + rematch * (1 - rematch) * rest))


def free_running_contrast(a: np.ndarray, b: np.ndarray, *, rematch: float = 0.0) -> Contrast:
    """Difference of two free-running scores, from both variants' hazards [N, T]."""
    x, y = free_running(a, rematch=rematch), free_running(b, rematch=rematch)
    return Contrast(x.mean - y.mean, x.variance + y.variance)


def teacher_forced_contrast(a: np.ndarray, b: np.ndarray) -> Contrast:
    """Places where only A agrees minus places where only B does: McNemar's counts, summed over each prompt."""
    only_a, only_b = (1 - a) * b, a * (1 - b)
    difference, discordant = np.nansum(only_a - only_b, -1), np.nansum(only_a + only_b, -1)
    return Contrast(difference, discordant - np.nansum((only_a - only_b) ** 2, -1))


def hazard(flips: np.ndarray) -> float:
    """The mean probability that a place's token turns, over all places."""
    return float(np.nanmean(flips))


def of_length(flips: np.ndarray, tokens: int) -> np.ndarray:
    """Hazards [N, tokens]: the first places of each row and, past the golden's own, the mean hazard."""
    n, t = flips.shape
    if tokens <= t:
        return flips[:, :tokens]
    return np.concatenate([flips, np.full((n, tokens - t), hazard(flips))], -1)


def check_rematch(rematch: float) -> None:
    """Raises UsageError for what is no probability under 1."""
    if not 0 <= rematch < 1:
        raise UsageError(f"rematch={rematch}: expected a probability, 0 or more and under 1")


def smallest_difference(sd_a: float, sd_b: float, *, power: float, alpha: float) -> float:
    """The least difference of two scores that one run of each finds with probability `power`, in the sd's unit.

    sd_a, sd_b: of each score over draws of its own noise, the battery being the same.
    """
    z_alpha, z_power = quantiles(power=power, alpha=alpha)
    return (z_alpha + z_power) * math.hypot(sd_a, sd_b)


def quantiles(*, power: float, alpha: float) -> tuple[float, float]:
    """Standard normal quantiles at 1 - alpha / 2 and at `power`; raises UsageError for what no test can have."""
    for name, value in (("power", power), ("alpha", alpha)):
        if not 0 < value < 1:
            raise UsageError(f"{name}={value}: expected a probability between 0 and 1")
    if power <= alpha / 2:
        raise UsageError(f"power={power} is no more than a test of size alpha={alpha} has without any difference")
    return float(special.ndtri(1 - alpha / 2)), float(special.ndtri(power))
