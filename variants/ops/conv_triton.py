"""The causal depthwise short convolution with SiLU as Triton kernels, over a packed batch and state slots.

The reference is `variants.ops.conv.taps` followed by SiLU. The sum runs from the oldest tap to the newest in float32,
whatever the length of the piece, so prefill and update give a token the same bits.
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from variants.errors import UsageError
from variants.ops.launch_triton import Ragged, expect, format_of, narrow, require, sigmoid

BLOCK_T, BLOCK_C = 16, 256


def short_conv(
    raw: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    batch: Ragged,
    silu: bool = True,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Each token's sum over its taps, then SiLU, rounded once to `out_dtype`; the carried inputs are updated in place.

    raw [T, C] packed inputs; weight [C, W], oldest tap first; state [slots, W - 1, C], the last inputs of each slot in
    the dtype they are kept in (a float32 input is rounded when it is stored; inside a piece it is not). float32,
    bfloat16 or float16 each. Slot -1: the output is zero and no state is touched. Returns [T, C].
    """
    require("short conv", raw=raw, weight=weight, state=state)
    channels, width = weight.shape
    expect("short conv", {
        "raw": (raw, (batch.tokens, channels)), "state": (state, (state.shape[0], width - 1, channels)),
    })  # fmt: skip
    if not state.is_contiguous() or width < 2:
        raise UsageError("short conv: the state must be contiguous and the filter 2 taps or more")
    out = torch.empty(raw.shape, dtype=out_dtype, device=raw.device)
    raw, weight = raw.contiguous(), weight.contiguous()
    cells, longest = triton.cdiv(channels, BLOCK_C), max(batch.lengths)
    tokens = 1 if longest == 1 else BLOCK_T  # of a program; no token's sum follows it
    _conv_kernel[(triton.cdiv(longest, tokens), cells, len(batch.lengths))](
        raw, weight, state, out, batch.cu_seqlens, batch.slots,
        C=channels, W=width, BT=tokens, BC=BLOCK_C, SILU=silu, OUT=format_of(out_dtype), num_warps=4,
    )  # fmt: skip
    _carry_kernel[(cells, len(batch.lengths))](
        raw, state, batch.cu_seqlens, batch.slots, C=channels, W=width, BC=BLOCK_C,
        KEPT=format_of(state.dtype), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _conv_kernel(
    raw, weight, state, out, cu_seqlens, slots,
    C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """BT tokens of BC channels of one sequence; the inputs before the piece come from the slot's state."""
    n = tl.program_id(2)
    begin, slot = tl.load(cu_seqlens + n).to(tl.int64), tl.load(slots + n)
    length, live = tl.load(cu_seqlens + n + 1) - begin, slot >= 0
    t, c = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (t < length)[:, None] & (c < C)[None, :]
    acc = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(W):
        at = t + j - (W - 1)
        fresh = tl.load(raw + (begin + at)[:, None] * C + c[None, :], mask=mask & live & (at >= 0)[:, None], other=0.0)
        kept = state + (slot.to(tl.int64) * (W - 1) + at + (W - 1))[:, None] * C + c[None, :]
        carried = tl.load(kept, mask=mask & live & (at < 0)[:, None], other=0.0)
        tap = tl.load(weight + c * W + j, mask=c < C, other=0.0).to(tl.float32)
        acc += tap[None, :] * tl.where((at >= 0)[:, None], fresh.to(tl.float32), carried.to(tl.float32))
    if SILU:
        acc = acc * sigmoid(acc)
    tl.store(out + (begin + t)[:, None] * C + c[None, :], narrow(acc, OUT), mask=mask)


@triton.jit
def _carry_kernel(
    raw, state, cu_seqlens, slots, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, KEPT: tl.constexpr
):
    """The last W - 1 inputs of one sequence into its slot, oldest first: none is overwritten before its read."""
    n = tl.program_id(1)
    begin, slot = tl.load(cu_seqlens + n).to(tl.int64), tl.load(slots + n)
    length = (tl.load(cu_seqlens + n + 1) - begin).to(tl.int32)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    mask = (c < C) & (slot >= 0)
    home = state + slot.to(tl.int64) * (W - 1) * C + c
    for j in tl.static_range(W - 1):
        at = length + j - (W - 1)
        fresh = tl.load(raw + (begin + at) * C + c, mask=mask & (at >= 0), other=0.0).to(tl.float32)
        kept = tl.load(home + (length + j) * C, mask=mask & (at < 0), other=0.0).to(tl.float32)
        tl.store(home + j * C, narrow(tl.where(at >= 0, fresh, kept), KEPT), mask=mask)
