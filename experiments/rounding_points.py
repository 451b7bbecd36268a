"""Does the jitter floor tell "all roundings matched" from "one missing"? Each rounding point of a mirror, taken out.

The mirror of an engine is compared with that engine, teacher-forced, as it is and with one rounding point at a time
removed at all layers; the floor is its distance to itself jittered. A point whose reader rounds to the same format
again is not a point of its own: taking it out changes no bit, and the row says so. Late points (the final norm, the
head) move the logits by less than the floor does: there only bit-equality shows them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from harness.calibration import of_recipe
from harness.golden_data import Golden
from harness.jitter import Distance, distance, forced_logprobs, jittered_candidate
from harness.progress import progress
from harness.rounding_noise import COARSE_BITS
from harness.significance import Spread, next_run_p
from variants.dtypes import DType
from variants.errors import UsageError
from variants.recipe import Recipe, Rule
from variants.weights import Casts


@dataclass(frozen=True, kw_only=True)
class Removed:
    """One row: the point that was taken out ("" for none), the distance to the engine, and whether any bit changed.

    p: how surprising so large a median distance is for an implementation that has every point, other sums; 1 where no
    bit changed.
    """

    point: str
    engine: Distance
    changed: bool
    p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Points:
    """The floor (the mirror to itself jittered, once a seed), the mirror as it is, and every point removed alone."""

    floors: tuple[Distance, ...]
    mirror: Removed
    removed: tuple[Removed, ...]


def rounding_points_removed(
    recipe: Recipe, casts: Casts, golden: Golden, engine: np.ndarray, *, seed: int = 0, floors: int = 5
) -> Points:
    """Measure every rounding point of `recipe` against an engine's logprobs [N, T, V] along the golden's tokens.

    Raises UsageError for a recipe that rounds nowhere.
    """
    cases = dict(without_one(recipe))
    if not cases:
        raise UsageError("rounding points: the recipe rounds nowhere to 11 bits or fewer; nothing can be taken out")
    rows = range(len(golden.prompts))
    whole = forced_logprobs(of_recipe(recipe, casts), casts, golden, rows)
    own = []
    for i in range(floors):
        moved = jittered_candidate(recipe, casts, seed=seed + i)
        own.append(distance(forced_logprobs(moved, casts, golden, rows), whole, golden))
    removed = []
    with progress("rounding points", len(cases)) as done:
        for point, without in cases.items():
            found = forced_logprobs(of_recipe(without, casts), casts, golden, rows)
            changed = not np.array_equal(found, whole)
            away = distance(found, engine, golden)
            removed.append(Removed(point=point, engine=away, changed=changed, p=_p(away, own) if changed else 1.0))
            done()
    mirror = Removed(point="", engine=distance(whole, engine, golden), changed=False)
    return Points(floors=tuple(own), mirror=mirror, removed=tuple(removed))


def _p(away: Distance, floors: list[Distance]) -> float:
    """By the logarithm of the median, Student's t from the floors."""
    if away.median == 0 or not all(f.median for f in floors):
        return 1.0
    return float(next_run_p(np.log(away.median), Spread.of(np.log([f.median for f in floors]))))


def without_one(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """The recipe without one of its rounding points, by the point's name: a site in both phases, at all layers.

    Of a norm that rounds twice, the rounding before the weight is a point of its own, "site (before the weight)"; the
    row of the site takes out both.
    """
    for site in dict.fromkeys(key.split(".")[0] for key in recipe.rules):
        keys = [k for k in recipe.rules if k.split(".")[0] == site]
        if any(_rounds(recipe.rules[k]) for k in keys):
            yield site, replace(recipe, rules={**recipe.rules, **{k: _kept(recipe.rules[k]) for k in keys}})
        if any(recipe.rules[k].algorithm.endswith("_twice") for k in keys):
            once = {
                k: replace(r, algorithm=r.algorithm.removesuffix("_twice")) for k in keys for r in [recipe.rules[k]]
            }
            yield f"{site} (before the weight)", replace(recipe, rules={**recipe.rules, **once})


def _rounds(rule: Rule) -> bool:
    narrow = (rule.output, rule.accum)
    return rule.algorithm != "operand" and any(f is not None and f.precision <= COARSE_BITS for f in narrow)


def _kept(rule: Rule) -> Rule:
    """The rule with what it computes summed and kept in float32; operands stay as narrow as they were."""
    if not _rounds(rule):
        return rule
    algorithm = rule.algorithm.removesuffix("_twice")
    wide = {"dense_bf16": "dense_f32", "conv1d": "taps"}.get(algorithm, algorithm)
    accum = rule.accum if rule.accum.precision > COARSE_BITS else DType.f32
    return replace(rule, accum=accum, output=DType.f32, storage=DType.f32, algorithm=wide)
