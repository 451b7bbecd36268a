"""Floating-point formats as data: precision, storage, rounding and the size of a last place."""

from enum import Enum
from functools import cached_property

import torch
from torch import Tensor


class DType(Enum):
    """A binary floating-point format; the value is the name that torch gives it.

    `e4m3` and `e5m2` exist for planted faults only: no axis offers them.
    """

    f64 = "float64"
    f32 = "float32"
    f16 = "float16"
    bf16 = "bfloat16"
    e4m3 = "float8_e4m3fn"
    e5m2 = "float8_e5m2"

    @cached_property
    def torch(self) -> torch.dtype:
        return getattr(torch, self.value)

    @cached_property
    def precision(self) -> int:
        """Bits of significand, the hidden one included (bf16: 8)."""
        return _PRECISION[self]

    @property
    def unit_roundoff(self) -> float:
        """u = 2^-precision: the largest relative error of rounding ties-to-even in the normal range."""
        return 2.0**-self.precision

    @cached_property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number (bf16 and f32: -126)."""
        return _MIN_EXPONENT[self]


_PRECISION = {DType.f64: 53, DType.f32: 24, DType.f16: 11, DType.bf16: 8, DType.e4m3: 4, DType.e5m2: 3}
_MIN_EXPONENT = {DType.f64: -1022, DType.f32: -126, DType.f16: -14, DType.bf16: -126, DType.e4m3: -6, DType.e5m2: -14}
_BY_TORCH = {d.torch: d for d in DType}


def dtype_of(x: Tensor) -> DType:
    """The format that a tensor is stored in; raises KeyError for one that is not floating point."""
    return _BY_TORCH[x.dtype]


def widest(*dtypes: DType) -> DType:
    """The format of the highest precision."""
    return max(dtypes, key=lambda d: d.precision)


def round_to(x: Tensor, dtype: DType) -> Tensor:
    """`x` rounded ties-to-even to `dtype`'s values and kept in its own storage; a no-op where storage is narrower.

    float64 to a format under float32 is rounded once: torch casts through float32, which would round twice.
    """
    if dtype_of(x).precision <= dtype.precision:
        return x
    if x.dtype == torch.float64 and dtype.precision < DType.f32.precision:
        x = _to_odd_f32(x)
        return x.to(dtype.torch).to(torch.float64)
    return x.to(dtype.torch).to(x.dtype)


def store_as(x: Tensor, dtype: DType) -> Tensor:
    """`x` in the storage of `dtype`, rounded ties-to-even, once."""
    if x.dtype == torch.float64 and dtype.precision < DType.f32.precision:
        x = _to_odd_f32(x)
    return x.to(dtype.torch)


def _to_odd_f32(x: Tensor) -> Tensor:
    """float64 rounded to float32 with the sticky bit kept (round to odd), so that a later rounding is the only one."""
    y = x.to(torch.float32)
    back = y.to(torch.float64)
    inexact = (back != x) & torch.isfinite(x)
    even = (y.view(torch.int32) & 1) == 0
    away = torch.where(x.abs() > back.abs(), 1, -1).to(torch.int32)
    bits = y.view(torch.int32) + torch.where(inexact & even, away, torch.zeros_like(away))
    return bits.view(torch.float32)


def ulp(x: Tensor, dtype: DType) -> Tensor:
    """Size of the last place of `dtype` at |x|, as float64; at zero and below the normal range the smallest step."""
    _, exponent = torch.frexp(x.to(torch.float64))
    exponent = torch.where(x == 0, torch.full_like(exponent, dtype.min_exponent + 1), exponent)
    exponent = exponent.clamp_min(dtype.min_exponent + 1)
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - dtype.precision)


def narrowest_holding(x: Tensor) -> DType:
    """The narrowest of bf16, f16, f32, f64 that holds every element of `x` exactly: what its values really are.

    A float32 buffer that was rounded at every store shows up as bf16 here; this reads values, not declarations.
    """
    own = dtype_of(x)
    for dtype in (DType.bf16, DType.f16, DType.f32):
        if dtype.precision < own.precision and bool((round_to(x, dtype) == x).logical_or(x.isnan()).all()):
            return dtype
    return own
