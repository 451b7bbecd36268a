"""Which instruments run for an engine, and their findings: from an engine and a golden to a `Verdict`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.as_run import as_run, chosen_as_watched, free_and_forced
from harness.beyond_envelope import beyond, moderate, suspects
from harness.calibration import Calibration
from harness.compose import groups, named_variant
from harness.divergence import far
from harness.engines.local import LocalEngine
from harness.engines.protocol import Scored
from harness.engines.transformers_candidate import TransformersCandidate
from harness.engines.transformers_engine import TransformersEngine
from harness.engines.transformers_steps import TransformersStepper
from harness.envelope import CANDIDATE, Envelope, envelope
from harness.expected import ExpectedScore, ends_at, expected_score
from harness.forced_errors import Battery
from harness.forced_values import Candidate, ModelCandidate
from harness.gaps import cannot_discriminate
from harness.gate import GateResult
from harness.golden_data import ENDED, Golden
from harness.hypotheses import Subject, explain
from harness.inspect import Inspection, inspect_closely, inspect_library, inspect_local, make_oracle
from harness.judge import Evidence, divergences, noise_nats
from harness.lockstep import Stepper
from harness.on_record import on_record
from harness.oracle import Forced
from harness.parts import part
from harness.probes import Tap
from harness.reused_slot import reused_slot
from harness.roundings import roundings
from harness.shared_code import second_opinion, sound_oracle
from harness.stored import stored
from harness.through_runner import through_runner
from harness.verdict import (
    Finding,
    Verdict,
    conclude,
    end_findings,
    ladder_findings,
    non_finite_findings,
    replay_findings,
)
from harness.verdict_sample import last_places, sampled, sampled_lengths
from variants.decode import Sequences
from variants.recipe import Recipe, Semantics, resolve
from variants.weights import Casts

Checked = LocalEngine | TransformersEngine
EXPLAINED = 6  # sites at most whose first finding is explained


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is judged, and with what effort.

    casts: the checkpoint in our own forward. declared: what the engine is taken to do. reference: the recipe of an
    engine like the golden's. calibration: None to use the members' spread alone.
    """

    golden: Golden
    engine: Checked
    casts: Casts
    declared: Recipe
    reference: Recipe
    members: int = 8
    seed: int = 0
    calibration: Calibration | None = None


def other_model(golden: Golden, sha256: str) -> str | None:
    """That a golden was made of other weights than these, as far as it says."""
    made_of = golden.provenance.get("model_sha256")
    if made_of in (None, sha256):
        return None
    return f"the golden was made of weights {str(made_of)[:12]}, these are {sha256[:12]}: name those with model=DIR"


def judge_run(question: Question, gate: GateResult, *, contradictions: Sequence[str] = ()) -> tuple[Verdict, Scored]:
    """Run every instrument that the engine allows. gate: the free-running result. contradictions: observed against
    declared. Also returns the teacher-forced scores."""
    golden, config = question.golden, question.casts.checkpoint.config
    battery = Battery.of(golden)
    with part("forced tokens"):
        scored = question.engine.score(golden.prompts, _continuations(golden), top_k=2)
    chosen = np.where(golden.tokens[0] == ENDED, ENDED, scored.top_ids[..., 0])
    invalid = gate.agreement.not_finite or scored.not_finite
    inspection = _inspect(question, battery)
    if invalid:
        made = non_finite_findings(inspection.replays)
        return conclude(made, (), invalid=invalid, bar_met=None, config=config), scored
    findings, shared = _shared_code(question, battery, gate, chosen)
    whole, lengths = _envelope(question, battery, chosen)
    own = sampled(whole, lengths)
    reference = _reference(question, battery, chosen, whole)
    expected = _expected(question)
    findings += [Finding(instrument="observed", reason=line) for line in contradictions]
    findings += end_findings(gate.agreement)
    outside = beyond(question.calibration, question.declared, own)
    found = divergences(_evidence(question, chosen, whole, reference))
    if isinstance(question.engine, LocalEngine):
        findings += chosen_as_watched(question.engine, found)
    findings += _inside(question, inspection) or _closer(question, inspection, suspects(own, outside, found))
    findings += outside
    weak = cannot_discriminate(golden, noise_nats(own))
    verdict = conclude(
        findings,
        found,
        invalid=weak if weak and not findings else None,
        bar_met=gate.agreement.bar_met,
        config=config,
        inspected=moderate(own, found),
        other_model=other_model(golden, question.casts.checkpoint.sha256),
        instruments=(*shared, "local_replay", "ladder", "envelope", "expected_score", "routing"),
        figures={
            **shared,
            **_figures(question, own, expected, inspection, gate),
            "far": far(found),
        },
    )
    return verdict, scored


