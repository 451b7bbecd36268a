"""Expert choice as a cause: where a candidate's experts differ from the oracle's, at what gap, and what that explains.

A changed set of experts moves logits far more than the rounding that changed it. The evidence is causal: the oracle is
run again with the other choice at one place (or with all of a candidate's choices) and its margin is looked at again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.lockstep import Tokens
from harness.probes import Tap, chain
from variants import decode
from variants.model import Model
from variants.recipe import Rule
from variants.rounding import Probe, RoundAt, Step

Route = tuple[int, int]  # (layer, position)


@dataclass(frozen=True)
class Choice:
    """The oracle's choice at one (layer, position) of one sequence.

    chosen: expert ids in decreasing order of choice score; runner_up: the best id left out; gap: choice score of the
    last chosen minus that of the runner-up.
    """

    layer: int
    position: int
    chosen: tuple[int, ...]
    runner_up: int
    gap: float

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


def _choices(model: Model, tap: Tap) -> dict[Route, Choice]:
    found = {}
    for (site, layer), scores in tap.values.items():
        if site != "router_scores":
            continue
        name = f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"
        choice = scores + model.weights.get(name, model.recipe.rule("router_scores", layer).accum)
        ids = tap.values[("router_ids", layer)]
        k = ids.shape[-1]
        if k == choice.shape[-1]:
            continue  # every expert is chosen: there is no boundary
        top = choice.topk(k + 1, -1)
        for position in range(ids.shape[0]):
            last, next_ = top.values[position, k - 1], top.values[position, k]
            found[(layer, position)] = Choice(
                layer=layer,
                position=position,
                chosen=tuple(top.indices[position, :k].tolist()),
                runner_up=int(top.indices[position, k]),
                gap=float(last - next_),
            )
    return found


def changed(oracle: Mapping[Route, Choice], ids: Mapping[Route, Sequence[int]]) -> list[Route]:
    """Places at which a candidate's set of experts is not the oracle's, in order of position, then layer."""
    routes = [r for r, chosen in ids.items() if r in oracle and set(chosen) != set(oracle[r].chosen)]
    return sorted(routes, key=lambda r: (r[1], r[0]))


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
) -> Explanation | None:
    """The exchange at the narrowest router gap that makes `wanted` hold of the oracle's margin.

    pair: tokens (a, b); the margin is logit a minus logit b after the last forced token. within: only choices whose gap
    is at most this many units of choice score are tried, at any position that the last token sees, narrowest first.
    """
    base = oracle_pass(build, prompt, forced)
    near = sorted((c for c in base.choices.values() if c.gap <= within), key=lambda c: (c.gap, -c.position))
    for choice in near[:MOST_SWAPS]:
        swapped = oracle_pass(build, prompt, forced, ids={(choice.layer, choice.position): choice.swapped})
        margin = float(swapped.logits[-1, pair[0]] - swapped.logits[-1, pair[1]])
        if wanted(margin):
            return Explanation(choice, margin)
    return None


MOST_SWAPS = 24
