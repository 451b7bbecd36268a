"""Local replay: every operation again in float64 on the variant's own recorded inputs.

Two runs go in lockstep. The variant runs as it is and its values are tapped; the replay runs the oracle's arithmetic,
is compared at every place that both have, and goes on from the variant's value. What differs at a place is then that
one operation's own error, free of everything upstream, to be held against what the variant's recipe allows there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from harness.lockstep import Stepper, Tokens, walk_steppers
from harness.op_error import LIMIT, OpError, bounding_rule, enter, note_positions, real_tokens
from harness.probes import AgainstPasses, Passes, Place, Tap, Wanted, chain, every_place
from harness.routing import choice_scores
from variants.decode import Sequences
from variants.dtypes import DType
from variants.model import Model
from variants.recipe import Recipe
from variants.rounding import Probe, Step
from variants.sites import INSIDE_ATTENTION, INTEGER
from variants.weights import Weights

CHOICE_UNITS = 8.0  # a choice of experts may differ at a gap of so many units of the scores' format

Key = tuple[str, int, str]


@dataclass(frozen=True)
class LocalReplay:
    """Errors by (site, layer, phase), in the order in which the forward produces them."""

    errors: Mapping[Key, OpError]
    compared: frozenset[Place]

    def excess(self) -> list[Key]:
        """Places in excess, those that ran first in the first bad step first; upstream places come before."""
        return [k for k, e in self.errors.items() if e.in_excess]


def merged(parts: Sequence[LocalReplay]) -> LocalReplay:
    """The errors of several batteries as one; a part's rows are numbered by its place among the parts."""
    errors: dict[Key, OpError] = {}
    for number, part in enumerate(parts):
        for key, error in part.errors.items():
            errors.setdefault(key, OpError()).include(error, number)
    return LocalReplay(errors, frozenset().union(*(p.compared for p in parts)))


@dataclass(frozen=True)
class Meaning:
    """What a run is held against.

    make_oracle(probe): a float64 model of what is to be computed. recipe: what rounding allows at each place. wanted:
    the places that are compared; the replay goes on from the variant's value at all of them.
    """

    make_oracle: Callable[[Probe], Model]
    recipe: Recipe
    wanted: Wanted = every_place


def local_replay(
    make_variant: Callable[[Tap], Stepper],
    make_oracle: Callable[[Probe], Model],
    recipe: Recipe,
    prompts: Sequence[Tokens],
    continuations: Sequence[Tokens],
) -> LocalReplay:
    """Run a forced battery, the variant and its replay step by step.

    make_variant(tap): the variant's run with its values tapped (`model_stepper`, or an engine's). make_oracle(probe): a
    float64 model under the oracle's recipe. recipe: what the variant declares, for what rounding allows at each place.
    """
    return replays(make_variant, [Meaning(make_oracle, recipe)], prompts, continuations)[0]


def replays(
    make_variant: Callable[[Tap], Stepper],
    meanings: Sequence[Meaning],
    prompts: Sequence[Tokens],
    continuations: Sequence[Tokens],
) -> list[LocalReplay]:
    """One run of the variant, held against several meanings at once: the variant's values are the same for all."""
    tap = Passes()
    comparisons = [_Comparison(m, tap) for m in meanings]
    tokens = max(len(c) for c in continuations)
    runs: list[Stepper] = [make_variant(tap), *(Sequences(c.oracle, prompts, tokens) for c in comparisons)]
    for _ in walk_steppers(runs, continuations):
        tap.passes.clear()
        for c in comparisons:
            c.probe.again()
    return [LocalReplay(c.errors, frozenset((site, layer) for site, layer, _ in c.errors)) for c in comparisons]


class _Comparison:
    """Where the reports of a replay's probe go. `scores` sees the router's scores that the replay goes on with."""

    def __init__(self, meaning: Meaning, tap: Passes) -> None:
        self.recipe, self.wanted = meaning.recipe, meaning.wanted
        self.bound = cache(lambda place, phase: bounding_rule(meaning.recipe, place, phase))
        self.errors: dict[Key, OpError] = {}
        self.probe = AgainstPasses(tap, self._report)
        self.scores = Tap(lambda site, layer: site == "router_scores")
        self.oracle = meaning.make_oracle(chain([self.probe, self.scores]))
        self.weights: Weights = self.oracle.weights

    def _report(self, place: Place, mine: Tensor, theirs: Tensor) -> bool:
        step = self.probe.step
        assert step is not None
        if place[0] in INSIDE_ATTENTION or mine.shape != theirs.shape:
            return False
        if not self.wanted(*place):
            return True
        entry = self.errors.setdefault((*place, step.phase), OpError())
        if place[0] in INTEGER:
            self._choices(entry, place[1], mine, theirs.to(mine.device), step)
            return True
        rule = self.bound(place, step.phase)
        entry.least = self._least_size(place)
        enter(entry, mine.double(), theirs.double().to(mine.device), rule=rule, step=step, site=place[0])
        return True

    def _least_size(self, place: Place) -> float:
        """Mean square that a place errs as if it had: log(1 + e^x) errs by a unit of the 1, however small it is."""
        if place[0] != "decay_gate":
            return 0.0
        a_log = self.weights.get(f"model.layers.{place[1]}.self_attn.A_log", DType.f64)
        return float((2 * a_log).exp().mean())

    def _choices(self, entry: OpError, layer: int, mine: Tensor, theirs: Tensor, step: Step) -> None:
        """Expert sets chosen from the same scores: they may differ only where the gap is within the sum's rounding."""
        choice = choice_scores(self.weights, layer, self.scores.values[("router_scores", layer)].double())
        gap = choice.gather(-1, mine).amin(-1) - choice.gather(-1, theirs).amin(-1)
        changed = (mine.sort(-1).values != theirs.sort(-1).values).any(-1)
        unit = self.recipe.rule("router_scores", layer, step.phase).accum.unit_roundoff
        allowed_gap = CHOICE_UNITS * unit * choice.abs().amax(-1).clamp_min(1.0)
        changed = changed.reshape(len(step.slots), -1)
        if (real := real_tokens(step, changed.shape[1])) is not None:
            changed &= real.to(changed.device)
        ratio = torch.where(changed, (gap / allowed_gap * LIMIT).reshape(changed.shape), 0.0)
        entry.count += mine.shape[0]
        entry.changed += int(changed.sum())
        note_positions(entry, ratio, tuple(step.starts), step)
