"""Expert choice as a cause: where a candidate's experts differ from the oracle's, at what gap, and what that explains.

A changed set of experts moves logits far more than the rounding that changed it. The evidence is causal: the oracle is
run again with the other choice at one place (or with all of a candidate's choices) and its margin is looked at again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.lockstep import Tokens
from harness.probes import Tap, chain
from variants import decode
from variants.dtypes import DType, dtype_of
from variants.model import Model
from variants.ops.moe import top_k_lowest_id
from variants.recipe import Recipe, Rule
from variants.rounding import Probe, RoundAt, Step
from variants.weights import Weights

Route = tuple[int, int]  # (layer, position)
MOST_SWAPS = 24
LATE = 8  # positions before a token whose exchanges of experts move its logits most
# bf16 activations move a router score (0 to 1) by about a hundredth; five times that is 12.8 of its unit roundoffs.
GAP_UNITS = 12.8
SUM_UNITS = 8  # in f32 and f64 it is the sums that lose most: so many unit roundoffs for a few hundred products


@dataclass(frozen=True)
class Choice:
    """The oracle's choice at one (layer, position) of one sequence.

    chosen: expert ids in decreasing order of choice score; runner_up: the best id left out; gap: choice score of the
    last chosen minus that of the runner-up. scores: choice score of every expert.
    """

    layer: int
    position: int
    chosen: tuple[int, ...]
    runner_up: int
    gap: float
    scores: Tensor = field(compare=False, repr=False)

    def gap_to(self, ids: Sequence[int]) -> float:
        """How far another choice lies: the best score that it leaves out minus the worst that it takes instead."""
        out, into = sorted(set(self.chosen) - set(ids)), sorted(set(ids) - set(self.chosen))
        return float(self.scores[out].max() - self.scores[into].min()) if out and into else 0.0

    @property
    def swapped(self) -> tuple[int, ...]:
        """The choice with its last expert exchanged for the runner-up."""
        return (*self.chosen[:-1], self.runner_up)


class Forcing:
    """Puts given expert ids in place of a run's own at some (layer, position) of its single row."""

    def __init__(self, ids: Mapping[Route, Sequence[int]]) -> None:
        self.ids = ids
        self.start = 0

    def begin(self, step: Step) -> None:
        (self.start,) = step.starts

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        if site != "router_ids":
            return rounding
        mine = {position: list(ids) for (at, position), ids in self.ids.items() if at == layer}

        def force(x: Tensor) -> Tensor:
            for position, ids in mine.items():
                if self.start <= position < self.start + x.shape[0]:
                    x[position - self.start] = torch.tensor(ids, device=x.device)
            return x

        return force if mine else rounding


Build = Callable[[Probe], Model]


@dataclass(frozen=True)
class Pass:
    """One float64 pass over a prompt and forced tokens: logits [T, V] and the choice made at every place."""

    logits: Tensor
    choices: dict[Route, Choice]


def oracle_pass(
    build: Build, prompt: Tokens, forced: Tokens, *, ids: Mapping[Route, Sequence[int]] | None = None
) -> Pass:
    """The oracle over one sequence in a single pass, with `ids` forced where given.

    build(probe): a float64 model. Positions count from the start of the prompt.
    """
    tap = Tap(lambda site, layer: site in ("router_scores", "router_ids"))
    model = build(chain([Forcing(ids or {}), tap]))
    logits = decode.single_pass(model, [prompt], [forced])[0]
    return Pass(logits, _choices(model, tap))


def choice_scores(weights: Weights, layer: int, scores: Tensor) -> Tensor:
    """What experts are chosen by: scores [N, E] plus the stored correction bias, in the scores' dtype."""
    name = f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"
    return scores + weights.get(name, dtype_of(scores))


