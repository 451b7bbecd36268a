"""Faults planted on purpose, to learn what the instruments catch; nothing that a user can name leads here.

planted = plant(DEFECTS["mla_scaled"], severity=Severity.light, layers=Spread.one, config=config)
model = build(engine, recipe, planted, probe=tap)   # a watcher sees what the faulty code gives
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from variants import defects_delta, defects_inputs, defects_mixers, defects_shared
from variants.defects_kinds import (
    AtSite,
    Clock,
    Defect,
    InBlock,
    InParameter,
    InSlots,
    Run,
    Severity,
    Target,
    Visit,
)
from variants.errors import UsageError
from variants.model import Model
from variants.model_config import ModelConfig
from variants.recipe import Recipe, Rule, is_incremental
from variants.rounding import Probe, RoundAt, Step
from variants.state import State
from variants.weights import Patch

_ROWS = (*defects_delta.TABLE, *defects_inputs.TABLE, *defects_mixers.TABLE, *defects_shared.TABLE)
DEFECTS: dict[str, Defect] = {d.name: d for d in _ROWS}
assert len(DEFECTS) == len(_ROWS), "a defect's name stands once"


class Spread(Enum):
    """One layer of the defect's kind (the middle one), or all of them."""

    one = "one"
    all = "all"


@dataclass(frozen=True)
class Planted:
    """A defect at chosen layers with a chosen strength; what it hands out follows one run, which `build` starts."""

    defect: Defect
    severity: Severity
    target: Target

    @property
    def layers(self) -> tuple[int, ...]:
        return self.target.layers

    @property
    def patch(self) -> Patch | None:
        """What it does to parameters."""
        m = self.defect.mechanism
        if not isinstance(m, InParameter):
            return None
        names = [f"model.layers.{n}.{m.leaf}" for n in self.layers]

        def patched(name: str, value: Tensor) -> Tensor:
            return m.change(value, self.target) if any(fnmatchcase(name, pattern) for pattern in names) else value

        return patched

    @property
    def probe(self) -> Probe:
        """What it does at sites; it also tells the planted fault which step runs, so it is needed for every defect."""
        return _Fault(self)

    def mutate(self, model: Model) -> None:
        """What it does to constants and functions of built layers, and to slots."""
        m = self.defect.mechanism
        if isinstance(m, InBlock):
            for phase in model.phases.values():
                for n in self.layers:
                    m.change(phase.layers[n], self.target)
        if isinstance(m, InSlots):
            _unclean(model, m, self.target)


def plant(defect: Defect, *, severity: Severity, layers: Spread | Sequence[int], config: ModelConfig) -> Planted:
    """Choose strength and place. Raises UsageError when the model has no layer in which the defect can sit, or when a
    named layer is of another kind."""
    able = defect.needs.layers(config)
    if not able:
        raise UsageError(f"defect {defect.name} needs {defect.needs.value}; this model has none")
    if layers is Spread.one:
        chosen = (able[len(able) // 2],)
    else:
        chosen = able if isinstance(layers, Spread) else tuple(sorted(set(layers)))
    wrong = [n for n in chosen if n not in able]
    if wrong or not chosen:
        raise UsageError(f"defect {defect.name} needs {defect.needs.value}: {list(able)}, got layers {list(chosen)}")
    return Planted(defect, severity, Target(defect.kind.amount(severity), chosen, config))


class Builds(Protocol):
    """An engine that makes models over a loaded checkpoint."""

    def build(self, *, recipe: Recipe | None = ..., probe: Probe | None = ..., patch: Patch | None = ...) -> Model: ...


def build(engine: Builds, recipe: Recipe, planted: Planted, *, probe: Probe | None = None) -> Model:
    """A model under `recipe` with the defect in it; `probe` watches what the faulty code gives.

    Raises UsageError when the recipe never runs the code in which the defect sits.
    """
    for need in planted.defect.run:
        if not _runs(recipe, need):
            raise UsageError(f"defect {planted.defect.name} sits in code that this variant never runs: {need.value}")
    planted = replace(planted, target=replace(planted.target, clock=Clock()))
    fault = planted.probe
    model = engine.build(recipe=recipe, probe=fault if probe is None else _Watched(fault, probe), patch=planted.patch)
    planted.mutate(model)
    return model


def _runs(recipe: Recipe, need: Run) -> bool:
    return recipe.rules["kda_core.prefill"].algorithm == "chunk" if need is Run.chunk else is_incremental(recipe)


class _Fault:
    """The probe of a planted defect: follows the run and changes values at faulty sites, before their rounding."""

    def __init__(self, planted: Planted) -> None:
        self.planted = planted
        self.calls: Counter[tuple[str, int]] = Counter()
        self.seen: dict[int, dict[str, Tensor]] = {n: {} for n in planted.layers}

    def begin(self, step: Step) -> None:
        self.planted.target.clock.begin(step)
        self.calls.clear()

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        m = self.planted.defect.mechanism
        if not isinstance(m, AtSite) or layer not in self.planted.layers:
            return rounding
        if site in m.sites:
            return self._changed(m, site, layer, rounding)
        return self._remembered(site, layer, rounding) if site in m.reads else rounding

    def _changed(self, m: AtSite, site: str, layer: int, rounding: RoundAt | None) -> RoundAt:
        def faulty(x: Tensor) -> Tensor:
            visit = Visit(site, self.calls[(site, layer)], self.seen[layer])
            self.calls[(site, layer)] += 1
            y = m.change(x, self.planted.target, visit).to(x.dtype)
            return y if rounding is None else rounding(y)

        return faulty

    def _remembered(self, site: str, layer: int, rounding: RoundAt | None) -> RoundAt:
        def remember(x: Tensor) -> Tensor:
            self.seen[layer][site] = x if rounding is None else rounding(x)
            return self.seen[layer][site]

        return remember


class _Watched:
    """The fault first, then what watches."""

    def __init__(self, fault: Probe, watcher: Probe) -> None:
        self.fault, self.watcher = fault, watcher

    def begin(self, step: Step) -> None:
        self.fault.begin(step)
        self.watcher.begin(step)

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        return self.watcher.bind(site, layer, rule, self.fault.bind(site, layer, rule, rounding))


def _unclean(model: Model, m: InSlots, target: Target) -> None:
    """States of this model hold something after `reset` that they should not."""
    fresh = model.new_state

    def new_state(*, slots: int, max_len: int, pages: int | None = None) -> State:
        state = fresh(slots=slots, max_len=max_len, pages=pages)
        clean = state.reset

        @torch.inference_mode()
        def reset(slots: Sequence[int]) -> None:
            clean(slots)
            m.change(state, list(slots), target)

        state.reset = reset
        return state

    model.new_state = new_state
