"""Rounding to a format happens once, ties to even, and the size of a last place is the step to the next value."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from variants.dtypes import DType, dtype_of, narrowest_holding, round_to, store_as, ulp, widest

NARROW = [DType.bf16, DType.f16, DType.f32]


def rounded(x: float, dtype: DType) -> float:
    """The definition: the integer multiple of the last place that is nearest to x, in exact rational arithmetic."""
    if x == 0 or not math.isfinite(x):
        return x
    exponent = max(math.frexp(x)[1], dtype.min_exponent + 1) - dtype.precision
    step = Fraction(2) ** exponent
    return math.copysign(float(round(Fraction(x) / step) * step), x)  # Fraction rounds ties to even


def samples(dtype: DType) -> Tensor:
    """float64 values in the format's range: random ones, exact ties and their neighbours, subnormals, both zeros."""
    random = torch.Generator().manual_seed(dtype.precision)
    spread = torch.randint(dtype.min_exponent - dtype.precision, 15, (300,), generator=random)
    values = torch.ldexp(torch.rand(300, generator=random, dtype=torch.float64) + 1, spread)
    last = torch.ldexp(torch.ones(4, dtype=torch.float64), torch.tensor([0, 3, -5, dtype.min_exponent]))
    step = last * 2.0 ** (1 - dtype.precision)
    ties = torch.stack([last + step * (n + 0.5) for n in range(6)]).flatten()
    near = torch.cat([ties * (1 + 2.0**-45), ties * (1 - 2.0**-45)])
    values = torch.cat([values, ties, near, torch.zeros(1, dtype=torch.float64)])
    return torch.cat([values, -values])


def disagreements(rounding: Callable[[Tensor, DType], Tensor], dtype: DType) -> int:
    values = samples(dtype)
    return sum(
        got != rounded(x, dtype) for x, got in zip(values.tolist(), rounding(values, dtype).tolist(), strict=True)
    )


def by_way_of_f32(x: Tensor, dtype: DType) -> Tensor:
    return x.to(torch.float32).to(dtype.torch).double()


def towards_zero(x: Tensor, dtype: DType) -> Tensor:
    step = ulp(x, dtype)
    return torch.trunc(x / step) * step


def ties_away(x: Tensor, dtype: DType) -> Tensor:
    step = ulp(x, dtype)
    return torch.sign(x) * torch.floor(x.abs() / step + 0.5) * step


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_is_that_of_the_definition(dtype: DType) -> None:
    """Every value, tie, neighbour of a tie and subnormal goes where exact rational arithmetic puts it."""
    assert disagreements(round_to, dtype) == 0
    assert disagreements(lambda x, d: store_as(x, d).double(), dtype) == 0


@pytest.mark.parametrize("mutant", [towards_zero, ties_away])
@pytest.mark.parametrize("dtype", NARROW)
def test_another_rounding_is_seen(mutant: Callable[[Tensor, DType], Tensor], dtype: DType) -> None:
    """Truncation and ties away from zero both disagree with the definition on these samples."""
    assert disagreements(mutant, dtype) > 5


@pytest.mark.parametrize("dtype", [DType.bf16, DType.f16])
def test_rounding_by_way_of_float32_is_seen(dtype: DType) -> None:
    """Rounding twice, as a cast by way of float32 does, disagrees with the definition on these samples."""
    assert disagreements(by_way_of_f32, dtype) > 5


def test_a_double_rounding_witness() -> None:
    """1 + 2^-8 + 2^-30 lies above a bf16 tie by less than float32 sees: once gives 1 + 2^-7, twice gives 1."""
    x = torch.tensor([1 + 2.0**-8 + 2.0**-30, -(1 + 2.0**-8 + 2.0**-30)], dtype=torch.float64)
    assert by_way_of_f32(x, DType.bf16).tolist() == [1.0, -1.0]
    assert round_to(x, DType.bf16).tolist() == [1 + 2.0**-7, -(1 + 2.0**-7)]
    assert store_as(x, DType.bf16).tolist() == [1 + 2.0**-7, -(1 + 2.0**-7)]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("storage", [torch.float32, torch.float64])