def _choices(model: Model, tap: Tap) -> dict[Route, Choice]:
    found = {}
    for (site, layer), scores in tap.values.items():
        if site != "router_scores":
            continue
        choice = choice_scores(model.weights, layer, scores)
        ids = tap.values[("router_ids", layer)]
        k = ids.shape[-1]
        if k == choice.shape[-1]:
            continue  # every expert is chosen: there is no boundary
        ranked = top_k_lowest_id(choice, k + 1)
        values = choice.gather(-1, ranked)
        for position in range(ids.shape[0]):
            last, next_ = values[position, k - 1], values[position, k]
            found[(layer, position)] = Choice(
                layer=layer,
                position=position,
                chosen=tuple(ranked[position, :k].tolist()),
                runner_up=int(ranked[position, k]),
                gap=float(last - next_),
                scores=choice[position],
            )
    return found


def changed(oracle: Mapping[Route, Choice], ids: Mapping[Route, Sequence[int]]) -> list[Route]:
    """Places at which a candidate's set of experts is not the oracle's, in order of position, then layer."""
    routes = [r for r, chosen in ids.items() if r in oracle and set(chosen) != set(oracle[r].chosen)]
    return sorted(routes, key=lambda r: (r[1], r[0]))


def rounding_gap(recipe: Recipe) -> float:
    """The widest gap of choice scores (0 to 1) over which rounding under a recipe exchanges experts."""
    rules = (*recipe.rules.values(), *recipe.exceptions.values())
    coarsest = min((f for r in rules for f in (r.input, r.accum, r.output) if f), key=lambda f: f.precision)
    units = GAP_UNITS if coarsest.precision <= DType.f16.precision else GAP_UNITS * SUM_UNITS
    return units * coarsest.unit_roundoff


@dataclass(frozen=True)
class Adoption:
    """The oracle with a candidate's choices in place: the pass, what was taken over, and what lies too far off."""

    run: Pass
    taken: dict[Route, Choice]
    wide: dict[Route, Choice]


def adopted(
    build: Build, prompt: Tokens, forced: Tokens, ids: Mapping[Route, Sequence[int]], *, within: float
) -> Adoption:
    """Force a candidate's choices `ids` upon the oracle wherever rounding can have made them.

    One exchange changes what later layers and tokens see, so after each round the rest is compared with what the oracle
    then chooses; it ends where no further choice lies within `within` of its own.
    """
    taken: dict[Route, Choice] = {}
    while True:
        run = oracle_pass(build, prompt, forced, ids={r: ids[r] for r in taken})
        differ = {r: run.choices[r] for r in changed(run.choices, ids) if r not in taken}
        near = {r: c for r, c in differ.items() if c.gap_to(ids[r]) <= within}
        if not near:
            return Adoption(run, taken, differ)
        taken |= near


@dataclass(frozen=True)
class Explanation:
    """One exchange of experts that brings the oracle's margin to the observed one."""

    choice: Choice
    margin: float


def explaining_swap(
    build: Build,
    prompt: Tokens,
    forced: Tokens,
    *,
    pair: tuple[int, int],
    wanted: Callable[[float], bool],
    within: float,
    late: int = 0,
) -> Explanation | None:
    """The exchange at the narrowest router gap that makes `wanted` hold of the oracle's margin.

    pair: tokens (a, b); the margin is logit a minus logit b after the last forced token. within: only choices whose gap
    is at most this many units of choice score are tried, the `MOST_SWAPS` narrowest at any position that the last token
    sees, and all at the last `late` positions: after a prompt of 190 tokens 500 choices are as narrow as that.
    """
    base = oracle_pass(build, prompt, forced)
    near = sorted((c for c in base.choices.values() if c.gap <= within), key=lambda c: (c.gap, -c.position))
    end = len(prompt) + len(forced) - 1
    for choice in [c for i, c in enumerate(near) if i < MOST_SWAPS or c.position >= end - late]:
        swapped = oracle_pass(build, prompt, forced, ids={(choice.layer, choice.position): choice.swapped})
        margin = float(swapped.logits[-1, pair[0]] - swapped.logits[-1, pair[1]])
        if wanted(margin):
            return Explanation(choice, margin)
    return None
