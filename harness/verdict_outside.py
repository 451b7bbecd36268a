"""A verdict on an engine that cannot be looked into, whose checkpoint is here: the oracle and the envelope beside it.

The engine is taken to compute as a declared recipe. Its first divergences are judged as those of any candidate, with
its own margins where it gave logprobs; its logprobs along the shared prefixes are held against the members'; and its
score against what members of the recipe reach. All of this sees outputs alone, so a defect is named without a place;
known departures from the checkpoint's own function are tried on the oracle. An engine that can be forced is judged at
every place, and where its own code can run in a finer format too, at both: rounding falls with the format, a defect
stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from harness.beside import Beside, Level, stand_beside
from harness.calibration import ENVELOPE_P, Calibration, alone_logprobs, family
from harness.engines.protocol import Scored
from harness.envelope import F64_FLOOR, Envelope
from harness.expected import ExpectedScore
from harness.gaps import cannot_discriminate
from harness.gate import GateResult
from harness.golden_data import ENDED, Golden
from harness.inspect import make_oracle
from harness.judge import ALPHA, Evidence, divergences, noise_nats
from harness.question_hints import hint
from harness.reach import beyond
from harness.verdict import GROSS, Finding, RunClass, Verdict, conclude, end_findings
from harness.verdict_semantics import LEAST, explained_by
from variants.recipe import Recipe, Semantics
from variants.weights import Casts

WATCHED = 64  # logprobs asked for with each forced token
# A library in bf16 or f32 is taken to compute as the variant of this name, with the checkpoint's own semantics.
TAKEN_FOR = {"bf16": "bf16_engine", "f16": "bf16_engine", "f32": "f32"}
# ln. Another engine's sums go in an order of their own, which no recipe names: MLX's float32 stands e^0.5 over ours.
EXCESS = 1.0
# ln. Beside bf16 roundings no order of sums shows: 21 correct variants taken for bf16_engine stand e^-0.1 and lower.
EXCESS_BF16 = 0.5


@dataclass(frozen=True, kw_only=True)
class OutsideQuestion:
    """What is judged, as `harness.verdict_run.Question`, without an engine: the gate's result says all of it.

    scored: the engine forced along the golden's tokens, None where it cannot be. finer: the same, by the precision that
    its code was raised to.
    """

    golden: Golden
    casts: Casts
    declared: Recipe
    reference: Recipe
    members: int = 8
    seed: int = 0
    calibration: Calibration | None = None
    scored: Scored | None = None
    finer: Mapping[str, Scored] = field(default_factory=dict)


def judge_outside(q: OutsideQuestion, gate: GateResult, beside: Beside | None = None) -> Verdict:
    """Divergences, logprobs and score of one run against oracle, envelope and members.

    beside: what was walked for several runs of this battery (`Beside.of` this one); None to walk it now.
    """
    config = q.casts.checkpoint.config
    if invalid := gate.agreement.not_finite or (q.scored and q.scored.not_finite):
        return conclude((), (), invalid=invalid, bar_met=None, config=config, instruments=("tokens",))
    chosen, margins = first_choices(q.golden, gate) if q.scored is None else forced_choices(q.golden, q.scored)
    b = beside or stand_beside(
        q.golden, q.casts, q.declared, q.reference, [chosen], members=q.members, seed=q.seed, precisions=[*q.finer]
    )
    seen = _given(gate) if q.scored is None else _Lists.of(q.scored)
    logprobs, figures = _logprobs(q, b.as_runs, seen)
    for precision, scored in q.finer.items():
        more, rung = _logprobs(q, b.finer[precision], _Lists.of(scored), at=precision)
        logprobs, figures = [*logprobs, *more], figures | rung
    noise = noise_nats(b.as_runs.own)
    weak = cannot_discriminate(q.golden, noise)
    wrong = [*logprobs, *_score(b.expected, gate)]
    found = divergences(_evidence(q, b, chosen, margins, causal=not wrong))
    findings = [*end_findings(gate.agreement), *wrong]
    last = "tokens" if q.scored is None else "forced_logprobs"
    verdict = conclude(
        findings,
        found,
        invalid=weak if weak and not findings else None,
        bar_met=gate.agreement.bar_met,
        config=config,
        instruments=("envelope", *(("ladder",) if q.finer else ()), "expected_score", "routing", last),
        figures={
            "expected": b.expected.record(),
            "expected_p": b.expected.p_value(gate.agreement.matched),
            "noise_nats": noise,
            "members": q.members,
            "definition": b.opinion.record(),
            "not_reached": beyond(q.declared, b.as_runs.battery),
            **figures,
        },
    )
    if verdict.run_class is not RunClass.defect:
        return verdict
    return replace(verdict, reason=verdict.reason + hint(q.golden, gate.agreement))


def _evidence(
    q: OutsideQuestion, b: Beside, chosen: np.ndarray, margins: dict[tuple[int, int], float], *, causal: bool
) -> Evidence:
    return Evidence(
        golden=q.golden,
        chosen=chosen,
        own=b.as_runs.own,
        reference=b.reference,
        declared=q.declared,
        golden_recipe=q.reference,
        oracle=make_oracle(q.casts, q.declared),
        truth=make_oracle(q.casts, q.declared, semantics=Semantics()),
        make_row=None,
        margins=margins,
        causal=causal,
    )


def first_choices(golden: Golden, gate: GateResult) -> tuple[np.ndarray, dict[tuple[int, int], float]]:
    """The candidate's choices [N, T] up to each row's first divergence, the golden's after it; its margins there."""
    chosen = golden.tokens[0].copy()
    margins: dict[tuple[int, int], float] = {}
    made = gate.generation
    for d in gate.agreement.first_divergence:
        if ENDED in (d.golden_id, d.candidate_id):
            continue
        place = (d.prompt, d.position)
        chosen[place] = d.candidate_id
        if made.top_ids is None or made.top_logprobs is None:
            continue
        known = dict(zip(made.top_ids[place].tolist(), made.top_logprobs[place].tolist(), strict=True))
        if d.golden_id in known and d.candidate_id in known:
            margins[place] = known[d.golden_id] - known[d.candidate_id]
    return chosen, margins


