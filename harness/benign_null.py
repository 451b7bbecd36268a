"""How far a run lies outside what correct runs show, on a battery of any size; p is uniform for correct runs.

A run's shift on a prompt is its mean ln(error) minus that of noisy members on the same prompt. Over correct runs it has
two parts: one of the variant, alike on every prompt (real roundings are not quite the members' noise), and one of the
prompt, with a heavy tail (a token that is sent to other experts). A battery's shift is the mean over its prompts.

A draw of its null distribution is a variant's part, Student's t about the variants that were measured, plus the mean of
as many prompts' parts as the battery has. These are drawn from what was measured and from the run's own, which is one
of the exchangeable runs if it is correct. So no tail is assumed, and what was not seen in n prompts is not taken for
much rarer than one in n.
"""

from dataclasses import dataclass

import numpy as np

from harness.significance import empirical_p
from variants.errors import UsageError

DRAWS = 4000


@dataclass(frozen=True, kw_only=True, eq=False)
class Outside:
    """z: standard deviations of a correct run's shift, at each place [S]. p: corrected for all places [S]."""

    z: np.ndarray
    p: np.ndarray


def outside(own: np.ndarray, correct: np.ndarray, *, draws: int = DRAWS, seed: int = 0) -> Outside:
    """Hold a run's shifts [N, S] over N prompts against those of V correct runs over n prompts each, [V, n, S].

    p: how often some place of a correct run is as high as this place is here, the single-step max-statistic of Westfall
    and Young. Raises UsageError for fewer than three correct runs: a spread is read off them.
    """
    if len(correct) < 3:
        raise UsageError(f"null distribution: got {len(correct)} correct runs, expected at least 3")
    random = np.random.default_rng(seed)
    of_variant = correct.mean(1)
    # What prompts explain of the variants' spread stays in it: it is how well their mean is known.
    variant = of_variant.mean(0) + _t_weights(len(correct), draws, random) @ (of_variant - of_variant.mean(0))
    seen = _prompt_parts(correct)
    null = variant + _means(seen, len(own), draws, random)
    mean, sd = null.mean(0), null.std(0, ddof=1)

    def z(shift: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(sd > 0, (shift - mean) / sd, np.where(shift > mean, np.inf, 0.0))

    pool = np.concatenate([seen, own - of_variant.mean(0)])
    worst = z(variant + _means(pool, len(own), draws, random)).max(-1)
    found = z(own.mean(0))
    return Outside(z=found, p=empirical_p(found, worst))


def _prompt_parts(shifts: np.ndarray) -> np.ndarray:
    """What is left of each shift without its variant's mean, with the variance of one prompt: [V * n, S]."""
    count = shifts.shape[1]
    widened = np.sqrt(count / (count - 1)) if count > 1 else 0.0
    return (widened * (shifts - shifts.mean(1, keepdims=True))).reshape(-1, shifts.shape[-1])


def _means(pool: np.ndarray, prompts: int, draws: int, random: np.random.Generator) -> np.ndarray:
    """Means over `prompts` parts of a pool, drawn with replacement: [draws, S]."""
    total = np.zeros((draws, pool.shape[1]))
    for _ in range(prompts):
        total += pool[random.integers(len(pool), size=draws)]
    return total / prompts


def _t_weights(variants: int, draws: int, random: np.random.Generator) -> np.ndarray:
    """Weights [draws, V] by which deviations add up to one further variant's: Student's t, places correlated as seen.

    sqrt((V + 1) / V) for the mean, which is estimated too.
    """
    normal = random.standard_normal((draws, variants)) / np.sqrt(variants - 1)
    chi = np.sqrt(random.chisquare(variants - 1, (draws, 1)) / (variants - 1))
    return normal / chi * np.sqrt((variants + 1) / variants)
