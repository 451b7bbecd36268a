"""How surprising a value is: p-values that are uniform where nothing is wrong, corrected for how many were looked at.

Student's t carries the uncertainty of a spread that was estimated from few runs; nothing here takes it as known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from variants.errors import UsageError


@dataclass(frozen=True)
class Interval:
    """A mean and the bounds of an interval about it, in the unit of what it was made of."""

    mean: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def empirical_p(values: np.ndarray | float, null: Sequence[float] | np.ndarray) -> np.ndarray:
    """Share of `null` that is at least as large, each value counted among them: (1 + #{null >= value}) / (1 + n).

    Never 0, and valid in finite samples where the value and the null are exchangeable: P(p <= a) <= a.
    """
    ranked = np.sort(np.asarray(null, dtype=float))
    if not ranked.size or np.isnan(ranked).any() or np.isnan(values).any():
        raise UsageError("empirical p-value: needs at least one null value, and none that is NaN")
    at_least = ranked.size - np.searchsorted(ranked, values, side="left")
    return (1 + at_least) / (1 + ranked.size)


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """p-values corrected for being looked at together (Holm 1979): any dependence, family-wise error held."""
    p = np.asarray(p, dtype=float)
    order = np.argsort(p, kind="stable")
    stepped = np.minimum(np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)), 1.0)
    adjusted = np.empty_like(p)
    adjusted[order] = stepped
    return adjusted


def wilson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """A share of trials and its Wilson score interval, which holds near 0 and 1 too. Raises UsageError for none."""
    if trials < 1 or not 0 <= successes <= trials:
        raise UsageError(f"share: got {successes} of {trials}, expected 0 to all of at least one trial")
    z = float(special.ndtri(0.5 + confidence / 2))
    share, square = successes / trials, z * z / trials
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * np.sqrt(share * (1 - share) / trials + square / (4 * trials))
    return Interval(share, max(0.0, float(middle - half)), min(1.0, float(middle + half)))


def upper_t(t: np.ndarray | float, df: np.ndarray | float) -> np.ndarray:
    """P(T >= t) of Student's t with `df` degrees of freedom."""
    return special.stdtr(df, -np.asarray(t, dtype=float))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Something estimated from `count` runs: its mean, the variance of one run, and the degrees of freedom of that."""

    mean: np.ndarray
    variance: np.ndarray
    df: np.ndarray
    count: int

    @classmethod
    def of(cls, runs: np.ndarray) -> "Spread":
        """From runs [K, ...]. Raises UsageError for fewer than two."""
        runs = np.asarray(runs, dtype=float)
        if runs.shape[0] < 2:
            raise UsageError(f"a spread needs at least 2 runs, got {runs.shape[0]}")
        mean = runs.mean(0)
        return cls(
            mean=mean, variance=runs.var(0, ddof=1), df=np.full(mean.shape, runs.shape[0] - 1.0), count=len(runs)
        )

    @property
    def of_next(self) -> np.ndarray:
        """Variance of one further run about the mean of these."""
        return self.variance * (1 + 1 / self.count)


def next_run_p(value: np.ndarray | float, *sources: Spread) -> np.ndarray:
    """P-value of a further run that is too high, where it is the sum of one draw of each source.

    One source is Student's t of a prediction; more are joined by the degrees of freedom of Welch and Satterthwaite.
    Where no source has any spread the rank is all that is known: 1 at or under the mean, else 1 / (1 + runs).
    """
    mean = sum((s.mean for s in sources), np.zeros(()))
    variance = sum((s.of_next for s in sources), np.zeros(()))
    with np.errstate(divide="ignore", invalid="ignore"):
        df = variance**2 / sum((s.of_next**2 / s.df for s in sources), np.zeros(()))
        p = upper_t((value - mean) / np.sqrt(variance), df)
    rank = 1 / (1 + min(s.count for s in sources))
    return np.where(variance > 0, p, np.where(value > mean, rank, 1.0))


def prediction(mean: float, variance: float, df: float, *, runs: int, confidence: float = 0.95) -> Interval:
    """The interval that holds one further run's value with the given confidence; `variance` is of one run."""
    t = float(special.stdtrit(df, 0.5 + confidence / 2)) if variance > 0 else 0.0
    half = t * np.sqrt(variance * (1 + 1 / runs))
    return Interval(mean, mean - half, mean + half)
