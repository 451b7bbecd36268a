"""`neartie verdict`: is what differs rounding or a defect, and where; every instrument that the engine allows."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from experiments.gate import announced, environment_of, known_of, observe_engine, texts, with_gaps
from experiments.words import Flags
from harness import strict_json
from harness.calibration import Calibration, find_calibration
from harness.compose import named_variant
from harness.config import READS, Config, EngineChoice, EngineKind
from harness.divergence import FAR
from harness.engines import make_engine
from harness.engines.assets import checkpoint_folder
from harness.engines.loaded import casts_of, shared_casts
from harness.engines.local import LocalEngine
from harness.engines.protocol import Engine, Scored
from harness.gate import GateResult, part_of, run_gate
from harness.golden import Golden, load_golden
from harness.golden_model import is_made_of
from harness.ledger import Ledger, Run
from harness.numerics import check_device, policy
from harness.oracle import Forced
from harness.parts import part, recorded
from harness.pregate import check_vocabulary
from harness.shared_code import INSTRUMENT as DEFINITION
from harness.verdict import RunClass, Verdict
from harness.verdict_outside import TAKEN_FOR, WATCHED, OutsideQuestion, judge_outside
from harness.verdict_run import Checked, Question, judge_run
from harness.verdict_tokens import judge_tokens
from variants.errors import UsageError
from variants.model_config import ModelConfig
from variants.recipe import Recipe, is_incremental, resolve
from variants.weights import Casts

DEFECT = 1
FAR_UNDER = 4.0  # ln; f16 where bf16 is meant stands e^-2.7 under its members, f32 e^-10
FINE = ": far less than it is taken to round, which leaves a fault room; name what it computes with declared=VARIANT"
SHARED = "what a correct run scores cannot be told: the members run the same faulty code"


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """members: of the envelope and the expected score. reference: variant that stands for the golden's engine.

    declared: variant that an engine which is none of ours is taken to compute as; None for that of its dtype. noise: in
    nats, for an engine that is judged by tokens alone and gives no logprobs. The oracle runs in this process, so it
    reads `device.threads` for every engine.
    """

    own_words: ClassVar[frozenset[str]] = frozenset(("device.threads",))
    members: int = 8
    reference: str = "bf16_engine"
    declared: str | None = None
    noise: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.members < 2:
            raise UsageError(f"members={self.members}: expected 2 or more, a spread is read off them")
        if self.noise is not None and not self.noise > 0:
            raise UsageError(f"noise={self.noise}: expected nats above 0")
        if self.declared is not None and self.engine.kind is EngineKind.local:
            raise UsageError(
                f"declared={self.declared} has no effect with engine=local: a variant declares itself; leave it out, "
                "or name the library with engine=transformers"
            )


def run(config: Settings, flags: Flags) -> int:
    """Judge one run and put it on record; exit code 1 with --fail where it is a defect, suspect or invalid."""
    with Ledger(Path(config.results) / "ledger").begin(announced(config, flags, "verdict")) as row:
        check_device(config.device)
        with (
            recorded() as parts,
            policy(config.device, tf32=config.variant.tf32, reduced_sums=config.variant.reduced_sums),
            ExitStack() as stack,
        ):
            verdict, gate = _judged(config, row, stack)
        row.add({"detail": {"seconds": parts.record()}})
        row.finish(gate.record() | {"verdict": verdict.record(), "expected": verdict.figures.get("expected")})
    if flags.json:
        told = {"run_id": row.run_id, **verdict.record(), "seconds": parts.record()}
        print(strict_json.dumps(told).decode())
    else:
        print(text(config, verdict, gate, parts.line()))
    bad = verdict.run_class in (RunClass.defect, RunClass.suspect, RunClass.invalid)
    return DEFECT if bad and "fail" in flags.values else 0


def _judged(config: Settings, row: Run, stack: ExitStack) -> tuple[Verdict, GateResult]:
    row.add({"environment": environment_of(config)})
    golden = part_of(load_golden(config.golden), prompts=config.limit, tokens=config.max_tokens)
    row.add({"golden_hash": golden.hash, "battery_hash": golden.battery_hash, "bar": golden.bar.name})
    engine = make_engine(config)
    if not isinstance(engine, Checked):
        return _outside(config, golden, engine, row, stack)
    if config.noise is not None:
        raise UsageError(f"noise={config.noise} has no effect: this engine's own noise is measured; leave it out")
    folder = checkpoint_folder(config.model.path)
    with part("load"):  # of the model beside an engine that has none of ours
        casts = casts_of(config)
    stack.callback(casts.drop)
    calibration = _calibration(config, casts)
    row.add({"model_hash": engine.info.model_sha256})
    check_vocabulary(golden, casts.checkpoint.config.vocab_size)
    seen: tuple[str, ...] = ()
    if isinstance(engine, LocalEngine):
        row.add({"variant_hash": engine.recipe.hash, "recipe": {"declared": engine.recipe.as_dict()}})
        seen = observe_engine(engine, golden, row)
    model = casts.checkpoint.config
    gate = run_gate(golden, engine, vocab_size=model.vocab_size, text=texts(folder / "tokenizer.json"))
    question = Question(
        golden=golden,
        engine=engine,
        casts=casts,
        declared=engine.recipe if isinstance(engine, LocalEngine) else _taken_for(config, casts.checkpoint.config),
        reference=resolve(named_variant(config.reference), model),
        members=config.members,
        seed=config.seed,
        calibration=calibration,
    )
    verdict, scored = judge_run(question, gate, contradictions=seen)
    row.add({"teacher_forced": _teacher_forced(golden, scored.top_ids[..., 0])})
    return verdict, gate


def _outside(
    config: Settings, golden: Golden, engine: Engine, row: Run, stack: ExitStack
) -> tuple[Verdict, GateResult]:
    """An engine that cannot be looked into: beside the oracle where the golden's checkpoint is here, else by tokens."""
    row.add({"model_hash": engine.info.model_sha256})
    golden = with_gaps(golden, engine)
    casts = _oracle(config, golden)
    gate = run_gate(golden, engine, **known_of(config, golden, engine))
    if casts is None:
        if config.declared is not None:
            raise UsageError(
                f"declared={config.declared} has no effect: the golden was not made of model={config.model.path}, so "
                "nothing runs beside this engine; name its checkpoint with model=DIR"
            )
        if config.device.threads and "device" not in READS[config.engine.kind][1]:
            raise UsageError(
                f"device.threads={config.device.threads} has no effect: the golden was not made of model="
                f"{config.model.path}, so nothing of ours runs; leave it out, or name its checkpoint with model=DIR"
            )
        return judge_tokens(golden, gate.generation, gate.agreement, noise=config.noise), gate
    if config.noise is not None:
        raise UsageError(f"noise={config.noise} has no effect: the envelope measures it here; leave it out")
    stack.callback(casts.drop)
    scored, finer = forced_scores(engine, golden)
    if scored is not None:
        row.add({"teacher_forced": _teacher_forced(golden, scored.top_ids[..., 0])})
    question = OutsideQuestion(
        golden=golden,
        casts=casts,
        declared=_taken_for(config, casts.checkpoint.config),
        reference=resolve(named_variant(config.reference), casts.checkpoint.config),
        members=config.members,
        seed=config.seed,
        calibration=find_calibration(casts.checkpoint.sha256),
        scored=scored,
        finer=finer,
    )
    return judge_outside(question, gate), gate