def forced_choices(golden: Golden, scored: Scored) -> tuple[np.ndarray, dict[tuple[int, int], float]]:
    """The forced candidate's choices [N, T], and its own margins where it returned both tokens."""
    tokens = golden.tokens[0]
    chosen = np.where(tokens == ENDED, ENDED, scored.top_ids[..., 0])
    margins: dict[tuple[int, int], float] = {}
    for n, t in np.argwhere(chosen != tokens).tolist():
        margin = float(scored.token_logprobs[n, t] - scored.top_logprobs[n, t, 0])
        if np.isfinite(margin):
            margins[(n, t)] = margin
    return chosen, margins


@dataclass(frozen=True, kw_only=True)
class _Lists:
    """Ranked logprobs [N, T, k] and how many places of each row stand on the golden's own tokens."""

    ids: np.ndarray | None
    logprobs: np.ndarray | None
    upto: tuple[int, ...] | None = None

    @classmethod
    def of(cls, scored: Scored) -> "_Lists":
        """A forced engine stands on them everywhere."""
        return cls(ids=scored.top_ids, logprobs=scored.top_logprobs)


def _given(gate: GateResult) -> _Lists:
    # The list at the first divergence itself still stands on the shared prefix.
    upto = tuple(row.prefix + 1 for row in gate.agreement.per_prompt)
    return _Lists(ids=gate.generation.top_ids, logprobs=gate.generation.top_logprobs, upto=upto)


