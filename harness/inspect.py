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
from harness.op_error import OpError
from harness.oracle import oracle_recipe
from harness.parts import part
from harness.probes import Tap
from harness.reach import long_enough
from variants.decode import Sequences
from variants.dtypes import DType
from variants.model import Model
from variants.model_config import ModelConfig
from variants.recipe import Recipe, Semantics
from variants.rounding import Probe
from variants.weights import Casts, Weights

POSITIONS = 160  # enough for every site; a larger battery is sampled evenly
RUNGS = (DType.f32, DType.f64)
NORMS = ("input_norm", "post_attn_norm", "final_norm")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way in which an engine ran under local replay.

    make(battery, tap): steps it over forced prompts (a library over one). recipe: what bounds it. battery: what was
    inspected. precision: to which its formats were raised, None as run. together: whether prompts run as rows of one
    batch.
    """

    make: Callable[[Battery, Tap], Stepper]
    recipe: Recipe
    battery: Battery
    precision: DType | None = None
    together: bool = True


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """arms, replays: by what ran ("as run", or the rung's name); the ladder; its size; the tokens of a longer prompt
    that was replayed beside it, 0 for none."""

    arms: Mapping[str, Arm]
    replays: Mapping[str, LocalReplay]
    ladder: Ladder
    prompts: int
    tokens: int
    longer: int = 0


def sample(battery: Battery, positions: int = POSITIONS) -> Battery:
    """Prompts spread evenly over a battery, cut so that about `positions` tokens are forced."""
    longest = max(len(c) for c in battery.continuations)
    tokens = min(longest, 16)
    count = max(1, min(len(battery.prompts), positions // tokens))
    rows = [round(i * (len(battery.prompts) - 1) / max(1, count - 1)) for i in range(count)]
    return battery.part(sorted(set(rows)), tokens)


def inspect_local(engine: LocalEngine, battery: Battery) -> Inspection:
    """Local replay of a variant as it runs and in float64, and its ladder; the oracle has the variant's semantics."""
    small, recipe = sample(battery), engine.recipe
    longer = long_enough(recipe, small, engine.casts.checkpoint.config.max_length)
    inspected = small.beside(longer)

    def steps(at: Recipe) -> Callable[[Tap], Stepper]:
        return lambda tap: model_stepper(engine.build(recipe=at, probe=tap), small)

    def reference(at: Recipe) -> Callable[[Tap], Stepper]:
        return lambda tap: model_stepper(model_under(engine.casts, at, tap), small)

    def arm(at: Recipe, precision: DType | None) -> Arm:
        return Arm(
            make=lambda battery, tap: model_stepper(engine.build(recipe=at, probe=tap), battery),
            recipe=at,
            battery=inspected,
            precision=precision,
        )

    rungs = {p: recipe.at_precision(p) for p in RUNGS}
    arms = {"as run": arm(recipe, None)}
    if rungs[DType.f64].hash != recipe.hash:
        arms["f64"] = arm(rungs[DType.f64], DType.f64)
    oracle = make_oracle(engine.casts, recipe)
    found = ladder(
        oracle,
        {p: steps(r) for p, r in rungs.items()},
        {p: reference(other_order(r)) for p, r in rungs.items()},
        small.prompts,
        small.continuations,
    )
    return Inspection(
        arms=arms,
        replays={name: _longer(a, make_replay(engine.casts, a.recipe), small, longer) for name, a in arms.items()},
        ladder=found,
        prompts=len(small.prompts),
        tokens=max(map(len, small.continuations)),
        longer=0 if longer is None else len(longer.prompts[0]),
    )


def inspect_closely(inspection: Inspection, casts: Casts, battery: Battery) -> dict[str, LocalReplay]:
    """The same arms over other prompts, whole and one at a time: for an alarm that lies outside the sample."""
    whole = {name: replace(arm, battery=battery) for name, arm in inspection.arms.items()}
    return {name: _by_prompt(arm, make_replay(casts, arm.recipe)) for name, arm in whole.items()}


def inspect_library(engine: TransformersEngine, casts: Casts, declared: Recipe, battery: Battery) -> Inspection:
    """Local replay of the library as it runs and, from a narrower dtype, with its own parameters upcast after load.

    declared: what such an engine is taken to do where nothing else is said, with the checkpoint's own semantics.
    """
    small = sample(battery)
    longer = long_enough(declared, small, casts.checkpoint.config.max_length)
    inspected = small.beside(longer)
    wide, at = engine.at_precision("f32"), declared.at_precision(DType.f32)

    def arm(runs: TransformersEngine, recipe: Recipe, precision: DType | None) -> Arm:
        make = lambda b, tap: _one_prompt(runs, b, tap)  # noqa: E731
        return Arm(make=make, recipe=recipe, battery=inspected, precision=precision, together=False)

    arms = {"as run": arm(engine, declared, None)}
    if wide is not engine:
        arms["f32"] = arm(wide, at, DType.f32)
    oracle = make_oracle(casts, declared)
    found = ladder(
        oracle,
        {DType.f32: lambda tap: LibraryRows(wide, small, tap)},
        {DType.f32: lambda tap: model_stepper(model_under(casts, other_order(at), tap), small)},
        small.prompts,
        small.continuations,
    )
    return Inspection(
        arms=arms,
        replays={name: _by_prompt(a, make_replay(casts, a.recipe)) for name, a in arms.items()},
        ladder=found,
        prompts=len(small.prompts),
        tokens=max(map(len, small.continuations)),
        longer=0 if longer is None else len(longer.prompts[0]),
    )


@part("local replay")
def _replayed(arm: Arm, oracle: Callable[[Probe], Model], battery: Battery) -> LocalReplay:
    return local_replay(lambda tap: arm.make(battery, tap), oracle, arm.recipe, battery.prompts, battery.continuations)


def _longer(arm: Arm, oracle: Callable[[Probe], Model], battery: Battery, longer: Battery | None) -> LocalReplay:
    """A battery and the errors over the longer prompt, which counts as the row after the last."""
    found = _replayed(arm, oracle, battery)
    if longer is None:
        return found
    more = _replayed(arm, oracle, longer)
    errors = dict(found.errors)
    for key, error in more.errors.items():
        errors.setdefault(key, OpError()).include(error, len(arm.battery.prompts) - 1)
    return LocalReplay(errors, found.compared | more.compared)


def _by_prompt(arm: Arm, oracle: Callable[[Probe], Model]) -> LocalReplay:
    """The library runs a prompt at a time; the errors of all prompts are one."""
    return merged([_replayed(arm, oracle, arm.battery.part([n])) for n in range(len(arm.battery.prompts))])


def _one_prompt(engine: TransformersEngine, battery: Battery, tap: Tap) -> Stepper:
    (prompt,) = battery.prompts
    return TransformersStepper(engine, prompt, tap)


def model_under(casts: Casts, recipe: Recipe, probe: Probe) -> Model:
    return Model(casts.checkpoint.config, recipe, Weights(casts, recipe.semantics), probe=probe)


def model_stepper(model: Model, battery: Battery) -> Stepper:
    return Sequences(model, battery.prompts, max(len(c) for c in battery.continuations))


def make_oracle(casts: Casts, declared: Recipe, *, semantics: Semantics | None = None) -> Callable[[Probe], Model]:
    """The float64 model that a run is held against: the declared semantics and execution, the oracle's arithmetic.

    semantics: another meaning than the declared one, for instance the checkpoint's own.
    """
    recipe = exact_recipe(casts.checkpoint.config, declared, declared.semantics if semantics is None else semantics)
    return lambda probe: model_under(casts, recipe, probe)


def make_replay(casts: Casts, declared: Recipe) -> Callable[[Probe], Model]:
    """As `make_oracle`, for a run whose recorded values are substituted (`replay_recipe`)."""
    recipe = replay_recipe(casts.checkpoint.config, declared)
    return lambda probe: model_under(casts, recipe, probe)


def replay_recipe(config: ModelConfig, declared: Recipe) -> Recipe:
    """`exact_recipe`, whose products read weights, and operands that single places round, as `declared` does.

    No value shows these roundings. Attention over the latent has the weight of its products as it is stored.
    """
    exact, own = exact_recipe(config, declared, declared.semantics), declared.own_operands()
    latent = {"kv_b_proj"} if absorbed(declared) else set()
    rules = {k: r if k in latent else replace(r, weight=declared.rules[k].weights) for k, r in exact.rules.items()}
    exceptions = {at: replace(rules[at[0]], input=own.get(at, rules[at[0]].input), weight=r.weights)
                  for at, r in declared.exceptions.items()}  # fmt: skip
    return replace(exact, rules=rules, exceptions=exceptions)


def absorbed(recipe: Recipe) -> bool:
    return any(recipe.rules[f"mla_core.{phase}"].algorithm.startswith("absorbed") for phase in ("prefill", "decode"))


def exact_recipe(config: ModelConfig, declared: Recipe, semantics: Semantics) -> Recipe:
    """The oracle's arithmetic, run in the steps and with the cache of what is declared."""
    recipe = oracle_recipe(config, semantics)
    # Which sum a norm reads is the variant's own legal order: it shows wherever a recorded store is substituted.
    norms = {site: replace(recipe.rules[site], algorithm=declared.rules[site].algorithm) for site in NORMS}
    return replace(
        recipe,
        rules={**recipe.rules, **norms},
        execution=declared.execution,
        expanded_cache=declared.expanded_cache,
    )
