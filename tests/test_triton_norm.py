"""The RMSNorm kernels against the float64 reference."""

import pytest
import torch
from torch import Tensor

from tests.triton_case import F32_BOUND, agrees, draw
from variants.errors import UsageError
from variants.ops import norm
from variants.ops.norm_triton import MAX_WIDTH, NormRule, gated_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("poisoned")
BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-5
WIDTHS = [1, 72, 129, pytest.param(2304, marks=pytest.mark.gpu), pytest.param(7168, marks=pytest.mark.gpu)]


def rounded_once(got: Tensor, exact: Tensor) -> bool:
    """Whether all but one element in a thousand are the exact value's bfloat16: float32 sums err by 2^-22, and that
    share of values lies so near a tie that it shows; a second rounding would move one in ten."""
    return float((got != exact.to(BF16)).double().mean()) <= 1e-3


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_the_reference(width: int) -> None:
    """Plain RMSNorm is within float32 rounding, and a rounded output is the exact one rounded once."""
    x, weight = draw(2, 3, width, seed=1), draw(width, seed=2)
    out = rms_norm(x, weight, EPS)
    expected = norm.rms_norm(x.double(), weight.double(), EPS)
    assert agrees(out, expected, F32_BOUND)
    assert not agrees(out, norm.rms_norm(x.double(), weight.double(), EPS + 1e-3), F32_BOUND), "another eps is seen"
    assert rounded_once(rms_norm(x, weight, EPS, rule=NormRule(out_dtype=BF16)), expected)


def test_two_roundings_are_before_and_after_the_weight() -> None:
    """With `twice` the normed value is rounded before the weight, and the product again."""
    x, weight = draw(4, 72, seed=1, dtype=BF16), draw(72, seed=2, dtype=BF16)
    ones = torch.ones_like(weight)
    once = rms_norm(x, ones, EPS, rule=NormRule(out_dtype=BF16))
    twice = rms_norm(x, weight, EPS, rule=NormRule(out_dtype=BF16, twice=True))
    assert torch.equal(twice, (once.float() * weight.float()).to(BF16))
    exact = norm.rms_norm(x.double(), weight.double(), EPS)
    assert not rounded_once(twice, exact)
    assert rounded_once(rms_norm(x, weight, EPS, rule=NormRule(out_dtype=BF16)), exact)


@pytest.mark.parametrize("width", WIDTHS)
def test_gated_rms_norm_is_the_reference(width: int) -> None:
    """Norm, weight and sigmoid gate are within float32 rounding, rounded once at the end."""
    x, gate, weight = draw(2, 3, width, seed=1), draw(2, 3, width, seed=2), draw(width, seed=3)
    out = gated_rms_norm(x, weight, gate, eps=EPS)
    wide = [y.double() for y in (x, weight, gate)]
    assert agrees(out, norm.gated_rms_norm(wide[0], wide[1], wide[2].sigmoid(), eps=EPS), F32_BOUND)
    assert not agrees(out, norm.gated_rms_norm(wide[0], wide[1], wide[2].tanh(), eps=EPS), F32_BOUND)
    expected = norm.gated_rms_norm(wide[0], wide[1], wide[2].sigmoid(), eps=EPS)
    assert rounded_once(gated_rms_norm(x, weight, gate, eps=EPS, out_dtype=BF16), expected)


def test_a_row_has_its_bits_whatever_stands_beside_it() -> None:
    """One row alone and the same row among others: the same bits."""
    x, weight = draw(5, 72, seed=1), draw(72, seed=2)
    assert torch.equal(rms_norm(x, weight, EPS)[2:3], rms_norm(x[2:3], weight, EPS))


def test_a_row_too_wide_is_refused() -> None:
    """A row wider than the kernel holds stops in one line."""
    with pytest.raises(UsageError, match=f"exceeds the kernel's {MAX_WIDTH}"):
        rms_norm(draw(1, MAX_WIDTH + 1, seed=1), draw(MAX_WIDTH + 1, seed=2), EPS)
