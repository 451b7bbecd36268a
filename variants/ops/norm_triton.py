"""RMSNorm as Triton kernels: plain and gated.

The references are `variants.ops.norm.rms_norm` and `gated_rms_norm`. The residual add is no part of them: its sum is a
site of its own, which probes see and change before the norm reads it. All arithmetic is float32 with one rounding at
the end, or two where `twice` is asked for. One program takes one row whatever the number of rows (batch-invariant).
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
    """How a norm rounds: to `out_dtype` once at the end; `twice`: also before the weight."""

    out_dtype: torch.dtype = torch.float32
    twice: bool = False


PLAIN = NormRule()


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, rule: NormRule = PLAIN) -> Tensor:
    """weight * x * rsqrt(mean(x^2) + eps) over the last dimension: x [..., D], weight [D] -> [..., D]."""
    require("rms norm", x=x, weight=weight)
    expect("rms norm", {"weight": (weight, (_width(x),))})
    out = torch.empty(x.shape, dtype=rule.out_dtype, device=x.device)
    width = x.shape[-1]
    _norm_kernel[(x.numel() // width,)](
        x.contiguous(), weight.contiguous(), out, eps, D=width, BD=block(width), TWICE=rule.twice,
        OUT=format_of(rule.out_dtype), num_warps=_warps(width),
    )  # fmt: skip
    return out


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


@triton.jit
def _norm_kernel(
    x, weight, out, eps, D: tl.constexpr, BD: tl.constexpr, TWICE: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """One row."""
    at, cols = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BD)
    mask = cols < D
    y = tl.load(x + at + cols, mask=mask, other=0.0).to(tl.float32)
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
