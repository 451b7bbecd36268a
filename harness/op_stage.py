"""One operation of the forward, run alone: a single layer (or the head) over recorded values, as far as one site.

There is no code for each operation. The layer is bound as in any run; a probe puts a recorded value in place of what
every other site gives and stops the run when the wanted site has given its own. What is not recorded is NaN: the
weights, the carried state and the layer's input too, so that a value which the operation reads but nobody recorded
cannot go unseen.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from variants.binding import Binder
from variants.checkpoint import Checkpoint
from variants.checkpoint_names import expected_tensors, is_float32_parameter
from variants.model import Layer, Phase
from variants.model_config import ModelConfig
from variants.recipe import Place, Recipe, Rule
from variants.rounding import RoundAt, Step
from variants.sites import HEAD_SITES
from variants.state import Batch, State
from variants.weights import Casts, Weights

ENTERING = ("stream", "unrounded")  # the residual as stored and before its store, as the layer gets it
CARRIED = ("conv", "recurrent", "latent", "keys", "values")


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What an operation may read. values: by site, in the order of their calls. carried: of `ENTERING` and `CARRIED`,
    the caches as far as they were filled. parameters: by their release names, as stored."""

    values: Mapping[str, Sequence[Tensor]]
    carried: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Where:
    """An operation and the step it ran in. starts, lengths: of each row; width: tokens of the batch; max_len: of the
    caches; calls: how often the site gave a value (an expert's site once for each expert)."""

    site: str
    layer: int
    phase: str
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    width: int
    max_len: int
    calls: int

    @property
    def place(self) -> Place:
        return self.site, self.layer

    @property
    def step(self) -> Step:
        return Step(self.phase, tuple(range(len(self.lengths))), self.starts, self.lengths)


@torch.inference_mode()
def run_op(where: Where, config: ModelConfig, recipe: Recipe, inputs: Inputs) -> list[Tensor]:
    """What the operation gives under a recipe, one tensor a call; fewer than `where.calls` where it is not reached."""
    head = where.site in HEAD_SITES
    layer = 0 if head else where.layer
    if head:  # the same head over no layers: there it is layer 0
        moved = {(k, 0): r for (k, n), r in recipe.exceptions.items() if n == config.num_layers}
        recipe, config = replace(recipe, exceptions=moved), replace(config, layer_kinds=(), moe_layers=())
    weights = Weights(_casts(config, layer, head, inputs.parameters), recipe.semantics)
    probe = _Substitute(where, layer, inputs.values)
    binder = Binder(config, recipe, weights, probe, layer, where.phase)
    stream, unrounded = (_entering(name, where, config, inputs, head) for name in ENTERING)
    try:
        if head:
            Phase(binder).logits(stream, unrounded)
        else:
            state, batch = _state(where, config, recipe, inputs)
            Layer(binder)(stream, unrounded, batch, state)
    except _Reached:
        pass
    return probe.out


class _Reached(Exception):
    """The operation has given all its values: not an error, but the way out of the layer."""


class _Substitute:
    """Gives recorded values at every site that has some, collects those of the wanted one, and ends the run there."""

    def __init__(self, where: Where, layer: int, values: Mapping[str, Sequence[Tensor]]) -> None:
        self.where, self.layer = where, layer
        self.recorded = {
            site: iter(calls) for site, calls in values.items()
        }  # one for all experts: each binds the site
        self.out: list[Tensor] = []

    def begin(self, step: Step) -> None:
        return None

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        if layer != self.layer:
            return rounding
        if site == self.where.site:
            return lambda x: self._reach(x if rounding is None else rounding(x))
        if site not in self.recorded:
            return rounding
        recorded = self.recorded[site]
        return lambda x: _given(recorded, x if rounding is None else rounding(x))

    def _reach(self, y: Tensor) -> Tensor:
        self.out.append(y)
        if len(self.out) == self.where.calls:
            raise _Reached
        return y


def _given(recorded: Iterator[Tensor], own: Tensor) -> Tensor:
    """The next recorded value in the dtype that the run has there, which is at least as wide."""
    value = next(recorded, None)
    return own if value is None else value.to(own.dtype)


def _entering(name: str, where: Where, config: ModelConfig, inputs: Inputs, head: bool) -> Tensor:
    if name in inputs.carried:
        return inputs.carried[name]
    return torch.full((len(where.lengths), 1 if head else where.width, config.hidden_size), torch.nan)


def _state(where: Where, config: ModelConfig, recipe: Recipe, inputs: Inputs) -> tuple[State, Batch]:
    """The state before the step, NaN where it was not recorded, and the rows of the step."""
    rows = len(where.lengths)
    state = State(config, recipe, slots=rows, max_len=where.max_len)
    state.length = list(where.starts)
    for name in CARRIED:
        store: dict[int, Tensor] = getattr(state, name)
        if where.layer not in store:
            continue
        kept = inputs.carried.get(name)
        if kept is None:
            store[where.layer].fill_(torch.nan)
        elif kept.shape == store[where.layer].shape:
            store[where.layer] = kept.to(store[where.layer].dtype)
        else:
            store[where.layer][:, : kept.shape[1]] = kept.to(store[where.layer].dtype)
    return state, state.batch(range(rows), where.lengths, where.width)


def layer_parameters(config: ModelConfig, layer: int, head: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters that a layer, or the head, is bound to."""
    wanted = expected_tensors(config)
    if head:
        return {n: s for n, s in wanted.items() if not n.startswith("model.layers.")}
    return {n: s for n, s in wanted.items() if n.startswith(f"model.layers.{layer}.")}


def _casts(config: ModelConfig, layer: int, head: bool, parameters: Mapping[str, Tensor]) -> Casts:
    tensors = {}
    for name, shape in layer_parameters(config, layer, head).items():
        dtype = torch.float32 if is_float32_parameter(name) else torch.bfloat16
        found = parameters.get(name)
        tensors[name] = torch.full(tuple(shape), torch.nan, dtype=dtype) if found is None else found
    return Casts(Checkpoint(path=Path(), config=config, tensors=tensors, sha256=""))
