"""RMSNorm as Triton kernels: plain, after a residual add with either order of variance and store, and gated.

The references are `variants.ops.norm.rms_norm` and `gated_rms_norm`. All arithmetic is float32 with one rounding at the
end, or two where `twice` is asked for. One program takes one row whatever the number of rows (batch-invariant).
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from variants.errors import UsageError
from variants.ops.launch_triton import block, expect, format_of, narrow, require, sigmoid

MAX_WIDTH = 16384


@dataclass(frozen=True)
class NormRule:
    """How a norm rounds: `out_dtype` once at the end; `twice`: also before the weight, whose product is rounded again.

    stored: the variance is of the sum as it was stored in the residual's dtype, and so is the value that is
    normalised; otherwise both are of the float32 sum before the store. Only `add_rms_norm` reads it.
    """

    out_dtype: torch.dtype = torch.float32
    twice: bool = False
    stored: bool = True


PLAIN = NormRule()


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, rule: NormRule = PLAIN) -> Tensor:
    """weight * x * rsqrt(mean(x^2) + eps) over the last dimension: x [..., D], weight [D] -> [..., D]."""
    require("rms norm", x=x, weight=weight)
    expect("rms norm", {"weight": (weight, (_width(x),))})
    out = torch.empty(x.shape, dtype=rule.out_dtype, device=x.device)
    _launch(x, x, weight, (x, out), eps, rule, add=False)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rule: NormRule = PLAIN
) -> tuple[Tensor, Tensor]:
    """The residual add and the norm of its sum: x, residual [..., D] -> (normed [..., D], the new residual).

    The sum is taken in float32 and stored in the residual's dtype (ties_to_even); `rule.stored` says which of the two
    the norm sees. Neither input is changed.
    """
    require("add rms norm", x=x, residual=residual, weight=weight)
    expect("add rms norm", {"weight": (weight, (_width(x),)), "residual": (residual, tuple(x.shape))})
    out = torch.empty(x.shape, dtype=rule.out_dtype, device=x.device)
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    _launch(x, residual, weight, (total, out), eps, rule, add=True)
    return out, total


def gated_rms_norm(
    x: Tensor, weight: Tensor, gate: Tensor, *, eps: float, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """weight * norm(x) * sigmoid(gate), rounded once: x, gate [..., V], weight [V]; the gate arrives before its
    sigmoid."""
    require("gated rms norm", x=x, weight=weight, gate=gate)
    expect("gated rms norm", {"weight": (weight, (_width(x),)), "gate": (gate, tuple(x.shape))})
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    _gated_kernel[(rows,)](
        x.contiguous(), weight.contiguous(), gate.contiguous(), out, eps,
        D=width, BD=block(width), OUT=format_of(out_dtype), num_warps=_warps(width),
    )  # fmt: skip
    return out


def _width(x: Tensor) -> int:
    if x.shape[-1] > MAX_WIDTH:
        raise UsageError(f"rms norm: a row of {x.shape[-1]} exceeds the kernel's {MAX_WIDTH}; choose impl torch")
    return x.shape[-1]


def _warps(width: int) -> int:
    return min(8, max(1, block(width) // 512))


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    outputs: tuple[Tensor, Tensor],
    eps: float,
    rule: NormRule,
    *,
    add: bool,
) -> None:
    width = x.shape[-1]
    _norm_kernel[(x.numel() // width,)](
        x.contiguous(), residual.contiguous(), weight.contiguous(), *outputs, eps,
        D=width, BD=block(width), ADD=add, STORED=rule.stored, TWICE=rule.twice,
        TOTAL=format_of(residual.dtype), OUT=format_of(rule.out_dtype), num_warps=_warps(width),
    )  # fmt: skip


@triton.jit
def _norm_kernel(
    x, residual, weight, total, out, eps, D: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr,
    STORED: tl.constexpr, TWICE: tl.constexpr, TOTAL: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """One row."""
    at, cols = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BD)
    mask = cols < D
    y = tl.load(x + at + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(residual + at + cols, mask=mask, other=0.0).to(tl.float32)
        kept = narrow(y, TOTAL)
        tl.store(total + at + cols, kept, mask=mask)
        if STORED:
            y = kept.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / D + eps)
    if TWICE:
        y = narrow(y, OUT).to(tl.float32)
    y = y * tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at + cols, narrow(y, OUT), mask=mask)


@triton.jit
def _gated_kernel(x, weight, gate, out, eps, D: tl.constexpr, BD: tl.constexpr, OUT: tl.constexpr):
    """One row of one head."""
    at, cols = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BD)
    mask = cols < D
    y = tl.load(x + at + cols, mask=mask, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / D + eps)
    y = y * tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    y = y * sigmoid(tl.load(gate + at + cols, mask=mask, other=0.0).to(tl.float32))
    tl.store(out + at + cols, narrow(y, OUT), mask=mask)
