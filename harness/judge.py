"""Every teacher-forced divergence of a run with its cause: rounding, routing, a tie, or none of these.

The candidate walks beside the oracle and the members of its own envelope; the golden's recorded logprobs are held
against the envelope of an engine like the one that made it. What neither explains is tried as routing, causally; so is
what only a sigma explains in which the members' own experts have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from torch import Tensor

from harness.divergence import Cause, Divergence, Side, cause_of, golden_margin, side_p
from harness.envelope import CANDIDATE, Envelope
from harness.gaps import gap_ulp
from harness.golden_data import ENDED, Golden
from harness.lockstep import Stepper, walk_steppers
from harness.parts import part
from harness.probes import Passes, Tap
from harness.routing import Adoption, Build, Choice, Route, adopted, explaining_swap, rounding_gap
from variants.decode import single_pass
from variants.dtypes import DType
from variants.recipe import Recipe
from variants.rounding import NoProbe

ALPHA = 1e-3  # family-wise, over every divergence and both sides
# A sigma this many times the usual noise has members in it whose experts changed; the exchange that a side is said to
# have made must then bring the oracle's margin to within the usual noise of it, at this level.
SPLIT, AMPLIFIED_P = 2.0, 0.01
MakeRow = Callable[[int, Tap], Stepper]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the judge reads.

    own, reference: envelopes of the candidate's recipe (walked with the candidate) and of the golden engine's, whose
    recipes are `declared` and `golden_recipe`. oracle: makes the float64 model with the candidate's declared semantics;
    truth: the same with the checkpoint's own. make_row(prompt, tap): the candidate over one prompt alone; None where
    its values cannot be looked at. margins: by (prompt, t), what such a candidate itself gave as the logprob of the
    golden's token minus that of its own; None where it gave none. causal: whether an exchange of experts is sought for
    what rounding leaves, at seconds a place; of no use where the run is a defect already.
    """

    golden: Golden
    chosen: np.ndarray
    own: Envelope
    reference: Envelope
    declared: Recipe
    golden_recipe: Recipe
    oracle: Build
    truth: Build
    make_row: MakeRow | None
    margins: Mapping[tuple[int, int], float] | None = None
    causal: bool = True


@part("divergences")
def divergences(evidence: Evidence) -> list[Divergence]:
    """Each place where the candidate's teacher-forced choice is not the golden's token, in order."""
    tokens = evidence.golden.tokens[0]
    found = np.argwhere((evidence.chosen != tokens) & (tokens != ENDED))
    alpha = ALPHA / max(1, 2 * len(found))
    logits = cache(lambda n: _oracle_logits(evidence, n))
    judged = [_judge(evidence, int(n), int(t), alpha) for n, t in found]
    return [_sized(d, logits(d.prompt)[d.position], evidence.declared) for d in judged]


def noise_nats(own: Envelope) -> float:
    """Typical noise of a top-2 difference under the recipe, in nats: rms over positions of the oracle's two best."""
    spread = own.deviations[:, :, 0] - own.deviations[:, :, 1]
    return float(np.sqrt(np.mean(spread**2)))


def _usual_noise(own: Envelope) -> float:
    """As `noise_nats`, at the median position: a few where members' experts change do not move it."""
    spread = own.deviations[:, :, 0] - own.deviations[:, :, 1]
    return float(np.median(np.sqrt(np.mean(spread**2, axis=0))))


def _oracle_logits(e: Evidence, n: int) -> Tensor:
    """The oracle's logits [T, V] along one prompt's golden tokens."""
    tokens = [int(i) for i in e.golden.tokens[0, n] if i != ENDED]
    return single_pass(e.oracle(NoProbe()), [list(e.golden.prompts[n])], [tokens])[0]


def _sized(d: Divergence, logits: Tensor, declared: Recipe) -> Divergence:
    """With the margin in units in the last place of the logits as the candidate stores them."""
    rule = declared.rule("lm_head", -1)
    stored = rule.output or rule.accum
    ulps = gap_ulp(float(logits[d.golden_token]), float(logits[d.token]), stored.value)
    return replace(d, ulps=ulps, logits_format=DType(stored).name)


