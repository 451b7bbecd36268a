"""Run a captured operation again: under its own rule, which gives the captured bits or something is wrong, and exactly.

Exactly means: the same inputs in float64, the delta rule step by step and attention dense, whatever algorithm the rule
names; so a fault in a kernel's own algorithm is not repeated.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.op_capture import INNER, OpCapture, same_bits
from harness.op_error import LIMIT, OpError, bounding_rule, enter
from harness.op_stage import run_op
from harness.signature import hints
from variants.dtypes import DType, dtype_of, ulp
from variants.errors import EngineError
from variants.ops.mla import LATENT_CORES
from variants.recipe import Recipe, Rule
from variants.sites import INTEGER


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The element with the largest error; ulps: that error in units of the last place, as stored."""

    call: int
    index: tuple[int, ...]
    captured: float
    exact: float
    ulps: float


@dataclass(frozen=True, kw_only=True)
class OpReplay:
    """What came of running a captured operation again.

    bit_equal: whether its own rule gives the captured bits. own, captured: error against float64, of the replay under
    the rule and of what was captured; None for a choice of experts. worst: of the captured values. changed: tokens
    whose set of experts is not the exact one, of `positions`. hints: what the captured error looks like.
    """

    bit_equal: bool
    format: DType
    own: OpError | None
    captured: OpError | None
    worst: Worst | None
    changed: int
    hints: tuple[str, ...]

    @property
    def fault(self) -> bool:
        """Whether what was captured is not what the rule says: other bits, or an error beyond its rounding."""
        return not self.bit_equal or (self.captured is not None and self.captured.in_excess)


def replay_op(capture: OpCapture) -> OpReplay:
    """Run the operation under its own rule and in float64; raises EngineError where the layer never reaches it."""
    own = run_op(capture.where, capture.config, capture.recipe, capture.inputs)
    exact = run_op(capture.where, capture.config, exact_recipe(capture.recipe, capture.where.site), capture.inputs)
    if not len(own) == len(exact) == len(capture.output):
        counts = f"{len(own)} under its rule, {len(exact)} in float64, {len(capture.output)} captured"
        raise EngineError(f"replay: {capture.where.site} gave values {counts}; this version runs it otherwise")
    equal = all(_equal(x, y) for x, y in zip(own, capture.output, strict=True))
    rule = capture.recipe.rule(*capture.where.place, capture.where.phase)
    if capture.where.site in INTEGER:
        changed = sum(_changed(x, y) for x, y in zip(exact, capture.output, strict=True))
        return OpReplay(
            bit_equal=equal, format=rule.accum, own=None, captured=None, worst=None, changed=changed, hints=()
        )
    stored = rule.output or dtype_of(capture.output[0])
    found = _error(capture, exact, capture.output)
    key = (*capture.where.place, capture.where.phase)
    return OpReplay(
        bit_equal=equal,
        format=stored,
        own=_error(capture, exact, own),
        captured=found,
        worst=_worst(exact, capture.output, stored),
        changed=0,
        hints=tuple(hints(key, found, recipe=capture.recipe, config=capture.config)) if found.worst > LIMIT else (),
    )


def exact_recipe(recipe: Recipe, site: str) -> Recipe:
    """The recipe in float64, its cores by the reference's algorithm unless the site lies inside one of them."""
    wide = recipe.at_precision(DType.f64)
    if site in INNER:
        return wide
    return replace(
        wide,
        rules={key: _reference(key, rule) for key, rule in wide.rules.items()},
        exceptions={(key, n): _reference(key, rule) for (key, n), rule in wide.exceptions.items()},
    )


def _reference(key: str, rule: Rule) -> Rule:
    if key.startswith("kda_core"):
        return replace(rule, algorithm="recurrent", options=())
    if key.startswith("mla_core") and rule.algorithm not in LATENT_CORES:
        return replace(rule, algorithm="dense_f32", options=())
    return rule


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and same_bits(x, y)


def _changed(exact: Tensor, captured: Tensor) -> int:
    return int((exact.sort(-1).values != captured.sort(-1).values).any(-1).sum())


def _error(capture: OpCapture, exact: list[Tensor], values: tuple[Tensor, ...] | list[Tensor]) -> OpError:
    where, entry = capture.where, OpError()
    rule = bounding_rule(capture.recipe, where.place, where.phase)
    site = "kda_state" if where.site in INNER else where.site  # inside another operation: a row's values are one
    for x, y in zip(exact, values, strict=True):
        enter(entry, x.double(), y.double(), rule=rule, step=where.step, site=site)
    return entry


def _worst(exact: list[Tensor], values: tuple[Tensor, ...], stored: DType) -> Worst:
    found: list[tuple[float, Worst]] = []
    for call, (x, y) in enumerate(zip(exact, values, strict=True)):
        x, y = x.double(), y.double()
        off = torch.where(x.isfinite() & y.isfinite(), (y - x).abs(), torch.where(x == y, 0.0, torch.inf))
        index = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
        ulps = float(off[index] / ulp(x[index], stored))
        one = Worst(call=call, index=index, captured=float(y[index]), exact=float(x[index]), ulps=ulps)
        found.append((float(off[index]), one))
    return max(found, key=lambda w: w[0])[1]
