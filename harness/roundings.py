"""Whether what a recipe rounds is rounded to the nearest: local replay bounds the size of an error, not its kind.

A value that is cut where it should be rounded errs by twice as much, which is less than a bound may forbid. But a
correct rounding leaves no element farther than half a unit in the last place from the replayed value, give or take what
the operation errs inside; one that cuts leaves every other one there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.inspect import make_replay
from harness.lockstep import walk_steppers
from harness.op_error import bounding_rule, inner_units
from harness.parts import part
from harness.probes import AgainstPasses, Passes, Place
from harness.reach import of_all_lengths
from harness.verdict import Finding
from variants.decode import Sequences
from variants.dtypes import ulp
from variants.model import Model
from variants.recipe import Recipe, Rule
from variants.rounding import Probe
from variants.sites import INSIDE_ATTENTION, INTEGER

INSTRUMENT = "roundings"
PROMPT, TOKENS = 16, 3  # tokens of the prompt, or more, and those forced after it
INSIDE = 4.0  # times what an operation may err inside, as local replay has it: that is a root mean square
# Elements that are looked at, and the share of them that may lie farther off. Of a rounding to the nearest under one in
# a hundred does, as tests hold of every variant that torch computes; of one that cuts every other one.
FEWEST, LIMIT = 200, 0.15


@dataclass(frozen=True, kw_only=True)
class Roundings:
    """places: how many were looked at. largest: share of elements beyond half a unit. found: the first place over."""

    places: int = 0
    largest: float = 0.0
    found: Finding | None = None

    def record(self) -> dict[str, object]:
        return {"places": self.places, "largest": self.largest}

    def findings(self) -> list[Finding]:
        return [] if self.found is None else [self.found]


@part("roundings")
def roundings(engine: LocalEngine, battery: Battery) -> Roundings:
    """One prompt and a few tokens, as run, beside a replay of each operation on the variant's own values."""
    rows = of_all_lengths(battery, len(battery.prompts))
    prompt, forced = next((row for row in rows if len(row[0]) >= PROMPT), rows[-1])
    prompt, forced = list(prompt), list(forced[:TOKENS])
    tap = Passes()
    shares = _Shares(engine.recipe, make_replay(engine.casts, engine.recipe), tap)
    runs = [Sequences(m, [prompt], len(forced)) for m in (engine.build(probe=tap), shares.oracle)]
    for _ in walk_steppers(runs, [forced]):
        tap.passes.clear()
        shares.probe.again()
    counted = {p: beyond / count for p, (beyond, count) in shares.counts.items() if count >= FEWEST}
    over = [p for p, share in counted.items() if share > LIMIT]
    found = None if not over else _finding(over[0], counted[over[0]])
    return Roundings(places=len(counted), largest=max(counted.values(), default=0.0), found=found)


class _Shares:
    """How many elements of each place lie farther than half a unit from the replayed value, and of how many."""

    def __init__(self, recipe: Recipe, make: Callable[[Probe], Model], tap: Passes) -> None:
        self.recipe = recipe
        self.counts: dict[Place, tuple[int, int]] = {}
        self.probe = AgainstPasses(tap, self._report)
        self.oracle = make(self.probe)

    def _report(self, place: Place, mine: Tensor, theirs: Tensor) -> bool:
        step = self.probe.step
        assert step is not None
        if place[0] in INSIDE_ATTENTION or mine.shape != theirs.shape:
            return False
        rule = bounding_rule(self.recipe, place, step.phase)
        if place[0] in INTEGER or not self._rounds_once(place, step.phase, rule):
            return True
        assert rule.output is not None
        mine, theirs = mine.double(), theirs.double().to(mine.device)
        inside = INSIDE * inner_units(rule) * rule.accum.unit_roundoff * mine.square().mean(-1, keepdim=True).sqrt()
        half = ulp(mine.abs().maximum(theirs.abs()), rule.output) / 2
        beyond, count = self.counts.get(place, (0, 0))
        self.counts[place] = (beyond + int(((theirs - mine).abs() > half + inside).sum()), count + mine.numel())
        return True

    def _rounds_once(self, place: Place, phase: str, rule: Rule) -> bool:
        """Whether torch computes a place in a wider format and rounds it once, at its end and nowhere inside."""
        if rule.output is None or rule.output.precision >= rule.accum.precision or rule.algorithm.endswith("_twice"):
            return False
        if rule.impl != "torch" or (self.recipe.reduced_sums and rule.algorithm.startswith("gemm")):
            return False
        inside = INSIDE_ATTENTION if place[0] == "mla_core" else ()
        return all(self.recipe.rule(site, place[1], phase).output is None for site in inside)


def _finding(place: Place, share: float) -> Finding:
    site, layer = place
    reason = (
        f"layer {layer} {site}: {share:.0%} of its values are more than half a unit in the last place from what is "
        "rounded there: they are not rounded to the nearest"
    )
    return Finding(instrument=INSTRUMENT, reason=reason, site=site, layer=layer)