def _judge(e: Evidence, n: int, t: int, alpha: float) -> Divergence:
    a, b = int(e.golden.tokens[0, n, t]), int(e.chosen[n, t])
    table, place = e.own.table, e.own.table.index(n, t)
    ia, ib = table.column(place, a), table.column(place, b)
    margin = float(table.oracle_logprobs[place, ia] - table.oracle_logprobs[place, ib])
    seen = table.parties.get(CANDIDATE)
    # Where only tokens are known, a side prefers its own token by nothing at least: the smallest shift that fits.
    least_own, least_golden = min(margin, 0.0), max(margin, 0.0)
    own = least_own if seen is None else margin + float(seen.deviations[0, place, ia] - seen.deviations[0, place, ib])
    told = (e.margins or {}).get((n, t))
    own = own if told is None else told
    recorded = _recorded(e.golden, n, t, a, b)
    candidate = Side(margin=own, sigma=e.own.sigma(n, t, a, b), least=seen is None and told is None)
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
    return _amplified(e, verdict, members) if verdict.cause is Cause.rounding else verdict


def _amplified(e: Evidence, d: Divergence, members: int) -> Divergence:
    """A shift that is rounding by a wide sigma alone, with the exchange of experts that made it, if one did."""
    for name, own in (("candidate", e.own), ("golden", e.reference)):
        side: Side = getattr(d, name)
        usual = replace(side, sigma=_usual_noise(own))
        if side.sigma <= SPLIT * usual.sigma or side_p(usual, d.margin, members) >= AMPLIFIED_P:
            continue
        search = _candidate_routing if name == "candidate" else _golden_routing
        found = search(e, replace(d, **{name: usual}), members, AMPLIFIED_P)
        if found.cause is Cause.routing:
            return replace(d, cause=Cause.routing, evidence=found.evidence)
    return d


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
    found = adopted(e.oracle, prompt, forced, ids, within=rounding_gap(e.declared))
    logits = found.run.logits[-1]
    margin = float(logits[d.golden_token] - logits[d.token])
    if not found.taken or side_p(d.candidate, margin, members) < alpha:
        return replace(d, evidence=_too_wide(found, ids))
    choice, gap = _narrowest(found.taken, ids)
    evidence = _exchange(choice, ids[(choice.layer, choice.position)], gap)
    evidence |= {"side": "candidate", "changed sets": len(found.taken), "margin with them": f"{margin:+.3g} nat"}
    return replace(d, cause=Cause.routing, evidence=evidence)


def _narrowest(choices: Mapping[Route, Choice], ids: Mapping[Route, Sequence[int]]) -> tuple[Choice, float]:
    return min(((c, c.gap_to(ids[r])) for r, c in choices.items()), key=lambda found: found[1])


def _too_wide(found: Adoption, ids: Mapping[Route, Sequence[int]]) -> dict[str, object]:
    """What speaks against rounding: experts exchanged at a gap that it does not bridge."""
    if not found.wide:
        return {}
    choice, gap = _narrowest(found.wide, ids)
    return _exchange(choice, ids[(choice.layer, choice.position)], gap) | {
        "side": "candidate",
        "gap is": "not rounding",
    }


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
        within=rounding_gap(e.golden_recipe if side == "golden" else e.declared),
    )
    if found is None:
        return d
    c = found.choice
    evidence = _exchange(c, c.swapped, c.gap)
    evidence |= {"side": side, "margin with it": f"{found.margin:+.3g} nat"}
    return replace(d, cause=Cause.routing, evidence=d.evidence | evidence)


def _exchange(choice: Choice, other: Sequence[int], gap: float) -> dict[str, object]:
    out, into = sorted(set(choice.chosen) - set(other)), sorted(set(other) - set(choice.chosen))
    where: dict[str, object] = {"layer": choice.layer, "position": choice.position}
    return where | {"experts": f"{out} -> {into}", "gap": float(f"{gap:.3g}")}


def choices_of(make: Callable[[Tap], Stepper], forced: Sequence[int]) -> Mapping[Route, list[int]]:
    """Expert ids that a run chose at every (layer, position) of one prompt and its forced tokens."""
    tap = Passes(lambda site, layer: site == "router_ids")
    found: dict[Route, list[int]] = {}
    for _ in walk_steppers([make(tap)], [forced]):
        for step, calls in tap.passes:
            (start,) = step.starts
            for (_, layer), (ids,) in calls.items():
                found |= {(layer, start + i): row for i, row in enumerate(ids.tolist())}
        tap.passes.clear()
    return found