def _shared_code(
    q: Question, battery: Battery, gate: GateResult, chosen: np.ndarray
) -> tuple[list[Finding], dict[str, object]]:
    """What is wrong in what our own variants run by, and what was looked at, by instrument; of a library the oracle."""
    if not isinstance(q.engine, LocalEngine):
        return [], {"definition": sound_oracle(q.casts, q.declared, battery).record()}
    engine, casts, declared = q.engine, q.casts, q.declared
    records = {
        "on_record": on_record(engine.name, engine.variant, casts.checkpoint.config, engine.recipe),
        "stored": stored(casts.checkpoint),
        "definition": second_opinion(casts, declared, battery),
        "through_runner": through_runner(casts, declared, battery),
        "reused_slot": reused_slot(engine, battery),
        "as_run": as_run(engine, battery),
        "roundings": roundings(engine, battery),
    }
    found = [f for instrument in records.values() for f in instrument.findings()]  # what the others pass through first
    found += free_and_forced(engine, q.golden, gate.generation.tokens, chosen)
    return found, {name: instrument.record() for name, instrument in records.items()}


def _expected(q: Question) -> ExpectedScore:
    stop = ends_at(q.golden, q.casts)
    return expected_score(q.declared, q.casts, q.golden, members=q.members, seed=q.seed, stop_at=stop)


def _continuations(golden: Golden) -> list[list[int]]:
    return Forced.of(golden).continuations


def _inspect(q: Question, battery: Battery) -> Inspection:
    if isinstance(q.engine, LocalEngine):
        return inspect_local(q.engine, battery)
    return inspect_library(q.engine, q.casts, q.declared, battery)


def _candidate(q: Question) -> Candidate:
    if isinstance(q.engine, LocalEngine):
        engine = q.engine
        return ModelCandidate(lambda seen: engine.build(probe=seen), engine.recipe.execution.batch)
    return TransformersCandidate(q.engine)


@part("envelope")
def _envelope(q: Question, battery: Battery, chosen: np.ndarray) -> tuple[Envelope, list[int]]:
    """The candidate's envelope over a sample and every prompt up to its last divergence, and the sample's lengths."""
    lengths = sampled_lengths(battery)
    walked = [max(n, last) for n, last in zip(lengths, last_places(_diverges(q, chosen)), strict=True)]
    watched = battery.watching(chosen).cut(walked)
    found = envelope(
        q.declared, q.casts, watched, members=q.members, seed=q.seed, candidates={CANDIDATE: _candidate(q)}
    )
    return found, lengths


def _diverges(q: Question, chosen: np.ndarray) -> np.ndarray:
    return (chosen != q.golden.tokens[0]) & (chosen != ENDED)


@part("envelope of the golden")
def _reference(q: Question, battery: Battery, chosen: np.ndarray, own: Envelope) -> Envelope:
    """The envelope of an engine like the golden's, as far as each prompt's last divergence: it is asked there alone.

    The candidate's own where it is the same or nothing diverges.
    """
    diverges = _diverges(q, chosen)
    if q.reference.hash == q.declared.hash or not diverges.any():
        return own
    watched = battery.watching(chosen).cut(last_places(diverges))
    return envelope(q.reference, q.casts, watched, members=q.members, seed=q.seed + 1)