def test_what_is_no_number_and_signed_zero_are_kept(dtype: DType, storage: torch.dtype) -> None:
    """NaN stays NaN, infinities stay, overflow becomes infinity, and the sign of zero is kept."""
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0], dtype=storage)
    y = round_to(x, dtype)
    assert y.dtype == storage
    assert math.isnan(y[0])
    assert y[1:].tolist() == [math.inf, -math.inf, 0.0, 0.0]
    assert [math.copysign(1, v) for v in y[3:].tolist()] == [-1, 1]
    if storage == torch.float64:
        assert round_to(torch.tensor([1e300, -1e300]).double(), dtype).tolist() == [math.inf, -math.inf]


def test_a_format_that_holds_the_storage_is_no_operation() -> None:
    """Rounding to a format at least as precise as the storage returns the tensor itself."""
    x = torch.tensor([1.1], dtype=torch.bfloat16)
    assert round_to(x, DType.bf16) is x
    assert round_to(x, DType.f32) is x


@pytest.mark.parametrize(("dtype", "kind"), [(DType.f16, np.float16), (DType.f32, np.float32), (DType.f64, np.float64)])
def test_a_last_place_is_the_step_to_numpys_next_value(dtype: DType, kind: type[np.floating]) -> None:
    """At random values, powers of two, the smallest normal, subnormals and zero."""
    info = np.finfo(kind)
    values = [0.0, 1.0, 2.0, 1.999, 0.75, 1000.0, float(info.tiny), float(info.tiny) / 4, float(info.max) / 2, 3e-5]
    x = np.array([*values, *(-v for v in values)], dtype=kind)
    above = np.nextafter(np.abs(x), kind(np.inf)).astype(np.float64)
    expected = above - np.abs(x).astype(np.float64)
    assert np.array_equal(ulp(torch.from_numpy(x.astype(np.float64)), dtype).numpy(), expected)


def test_a_last_place_of_bf16_is_the_step_of_its_bits() -> None:
    """From every kind of bf16 value to the next one up, by counting its bit pattern on."""
    bits = torch.arange(0, 0x7F7F, 37, dtype=torch.int16)
    x, above = bits.view(torch.bfloat16).double(), (bits + 1).view(torch.bfloat16).double()
    assert torch.equal(ulp(x, DType.bf16), above - x)


def test_unit_roundoff_is_half_a_last_place_at_one() -> None:
    """u is 2^-8 for bf16, 2^-11 for f16, 2^-24 for f32, 2^-53 for f64."""
    assert [d.unit_roundoff for d in (DType.bf16, DType.f16, DType.f32, DType.f64)] == [
        2.0**-n for n in (8, 11, 24, 53)
    ]
    for dtype in DType:
        assert float(ulp(torch.ones(1), dtype)) == 2 * dtype.unit_roundoff


@pytest.mark.parametrize(
    ("value", "held"),
    [(1.0, "bf16"), (1 + 2.0**-7, "bf16"), (1 + 2.0**-10, "f16"), (1 + 2.0**-20, "f32"), (1 + 2.0**-40, "f64"),
     (2.0**100 + 2.0**85, "f32"), (65536.0, "bf16"), (65536 + 64.0, "f32"), (math.nan, "bf16")],
)  # fmt: skip
def test_the_narrowest_format_that_holds_a_value(value: float, held: str) -> None:
    """It is read off the values: precision counts, and so does range; a NaN fits everywhere."""
    assert narrowest_holding(torch.tensor([1.0, value], dtype=torch.float64)).name == held


def test_values_tell_what_storage_hides() -> None:
    """A float32 buffer rounded to bf16 at its store is seen as bf16; one element more precise makes it float32."""
    x = round_to(torch.linspace(1, 2, 50), DType.bf16)
    assert (dtype_of(x), narrowest_holding(x)) == (DType.f32, DType.bf16)
    x[7] = 1.0000001
    assert narrowest_holding(x) is DType.f32


def test_widest_is_by_precision() -> None:
    """bf16 is the least precise of the four, whatever its range."""
    assert widest(DType.bf16, DType.f16) is DType.f16
    assert widest(DType.f32, DType.f64, DType.bf16) is DType.f64
