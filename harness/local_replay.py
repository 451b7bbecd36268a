"""Local replay: every operation again in float64 on the variant's own recorded inputs.

Two runs go in lockstep. The variant runs as it is and its values are tapped; the replay runs the oracle's arithmetic,
is compared at every place that both have, and goes on from the variant's value. What differs at a place is then that
one operation's own error, free of everything upstream, to be held against what the variant's recipe allows there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.lockstep import Stepper, Tokens, walk_steppers
from harness.probes import Against, Place, Tap, chain
from variants.decode import Sequences
from variants.dtypes import DType, narrowest_holding, ulp
from variants.model import Model
from variants.recipe import Recipe, Rule
from variants.rounding import Probe, Step
from variants.sites import BY_EXPERT, BY_KEY, BY_ROW, INSIDE_ATTENTION, INTEGER
from variants.weights import Weights

# Rounding inside an operation beyond its last store, in units of its accumulation format at the value's typical size.
# The chunked delta rule inverts a matrix and subtracts large terms: its error at single positions is larger. Measured
# on benign variants on both batteries, the worst position stays under half of LIMIT with these.
SUM_UNITS = 16.0
ELEMENTWISE_UNITS = 4.0
CHUNK_UNITS = 128.0
ELEMENTWISE = ("rms_norm", "sigmoid", "silu", "softplus", "l2norm", "mul", "add", "copy", "operand", "gather", "scale")
LIMIT = 6.0  # root mean square of a position's error over what is allowed there


@dataclass
class OpError:
    """The error of one operation at one (site, layer) in one phase, over a battery.

    error2, value2, allowed2: sums of squares of the error, of the replayed value and of what rounding allows; cross:
    sum of error times value. worst: largest ratio of one position, and its (row, position); first: the earliest
    position over LIMIT; rows: the battery's rows that have one; fits: the narrowest formats that hold the variant's
    values there. over, positions: how many of how many are over LIMIT. changed: rows whose set of experts differs.
    """

    count: int = 0
    error2: float = 0.0
    value2: float = 0.0
    allowed2: float = 0.0
    cross: float = 0.0
    non_finite: int = 0
    changed: int = 0
    worst: float = 0.0
    worst_at: tuple[int, int] = (-1, -1)
    first: tuple[int, int] | None = None
    rows: set[int] = field(default_factory=set)
    fits: set[str] = field(default_factory=set)
    over: int = 0
    positions: int = 0

    def include(self, other: "OpError", row: int) -> None:
        """Add another battery's error, all of it as row `row`."""
        for name in ("count", "error2", "value2", "allowed2", "cross", "non_finite", "changed", "over", "positions"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.fits |= other.fits
        if other.over:
            self.rows.add(row)
        if other.worst > self.worst:
            self.worst, self.worst_at = other.worst, (row, other.worst_at[1])
        if other.first is not None and (self.first is None or other.first[1] < self.first[1]):
            self.first = (row, other.first[1])

    @property
    def ratio(self) -> float:
        """Root mean square error over what rounding allows, all positions together."""
        return _root(self.error2, self.allowed2)

    @property
    def relative(self) -> float:
        """Root mean square error over root mean square value."""
        return _root(self.error2, self.value2)

    @property
    def scale(self) -> float:
        """Least-squares factor from the replayed value to the variant's, minus 1: a constant off by 1 % gives 0.01."""
        return self.cross / self.value2 if self.value2 else 0.0

    @property
    def explained_by_scale(self) -> float:
        """Share of the squared error that this one factor explains."""
        return self.cross**2 / (self.value2 * self.error2) if self.value2 and self.error2 else 0.0

    @property
    def in_excess(self) -> bool:
        return self.worst > LIMIT or self.non_finite > 0


def _root(a: float, b: float) -> float:
    return (a / b) ** 0.5 if b else (float("inf") if a else 0.0)


Key = tuple[str, int, str]


@dataclass(frozen=True)
class LocalReplay:
    """Errors by (site, layer, phase), in the order in which the forward produces them."""

    errors: Mapping[Key, OpError]
    compared: frozenset[Place]

    def excess(self) -> list[Key]:
        """Places in excess, those that ran first in the first bad step first; upstream places come before."""
        return [k for k, e in self.errors.items() if e.in_excess]


def merged(parts: Sequence[LocalReplay]) -> LocalReplay:
    """The errors of several batteries as one; a part's rows are numbered by its place among the parts."""
    errors: dict[Key, OpError] = {}
    for number, part in enumerate(parts):
        for key, error in part.errors.items():
            errors.setdefault(key, OpError()).include(error, number)
    return LocalReplay(errors, frozenset().union(*(p.compared for p in parts)))


def local_replay(
    make_variant: Callable[[Tap], Stepper],
    make_oracle: Callable[[Probe], Model],
    recipe: Recipe,
    prompts: Sequence[Tokens],
    continuations: Sequence[Tokens],
) -> LocalReplay:
    """Run a forced battery, the variant and its replay step by step.

    make_variant(tap): the variant's run with its values tapped (`model_stepper`, or an engine's). make_oracle(probe): a
    float64 model under the oracle's recipe. recipe: what the variant declares, for what rounding allows at each place.
    """
    tap = Tap()
    comparison = _Comparison(recipe, tap)
    oracle = make_oracle(chain([comparison.probe, comparison.scores]))
    comparison.weights = oracle.weights
    tokens = max(len(c) for c in continuations)
    runs = [make_variant(tap), Sequences(oracle, prompts, tokens)]
    for _ in walk_steppers(runs, continuations):
        pass
    return LocalReplay(comparison.errors, frozenset((site, layer) for site, layer, _ in comparison.errors))


class _Comparison:
    """Where the reports of the replay's probe go. `scores` sees the router's scores that the replay goes on with."""

    def __init__(self, recipe: Recipe, tap: Tap) -> None:
        self.recipe = recipe
        self.errors: dict[Key, OpError] = {}
        self.probe = Against(lambda: tap.calls, self._report, substitute=True)
        self.scores = Tap(lambda site, layer: site == "router_scores")
        self.weights: Weights | None = None

    def _report(self, place: Place, mine: Tensor, theirs: Tensor) -> bool:
        step = self.probe.step
        assert step is not None
        if place[0] in INSIDE_ATTENTION or mine.shape != theirs.shape:
            return False
        entry = self.errors.setdefault((*place, step.phase), OpError())
        if place[0] in INTEGER:
            self._choices(entry, place[1], mine, theirs.to(mine.device), step)
            return True
        rule = bounding_rule(self.recipe, place, step.phase)
        enter(entry, mine.double(), theirs.double().to(mine.device), rule=rule, step=step, site=place[0])
        return True

    def _choices(self, entry: OpError, layer: int, mine: Tensor, theirs: Tensor, step: Step) -> None:
        """Expert sets chosen from the same scores: they may differ only where the gap is within the sum's rounding."""
        assert self.weights is not None
        scores = self.scores.values[("router_scores", layer)].double()
        name = f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"
        choice = scores + self.weights.get(name, DType.f64)
        gap = choice.gather(-1, mine).amin(-1) - choice.gather(-1, theirs).amin(-1)
        changed = (mine.sort(-1).values != theirs.sort(-1).values).any(-1)
        unit = self.recipe.rule("router_scores", layer, step.phase).accum.unit_roundoff
        allowed_gap = CHOICE_UNITS * unit * choice.abs().amax(-1).clamp_min(1.0)
        ratio = torch.where(changed, gap / allowed_gap * LIMIT, 0.0).reshape(len(step.slots), -1)
        entry.count += mine.shape[0]
        entry.changed += int(changed.sum())
        note_positions(entry, ratio, tuple(step.starts), step)


CHOICE_UNITS = 8.0


def bounding_rule(recipe: Recipe, place: Place, phase: str) -> Rule:
    """The rule that says how much a place may err; a carried state errs as the core that made it, and by its store."""
    rule = recipe.rule(*place, phase)
    if place[0] != "kda_state":
        return rule
    core = recipe.rule("kda_core", place[1], phase)
    return replace(rule, accum=core.accum, algorithm=core.algorithm)


def inner_units(rule: Rule) -> float:
    """What an operation may err inside itself, in units of its accumulation format."""
    if rule.algorithm == "chunk":
        return CHUNK_UNITS
    return ELEMENTWISE_UNITS if rule.algorithm.startswith(ELEMENTWISE) else SUM_UNITS


def allowed(rule: Rule, value: Tensor, *, usual: float = 0.0) -> Tensor:
    """Mean square error that a rule allows at each element of `value` (float64): its last rounding (ties_to_even, so
    uniform in half a unit in the last place), and the rounding inside the operation at the value's typical size.

    usual: mean square of the place's values so far; a small result of a sum errs as the sum's terms do.
    """
    square = value.square()
    typical = torch.maximum(square.mean(-1, keepdim=True), square.mean()).clamp_min(usual)
    inner = (inner_units(rule) * rule.accum.unit_roundoff) ** 2 * typical
    if rule.output is None:
        return inner
    stores = 2 if rule.algorithm.endswith("_twice") else 1
    return stores * ulp(value, rule.output).square() / 12 + inner


def enter(entry: OpError, mine: Tensor, theirs: Tensor, *, rule: Rule, step: Step, site: str) -> None:
    """Add one step's values, float64 and of one shape, to a place's error."""
    finite = torch.isfinite(theirs) & torch.isfinite(mine)
    error, value = torch.where(finite, theirs - mine, 0.0), torch.where(finite, mine, 0.0)
    usual = entry.value2 / entry.count if entry.count else 0.0
    square, allow = error.square(), allowed(rule, value, usual=usual).expand_as(error)
    sums = torch.stack(
        [square.sum(), value.square().sum(), allow.sum(), (error * value).sum(), (~finite).sum().double()]
    )
    error2, value2, allowed2, cross, bad = sums.tolist()
    entry.count += error.numel()
    entry.error2, entry.value2 = entry.error2 + error2, entry.value2 + value2
    entry.allowed2, entry.cross = entry.allowed2 + allowed2, entry.cross + cross
    entry.non_finite += int(bad)
    before = entry.over
    _positions(entry, square, allow, step, site)
    if entry.over > before:
        entry.fits.add(narrowest_holding(theirs).name)


def _positions(entry: OpError, square: Tensor, allow: Tensor, step: Step, site: str) -> None:
    """The worst and the first bad position; experts' rows have no position of their own and count as position -1."""
    rows, starts = _layout(square, step, site)
    ratio = (square.reshape(rows).sum(-1) / allow.reshape(rows).sum(-1).clamp_min(1e-300)).sqrt()
    note_positions(entry, ratio, starts, step, by_key=site in BY_KEY)


def note_positions(
    entry: OpError, ratio: Tensor, starts: tuple[int, ...] | None, step: Step, *, by_key: bool = False
) -> None:
    """Enter ratios [rows, positions] of error over bound; tokens that fill up a shorter row do not count."""
    real = torch.ones_like(ratio, dtype=torch.bool)
    if starts is not None and ratio.shape[1] == max(step.lengths) and not by_key:
        lengths = torch.tensor(step.lengths, device=ratio.device).unsqueeze(1)
        real = torch.arange(ratio.shape[1], device=ratio.device) < lengths
    ratio = torch.where(real, ratio, 0.0)
    entry.positions += int(real.sum())
    worst = float(ratio.max())
    if worst > entry.worst:
        entry.worst, entry.worst_at = worst, _where(ratio == worst, starts)
    if worst > LIMIT:
        entry.over += int((ratio > LIMIT).sum())
        entry.rows |= {step.slots[r] for r in (ratio > LIMIT).any(-1).nonzero()[:, 0].tolist()} if starts else set()
        found = _where((ratio > LIMIT), starts)
        entry.first = found if entry.first is None or found[1] < entry.first[1] else entry.first


def _layout(x: Tensor, step: Step, site: str) -> tuple[tuple[int, int, int], tuple[int, ...] | None]:
    """The shape (rows, positions, elements) of a value, and the position of each row's first column (None: unknown)."""
    batch = len(step.slots)
    if site in BY_EXPERT:
        return (x.shape[0], 1, -1), None
    if site in BY_ROW:
        return (batch, 1, -1), tuple(s + n - 1 for s, n in zip(step.starts, step.lengths, strict=True))
    width = x.shape[1] if site in BY_KEY else max(step.lengths)
    return (batch, width, -1), tuple(0 for _ in step.starts) if site in BY_KEY else tuple(step.starts)


def _where(hit: Tensor, starts: tuple[int, ...] | None) -> tuple[int, int]:
    """(row, position) of the hit with the lowest position."""
    found = hit.nonzero().tolist()
    if starts is None:
        return -1, -1
    return min(((row, starts[row] + column) for row, column in found), key=lambda p: p[1])
