"""The error of one operation: what is entered quickly has the bits of the definition; nothing not finite is lost."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from harness.op_error import OpError, enter, inner_units
from harness.rounding_noise import last_place
from variants.dtypes import DType, store_as, ulp
from variants.recipe import Rule
from variants.rounding import Step

STEP = Step("prefill", (0, 1), (0, 0), (5, 5))
RULES = [
    Rule(output=output, accum=accum, algorithm=name)
    for output, accum, name in itertools.product(
        (None, DType.bf16, DType.f32, DType.f64), (DType.f32, DType.f64), ("gemm", "rms_norm_twice")
    )
]


def values(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    mine = torch.randn(2, 5, 7, dtype=torch.float64, generator=random) * 10.0 ** torch.randint(-9, 9, (2, 5, 1))
    return mine, store_as(mine, DType.bf16).double()


def sums(mine: Tensor, theirs: Tensor, rule: Rule, usual: float) -> list[float]:
    """error2, value2, allowed2 and cross as they are defined: one sum over all elements each."""
    error, square = theirs - mine, mine.square()
    typical = torch.maximum(square.mean(-1, keepdim=True), square.mean()).clamp_min(usual)
    allow = (inner_units(rule) * rule.accum.unit_roundoff) ** 2 * typical
    if rule.output is not None:
        allow = (2 if rule.algorithm.endswith("_twice") else 1) * ulp(mine, rule.output).square() / 12 + allow
    return [float(x.sum()) for x in (error.square(), square, allow.expand_as(error), error * mine)]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.output}-{r.accum}-{r.algorithm}")
def test_entries_have_the_bits_of_the_definition(rule: Rule) -> None:
    """Step by step, the size of what came before included."""
    entry, total, count = OpError(), [0.0] * 4, 0
    for seed in range(3):
        mine, theirs = values(seed)
        enter(entry, mine, theirs, rule=rule, step=STEP, site="o_proj")
        usual = total[1] / count if count else 0.0
        total = [a + b for a, b in zip(total, sums(mine, theirs, rule, usual), strict=True)]
        count += mine.numel()
        assert [entry.error2, entry.value2, entry.allowed2, entry.cross] == total
    assert (entry.count, entry.positions, entry.non_finite) == (count, 30, 0)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_left_out(broken: float) -> None:
    """On one side it is an error of that position; on both it came from upstream; sums are over the rest."""
    mine, theirs = values(0)
    theirs[1, 2, 3] = broken
    mine[0, 1, 1] = theirs[0, 1, 1] = broken
    entry = OpError()
    enter(entry, mine, theirs, rule=Rule(output=DType.bf16), step=STEP, site="o_proj")
    assert (entry.non_finite, entry.worst, entry.first, entry.rows) == (1, math.inf, (1, 2), {1})
    kept = torch.isfinite(mine) & torch.isfinite(theirs)
    assert entry.value2 == float(torch.where(kept, mine, 0.0).square().sum())


@pytest.mark.parametrize("dtype", [DType.bf16, DType.f16, DType.f32])
def test_both_ways_to_a_last_place_agree(dtype: DType) -> None:
    """By exponent bits and by frexp: zeros, subnormals, powers of two and their neighbours."""
    powers = torch.ldexp(torch.ones(200, dtype=torch.float64), torch.arange(-160, 40)).repeat(2)
    x = torch.cat([torch.zeros(1).double(), powers, powers * (1 + 2.0**-52), powers * (1 - 2.0**-53), -powers])
    assert torch.equal(last_place(x, dtype), ulp(x, dtype))
