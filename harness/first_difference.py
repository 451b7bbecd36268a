"""Where two variants first differ on one forced sequence: at all, beyond rounding, and in the function itself.

*At all*: both run side by side and the first value that differs in any bit is named. *Beyond rounding*: every operation
of B is done again in float64 on A's own values, and what differs is held against what the coarser of the two rules may
round there, so nothing upstream counts. *In function*: the same with A raised to float64 too, so that no rounding is
left to hide behind: a constant, an eps, a parameter that one of them has otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.local_replay import local_replay
from harness.localize import Runner, Spot
from harness.lockstep import walk
from harness.mixing import PHASES
from harness.numerics import policy
from harness.op_error import allowed
from harness.probes import Against, Passes, Place
from variants.axes import Execution
from variants.decode import Sequences
from variants.dtypes import DType
from variants.model_config import ModelConfig
from variants.recipe import Recipe, Rule
from variants.sites import places


@dataclass(frozen=True, kw_only=True)
class ValueDifference:
    """The first value that differs.

    step: decode steps before it, 0 is the prefill. relative: rms difference over rms of A's value.
    """

    site: str
    layer: int
    step: int
    relative: float


@dataclass(frozen=True, kw_only=True)
class Excess:
    """A place whose operation differs beyond rounding; ratio: of the worst position's error to its bound."""

    site: str
    layer: int
    ratio: float


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """Both under A's execution. beyond and function: in the order of the forward, the first one is where to look."""

    at_all: ValueDifference | None
    beyond: tuple[Excess, ...]
    function: tuple[Excess, ...]


def first_difference(runner: Runner, a: Recipe, b: Recipe, spot: Spot) -> FirstDifference:
    """Look along one spot's tokens; three walks of two models each."""
    b = replace(b, execution=a.execution)
    if a.execution.mode is Execution.recompute:  # every step runs the whole prefix again: the last one is enough
        spot = Spot(prompt=[*spot.prompt, *spot.forced], forced=())
    exact_a, exact_b = a.at_precision(DType.f64), b.at_precision(DType.f64)
    config = runner.casts.checkpoint.config
    with policy(runner.device, tf32=a.tf32, reduced_sums=a.reduced_sums):
        return FirstDifference(
            at_all=_first_value(runner, a, b, spot),
            beyond=_excess(runner, a, exact_b, coarser(a, b, config), spot),
            function=_excess(runner, exact_a, exact_b, coarser(exact_a, exact_b, config), spot),
        )


def coarser(a: Recipe, b: Recipe, config: ModelConfig) -> Recipe:
    """`a` with the rules of `b` at every place where those may round more."""
    one = torch.ones(1, dtype=torch.float64)

    def bound(rule: Rule) -> float:
        return float(allowed(rule, one))

    def worst(recipe: Recipe, place: Place) -> float:
        return max(bound(recipe.rule(*place, phase)) for phase in PHASES)

    return a.with_places(b, [p for p in places(config) if worst(b, p) > worst(a, p)])


def _continuation(spot: Spot) -> list[int]:
    """The forced tokens and one more, which is not run: a walk ends with the logits for its last token."""
    return [*spot.forced, 0]


def _first_value(runner: Runner, a: Recipe, b: Recipe, spot: Spot) -> ValueDifference | None:
    tap, found, step, done = Passes(), [], 0, 0

    def same_pass() -> Mapping[Place, Sequence[Tensor]]:
        """A's values of the pass that B begins: a prompt in pieces has several before the first logits."""
        nonlocal done
        done += 1
        return tap.passes[done - 1][1]

    def compare(place: Place, mine: Tensor, theirs: Tensor) -> bool:
        if not found and mine.shape == theirs.shape and not torch.equal(mine.double(), theirs.double()):
            found.append(ValueDifference(site=place[0], layer=place[1], step=step, relative=_relative(mine, theirs)))
        return False

    models = [runner.model(a, probe=tap), runner.model(b, probe=Against(same_pass, compare))]
    for position in walk(models, [spot.prompt], [_continuation(spot)]):
        step, done = position.t + 1, 0
        tap.passes.clear()
        if found:
            return found[0]
    return None


def _relative(mine: Tensor, theirs: Tensor) -> float:
    right = theirs.double()
    scale = float(right.square().mean().sqrt())
    return float((mine.double() - right).square().mean().sqrt()) / scale if scale else float("inf")


def _excess(runner: Runner, a: Recipe, b: Recipe, bound: Recipe, spot: Spot) -> tuple[Excess, ...]:
    """Places in excess when B's operations run on A's values; the worst of both phases counts."""
    continuation = _continuation(spot)
    replay = local_replay(
        lambda tap: Sequences(runner.model(a, probe=tap), [spot.prompt], len(continuation)),
        lambda probe: runner.model(b, probe=probe),
        bound,
        [spot.prompt],
        [continuation],
    )
    worst: dict[Place, float] = {}
    for site, layer, phase in replay.excess():
        ratio = replay.errors[(site, layer, phase)].worst
        worst[(site, layer)] = max(ratio, worst.get((site, layer), 0.0))
    return tuple(Excess(site=site, layer=layer, ratio=ratio) for (site, layer), ratio in worst.items())