def _calibration(config: Settings, casts: Casts) -> Calibration | None:
    """What correct variants of this checkpoint show. Raises UsageError, before anything runs, for too few members."""
    found = find_calibration(casts.checkpoint.sha256)
    if found is not None:
        found.check_members(config.members)
    return found


def _oracle(config: Settings, golden: Golden) -> Casts | None:
    """The checkpoint, where its weights are those that the golden says it was made of."""
    if not is_made_of(golden, config.model):
        return None
    return shared_casts(str(checkpoint_folder(config.model.path)), config.model.sha256, *config.device.names)


def _taken_for(config: Settings, model: ModelConfig) -> Recipe:
    """The recipe that an engine which is none of ours is held against; one that names no dtype is taken for bf16.

    Raises UsageError for one that does not carry state.
    """
    name = config.declared or _usual(config.engine)
    recipe = resolve(named_variant(name), model)
    if not is_incremental(recipe) or recipe.execution.prefill_piece:
        raise UsageError(
            f"declared={name}: the library prefills a prompt in one piece and carries state; name a variant that does "
            "so (execution.mode=incremental, execution.prefill_piece=0)"
        )
    return recipe


def _usual(choice: EngineChoice) -> str:
    if choice.kind is EngineKind.llama_server and choice.dtype.name == "f32":
        return "llama_cpp_flash" if choice.flash else "llama_cpp_f16_kv" if choice.kv.name == "f16" else "llama_cpp"
    if choice.kind is EngineKind.mlx:
        return "f32"
    return TAKEN_FOR[choice.dtype.name if "dtype" in READS[choice.kind][0] else "bf16"]