def _logprobs(
    q: OutsideQuestion, level: Level, seen: _Lists, *, at: str = ""
) -> tuple[list[Finding], dict[str, object]]:
    """The candidate's logprobs of watched tokens, at the places it shares with the golden, against the members'.

    At most one finding, and its figures. at: the precision that the candidate's code was raised to, none as it runs.
    """
    own = level.own
    deviations = _deviations(own, seen)
    places = (~np.isnan(deviations)).sum(-1) > 1
    if places.sum() < 2:
        return [], {}

    def height(given: np.ndarray) -> tuple[float, float]:
        return _levels(own, given, places)

    value, mean = height(deviations)
    p, excess = _logprob_p(q, level, np.where(places[:, None], deviations, np.nan)), value - mean
    prefix = f"{at}_" if at else ""
    figures: dict[str, object] = {f"{prefix}logprob_excess": excess, f"{prefix}logprob_p": p}
    figures |= {f"{prefix}logprob_error": value, f"{prefix}logprob_places": int(places.sum())}
    suspicious = p < ENVELOPE_P or excess > LEAST
    why = explained_by(level.meanings, own, deviations, height) if suspicious else None
    most = EXCESS_BF16 if family(level.recipe) == "bf16" else EXCESS
    if why is None and excess < (most if p < ENVELOPE_P else GROSS):
        return [], figures
    where = f" in {at}" if at else ""
    reason = f"logprobs{where}: error e^{excess:+.2f} of the envelope of its recipe at {int(places.sum())} places"
    reason += f", p {p:.1e}" + (f"; {why}" if why else "")
    return [Finding(instrument="ladder" if at else "envelope", reason=reason, rung=at)], figures


def _logprob_p(q: OutsideQuestion, level: Level, deviations: np.ndarray) -> float:
    """How surprising the candidate's error is beside the members' over the same tokens."""
    declared, own = level.recipe, level.own
    members = replace(own, deviations=_centred(np.where(np.isnan(deviations), np.nan, own.deviations)))
    candidate = _centred(deviations)
    if q.calibration is not None and q.calibration.covers(declared):
        return float(q.calibration.judge_logprobs(declared, members, candidate).p[0])
    return float(alone_logprobs(members, candidate).p[0])


def _levels(own: Envelope, deviations: np.ndarray, places: np.ndarray) -> tuple[float, float]:
    """The candidate's level and the members' mean over the same tokens, without what a place's tokens share: how a
    server sums its softmax is no matter."""
    known = ~np.isnan(deviations[places])
    floor = F64_FLOOR * own.table.scale[own.head][places]
    members = np.where(known, own.deviations[:, places], np.nan)
    return float(_level(_centred(deviations[places]), floor)), float(_level(_centred(members), floor).mean())


def _centred(deviations: np.ndarray) -> np.ndarray:
    known = (~np.isnan(deviations)).sum(-1, keepdims=True)
    return deviations - np.nansum(deviations, -1, keepdims=True) / np.maximum(known, 1)


def _level(deviations: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Mean over places of ln(rms over the tokens known there): [..., P, W] -> [...]."""
    count = (~np.isnan(deviations)).sum(-1)
    rms = np.sqrt(np.nansum(deviations**2, -1) / count)
    return np.log(np.maximum(rms, floor)).mean(-1)


def _deviations(own: Envelope, seen: _Lists) -> np.ndarray:
    """Candidate's logprob minus the oracle's, [P, W]; NaN past a row's first divergence and where it gave none."""
    table = own.table
    found = np.full(table.ids.shape, np.nan)
    if seen.ids is None or seen.logprobs is None:
        return found
    for p, (n, t) in enumerate(table.positions.tolist()):
        if seen.upto is not None and t >= seen.upto[n]:
            continue
        given = dict(zip(seen.ids[n, t].tolist(), seen.logprobs[n, t].tolist(), strict=True))
        for w, token in enumerate(table.ids[p].tolist()):
            if token >= 0 and token in given:
                found[p, w] = given[token] - table.oracle_logprobs[p, w]
    return found


def _score(expected: ExpectedScore, gate: GateResult) -> list[Finding]:
    p = expected.p_value(gate.agreement.matched)
    if p >= ALPHA:
        return []
    e = expected.interval
    said = f"score {gate.agreement.matched}/{gate.agreement.total}, a correct run reaches {e.low:.0f} to {e.high:.0f}"
    return [Finding(instrument="expected_score", reason=f"{said}, p {p:.1e}")]
