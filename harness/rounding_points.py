"""Does the jitter floor tell "all roundings matched" from "one missing"? Each rounding point taken out, one at a time.

At the end of a model it often does not: what is changed early has grown to the size of the rounding itself, and what is
changed late moves the logits by less than that. So each point is looked at where it acts: it is taken out in one
layer alone, the first that has it, and the values that leave that layer are compared bit by bit with those of the
variant as it is, which read the same. Beside it stands the same layer with its products moved by 1e-7: the share of
values that any implementation changes which has every rounding point and other sums. Both are taken prompt by prompt,
and the two samples are compared by rank (Mann and Whitney), since a single flip may change much of one prompt.

A point that changes no bit is none of its own on this data: its values fit their format anyway, its reader rounds them
to the same format, or the operation that holds it is a site of its own (scores and probabilities inside `mla_core`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from scipy import stats

from harness.calibration import of_recipe
from harness.forced_errors import Battery
from harness.forced_values import Candidate, layer_places
from harness.jitter import RELATIVE, jittered_candidate
from harness.progress import progress
from harness.rounding_noise import COARSE_BITS
from harness.significance import holm
from variants.dtypes import DType
from variants.errors import UsageError
from variants.recipe import Place, Recipe, Rule
from variants.sites import places
from variants.weights import Casts

SEPARATED_P = 0.01
SEEDS = 6


@dataclass(frozen=True, kw_only=True)
class Removed:
    """One rounding point without which a layer ran. where: whose values are compared. point: its name.

    changed: share of values that differ, for each prompt. floors: the same with products moved by 1e-7 instead, for
    each seed and prompt. p: how surprising shares so large are for an implementation that has every point, corrected
    for all points; 1 where no value changed.
    """

    point: str
    layer: int
    where: Place
    changed: tuple[float, ...]
    floors: tuple[float, ...]
    p: float = 1.0

    @property
    def exercised(self) -> bool:
        return max(self.changed) > 0

    @property
    def separated(self) -> bool:
        return self.p < SEPARATED_P


def rounding_points(
    recipe: Recipe, casts: Casts, battery: Battery, *, relative: float = RELATIVE, seeds: int = SEEDS
) -> list[Removed]:
    """Every rounding point of a recipe, removed alone, in the order of the forward.

    battery: continuations of one length. Raises UsageError for a recipe that rounds nowhere to 11 bits or fewer.
    """
    cases = list(without_one(recipe))
    if not cases:
        raise UsageError("rounding points: the recipe rounds nowhere to 11 bits or fewer; nothing can be taken out")
    ends = layer_places(casts.checkpoint.config)
    whole = _values(of_recipe(recipe, casts), battery, ends)
    floors: dict[int, tuple[float, ...]] = {}
    found = []
    with progress("rounding points", len(cases)) as done:
        for point, site, without in cases:
            layer = next(n for s, n in places(casts.checkpoint.config) if s == site)
            where = ends[max(layer, 0)]
            if layer not in floors:
                moved = [
                    jittered_candidate(recipe, casts, relative=relative, seed=s, layer=layer) for s in range(seeds)
                ]
                floors[layer] = tuple(x for m in moved for x in _changed(whole, _values(m, battery, [where]), where))
            alone = recipe.with_places(without, [(site, layer)])
            changed = _changed(whole, _values(of_recipe(alone, casts), battery, [where]), where)
            found.append(Removed(point=point, layer=layer, where=where, changed=changed, floors=floors[layer]))
            done()
    p = holm([_p(row) for row in found])
    return [replace(row, p=float(x)) for row, x in zip(found, p, strict=True)]


def _values(candidate: Candidate, battery: Battery, wanted: Sequence[Place]) -> Mapping[Place, torch.Tensor]:
    """What leaves each place at every forced token: float64 [T, rows, width]."""
    steps = list(candidate.values(battery.prompts, battery.continuations, wanted))
    return {place: torch.stack([step[place] for step in steps]) for place in wanted}


def _changed(
    whole: Mapping[Place, torch.Tensor], other: Mapping[Place, torch.Tensor], where: Place
) -> tuple[float, ...]:
    return tuple((whole[where] != other[where]).double().mean((0, 2)).tolist())


def _p(row: Removed) -> float:
    if not row.exercised:
        return 1.0
    return float(stats.mannwhitneyu(row.changed, row.floors, alternative="greater").pvalue)


def without_one(recipe: Recipe) -> Iterator[tuple[str, str, Recipe]]:
    """The recipe without one of its rounding points, by the point's name and its site, in both phases.

    Of a norm that rounds twice, the rounding before the weight is a point of its own, "site (before the weight)"; the
    row of the site takes out both.
    """
    for site in dict.fromkeys(key.split(".")[0] for key in recipe.rules):
        keys = [k for k in recipe.rules if k.split(".")[0] == site]
        if any(_rounds(recipe.rules[k]) for k in keys):
            yield site, site, replace(recipe, rules={**recipe.rules, **{k: _kept(recipe.rules[k]) for k in keys}})
        if any(recipe.rules[k].algorithm.endswith("_twice") for k in keys):
            once = {
                k: replace(r, algorithm=r.algorithm.removesuffix("_twice")) for k in keys for r in [recipe.rules[k]]
            }
            yield f"{site} (before the weight)", site, replace(recipe, rules={**recipe.rules, **once})


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