def forced_scores(engine: Engine, golden: Golden) -> tuple[Scored | None, dict[str, Scored]]:
    """An engine that gives whole rows, forced along the golden, and again in the finer format that its code can run in.

    None for one that cannot: what it said freely is judged then.
    """
    info = engine.info
    if not (info.can_score and info.full_logits):
        return None, {}
    continuations = Forced.of(golden).continuations
    finer: dict[str, Scored] = {}
    for precision in info.precisions:
        exact = engine.at_precision(precision)  # pyright: ignore[reportAttributeAccessIssue]
        if exact is not engine:
            finer[precision] = exact.score(golden.prompts, continuations, top_k=WATCHED)
    return engine.score(golden.prompts, continuations, top_k=WATCHED), finer


def _teacher_forced(golden: Golden, chosen: object) -> dict[str, int]:
    tokens = golden.tokens[0]
    there = tokens >= 0
    return {"matched": int(((tokens == chosen) & there).sum()), "total": int(there.sum())}


def text(config: Settings, verdict: Verdict, gate: GateResult, took: str) -> str:
    """The verdict for a terminal: the line first, then the score against what was expected, divergences, the time."""
    a, f = gate.agreement, verdict.figures
    lines = [f"{verdict.run_class.value}  {config.label}: {verdict.reason}"]
    shared = any(x.instrument == DEFINITION for x in verdict.findings)
    if "expected" in f:
        lines.append(f"score {a.matched}/{a.total}; {SHARED if shared else _expected(a.matched, f['expected'])}")
    seen, total = f.get("inspected"), gate.golden.tokens[0].shape
    if isinstance(seen, dict):
        walked = f["enveloped"]
        assert isinstance(walked, dict)
        envelope = f"envelope over {walked['prompts']} x {walked['tokens']} and at every divergence"
        replayed = f"replayed {seen['prompts']} x {seen['tokens']} of {total[0]} x {total[1]} tokens, site by site"
        longer = f", and one prompt of {seen['longer']} for what begins later" if seen.get("longer") else ""
        lines.append(f"{replayed}{longer}; {envelope}")
    if unseen := f.get("not_reached"):
        assert isinstance(unseen, list)
        lines.append(f"no sequence here reaches: {', '.join(unseen)}; a fault that begins there cannot show")
    lines += _outputs(f)
    lines += [note for note in gate.notes if not note.startswith("prompt ")]
    lines += [f"  {x.instrument}: {x.reason}" for x in verdict.findings[:8]]
    if len(verdict.findings) > 8:
        lines.append(f"  and {len(verdict.findings) - 8} more findings (--json)")
    if verdict.divergences:
        forced = "tokens" not in verdict.instruments
        head = "divergences, teacher-forced on the golden's prefix:" if forced else "first divergences:"
        head = f"{head[:-1]}, causes by the same faulty code:" if shared else head
        lines += ["", head, *(f"  {d.reason}" for d in verdict.divergences), *_far(f.get("far"))]
    return "\n".join([*lines, "", took])


def _expected(matched: int, e: object) -> str:
    assert isinstance(e, dict)
    told = f"a correct run of this recipe: {e['mean']:.1f}, 95 % in {e['low']:.0f}..{e['high']:.0f}"
    return f"{told} (members {e['members']})" + (": fewer than these" if matched < e["low"] else "")


def _far(counts: object) -> list[str]:
    """How many divergences lie far from the golden's token, by class."""
    if not (isinstance(counts, dict) and counts):
        return []
    told = ", ".join(f"{n} {cause}" for cause, n in counts.items())
    return [f"{sum(counts.values())} of these more than {FAR:g} nat from the golden's token: {told}"]


def _outputs(figures: Mapping[str, object]) -> list[str]:
    """How far the logprobs of an engine seen from outside are from the oracle, as it runs and in a finer format."""
    lines = []
    for key, excess in figures.items():
        name = key.removesuffix("logprob_excess")
        if name != key and isinstance(excess, float):
            error, places = figures[f"{name}logprob_error"], figures[f"{name}logprob_places"]
            how = f"its own code in {name.removesuffix('_')}" if name else "as it runs"
            lines.append(
                f"logprobs {how}: error e^{error:.2f}, e^{excess:+.2f} of its recipe's members, {places} places"
                + (FINE if excess < -FAR_UNDER else "")
            )
    return lines


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["verdict", *sys.argv[1:]]))
