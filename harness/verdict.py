"""The verdict of a run: every instrument that the engine allows, and one line that a tired person can act on.

A defect is called by the instruments that look inside (observed recipe, local replay, ladder), by an error beyond the
envelope, or by a divergence that neither rounding nor routing explains. Otherwise what differs is rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from harness.agreement import Agreement
from harness.divergence import Cause, Divergence
from harness.golden_data import ENDED
from harness.ladder import Ladder
from harness.local_replay import Key, LocalReplay
from harness.signature import hints, rows_hint
from variants.model_config import ModelConfig
from variants.recipe import Recipe

EOS_RULE = "EOS rule"
OUTER = ("envelope", "expected_score")  # instruments whose finding is a matter of probability
# ln over the envelope. So far no order of sums goes, and no few places or members make it a matter of chance.
GROSS = 2.0


class RunClass(Enum):
    """The class of a whole run. SUSPECT is of tokens alone: beyond the noise, by routing or by a defect."""

    passed = "PASS"
    rounding = "ROUNDING"
    suspect = "SUSPECT"
    defect = "DEFECT"
    invalid = "INVALID"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Where something is wrong by one instrument.

    site and layer are None where the instrument cannot tell. rung: under which local replay found it ("as run", or a
    precision); worst_at: the (row, position) that is farthest off among what was inspected, -1 for unknown. rows: what
    the rows in excess look like, printed once it was seen that this stays with the row and not with its prompt.
    """

    instrument: str
    reason: str
    site: str | None = None
    layer: int | None = None
    rung: str = ""
    worst_at: tuple[int, int] = (-1, -1)
    rows: str = ""


class Told(Protocol):
    """A divergence with its cause, as whichever instrument tells it."""

    @property
    def reason(self) -> str: ...

    def record(self) -> dict[str, object]: ...


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Class, reason and place of a run; what was found by which instrument; every divergence with its cause.

    confidence: "high" when an instrument that looks inside found it (what ran, local replay, ladder), "low" when only
    the size of an error or a token did.
    """

    run_class: RunClass
    reason: str
    site: str | None = None
    layer: int | None = None
    confidence: str = "high"
    findings: tuple[Finding, ...] = ()
    divergences: Sequence[Told] = ()
    instruments: tuple[str, ...] = ()
    figures: dict[str, object] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """The ledger's verdict field: class, reason, site, layer fixed by the schema, and the rest."""
        return {
            "class": self.run_class.value,
            "reason": self.reason,
            "site": self.site,
            "layer": self.layer,
            "confidence": self.confidence,
            "instruments": list(self.instruments),
            "findings": [vars(f) for f in self.findings],
            "divergences": [d.record() for d in self.divergences],
            "figures": self.figures,
        }


def replay_findings(replay: LocalReplay, *, recipe: Recipe, config: ModelConfig, rung: str) -> list[Finding]:
    """One finding for each (site, layer) in excess, the first that a layer produces first."""
    found: dict[tuple[str, int], Finding] = {}
    for key in replay.excess():
        site, layer, _ = key
        if (site, layer) not in found:
            found[(site, layer)] = _replay_finding(key, replay, recipe, config, rung)
    return list(found.values())


def _replay_finding(key: Key, replay: LocalReplay, recipe: Recipe, config: ModelConfig, rung: str) -> Finding:
    error = replay.errors[key]
    told = hints(key, error, recipe=recipe, config=config)
    size = "not finite" if error.non_finite else f"{error.worst:.3g}x its bound"
    line = f"layer {key[1]} {key[0]}: {size} in local replay at {rung}"
    return Finding(
        instrument="local_replay",
        reason="; ".join([line, *told[:2]]),
        site=key[0],
        layer=key[1],
        rung=rung,
        worst_at=error.worst_at,
        rows=rows_hint(error) or "",
    )


def non_finite_findings(replays: Mapping[str, LocalReplay]) -> list[Finding]:
    """Where the first value that is not finite was made, by the first run that has one; nothing where none was seen."""
    for rung, replay in replays.items():
        for (site, layer, _), error in replay.errors.items():
            if error.non_finite:
                reason = f"first made at layer {layer} {site}"
                return [Finding(instrument="local_replay", reason=reason, site=site, layer=layer, rung=rung)]
    return []


def end_findings(agreement: Agreement) -> list[Finding]:
    """Where candidate and golden agree up to a token after which just one of them ends: at most one, with a count.

    The tokens are the same, so no rounding made the difference: the two follow another rule for the end of a sequence.
    """
    ends = [d for d in agreement.first_divergence if d.kind == "ended"]
    if not ends:
        return []
    d, more = ends[0], f" ({len(ends)} prompts)" if len(ends) > 1 else ""
    ended, goes_on = ("golden", "candidate") if d.golden_id == ENDED else ("candidate", "golden")
    reason = (
        f"{EOS_RULE}: at p{d.prompt}[{d.position}] the {ended} has ended and the {goes_on} goes on after the same "
        f"tokens{more}: input mismatch, not rounding; give both the same end-of-sequence ids"
    )
    return [Finding(instrument=EOS_RULE, reason=reason)]


