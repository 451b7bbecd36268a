"""The instruments that look inside an engine: local replay and precision ladder, over a battery small enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from harness.engines.local import LocalEngine
from harness.engines.transformers_engine import TransformersEngine
from harness.engines.transformers_steps import LibraryRows, TransformersStepper
from harness.forced_errors import Battery
from harness.ladder import Ladder, ladder, other_order
from harness.local_replay import LocalReplay, local_replay, merged
from harness.lockstep import Stepper
from harness.oracle import oracle_recipe
from harness.probes import Tap
from variants.decode import Sequences
from variants.dtypes import DType
from variants.model import Model
from variants.recipe import Recipe, Semantics
from variants.rounding import Probe
from variants.weights import Casts, Weights

POSITIONS = 160  # enough for every site; a larger battery is sampled evenly
RUNGS = (DType.f32, DType.f64)


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """replays: by what ran ("as run", or the rung's name), with the recipe that bounds each; the ladder; its size."""

    replays: Mapping[str, tuple[LocalReplay, Recipe]]
    ladder: Ladder
    prompts: int
    tokens: int


def sample(battery: Battery, positions: int = POSITIONS) -> Battery:
    """Prompts spread evenly over a battery, cut so that about `positions` tokens are forced."""
    longest = max(len(c) for c in battery.continuations)
    tokens = min(longest, 16)
    count = max(1, min(len(battery.prompts), positions // tokens))
    rows = [round(i * (len(battery.prompts) - 1) / max(1, count - 1)) for i in range(count)]
    return battery.part(sorted(set(rows)), tokens)


def inspect_local(engine: LocalEngine, battery: Battery) -> Inspection:
    """Local replay of a variant as it runs and in float64, and its ladder; the oracle has the variant's semantics."""
    small = sample(battery)
    recipe = engine.recipe

    def steps(at: Recipe) -> Callable[[Tap], Stepper]:
        return lambda tap: model_stepper(engine.build(recipe=at, probe=tap), small)

    def replayed(at: Recipe) -> LocalReplay:
        return local_replay(steps(at), make_oracle(engine.casts, recipe), at, small.prompts, small.continuations)

    rungs = {p: recipe.at_precision(p) for p in RUNGS}
    replays = {"as run": (replayed(recipe), recipe)}
    if rungs[DType.f64].hash != recipe.hash:
        replays["f64"] = (replayed(rungs[DType.f64]), rungs[DType.f64])
    found = ladder(
        make_oracle(engine.casts, recipe),
        {p: steps(r) for p, r in rungs.items()},
        {p: steps(other_order(r)) for p, r in rungs.items()},
        small.prompts,
        small.continuations,
    )
    return Inspection(
        replays=replays, ladder=found, prompts=len(small.prompts), tokens=max(map(len, small.continuations))
    )


def inspect_library(engine: TransformersEngine, casts: Casts, declared: Recipe, battery: Battery) -> Inspection:
    """Local replay of the library as it runs and, from a narrower dtype, with its own parameters upcast after load.

    declared: what such an engine is taken to do where nothing else is said, with the checkpoint's own semantics.
    """
    small = sample(battery)
    wide = engine.at_precision("f32")
    arms = {"as run": (engine, declared)}
    if wide is not engine:
        arms["f32"] = (wide, declared.at_precision(DType.f32))
    oracle = make_oracle(casts, declared)
    replays = {name: (_library_replay(e, r, oracle, small), r) for name, (e, r) in arms.items()}
    at = declared.at_precision(DType.f32)
    found = ladder(
        oracle,
        {DType.f32: lambda tap: LibraryRows(wide, small, tap)},
        {DType.f32: lambda tap: model_stepper(_model(casts, other_order(at), tap), small)},
        small.prompts,
        small.continuations,
    )
    return Inspection(
        replays=replays, ladder=found, prompts=len(small.prompts), tokens=max(map(len, small.continuations))
    )


def _library_replay(
    engine: TransformersEngine, declared: Recipe, oracle: Callable[[Probe], Model], battery: Battery
) -> LocalReplay:
    """The library runs a prompt at a time; the errors of all prompts are one."""
    parts = [
        local_replay(lambda tap, p=p: TransformersStepper(engine, p, tap), oracle, declared, [p], [c])
        for p, c in zip(battery.prompts, battery.continuations, strict=True)
    ]
    return merged(parts)


def _model(casts: Casts, recipe: Recipe, probe: Probe) -> Model:
    return Model(casts.checkpoint.config, recipe, Weights(casts, recipe.semantics), probe=probe)


def model_stepper(model: Model, battery: Battery) -> Stepper:
    return Sequences(model, battery.prompts, max(len(c) for c in battery.continuations))


def make_oracle(casts: Casts, declared: Recipe, *, semantics: Semantics | None = None) -> Callable[[Probe], Model]:
    """The float64 model that a run is held against: the declared semantics and execution, the oracle's arithmetic.

    semantics: another meaning than the declared one, for instance the checkpoint's own.
    """
    meaning = declared.semantics if semantics is None else semantics
    recipe = oracle_recipe(casts.checkpoint.config, meaning)
    recipe = replace(recipe, execution=declared.execution, expanded_cache=declared.expanded_cache)
    return lambda probe: Model(casts.checkpoint.config, recipe, Weights(casts, meaning), probe=probe)
