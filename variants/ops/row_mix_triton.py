"""Our decode kernels of mixers and experts, each operation as a launch of its own: one token of one sequence."""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from variants.errors import UsageError
from variants.ops.kda_triton import softplus_gate
from variants.ops.launch_triton import block, enter, expect, format_of, narrow, require, sigmoid
from variants.ops.moe_triton import Rounding
from variants.ops.row_triton import (
    CHANNELS,
    DELTA_WARPS,
    LATENT_COLUMNS,
    WARPS,
    absorb_columns,
    act_parts,
    conv_channels,
    expert_parts,
    expert_rows,
    expert_tile,
    gated,
    gemv_per_head,
    parts_of,
    routed_rows,
    routing,
    second_expert,
    split,
    vector,
)

MAX_EXPERTS = 65536
UP_TILE = 16384  # values of gate and up of a chosen expert that a program holds
SLOT_TILE = 16384  # values of all chosen experts' down projections that a program holds
DOWN_WARPS = 4


def short_conv(raw: Tensor, weight: Tensor, pool: Tensor, slot: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """One token: raw [C], weight float32 [C, W], pool [slots, W - 1, C], moved on in place at slot [1]. Returns [C].

    Slot -1: no state is touched.
    """
    require("row conv", raw=raw, weight=weight, pool=pool)
    channels, width = weight.shape
    expect("row conv", {"raw": (raw, (channels,)), "pool": (pool, (len(pool), width - 1, channels)),
                        "slot": (slot, (1,))})  # fmt: skip
    out = torch.empty(channels, dtype=out_dtype, device=raw.device)
    _conv_kernel[(triton.cdiv(channels, CHANNELS),)](
        raw.contiguous(), pool, slot, weight, out, C=channels, W=width, BC=CHANNELS, OUT=format_of(out_dtype),
        num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _conv_kernel(raw, pool, slot, weight, out, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, OUT: tl.constexpr):
    at, c = tl.load(slot).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    conv_channels(raw, pool + at * (W - 1) * C, weight, out, c, c < C, (c < C) & (at >= 0), C, W, OUT)


def delta_step(
    operands: tuple[Tensor, ...], pool: Tensor, slot: Tensor, gate: tuple[Tensor, Tensor], scale: float,
    *, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """One token of the delta rule: q, k [H, K], v [H, V], g [H, K] and beta [H] raw, pool [slots, H, K, V].

    gate: A_log [H] and dt_bias [H, K], float32. The state at slot [1] is updated in place (-1: none); returns o [H, V].
    """
    require("row delta rule", **dict(zip("qkvgb", operands, strict=True)))
    require("row delta rule", (torch.float32,), pool=pool)
    expect("row delta rule", {"slot": (slot, (1,))})
    _, heads, width, v_width = pool.shape
    out = torch.empty(heads, v_width, dtype=out_dtype, device=pool.device)
    delta_kernel[(heads,)](
        *(x.contiguous() for x in operands), *gate, pool, slot, out, out, out,
        scale, 0.0, K=width, V=v_width, BK=block(width), BV=block(v_width), POOL=True, TAIL=False, PDL=False,
        OUT=format_of(out_dtype), num_warps=DELTA_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def delta_kernel(
    q, k, v, g, beta, a_log, dt_bias, state, slot, o, gate, weight, scale, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, POOL: tl.constexpr, TAIL: tl.constexpr,
    PDL: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """One head, its state in registers. POOL: the state is that of a slot, -1 for none, of a pool of states; else the
    slot is not read. TAIL: the gated norm of the output is stored instead of it."""
    head = tl.program_id(0)
    rows, cols = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = rows < K, cols < V
    home = state + head * K * V + rows[:, None] * V + cols[None, :]
    held = in_k[:, None] & in_v[None, :]
    if POOL:
        at = tl.load(slot).to(tl.int64)
        home += at * tl.num_programs(0) * K * V
        held = held & (at >= 0)
    s = tl.load(home, mask=held, other=0.0)
    bias = tl.load(dt_bias + head * K + rows, mask=in_k, other=0.0)
    rate = tl.load(a_log + head)
    enter(PDL)
    query = tl.load(q + head * K + rows, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(k + head * K + rows, mask=in_k, other=0.0).to(tl.float32)
    decay = tl.load(g + head * K + rows, mask=in_k, other=0.0).to(tl.float32)
    value = tl.load(v + head * V + cols, mask=in_v, other=0.0).to(tl.float32)
    b = sigmoid(tl.load(beta + head).to(tl.float32))
    if TAIL:
        opened, scaled = vector(gate + head * V, V, 0, BV), vector(weight, V, 0, BV)
    query = query / tl.sqrt(tl.sum(query * query, 0) + 1e-6) * scale
    key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
    s = s * tl.exp(softplus_gate(decay + bias, rate))[:, None]
    error = (value - tl.sum(s * key[:, None], 0)) * b
    s = s + key[:, None] * error[None, :]
    y = narrow(tl.sum(s * query[:, None], 0), OUT)
    if TAIL:
        y = gated(y.to(tl.float32), opened, scaled, eps, V, OUT)
    tl.store(o + head * V + cols, y, mask=in_v)
    tl.store(home, s, mask=held)


def absorb(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Each head's x [H, N] by its weight [H, N, M] (columns contiguous) -> [H, M]."""
    require("row absorb", x=x, weight=weight)
    heads, n, m = weight.shape
    expect("row absorb", {"x": (x, (heads, n))})
    if weight.stride()[1:] != (m, 1):
        raise UsageError("row absorb: the columns of the weight must be contiguous")
    out = torch.empty(heads, m, dtype=out_dtype, device=x.device)
    _absorb_kernel[(triton.cdiv(m, LATENT_COLUMNS), heads)](
        x, weight, out, x.stride(0), weight.stride(0), N=n, BN=block(n), M=m, BM=LATENT_COLUMNS,
        OUT=format_of(out_dtype), num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _absorb_kernel(
    x, weight, out, x_step, w_step, N: tl.constexpr, BN: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    head, cols = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    absorb_columns(x + head * x_step, weight + head * w_step, out + head * M, cols, N, BN, M, OUT)


def expand(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Each head's x [H, R] by its weight [H, V, R] -> [H, V]."""
    return gemv_per_head(x, weight, out_dtype=out_dtype)


def route(
    logits: Tensor, bias: Tensor, *, k: int, factor: float, renormalize: bool, before: bool
) -> tuple[Tensor, Tensor]:
    """Sigmoid, the k largest of score + bias (lowest id first among equals), weights: logits [N, E] -> ids, weights.

    ids int64 [N, k]; weights float32 [N, k], of the unbiased scores, the factor applied before the division or after.
    """
    require("row route", logits=logits, bias=bias)
    n, experts = logits.shape
    if experts > MAX_EXPERTS:
        raise UsageError(f"row route: {experts} experts, the kernel takes {MAX_EXPERTS}; choose impl.router=torch")
    ids = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(n, k, dtype=torch.float32, device=logits.device)
    _route_kernel[(n,)](
        logits.contiguous(), bias, ids, weights, factor, E=experts, BE=block(experts), SLOTS=k,
        BEFORE=before, RENORMALIZE=renormalize, num_warps=WARPS,
    )  # fmt: skip
    return ids, weights


@triton.jit
def _route_kernel(
    logits, bias, ids, weights, factor, E: tl.constexpr, BE: tl.constexpr, SLOTS: tl.constexpr,
    BEFORE: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    routing(logits + n * E, bias, ids + n * SLOTS, weights + n * SLOTS, factor, E, BE, SLOTS, BEFORE, RENORMALIZE)


def up_rows(d: int) -> int:
    """Rows of gate, and as many of up, that a program takes."""
    return max(1, UP_TILE // (2 * split(d)["K1"]))


def down_shape(inner: int, slots: int) -> dict[str, int]:
    """Rows, padded slots and the two widths of a program of the down projections."""
    parts, padded = split(inner), 1 << (slots - 1).bit_length()
    return {
        "BN": max(1, SLOT_TILE // (padded * parts["K1"])), "BS": padded, "I1": parts["K1"], "I2": parts["K2"],
    }  # fmt: skip


def experts(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, *, rounding: Rounding) -> Tensor:
    """One token x [1, D] through its chosen experts, read where they lie: w13 [E, 2 I, D], w2 [E, D, I].

    ids [1, k]; weights float32 [1, k]. Returns the routed sum [1, D], slots summed first to last.
    """
    require("row experts", x=x, w13=w13, w2=w2)
    (_, d), inner, slots = x.shape, w2.shape[2], ids.shape[-1]
    act = torch.empty(slots, inner, dtype=rounding.expert_act, device=x.device)
    out = torch.empty(1, d, dtype=rounding.routed, device=x.device)
    parts, rows = split(d), up_rows(d)
    _up_kernel[(triton.cdiv(inner, rows), slots)](
        x.contiguous(), w13, act, ids, D=d, K1=parts["K1"], K2=parts["K2"], I=inner, BN=rows,
        **formats(rounding, "expert_gate_up", "expert_silu", "expert_act"), num_warps=WARPS,
    )  # fmt: skip
    shape = down_shape(inner, slots)
    _down_kernel[(triton.cdiv(d, shape["BN"]),)](
        act, w2, ids, weights, out, D=d, I=inner, SLOTS=slots, **shape,
        **formats(rounding, "expert_down", "expert_out", "routed"), num_warps=DOWN_WARPS,
    )  # fmt: skip
    return out


_FORMATS = {"expert_gate_up": "GATE_UP", "expert_silu": "SILU", "expert_act": "ACT", "expert_down": "DOWN",
            "expert_out": "SCALED", "routed": "ROUTED"}  # fmt: skip


def formats(rounding: Rounding, *sites: str) -> dict[str, tl.dtype]:
    """The constants of the kernels that say how an expert rounds."""
    return {_FORMATS[s]: format_of(getattr(rounding, s)) for s in sites}


@triton.jit
def _up_kernel(
    x, w13, act, ids, D: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, I: tl.constexpr, BN: tl.constexpr,  # noqa: E741
    GATE_UP: tl.constexpr, SILU: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    slot, rows = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    parts = expert_parts(w13, tl.load(ids + slot), rows, D, K1, K2, I)
    x1, x2 = parts_of(x, D, K1, K2)
    expert_rows(act, parts, x1, x2, slot, rows, K2, I, GATE_UP, SILU, ACT)


@triton.jit
def _down_kernel(
    act, w2, ids, weights, out, D: tl.constexpr, I: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr,  # noqa: E741
    BS: tl.constexpr, I1: tl.constexpr, I2: tl.constexpr, DOWN: tl.constexpr, SCALED: tl.constexpr,
    ROUTED: tl.constexpr,
):  # fmt: skip
    rows, slot = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BS)
    expert = tl.load(ids + slot, mask=slot < SLOTS, other=0)
    weight = tl.load(weights + slot, mask=slot < SLOTS, other=0.0)
    first = expert_tile(w2, expert, slot, rows, SLOTS, D, I, 0, I1)
    rest = second_expert(w2, expert, slot, rows, SLOTS, D, I, I1, I2)
    a1, a2 = act_parts(act, slot, SLOTS, I, I1, I2)
    y = routed_rows(a1, a2, first, rest, weight, slot, I2, SLOTS, DOWN, SCALED, ROUTED)
    tl.store(out + rows, narrow(y, ROUTED), mask=rows < D)
