"""How far rounding moves the lead of a token over its best rival, and how often it turns the choice between them.

A lead is the logprob of one token minus that of the best other token, in nats; noise is the error of a lead. It is
taken to be symmetric about zero and alike at all places of a battery: a routing change or a long context that makes one
place noisier than others is averaged into the whole. Where that matters, the envelope's members say more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from scipy import special
from torch import Tensor

from harness.engines.local import LocalEngine, forced_logits
from harness.oracle import Oracle
from variants import decode
from variants.errors import EngineError, UsageError
from variants.recipe import is_incremental

WITHIN = 0.6827  # the share of a normal distribution that one standard deviation holds
ROWS_AT_ONCE = 32


class Noise(Protocol):
    """A distribution of the error of a lead, in nats."""

    @property
    def scale_nats(self) -> float:
        """The half-width that holds 68 % of errors; the standard deviation, were it normal."""
        ...

    def flips(self, leads: np.ndarray) -> np.ndarray:
        """Probability that a lead with this error added is below zero; NaN where the lead is."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """Normal noise of a standard deviation in nats; 0 for none at all."""

    scale_nats: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.scale_nats) and self.scale_nats >= 0):
            raise UsageError(f"noise: got {self.scale_nats} nats, expected a finite number, 0 or more")

    def flips(self, leads: np.ndarray) -> np.ndarray:
        if self.scale_nats == 0:
            return np.where(np.isnan(leads), np.nan, 0.5 - 0.5 * np.sign(leads))
        return special.ndtr(-leads / self.scale_nats)


@dataclass(frozen=True, eq=False)
class Measured:
    """Noise as it was seen: |error| of every place, ascending, each taken with either sign.

    Its tails end with the largest error seen: a place that leads by more is said never to turn.
    """

    magnitudes: np.ndarray

    @classmethod
    def of(cls, errors: np.ndarray) -> "Measured":
        """From signed errors of any shape; NaN, a place without a token, is left out."""
        known = np.abs(errors[~np.isnan(errors)])
        if not known.size:
            raise UsageError("noise: no place has a measured error")
        return cls(np.sort(known))

    @property
    def scale_nats(self) -> float:
        return float(np.quantile(self.magnitudes, WITHIN))

    @property
    def rms_nats(self) -> float:
        return float(np.sqrt(np.mean(self.magnitudes**2)))

    def flips(self, leads: np.ndarray) -> np.ndarray:
        under = (np.searchsorted(self.magnitudes, np.abs(leads), side=s) for s in ("left", "right"))
        turned = (1 - sum(under) / 2 / self.magnitudes.size) / 2  # an error just as large as the lead makes a tie
        p = np.where(leads > 0, turned, np.where(leads < 0, 1 - turned, 0.5))
        return np.where(np.isnan(leads), np.nan, p)


def measure(engine: LocalEngine, oracle: Oracle) -> Measured:
    """The errors of a variant's leads against the oracle on its forced tokens: one run, one error a place.

    A variant that recomputes the prefix runs in one pass, which is the same arithmetic. The oracle should have the
    variant's semantics, so that a declared departure is not counted as noise. Raises EngineError for a logit that is
    not finite.
    """
    errors = np.full(oracle.leads.shape, np.nan)
    continuations = oracle.forced.continuations
    rows = [i for i, c in enumerate(continuations) if c]
    for start in range(0, len(rows), ROWS_AT_ONCE):
        group = rows[start : start + ROWS_AT_ONCE]
        forced = [continuations[i] for i in group]
        for i, logits in zip(group, _logits(engine, [oracle.forced.prompts[i] for i in group], forced), strict=True):
            errors[i, : len(logits)] = _leads(logits, continuations[i]) - oracle.leads[i, : len(logits)]
    if not np.isfinite(errors[oracle.ranks > 0]).all():
        raise EngineError(f"{engine.name}: logits that are not finite; noise cannot be measured on them")
    return Measured.of(errors)


def _logits(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Logits [n, V] of each row's continuation, n its length."""
    if not is_incremental(engine.recipe):
        with torch.inference_mode():
            return decode.single_pass(engine.model, prompts, continuations)
    steps = torch.stack(forced_logits(engine.model, prompts, continuations), 1)
    return [row[: len(c)] for row, c in zip(steps, continuations, strict=True)]


def _leads(logits: Tensor, tokens: Sequence[int]) -> np.ndarray:
    """Logit of each token minus the best other one, in float64: [n, V] -> [n]."""
    values = logits.double().cpu().numpy().copy()
    own = values[np.arange(len(tokens)), list(tokens)].copy()
    values[np.arange(len(tokens)), list(tokens)] = -np.inf
    return own - values.max(-1)
