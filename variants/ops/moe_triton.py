"""Experts as Triton kernels: chosen slots sorted by expert, gate and up with SwiGLU, down with the weight, the sum.

The reference is `variants.mlp_layers.MoeBlock` after its router, with `variants.ops.moe.SUM`. Products are summed in
float32; every rounding on the way has its dtype in `Rounding`, named as the site. Tiles never change with the number of
tokens and rows of a tile do not meet, so a token's bits depend on nothing beside it.
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from variants.errors import UsageError
from variants.ops.launch_triton import Precision, dot, expect, format_of, narrow, require, sigmoid

BLOCK_M, BLOCK_N, BLOCK_K = 16, 64, 64
F32 = torch.float32


@dataclass(frozen=True)
class Rounding:
    """Dtypes of what an expert stores. expert_down is rounded before the routing weight, expert_out after it.

    round_each: the sum over slots is rounded to `routed` after every slot, not only at the end. by_id: the sum runs in
    increasing order of expert id, otherwise in the order of the slots.
    """

    expert_gate_up: torch.dtype = F32
    expert_silu: torch.dtype = F32
    expert_act: torch.dtype = F32
    expert_down: torch.dtype = F32
    expert_out: torch.dtype = F32
    routed: torch.dtype = F32
    precision: Precision = Precision.ieee
    round_each: bool = False
    by_id: bool = False


_B = torch.bfloat16
VLLM = Rounding(expert_gate_up=_B, expert_silu=_B, expert_act=_B, expert_out=_B, routed=_B)


def experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    rounding: Rounding = Rounding(),
) -> Tensor:
    """Each token through its chosen experts, weighted and summed over its slots.

    x [N, D]; w13 [E, 2 I, D], gate rows first, then up; w2 [E, D, I]; one dtype for the three. ids integer [N, k], each
    under E and a token's all different; weights float32 [N, k]. Returns the routed sum [N, D] in `rounding.routed`.
    """
    require("experts", x=x, w13=w13, w2=w2)
    require("experts", (F32,), weights=weights)
    n, d = x.shape
    count, inner = w13.shape[0], w2.shape[2]
    expect("experts", {
        "w13": (w13, (count, 2 * inner, d)), "w2": (w2, (count, d, inner)), "ids": (ids, (n, ids.shape[-1])),
        "weights": (weights, tuple(ids.shape)),
    })  # fmt: skip
    if not x.dtype == w13.dtype == w2.dtype:
        raise UsageError(f"experts: x {x.dtype}, w13 {w13.dtype} and w2 {w2.dtype} must have one dtype")
    slots, k = ids.numel(), ids.shape[-1]
    order, owner, begin = _sorted_slots(ids, count)
    act = torch.empty(slots, inner, dtype=rounding.expert_act, device=x.device)
    out = torch.empty(slots, d, dtype=rounding.expert_out, device=x.device)
    tiles = owner.numel()
    shared = {"BM": BLOCK_M, "BN": BLOCK_N, "BK": BLOCK_K, "PRECISION": rounding.precision.value, "num_warps": 4}
    _up_kernel[(tiles, triton.cdiv(inner, BLOCK_N))](
        x.contiguous(), w13.contiguous(), act, order, owner, begin, D=d, I=inner, SLOTS=k,
        GATE_UP=format_of(rounding.expert_gate_up), SILU=format_of(rounding.expert_silu),
        ACT=format_of(rounding.expert_act), **shared,
    )  # fmt: skip
    _down_kernel[(tiles, triton.cdiv(d, BLOCK_N))](
        act, w2.contiguous(), weights.contiguous(), out, order, owner, begin, D=d, I=inner,
        DOWN=format_of(rounding.expert_down), SCALED=format_of(rounding.expert_out), **shared,
    )  # fmt: skip
    return _summed(out, ids, rounding)


def _sorted_slots(ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots in order of expert, and for each tile its expert (-1: none) and where its slots begin and end.

    Returns order int64 [N k], owner int64 [tiles], begin int64 [tiles, 2]; made on the device, whose host never waits.
    """
    flat = ids.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    sizes = torch.zeros(count, dtype=torch.int64, device=ids.device)
    sizes.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    ends = sizes.cumsum(0)
    tiles_end = ((sizes + BLOCK_M - 1) // BLOCK_M).cumsum(0)
    most = min(flat.numel(), triton.cdiv(flat.numel(), BLOCK_M) + count)
    tile = torch.arange(most, device=ids.device)
    owner = torch.searchsorted(tiles_end, tile, right=True)
    spare = owner >= count
    safe = owner.clamp(max=count - 1)
    tiles_before = tiles_end - (sizes + BLOCK_M - 1) // BLOCK_M
    begin = ends[safe] - sizes[safe] + (tile - tiles_before[safe]) * BLOCK_M
    return order, owner.masked_fill(spare, -1), torch.stack([begin, ends[safe]], 1).contiguous()


def _summed(out: Tensor, ids: Tensor, rounding: Rounding) -> Tensor:
    n, k = ids.shape
    d = out.shape[-1]
    first = torch.arange(k, device=ids.device).expand(n, k)
    sequence = ids.argsort(-1) if rounding.by_id else first
    routed = torch.empty(n, d, dtype=rounding.routed, device=out.device)
    _sum_kernel[(n, triton.cdiv(d, 256))](
        out, sequence.contiguous(), routed, D=d, SLOTS=k, BD=256, EACH=rounding.round_each,
        ROUTED=format_of(rounding.routed), num_warps=4,
    )  # fmt: skip
    return routed


@triton.jit
def _slots(order, begin, BM: tl.constexpr):
    """The slots of this program's tile and which of them are real."""
    tile = tl.program_id(0)
    at = tl.load(begin + tile * 2) + tl.arange(0, BM)
    real = at < tl.load(begin + tile * 2 + 1)
    return tl.load(order + at, mask=real, other=0), real


@triton.jit
def _up_kernel(
    x, w13, act, order, owner, begin, D: tl.constexpr, I: tl.constexpr, SLOTS: tl.constexpr,  # noqa: E741
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    GATE_UP: tl.constexpr, SILU: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """BN columns of gate and of up for BM slots of one expert, and their SwiGLU."""
    expert = tl.load(owner + tl.program_id(0))
    if expert >= 0:
        slot, real = _slots(order, begin, BM)
        cols, depth = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
        gate, up = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        rows = w13 + (expert * 2 * I + cols)[:, None] * D
        for start in range(0, D, BK):
            inside = (start + depth < D)[None, :]
            a = tl.load(
                x + (slot // SLOTS)[:, None] * D + start + depth[None, :], mask=real[:, None] & inside, other=0.0
            )
            mask = (cols < I)[:, None] & inside
            w = tl.load(rows + start + depth[None, :], mask=mask, other=0.0)
            gate += dot(a, tl.trans(w), PRECISION)
            w = tl.load(rows + I * D + start + depth[None, :], mask=mask, other=0.0)
            up += dot(a, tl.trans(w), PRECISION)
        gate, up = narrow(gate, GATE_UP).to(tl.float32), narrow(up, GATE_UP).to(tl.float32)
        gate = narrow(gate * sigmoid(gate), SILU).to(tl.float32)
        tl.store(
            act + slot[:, None] * I + cols[None, :], narrow(gate * up, ACT), mask=real[:, None] & (cols < I)[None, :]
        )


@triton.jit
def _down_kernel(
    act, w2, weights, out, order, owner, begin, D: tl.constexpr, I: tl.constexpr,  # noqa: E741
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    DOWN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """BN columns of the down product for BM slots of one expert, times each slot's weight."""
    expert = tl.load(owner + tl.program_id(0))
    if expert >= 0:
        slot, real = _slots(order, begin, BM)
        cols, depth = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, I, BK):
            inside = (start + depth < I)[None, :]
            a = tl.load(act + slot[:, None] * I + start + depth[None, :], mask=real[:, None] & inside, other=0.0)
            w = tl.load(w2 + (expert * D + cols)[:, None] * I + start + depth[None, :],
                        mask=(cols < D)[:, None] & inside, other=0.0)  # fmt: skip
            acc += dot(a, tl.trans(w), PRECISION)
        weight = tl.load(weights + slot, mask=real, other=0.0)
        acc = narrow(acc, DOWN).to(tl.float32) * weight[:, None]
        tl.store(out + slot[:, None] * D + cols[None, :], narrow(acc, SCALED), mask=real[:, None] & (cols < D)[None, :])


@triton.jit
def _sum_kernel(
    out, sequence, routed, D: tl.constexpr, SLOTS: tl.constexpr, BD: tl.constexpr, EACH: tl.constexpr,
    ROUTED: tl.constexpr,
):  # fmt: skip
    """One token's slots in the given sequence."""
    n, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    mask = cols < D
    total = tl.load(out + (n * SLOTS + tl.load(sequence + n * SLOTS)) * D + cols, mask=mask, other=0.0).to(tl.float32)
    for j in range(1, SLOTS):
        at = n * SLOTS + tl.load(sequence + n * SLOTS + j)
        total += tl.load(out + at * D + cols, mask=mask, other=0.0).to(tl.float32)
        if EACH:
            total = narrow(total, ROUTED).to(tl.float32)
    tl.store(routed + n * D + cols, narrow(total, ROUTED), mask=mask)
