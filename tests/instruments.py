"""What tests of the instruments share: the shipped checkpoint, a small battery, and runs with a defect planted."""

from functools import cache

from harness.compose import named_variant
from harness.engines.assets import checkpoint_folder
from harness.engines.local import LocalEngine, shared_casts
from harness.forced_errors import Battery
from harness.golden import load_golden
from harness.inspect import make_oracle, model_stepper
from harness.ladder import Ladder, ladder, other_order
from harness.local_replay import Key, LocalReplay, local_replay
from harness.op_error import OpError
from harness.verdict import Finding, replay_findings
from variants.axes import Execution, ExecutionAxes, Gemm, KdaAxes, KdaCore, MlaAxes, MlaCore, MoeAxes, Router, Variant
from variants.defects import DEFECTS, Planted, Spread, build, plant
from variants.defects_kinds import Severity
from variants.dtypes import DType
from variants.model import Model
from variants.recipe import Recipe
from variants.rounding import Probe
from variants.weights import Casts

# float32 everywhere, chunks so short that every fault of a hand-over is exercised.
CARRIER = Variant(
    gemm=Gemm.f32,
    kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=4),
    mla=MlaAxes(prefill=MlaCore.dense_f32, decode=MlaCore.absorbed),
    moe=MoeAxes(router=Router.f32),
    execution=ExecutionAxes(mode=Execution.incremental),
)


@cache
def shipped() -> Casts:
    return shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu")


@cache
def engine(name: str = "") -> LocalEngine:
    """A named variant's engine, the carrier's without a name."""
    return of(named_variant(name) if name else CARRIER)


def of(variant: Variant) -> LocalEngine:
    return LocalEngine(shipped(), variant, name="local")


def battery(rows: tuple[int, ...] = (0, 2), tokens: int = 5) -> Battery:
    """Prompts of 7 and 25 tokens: ragged, and long enough for six chunks of four."""
    return Battery.of(load_golden("gate")).part(rows, tokens)


def planted(name: str, severity: Severity = Severity.light, layers: Spread | list[int] = Spread.one) -> Planted:
    return plant(DEFECTS[name], severity=severity, layers=layers, config=shipped().checkpoint.config)


def faulty(p: Planted | None, recipe: Recipe, probe: Probe) -> Model:
    return engine().build(recipe=recipe, probe=probe) if p is None else build(engine(), recipe, p, probe=probe)


def replay(p: Planted | None, recipe: Recipe | None = None, *, over: Battery | None = None) -> LocalReplay:
    """Local replay of a recipe (the carrier's) with a defect in it, held against the recipe's own semantics."""
    at, b = recipe or engine().recipe, over or battery()
    oracle = make_oracle(shipped(), at)
    return local_replay(lambda tap: model_stepper(faulty(p, at, tap), b), oracle, at, b.prompts, b.continuations)


def climb(p: Planted | None, recipe: Recipe | None = None, *, precision: DType = DType.f32) -> Ladder:
    """One rung of the ladder with a defect in the candidate."""
    at, b = (recipe or engine().recipe).at_precision(precision), battery()
    return ladder(
        make_oracle(shipped(), at),
        {precision: lambda tap: model_stepper(faulty(p, at, tap), b)},
        {precision: lambda tap: model_stepper(faulty(None, other_order(at), tap), b)},
        b.prompts,
        b.continuations,
    )


def findings(found: LocalReplay, recipe: Recipe | None = None) -> list[Finding]:
    config = shipped().checkpoint.config
    return replay_findings(found, recipe=recipe or engine().recipe, config=config, rung="as run")


def worst(found: LocalReplay) -> tuple[Key, OpError]:
    return max(found.errors.items(), key=lambda e: e[1].worst)
