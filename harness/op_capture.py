"""Take one operation out of a run: what it read and what it gave, in one step, so that it can be run again alone.

What it read is found, not declared: a recorded value, a part of the carried state or a parameter is an input where the
operation, run alone, gives something else once that is poisoned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.localize import Spot, forced_along, rows_to
from harness.op_stage import CARRIED, ENTERING, Inputs, Where, layer_parameters, run_op
from variants.errors import UsageError
from variants.model import Model
from variants.model_config import ModelConfig
from variants.recipe import Place, Recipe, Rule
from variants.rounding import Probe, RoundAt, Step
from variants.sites import CHUNK_SITES, EMBED, HEAD_SITES, INSIDE_ATTENTION, INTEGER, MOE_SITES, places
from variants.state import SLOTTED, State

INNER = frozenset((*CHUNK_SITES, *INSIDE_ATTENTION))  # inside another operation: recorded where they are asked for


@dataclass(frozen=True, kw_only=True, eq=False)
class OpCapture:
    """One operation of one step: where it ran, under what, what it read and what it gave, one tensor a call."""

    where: Where
    config: ModelConfig
    recipe: Recipe
    model_sha256: str
    inputs: Inputs
    output: tuple[Tensor, ...]


def capture_op(build: Callable[[Probe], Model], spot: Spot, place: Place) -> OpCapture:
    """Run to a spot and keep the operation at a (site, layer) as it ran in the last step.

    build(probe): the model; it may hold a fault, which then shows in the output alone, since parameters are taken from
    the checkpoint. Raises UsageError for a place that the model or this run does not have, and off the host.
    """
    record = _Record(place)
    model = build(record)
    if str(model.device) != "cpu":
        raise UsageError(f"capture: the run is on {model.device}; an operation is replayed on the host, use device=cpu")
    _check(place, model.config)
    rows = rows_to(model, spot)
    record.state = rows.state
    forced_along(rows, spot)
    if place[0] not in record.calls:
        raise UsageError(f"capture: no value passes {place[0]} in layer {place[1]} of this variant; take another site")
    where, inputs = record.where(), record.inputs(model)
    needed = _needed(where, model.config, model.recipe, inputs)
    output = tuple(y.clone() for y in record.calls[place[0]])
    return OpCapture(
        where=where,
        config=model.config,
        recipe=model.recipe,
        model_sha256=model.weights.casts.checkpoint.sha256,
        inputs=needed,
        output=output,
    )


def _check(place: Place, config: ModelConfig) -> None:
    if place[0] == EMBED or place not in places(config):
        raise UsageError(f"capture: layer {place[1]} has no operation {place[0]!r}; `neartie explain` lists the sites")


class _Record:
    """Keeps every value of one layer in the step that ran last, what entered the layer and what was carried into it."""

    def __init__(self, place: Place) -> None:
        self.site, self.layer = place
        self.calls: dict[str, list[Tensor]] = {}
        self.entering: tuple[Tensor, ...] = ()
        self.carried: dict[str, Tensor] = {}
        self.step: Step | None = None
        self.state: State | None = None

    def begin(self, step: Step) -> None:
        self.step, self.calls = step, {}
        state, rows, self.carried = self.state, list(step.slots), {}
        assert state is not None
        for name in CARRIED:
            store: dict[int, Tensor] = getattr(state, name)
            if self.layer in store:
                kept = store[self.layer]
                self.carried[name] = kept[rows] if name in SLOTTED else state.rows(kept, rows, max(step.starts))

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        enters = (site, layer) == (EMBED, -1) if self.layer == 0 else (site, layer) == ("mlp_residual", self.layer - 1)
        if not enters and (layer != self.layer or (site in INNER and site != self.site)):
            return rounding

        def keep(x: Tensor) -> Tensor:
            y = x if rounding is None else rounding(x)
            if enters:
                self.entering = (y, y if site == EMBED else x)
            else:
                self.calls.setdefault(site, []).append(y)
            return y

        return keep

    def where(self) -> Where:
        step = self.step
        assert step is not None
        assert self.state is not None
        return Where(
            site=self.site,
            layer=self.layer,
            phase=step.phase,
            starts=tuple(step.starts),
            lengths=tuple(step.lengths),
            width=self.entering[0].shape[1],
            max_len=self.state.max_len,
            calls=len(self.calls[self.site]),
        )

    def inputs(self, model: Model) -> Inputs:
        head, step = self.site in HEAD_SITES, self.step
        assert step is not None
        entering = [_last(x, step) for x in self.entering] if head else self.entering
        names = layer_parameters(model.config, self.layer, head)
        stored = model.weights.casts.checkpoint.tensors
        return Inputs(
            values={site: calls for site, calls in self.calls.items() if site != self.site},
            carried={**dict(zip(ENTERING, entering, strict=True)), **self.carried},
            parameters={name: stored[name] for name in names},
        )


def _last(x: Tensor, step: Step) -> Tensor:
    """[B, T, D] -> [B, 1, D] of each row's last real token, which is all that the head sees."""
    return x[torch.arange(len(step.lengths)), torch.tensor(step.lengths) - 1].unsqueeze(1)


