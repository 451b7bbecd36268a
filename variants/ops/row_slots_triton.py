"""Slots of several tokens on their way to the experts and back: sorted by expert, and summed by their weights."""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from variants.ops.launch_triton import expect, format_of, narrow, require
from variants.ops.row_triton import CHANNELS, WARPS

COUNTED = 4096  # slots that are sorted by counting, at most
PLACED, BESIDE = 16, 128  # slots that a program places, and those that it compares them with at a time


def by_expert(ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots in the order of their experts, those of one expert in their own: ids int64 [N, k], each under `count`.

    Returns place int64 [N k], where each slot comes to stand; source int64 [N k], the token that stands at each place;
    ends int32 [count], where each expert's slots end. One launch, in which every slot counts those before it; many
    slots are sorted by the library instead.
    """
    flat, k = ids.reshape(-1), ids.shape[1]
    slots = len(flat)
    if slots > COUNTED:
        values, order = flat.sort(stable=True)
        every, experts_ = (torch.arange(n, device=ids.device) for n in (slots, count))
        ends = torch.searchsorted(values, experts_, right=True, out_int32=True)
        return torch.empty_like(order).scatter_(0, order, every), order // k, ends
    place, source = torch.empty_like(flat), torch.empty_like(flat)
    ends = torch.empty(count, dtype=torch.int32, device=ids.device)
    _place_kernel[(triton.cdiv(max(slots, count), PLACED),)](
        flat, place, source, ends, slots, count, SLOTS=k, BI=PLACED, BJ=BESIDE, num_warps=WARPS
    )
    return place, source, ends


@triton.jit
def _place_kernel(ids, place, source, ends, slots, count, SLOTS: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """BI slots, and as many experts."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    mine = tl.load(ids + i, mask=i < slots, other=0)[:, None]
    before, upto = tl.zeros([BI], tl.int32), tl.zeros([BI], tl.int32)
    for start in range(0, slots, BJ):
        j = start + tl.arange(0, BJ)
        theirs = tl.load(ids + j, mask=j < slots, other=count)[None, :]
        ahead = (theirs < mine) | ((theirs == mine) & (j[None, :] < i[:, None]))
        before += tl.sum(ahead.to(tl.int32), 1)
        upto += tl.sum((theirs <= i[:, None]).to(tl.int32), 1)
    tl.store(place + i, before.to(tl.int64), mask=i < slots)
    tl.store(source + before, (i // SLOTS).to(tl.int64), mask=i < slots)
    tl.store(ends + i, upto, mask=i < count)


def weighted_sum(rows: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """Each token's sum over its slots, first to last in float32, of its experts' rows by their weights.

    rows [N k, D]; place integer [N k]: the row of every slot; weights float32 [N, k]. Each product is rounded to the
    dtype of the rows, and so is the sum. Returns [N, D].
    """
    require("row sum", rows=rows)
    require("row sum", (torch.float32,), weights=weights)
    (n, slots), width = weights.shape, rows.shape[1]
    expect("row sum", {"rows": (rows, (n * slots, width)), "place": (place, (n * slots,))})
    out = torch.empty(n, width, dtype=rows.dtype, device=rows.device)
    _sum_kernel[(n, triton.cdiv(width, CHANNELS))](
        rows.contiguous(), place, weights.contiguous(), out, D=width, SLOTS=slots, BD=CHANNELS,
        OUT=format_of(rows.dtype), num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _weighted(rows, place, weights, slot, cols, D: tl.constexpr, OUT: tl.constexpr):
    """Some columns of one slot's row by its weight, rounded and widened again."""
    y = tl.load(rows + tl.load(place + slot) * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    return narrow(y * tl.load(weights + slot), OUT).to(tl.float32)


@triton.jit
def _sum_kernel(rows, place, weights, out, D: tl.constexpr, SLOTS: tl.constexpr, BD: tl.constexpr, OUT: tl.constexpr):
    n, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    total = _weighted(rows, place, weights, n * SLOTS, cols, D, OUT)
    for j in tl.static_range(1, SLOTS):
        total += _weighted(rows, place, weights, n * SLOTS + j, cols, D, OUT)
    tl.store(out + n * D + cols, narrow(total, OUT), mask=cols < D)
