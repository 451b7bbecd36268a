"""Every teacher-forced divergence of a run with its cause: rounding, routing, a tie, or none of these.

The candidate walks beside the oracle and the members of its own envelope; the golden's recorded logprobs are held
against the envelope of an engine like the one that made it. What neither explains is tried as routing, causally.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.divergence import Cause, Divergence, Side, cause_of, golden_margin, side_p
from harness.envelope import Envelope
from harness.golden_data import ENDED, Golden
from harness.lockstep import Stepper, walk_steppers
from harness.probes import Tap
from harness.routing import Build, Route, changed, explaining_swap, oracle_pass

ALPHA = 1e-3  # family-wise, over every divergence and both sides
CANDIDATE = "candidate"
# A router score (0 to 1) that bf16 activations move by about a hundredth; exchanges at wider gaps are not rounding.
WIDEST_GAP = 0.05
MakeRow = Callable[[int, Tap], Stepper]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the judge reads.

    own, reference: envelopes of the candidate's recipe (walked with the candidate) and of the golden engine's. oracle:
    makes the float64 model with the candidate's declared semantics; truth: the same with the checkpoint's own.
    make_row(prompt, tap): the candidate over one prompt alone; None where its values cannot be looked at.
    """

    golden: Golden
    chosen: np.ndarray
    own: Envelope
    reference: Envelope
    oracle: Build
    truth: Build
    make_row: MakeRow | None


def divergences(evidence: Evidence) -> list[Divergence]:
    """Each place where the candidate's teacher-forced choice is not the golden's token, in order."""
    tokens = evidence.golden.tokens[0]
    found = np.argwhere((evidence.chosen != tokens) & (tokens != ENDED))
    alpha = ALPHA / max(1, 2 * len(found))
    return [_judge(evidence, int(n), int(t), alpha) for n, t in found]


def _judge(e: Evidence, n: int, t: int, alpha: float) -> Divergence:
    a, b = int(e.golden.tokens[0, n, t]), int(e.chosen[n, t])
    table, place = e.own.table, e.own.table.index(n, t)
    ia, ib = table.column(place, a), table.column(place, b)
    margin = float(table.oracle_logprobs[place, ia] - table.oracle_logprobs[place, ib])
    seen = table.parties.get(CANDIDATE)
    # Where only tokens are known, a side prefers its own token by nothing at least: the smallest shift that fits.
    least_own, least_golden = min(margin, 0.0), max(margin, 0.0)
    own = least_own if seen is None else margin + float(seen.deviations[0, place, ia] - seen.deviations[0, place, ib])
    recorded = _recorded(e.golden, n, t, a, b)
    candidate = Side(margin=own, sigma=e.own.sigma(n, t, a, b), least=seen is None)
    golden = Side(
        margin=least_golden if recorded is None else recorded,
        sigma=e.reference.sigma(n, t, a, b),
        least=recorded is None,
    )
    members = min(e.own.members, e.reference.members)
    cause, p = cause_of(candidate, golden, margin, members=members, alpha=alpha)
    verdict = Divergence(
        prompt=n, position=t, golden_token=a, token=b, margin=margin, candidate=candidate, golden=golden,
        cause=cause, p=p,
    )  # fmt: skip
    if cause is Cause.defect:
        verdict = _candidate_routing(e, verdict, members, alpha)
    if verdict.cause is Cause.golden_side or (verdict.cause is Cause.routing and _golden_off(verdict, members, alpha)):
        verdict = _golden_routing(e, verdict, members, alpha)
    return verdict


def _golden_off(d: Divergence, members: int, alpha: float) -> bool:
    return side_p(d.golden, d.margin, members) < alpha


def _recorded(golden: Golden, n: int, t: int, a: int, b: int) -> float | None:
    if golden.top_ids is None or golden.top_logprobs is None:
        return None
    return golden_margin(golden.top_ids[n, t], golden.top_logprobs[n, t], a, b)


def _forced(e: Evidence, d: Divergence) -> tuple[list[int], list[int]]:
    """The prompt, and the golden's tokens up to and including the place's own (whose logits come before it)."""
    return list(e.golden.prompts[d.prompt]), e.golden.tokens[0, d.prompt, : d.position + 1].tolist()


def _candidate_routing(e: Evidence, d: Divergence, members: int, alpha: float) -> Divergence:
    """Whether the oracle with the candidate's own choice of experts has the candidate's margin."""
    prompt, forced = _forced(e, d)
    make = e.make_row
    if make is None:
        return _swap_explains(e, d, "candidate", members, alpha)
    ids = choices_of(lambda tap: make(d.prompt, tap), forced)
    right = oracle_pass(e.oracle, prompt, forced)
    routes = changed(right.choices, ids)
    if not routes:
        return d
    logits = oracle_pass(e.oracle, prompt, forced, ids={r: ids[r] for r in routes}).logits[-1]
    margin = float(logits[d.golden_token] - logits[d.token])
    if side_p(d.candidate, margin, members) < alpha:
        return d
    first = min(routes, key=lambda r: right.choices[r].gap)
    choice = right.choices[first]
    evidence = _exchange(choice.layer, choice.position, choice.chosen, ids[first], choice.gap)
    evidence |= {"side": "candidate", "changed sets": len(routes), "margin with them": f"{margin:+.3g} nat"}
    return replace(d, cause=Cause.routing, evidence=evidence)


def _golden_routing(e: Evidence, d: Divergence, members: int, alpha: float) -> Divergence:
    found = _swap_explains(e, d, "golden", members, alpha)
    return found if found.cause is Cause.routing and found is not d else replace(d, cause=Cause.golden_side)


def _swap_explains(e: Evidence, d: Divergence, side: str, members: int, alpha: float) -> Divergence:
    """Whether one exchange of experts at a narrow gap gives the oracle a margin that the side's rounding explains."""
    prompt, forced = _forced(e, d)
    shown = d.golden if side == "golden" else d.candidate
    found = explaining_swap(
        e.truth if side == "golden" else e.oracle,
        prompt,
        forced,
        pair=(d.golden_token, d.token),
        wanted=lambda margin: side_p(shown, margin, members) >= alpha,
        within=WIDEST_GAP,
    )
    if found is None:
        return d
    c = found.choice
    evidence = _exchange(c.layer, c.position, c.chosen, c.swapped, c.gap)
    evidence |= {"side": side, "margin with it": f"{found.margin:+.3g} nat"}
    return replace(d, cause=Cause.routing, evidence=d.evidence | evidence)


def _exchange(layer: int, position: int, oracle: Sequence[int], other: Sequence[int], gap: float) -> dict[str, object]:
    out, into = sorted(set(oracle) - set(other)), sorted(set(other) - set(oracle))
    return {"layer": layer, "position": position, "experts": f"{out} -> {into}", "gap": float(f"{gap:.3g}")}


def choices_of(make: Callable[[Tap], Stepper], forced: Sequence[int]) -> Mapping[Route, list[int]]:
    """Expert ids that a run chose at every (layer, position) of one prompt and its forced tokens."""
    tap = Tap(lambda site, layer: site == "router_ids")
    found: dict[Route, list[int]] = {}
    for _ in walk_steppers([make(tap)], [forced]):
        assert tap.step is not None
        (start,) = tap.step.starts
        for (_, layer), ids in tap.values.items():
            found |= {(layer, start + i): row for i, row in enumerate(ids.tolist())}
    return found