Key = tuple[str, str]  # a field of Inputs and a name in it
CHOICE: Key = ("values", "router_ids")
ROUTED = MOE_SITES[MOE_SITES.index("router_ids") + 1 :]


def _needed(where: Where, config: ModelConfig, recipe: Recipe, inputs: Inputs) -> Inputs:
    """Those of the inputs that the operation reacts to, and past the router the choice of experts.

    The choice says which experts run, hence what the recorded values of experts belong to: it is never another one.
    """
    found = [(kind, name) for kind in ("values", "carried", "parameters") for name in getattr(inputs, kind)]
    keys = [key for key in found if key != CHOICE]
    usual = run_op(where, config, recipe, inputs)

    def reacts(chosen: Sequence[Key]) -> bool:
        poisons = INTEGER_POISONS if where.site in INTEGER else (_nan,)
        return any(not _same(usual, run_op(where, config, recipe, _poisoned(inputs, chosen, p))) for p in poisons)

    # NaN cannot be made good by more NaN, so a group that nothing comes of holds no input; a choice of experts can.
    kept = [k for k in keys if reacts([k])] if where.site in INTEGER else _reacting(keys, reacts)
    if CHOICE in found and where.site in ROUTED:
        kept.append(CHOICE)
    needed = _part(inputs, kept)
    assert _same(usual, run_op(where, config, recipe, needed)), "what was found is all that the operation reads"
    return needed


def _reacting(keys: Sequence[Key], reacts: Callable[[Sequence[Key]], bool]) -> list[Key]:
    if not keys or not reacts(keys):
        return []
    if len(keys) == 1:
        return list(keys)
    middle = len(keys) // 2
    return _reacting(keys[:middle], reacts) + _reacting(keys[middle:], reacts)


def _nan(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan)


def _ramp(x: Tensor, sign: int) -> Tensor:
    """Values whose order is that of their ids, or the reverse."""
    return (100.0 * sign * torch.arange(x.shape[-1], dtype=x.dtype)).expand_as(x).clone()


INTEGER_POISONS: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: _ramp(x, 1), lambda x: _ramp(x, -1))


def _poisoned(inputs: Inputs, chosen: Sequence[Key], poison: Callable[[Tensor], Tensor]) -> Inputs:
    wanted = set(chosen)

    def one(kind: str) -> dict[str, object]:
        found = getattr(inputs, kind)
        return {n: _mapped(x, poison) if (kind, n) in wanted else x for n, x in found.items()}

    return Inputs(values=one("values"), carried=one("carried"), parameters=one("parameters"))  # pyright: ignore[reportArgumentType]


def _mapped(x: object, f: Callable[[Tensor], Tensor]) -> object:
    return f(x) if isinstance(x, Tensor) else [f(y) for y in x]  # pyright: ignore[reportGeneralTypeIssues]


def _part(inputs: Inputs, kept: Sequence[Key]) -> Inputs:
    wanted = set(kept)
    parts = {
        kind: {n: _mapped(x, same_layout) for n, x in getattr(inputs, kind).items() if (kind, n) in wanted}
        for kind in ("values", "carried", "parameters")
    }
    return replace(inputs, **parts)


def same_layout(x: Tensor) -> Tensor:
    """A copy with the strides of `x` and its alignment, by which a library may choose its order of sums."""
    return laid_out(x, x.stride(), int(x.storage_offset()))


def laid_out(x: Tensor, stride: Sequence[int], offset: int) -> Tensor:
    """A copy of `x` at these strides and, modulo 64 elements, this offset into memory of its own."""
    if not x.numel() or any(s == 0 and n > 1 for s, n in zip(stride, x.shape, strict=True)):
        return x.clone(memory_format=torch.contiguous_format)
    offset %= 64
    last = sum(s * (n - 1) for s, n in zip(stride, x.shape, strict=True))
    return x.new_empty(offset + last + 1).as_strided(x.shape, tuple(stride), offset).copy_(x)


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Bit for bit, NaN equal to NaN."""
    if len(a) != len(b):
        return False
    return all(x.shape == y.shape and x.dtype == y.dtype and same_bits(x, y) for x, y in zip(a, b, strict=True))


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    return torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))
