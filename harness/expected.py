"""The expected score: what N/128 a correct implementation of a recipe should reach, with an interval.

K noisy members (`harness.rounding_noise`) decode freely and greedily from the golden's prompts. Against a fixed golden
a member's score is a sum over prompts of independent parts, so the variance of one run is the sum of the prompts' own
variances over the members: as unbiased as the variance of the K totals, and known from K - 1 degrees of freedom for
each prompt instead of K - 1 in all. The interval is Student's t for one further run with the degrees of freedom of
Satterthwaite, widened to whole tokens. tests/test_expected.py counts how often it covers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from harness.forced_errors import groups
from harness.golden_data import ENDED, Golden
from harness.parts import part
from harness.progress import progress
from harness.rounding_noise import member, stream
from harness.significance import Interval, Spread, next_run_p, prediction
from variants import decode
from variants.errors import InputError, UsageError
from variants.model import Model
from variants.recipe import Recipe
from variants.weights import Casts, Weights


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpectedScore:
    """Scores of K members: matched int [K, N] tokens of each prompt; total tokens that count.

    confidence: of the interval for one further run.
    """

    recipe_hash: str
    golden_hash: str
    seed: int
    matched: np.ndarray
    total: int
    confidence: float = 0.95

    @property
    def scores(self) -> np.ndarray:
        """N of each member, [K]."""
        return self.matched.sum(1)

    @property
    def sd(self) -> float:
        """Standard deviation of one run's score."""
        return float(np.sqrt(self._spread.variance))

    @property
    def _spread(self) -> Spread:
        each = Spread.of(self.matched)
        variance = each.variance.sum()
        squares = (each.variance**2 / each.df).sum()
        df = variance**2 / squares if squares > 0 else each.df.sum()
        return Spread(mean=each.mean.sum(), variance=variance, df=np.asarray(df), count=each.count)

    @property
    def interval(self) -> Interval:
        """Mean score, and bounds that hold the score of one further correct run."""
        s = self._spread
        wide = prediction(float(s.mean), float(s.variance), float(s.df), runs=s.count, confidence=self.confidence)
        low, high = max(0.0, np.floor(wide.low)), min(float(self.total), np.ceil(wide.high))
        return Interval(wide.mean, float(low), float(high))

    def p_value(self, score: int) -> float:
        """How surprising so low a score is for a correct run."""
        s = self._spread
        return float(next_run_p(-score, replace(s, mean=-s.mean)))

    def record(self) -> dict[str, object]:
        """The ledger's `expected` field."""
        i = self.interval
        return {
            "mean": i.mean,
            "low": i.low,
            "high": i.high,
            "sd": self.sd,
            "members": len(self.matched),
            "seed": self.seed,
            "confidence": self.confidence,
        }


@part("expected score")
def expected_score(
    recipe: Recipe, casts: Casts, golden: Golden, *, members: int = 8, seed: int = 0, stop_at: int | None = None
) -> ExpectedScore:
    """Decode K members of `recipe` against run 0 of a golden; `stop_at`: the id after which a row ends, None for none.

    Raises UsageError for fewer than two members.
    """
    if members < 2:
        raise UsageError(f"expected score: got {members} members, expected at least 2 (a spread is read off them)")
    noisy, noise = member(recipe, casts, golden.prompts[0], seed=seed)
    model = Model(casts.checkpoint.config, noisy, Weights(casts, recipe.semantics), probe=noise)
    reference = golden.tokens[0]
    if not (reference != ENDED).any():
        raise InputError(f"golden {golden.name}: holds no token to be expected")
    matched = np.zeros((members, len(reference)), dtype=int)
    counted = np.zeros((members, len(reference)), dtype=int)
    with progress("expected score", len(reference)) as done:
        for number, rows in enumerate(groups(golden.prompts, members)):
            noise.restart(stream(seed, number))
            tokens = _greedy(model, [golden.prompts[n] for n in rows] * members, reference.shape[1], stop_at)
            tokens = tokens.reshape(members, len(rows), -1)
            here = (tokens != ENDED) | (reference[rows] != ENDED)
            matched[:, rows] = ((tokens == reference[rows]) & here).sum(-1)
            counted[:, rows] = here.sum(-1)
            for _ in rows:
                done()
    return ExpectedScore(
        recipe_hash=recipe.hash, golden_hash=golden.hash, seed=seed, matched=matched, total=int(counted.max(0).sum())
    )


def ends_at(golden: Golden, casts: Casts) -> int | None:
    """The id after which a row of a golden ends, None where its rows go on past it."""
    return casts.checkpoint.config.eos_token_id if golden.sampling.get("eos") == "stop" else None


def _greedy(model: Model, prompts: Sequence[Sequence[int]], steps: int, stop_at: int | None) -> np.ndarray:
    """Greedy tokens [rows, steps], -1 after `stop_at`."""
    out = np.full((len(prompts), steps), ENDED, dtype=np.int64)
    ended = torch.zeros(len(prompts), dtype=torch.bool)

    def choose(t: int, logits: Tensor) -> Tensor | None:
        tokens = decode.greedy(logits)
        out[:, t] = torch.where(ended, ENDED, tokens.cpu()).numpy()
        if stop_at is not None:
            ended.logical_or_(tokens.cpu() == stop_at)
        return None if bool(ended.all()) else tokens

    decode.steps(model, prompts, steps, choose)
    return out
