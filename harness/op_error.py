"""The error of one operation, what rounding allows it, and where in a battery it is over that."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.rounding_noise import last_place
from variants.dtypes import narrowest_holding, ulp
from variants.recipe import Place, Recipe, Rule
from variants.rounding import Step
from variants.sites import ALL_SITES, BY_EXPERT, BY_KEY, BY_ROW, BY_TOKEN, CHUNK_SITES, INSIDE_ATTENTION

# Rounding inside an operation beyond its last store, in units of its accumulation format at the value's typical size.
# The chunked delta rule inverts a matrix and subtracts large terms: its error at single positions is larger. Measured
# on benign variants on both batteries, the worst position stays under half of LIMIT with these.
SUM_UNITS = 16.0
ELEMENTWISE_UNITS = 4.0
CHUNK_UNITS = 128.0
# Not softplus: log(1 + e^x) loses digits to the 1 where x is far below zero.
ELEMENTWISE = ("rms_norm", "sigmoid", "silu", "l2norm", "mul", "add", "copy", "operand", "gather", "scale")
LIMIT = 6.0  # root mean square of a position's error over what is allowed there


@dataclass
class OpError:
    """The error of one operation at one (site, layer) in one phase, over a battery.

    error2, value2, allowed2: sums of squares of the error, of the replayed value and of what rounding allows; cross:
    sum of error times value. worst: largest ratio of one position, and its (row, position); first: the earliest
    position over LIMIT; seen, rows: the battery's rows that were compared, and those that have one; fits: the narrowest
    formats that hold the variant's values there. over, positions: how many of how many are over LIMIT. changed: tokens
    whose set of experts differs. non_finite: values that are finite on one side alone; where both are not, the fault
    came from upstream. Tokens that fill up a shorter row count nowhere. least: the mean square of the values that the
    operation errs as if it had.
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
    seen: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    fits: set[str] = field(default_factory=set)
    over: int = 0
    positions: int = 0
    least: float = 0.0

    def include(self, other: "OpError", row: int) -> None:
        """Add another battery's error, all of it as row `row`."""
        for name in ("count", "error2", "value2", "allowed2", "cross", "non_finite", "changed", "over", "positions"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.fits |= other.fits
        self.seen.add(row)
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


def bounding_rule(recipe: Recipe, place: Place, phase: str) -> Rule:
    """The rule that says how much a place may err; a carried state errs as the core that made it, and by its store."""
    rule = recipe.rule(*place, phase)
    if place[0] == "kda_state":
        core = _with_inside(recipe, ("kda_core", place[1]), phase)
        return replace(rule, accum=core.accum, algorithm=core.algorithm)
    return _with_inside(recipe, place, phase)


def _with_inside(recipe: Recipe, place: Place, phase: str) -> Rule:
    """The rule of a place that rounds inside: as an elementwise operation in the narrowest format in there."""
    site, layer = place
    rule = recipe.rule(site, layer, phase)
    chunked, limit = rule.algorithm in ("chunk", "chunk_rows"), rule.accum
    if rule.impl == "torch":  # its other operations show all that they round
        inner = [recipe.rule(s, layer, phase) for s in CHUNK_SITES if chunked]
        if site == "mla_core":
            inner = [recipe.rule(s, layer, phase) for s in _inside_attention(rule)]
            limit = min(rule.accum, rule.output or rule.accum, key=lambda f: f.precision)
    else:
        inner = [r for s in ALL_SITES if (r := recipe.rule(s, layer, phase)).inside == site]
        inner = [r for r in inner if chunked or r.algorithm != "chunk_inner"]
    narrow = [r.output for r in inner if r.output is not None and r.output.precision < limit.precision]
    if not narrow:
        return rule
    return replace(rule, accum=min(narrow, key=lambda f: f.precision), algorithm="mul")


def _inside_attention(rule: Rule) -> tuple[str, ...]:
    """What attention rounds between its operands and its output, and is not replayed by itself."""
    return ("q_latent", *INSIDE_ATTENTION, "o_latent") if rule.algorithm.startswith("absorbed") else INSIDE_ATTENTION


def inner_units(rule: Rule) -> float:
    """What an operation may err inside itself, in units of its accumulation format."""
    if rule.algorithm in ("chunk", "chunk_rows", "chunk_inner"):
        return CHUNK_UNITS
    return ELEMENTWISE_UNITS if rule.algorithm.startswith(ELEMENTWISE) else SUM_UNITS


def allowed(rule: Rule, value: Tensor, *, usual: float = 0.0, square: Tensor | None = None) -> Tensor:
    """Mean square error that a rule allows at each element of `value` (float64): its last rounding (ties_to_even, so
    uniform in half a unit in the last place), and the rounding inside the operation at the value's typical size.

    usual: mean square of the place's values so far; a small result of a sum errs as the sum's terms do. square: of the
    value, where it is known.
    """
    square = value.square() if square is None else square
    typical = torch.maximum(square.mean(-1, keepdim=True), square.mean()).clamp_min(usual)
    inner = (inner_units(rule) * rule.accum.unit_roundoff) ** 2 * typical
    if rule.output is None:
        return inner
    places = last_place if value.is_contiguous() else ulp  # the same; a sum over another layout has other bits
    stored = places(value, rule.output).square_()
    if rule.algorithm.endswith("_twice"):
        stored *= 2
    return stored.div_(12).add_(inner)


def enter(entry: OpError, mine: Tensor, theirs: Tensor, *, rule: Rule, step: Step, site: str) -> None:
    """Add one step's values, float64 and of one shape, to a place's error."""
    rows, starts = _layout(theirs, step, site)
    by_key = _by_key(theirs, step, site)
    real = None if starts is None else real_tokens(step, rows[1], by_key=by_key)
    usual = max(entry.least, entry.value2 / entry.count if entry.count else 0.0)
    broken: Tensor | None = None
    if real is None and mine.is_contiguous() and theirs.is_contiguous():
        square, allow, sums = _squares(theirs - mine, mine, rule, usual)
    else:
        sums = [math.nan]
    if not all(map(math.isfinite, sums)):  # something is not finite, or is no token, and has to be left out
        finite, broken = _comparable(mine, theirs, real, site)
        square, allow, sums = _squares(
            torch.where(finite, theirs - mine, 0.0), torch.where(finite, mine, 0.0), rule, usual
        )
    error2, value2, allowed2, cross = sums
    entry.count += mine.numel()
    entry.error2, entry.value2 = entry.error2 + error2, entry.value2 + value2
    entry.allowed2, entry.cross = entry.allowed2 + allowed2, entry.cross + cross
    ratio = (square.reshape(rows).sum(-1) / allow.reshape(rows).sum(-1).clamp_min(1e-300)).sqrt()
    if broken is not None and (bad := int(broken.sum())):
        entry.non_finite += bad
        ratio = torch.where(broken.reshape(rows).any(-1), float("inf"), ratio)
    before = entry.over
    note_positions(entry, ratio, starts, step, by_key=by_key)
    if entry.over > before:
        entry.fits.add(narrowest_holding(theirs).name)


def _squares(error: Tensor, value: Tensor, rule: Rule, usual: float) -> tuple[Tensor, Tensor, list[float]]:
    """Squared errors, what is allowed of each, and the sums of error2, value2, allowed2 and cross."""
    square, value2 = error.square(), value.square()
    allow = allowed(rule, value, usual=usual, square=value2).expand_as(error)
    return square, allow, torch.stack([square.sum(), value2.sum(), allow.sum(), (error * value).sum()]).tolist()


def _comparable(mine: Tensor, theirs: Tensor, real: Tensor | None, site: str) -> tuple[Tensor, Tensor]:
    """Which elements can be compared, and which are finite on one side alone; pads (not `real`) are neither."""
    here, there = torch.isfinite(mine), torch.isfinite(theirs)
    finite, broken = here & there, here != there
    if real is None:
        return finite, broken
    lead = 1 if site in BY_TOKEN else 2
    real = real.to(theirs.device).reshape(*theirs.shape[:lead], *[1] * (theirs.ndim - lead))
    return finite & real, broken & real


def real_tokens(step: Step, width: int, *, by_key: bool = False) -> Tensor | None:
    """bool [rows, width]: the tokens (or keys) that do not fill up a shorter row; None where all are real."""
    ends = [s + n for s, n in zip(step.starts, step.lengths, strict=True)] if by_key else list(step.lengths)
    if min(ends) == width or width != max(ends):
        return None
    return torch.arange(width) < torch.tensor(ends).unsqueeze(1)


def note_positions(
    entry: OpError, ratio: Tensor, starts: tuple[int, ...] | None, step: Step, *, by_key: bool = False
) -> None:
    """Enter ratios [rows, positions] of error over bound; rows of experts and chunks have no position: -1."""
    real = None if starts is None else real_tokens(step, ratio.shape[1], by_key=by_key)
    ratio = ratio if real is None else torch.where(real.to(ratio.device), ratio, 0.0)
    entry.positions += ratio.numel() if real is None else int(real.sum())
    entry.seen |= set(step.slots) if starts else set()
    worst = float(ratio.max())
    if worst > entry.worst:
        entry.worst, entry.worst_at = worst, _where(ratio == worst, starts, step)
    if worst > LIMIT:
        entry.over += int((ratio > LIMIT).sum())
        entry.rows |= {step.slots[r] for r in (ratio > LIMIT).any(-1).nonzero()[:, 0].tolist()} if starts else set()
        found = _where(ratio > LIMIT, starts, step)
        entry.first = found if entry.first is None or found[1] < entry.first[1] else entry.first


def _layout(x: Tensor, step: Step, site: str) -> tuple[tuple[int, int, int], tuple[int, ...] | None]:
    """The shape (rows, positions, elements) of a value, and the position of each row's first column (None: unknown)."""
    batch = len(step.slots)
    if site in BY_EXPERT or site in CHUNK_SITES:
        return (x.shape[0], 1, -1), None
    if site in BY_ROW:
        return (batch, 1, -1), tuple(s + n - 1 for s, n in zip(step.starts, step.lengths, strict=True))
    if _by_key(x, step, site):
        return (batch, x.shape[1], -1), tuple(0 for _ in step.starts)
    return (batch, max(step.lengths), -1), tuple(step.starts)


def _by_key(x: Tensor, step: Step, site: str) -> bool:
    """Whether a value has one row a key; where keys are expanded once, these sites see the new tokens alone."""
    return site in BY_KEY and x.shape[1] == max(s + n for s, n in zip(step.starts, step.lengths, strict=True))


def _where(hit: Tensor, starts: tuple[int, ...] | None, step: Step) -> tuple[int, int]:
    """(the battery's row, position) of the hit with the lowest position."""
    found = hit.nonzero().tolist()
    if starts is None:
        return -1, -1
    return min(((step.slots[row], starts[row] + column) for row, column in found), key=lambda p: p[1])