def ladder_findings(ladder: Ladder) -> list[Finding]:
    floor = ladder.floor()
    if floor is None:
        return []
    layer, precision = floor
    rung = next(r for r in ladder.rungs if r.precision is precision)
    by = max(rung.excess()[layer:])
    reason = f"layer {layer}: error has a floor at {precision.name}, e^{by:.1f} over a correct run's, from there on"
    return [Finding(instrument="ladder", reason=reason, layer=layer)]


def conclude(
    findings: Sequence[Finding],
    divergences: Sequence[Divergence],
    *,
    invalid: str | None,
    bar_met: bool | None,
    config: ModelConfig,
    inspected: bool = False,
    other_model: str | None = None,
    **more: object,
) -> Verdict:
    """Weigh what was found. invalid: why no verdict is possible, None where one is; findings then say where from.

    inspected: every operation was replayed on its own inputs and its ladder climbed. Where that found nothing, what the
    outputs alone suggest of the candidate (an envelope's alarm, an unlikely margin) is told and is no defect. Another
    end-of-sequence rule is an input mismatch, INVALID where nothing worse was found; so is a divergence
    that nothing explains from a golden of other weights. other_model: says that they are, None where none is known.
    """
    common = {"findings": tuple(findings), "divergences": tuple(divergences), **more}
    if invalid:
        why = "; ".join([invalid, *(f.reason for f in findings[:1])])
        site, layer = (findings[0].site, findings[0].layer) if findings else (None, None)
        return Verdict(run_class=RunClass.invalid, reason=why, site=site, layer=layer, **common)  # pyright: ignore[reportArgumentType]
    ends = [f for f in findings if f.instrument == EOS_RULE]
    # Where one side ended early the score is of another question.
    weighed = [f for f in findings if f not in ends and not (ends and f.instrument == "expected_score")]
    blamed = (Cause.defect, Cause.golden_side, Cause.non_finite)
    cleared = inspected and all(f.instrument in OUTER for f in weighed)
    if cleared:
        blamed = (Cause.golden_side, Cause.non_finite)
    elif weighed:
        first = _leading(weighed)
        sure = "low" if all(f.instrument in OUTER for f in weighed) else "high"
        return Verdict(run_class=RunClass.defect, reason=f"{first.reason}: defect", site=first.site, layer=first.layer,
                       confidence=sure, **common)  # fmt: skip  # pyright: ignore[reportArgumentType]
    unexplained = [d for d in divergences if d.cause in blamed]
    if unexplained:
        worst = min(unexplained, key=lambda d: d.p)
        if other_model and all(d.cause is not Cause.non_finite for d in unexplained):
            return Verdict(run_class=RunClass.invalid, reason=f"{other_model}; {worst.reason}", **common)  # pyright: ignore[reportArgumentType]
        return Verdict(run_class=RunClass.defect, reason=worst.reason, confidence="low", **common)  # pyright: ignore[reportArgumentType]
    if bar_met:
        return Verdict(run_class=RunClass.passed, reason="the bar is met", **common)  # pyright: ignore[reportArgumentType]
    if ends:
        return Verdict(run_class=RunClass.invalid, reason=ends[0].reason, **common)  # pyright: ignore[reportArgumentType]
    inside = "local_replay" in common.get("instruments", ("local_replay",))  # pyright: ignore[reportOperatorIssue]
    line = "; ".join([_rounding_line(divergences, inside=inside), *(f"though {f.reason}" for f in weighed if cleared)])
    return Verdict(run_class=RunClass.rounding, reason=line, **common)  # pyright: ignore[reportArgumentType]


def _leading(findings: Sequence[Finding]) -> Finding:
    """The first that names a site, else the first that names a layer, else the first."""
    sites = [f for f in findings if f.site is not None]
    return (sites or [f for f in findings if f.layer is not None] or list(findings))[0]


def _rounding_line(divergences: Sequence[Divergence], *, inside: bool) -> str:
    if not divergences:
        return "no divergence" + ("; every operation within what its recipe rounds" if inside else " from the golden")
    counts = {cause: sum(d.cause is cause for d in divergences) for cause in Cause}
    told = ", ".join(f"{n} {cause.value}" for cause, n in counts.items() if n)
    worst = min(divergences, key=lambda d: d.p)
    unlikely = sum(d.cause is Cause.defect for d in divergences)
    every = "every operation is within its bound" if unlikely else f"all {len(divergences)} divergences explained"
    return f"{every} ({told}); least likely: {worst.reason}"