def _inside(q: Question, inspection: Inspection) -> list[Finding]:
    """Findings of local replay and ladder; the first of each site with what explains it, where something does."""
    found: list[Finding] = []
    for rung, replay in inspection.replays.items():
        known = {(f.site, f.layer) for f in found}
        fresh = replay_findings(
            replay, recipe=inspection.arms[rung].recipe, config=q.casts.checkpoint.config, rung=rung
        )
        found += [f for f in fresh if (f.site, f.layer) not in known]
    return [*_explained(q, inspection, found), *ladder_findings(inspection.ladder)]


def _closer(q: Question, inspection: Inspection, places: dict[int, int]) -> list[Finding]:
    """Local replay over whole prompts up to a suspicious position, which the sample may not have reached."""
    found: list[Finding] = []
    for prompt, position in places.items():
        whole = Battery.of(q.golden).part([prompt], position + 1)
        for rung, replay in inspect_closely(inspection, q.casts, whole).items():
            recipe = inspection.arms[rung].recipe
            found += replay_findings(replay, recipe=recipe, config=q.casts.checkpoint.config, rung=rung)
        if found:
            break
    return found


def _explained(q: Question, inspection: Inspection, found: Sequence[Finding]) -> list[Finding]:
    """Each costs about a second on the shipped checkpoint, so the later findings of a site go without."""
    if not found:
        return []
    subject = Subject(casts=q.casts, arms=inspection.arms, named=_named(q))
    firsts = [f for i, f in enumerate(found) if f.site not in {g.site for g in found[:i]}][:EXPLAINED]
    told = {id(f): explain(f, subject) for f in firsts}
    return [replace(f, reason=f"{f.reason}; {text}") if (text := told.get(id(f))) else f for f in found]


def _named(q: Question) -> dict[str, Recipe]:
    """The named variants, that of the library first: it holds every rounding point of a real engine."""
    names = sorted(groups()["variant"], key=lambda n: n != "transformers_mirror")
    return {n: resolve(named_variant(n), q.casts.checkpoint.config) for n in names}


def _evidence(q: Question, chosen: np.ndarray, own: Envelope, reference: Envelope) -> Evidence:
    def make_row(prompt: int, tap: Tap) -> Stepper:
        ids = list(q.golden.prompts[prompt])
        if isinstance(q.engine, LocalEngine):
            return Sequences(q.engine.build(probe=tap), [ids], q.golden.tokens.shape[2])
        return TransformersStepper(q.engine, ids, tap)

    return Evidence(
        golden=q.golden,
        chosen=chosen,
        own=own,
        reference=reference,
        declared=q.declared,
        golden_recipe=q.reference,
        oracle=make_oracle(q.casts, q.declared),
        truth=make_oracle(q.casts, q.declared, semantics=Semantics()),
        make_row=make_row,
    )


def _figures(
    q: Question, own: Envelope, expected: ExpectedScore, inspection: Inspection, gate: GateResult
) -> dict[str, object]:
    errors = own.table.parties[CANDIDATE].rms[0]
    return {
        "excess_by_layer": {
            f"{s}@{n}": round(float(x), 4) for (s, n), x in zip(own.places, own.excess(errors), strict=True)
        },
        "ladder": {r.precision.name: [round(x, 3) for x in r.error] for r in inspection.ladder.rungs},
        "expected": expected.record(),
        "expected_p": expected.p_value(gate.agreement.matched),
        "noise_nats": noise_nats(own),
        "inspected": {"prompts": inspection.prompts, "tokens": inspection.tokens, "longer": inspection.longer},
        "enveloped": {"prompts": len(np.unique(own.table.positions[:, 0])), "tokens": own.tokens},
        "members": q.members,
        "calibration": None if q.calibration is None else q.calibration.hash,
    }
