"""A verdict on an engine that cannot be looked into, whose checkpoint is here: the oracle and the envelope beside it.

The engine is taken to compute as a declared recipe. Its first divergences are judged as those of any candidate, with
its own margins where it gave logprobs; its logprobs along the shared prefixes are held against the members'; and its
score against what members of the recipe reach. All of this sees outputs alone, so a defect is named without a place.
"""

from dataclasses import dataclass, replace

import numpy as np

from harness.calibration import Calibration, family
from harness.envelope import F64_FLOOR, Envelope, envelope
from harness.expected import ExpectedScore, expected_score
from harness.forced_errors import Battery
from harness.gaps import cannot_discriminate
from harness.gate import GateResult
from harness.golden_data import ENDED, Golden
from harness.inspect import make_oracle
from harness.judge import ALPHA, Evidence, divergences
from harness.significance import Spread, next_run_p
from harness.verdict import Finding, Verdict, conclude
from variants.recipe import Recipe, Semantics
from variants.weights import Casts


@dataclass(frozen=True, kw_only=True)
class OutsideQuestion:
    """What is judged, as `harness.verdict_run.Question`, without an engine: the gate's result says all of it."""

    golden: Golden
    casts: Casts
    declared: Recipe
    reference: Recipe
    members: int = 8
    seed: int = 0
    calibration: Calibration | None = None


def judge_outside(q: OutsideQuestion, gate: GateResult) -> Verdict:
    """Divergences, logprobs and score of one free run against oracle, envelope and members."""
    config = q.casts.checkpoint.config
    if gate.agreement.non_finite:
        n, t = gate.agreement.non_finite[0]
        reason = f"non-finite logits, first at prompt {n}, step {t}"
        return conclude((), (), invalid=reason, bar_met=None, config=config, instruments=("tokens",))
    chosen, margins = _first_choices(q.golden, gate)
    battery = Battery.of(q.golden)
    assert battery.watch is not None
    battery = replace(battery, watch=np.concatenate([battery.watch, chosen[..., None]], -1))
    own = envelope(q.declared, q.casts, battery, members=q.members, seed=q.seed)
    differs = bool(((chosen != q.golden.tokens[0]) & (chosen != ENDED)).any())
    reference = own
    if differs and q.reference.hash != q.declared.hash:
        reference = envelope(q.reference, q.casts, battery, members=q.members, seed=q.seed + 1)
    expected = expected_score(q.declared, q.casts, q.golden, members=q.members, seed=q.seed)
    found = divergences(
        Evidence(
            golden=q.golden,
            chosen=chosen,
            own=own,
            reference=reference,
            declared=q.declared,
            golden_recipe=q.reference,
            oracle=make_oracle(q.casts, q.declared),
            truth=make_oracle(q.casts, q.declared, semantics=Semantics()),
            make_row=None,
            margins=margins,
        )
    )
    logprobs, figures = _logprobs(q, own, gate)
    noise = _noise(own)
    weak = cannot_discriminate(q.golden, noise)
    findings = [*logprobs, *_score(expected, gate)]
    return conclude(
        findings,
        found,
        invalid=weak if weak and not findings else None,
        bar_met=gate.agreement.bar_met,
        config=config,
        instruments=("envelope", "expected_score", "routing", "tokens"),
        figures={
            "expected": expected.record(),
            "expected_p": expected.p_value(gate.agreement.matched),
            "noise_nats": noise,
            "members": q.members,
            **figures,
        },
    )


def _first_choices(golden: Golden, gate: GateResult) -> tuple[np.ndarray, dict[tuple[int, int], float]]:
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


def _logprobs(q: OutsideQuestion, own: Envelope, gate: GateResult) -> tuple[list[Finding], dict[str, object]]:
    """The candidate's logprobs of watched tokens, at the places it shares with the golden, against the members'."""
    deviations = _deviations(own, gate)
    known = ~np.isnan(deviations)
    places = known.any(-1)
    if places.sum() < 2:
        return [], {}
    unknown = ~known[places]
    members = np.where(unknown, np.nan, own.deviations[:, places])
    floor = F64_FLOOR * own.table.scale[own.head][places]
    level = float(_level(deviations[places], floor))
    spread = Spread.of(_level(members, floor))
    model = q.calibration.model(q.declared) if q.calibration and _known(q) else None
    last = None if model is None else Spread(
        mean=model.mean[-1], variance=model.variance[-1], df=model.df[-1], count=model.count
    )  # fmt: skip
    p = float(next_run_p(level, spread, *([] if last is None else [last])))
    excess = level - float(spread.mean)
    figures: dict[str, object] = {"logprob_excess": excess, "logprob_p": p, "logprob_places": int(places.sum())}
    if p >= ALPHA:
        return [], figures
    reason = f"logprobs: error e^{excess:+.2f} of the envelope of its recipe at {int(places.sum())} places, p {p:.1e}"
    return [Finding(instrument="envelope", reason=reason)], figures


def _known(q: OutsideQuestion) -> bool:
    return q.calibration is not None and family(q.declared) in {b.family for b in q.calibration.benign}


def _level(deviations: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Mean over places of ln(rms over the tokens known there): [..., P, W] -> [...]."""
    count = (~np.isnan(deviations)).sum(-1)
    rms = np.sqrt(np.nansum(deviations**2, -1) / count)
    return np.log(np.maximum(rms, floor)).mean(-1)


def _deviations(own: Envelope, gate: GateResult) -> np.ndarray:
    """Candidate's logprob minus the oracle's, [P, W]; NaN past a row's first divergence and where it gave none."""
    made, table = gate.generation, own.table
    found = np.full(table.ids.shape, np.nan)
    if made.top_ids is None or made.top_logprobs is None:
        return found
    prefix = [row.prefix for row in gate.agreement.per_prompt]
    for p, (n, t) in enumerate(table.positions.tolist()):
        if t > prefix[n]:  # the list at the first divergence itself still stands on the shared prefix
            continue
        given = dict(zip(made.top_ids[n, t].tolist(), made.top_logprobs[n, t].tolist(), strict=True))
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


def _noise(own: Envelope) -> float:
    """rms over positions of the members' error in the difference of the oracle's two best, in nats."""
    spread = own.deviations[:, :, 0] - own.deviations[:, :, 1]
    return float(np.sqrt(np.mean(spread**2)))
