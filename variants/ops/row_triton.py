"""Our decode kernels: what one token of one sequence needs, each operation alone, products as matrix-vector products.

A program loads whole rows of a weight at once, K in at most two powers of two, and sums them in float32. The functions
here are what the fused launches of `variants.ops.row_fused_triton` are made of too: same tiles, same warps, same order
of every sum, so that a fused step has the bits of these launches one by one.
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from variants.errors import UsageError
from variants.ops.launch_triton import block, enter, expect, format_of, narrow, require, sigmoid

WARPS = 4  # of every launch but the delta rule's
DELTA_WARPS = 4
TILE = 8192  # values of a weight that a program holds
CHANNELS = 256  # of the convolution, or values of an elementwise launch, a program
LATENT_COLUMNS = 64  # of the latent that a program of `absorb` makes
COPIES = tl.constexpr(4)  # of what every warp computes for itself
FIRST = tl.constexpr(-(2**62))  # under every key of `choice_keys` and `top_key`


def split(k: int) -> dict[str, int]:
    """The two widths, each a power of two, in which a row of k values is loaded; the second may be 0."""
    first = max(16, 1 << (k.bit_length() - 1))
    return {"K": k, "K1": first, "K2": block(k - first) if k > first else 0}


def rows_of(k: int) -> int:
    """Rows of a weight that a program takes, for rows of k values."""
    return max(1, TILE // split(k)["K1"])


@triton.jit
def tile(w, rows, ok, K: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    """Columns START.. of rows of a weight [N, K], zero outside it."""
    cols = START + tl.arange(0, WIDTH)
    at = w + rows.to(tl.int64)[:, None] * K + cols[None, :]
    if START + WIDTH <= K:
        return tl.load(at, mask=ok[:, None], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=ok[:, None] & (cols < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def vector(x, K: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    """Values START.. of a vector of K, as float32, zero past its end."""
    cols = START + tl.arange(0, WIDTH)
    return tl.load(x + cols, mask=cols < K, other=0.0).to(tl.float32)


@triton.jit
def parts_of(x, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr):
    """A vector in its two parts."""
    z1 = vector(x, K, 0, K1)
    if K2 > 0:
        return z1, vector(x, K, K1, K2)
    else:
        return z1, z1


@triton.jit
def along(w, x):
    """Each row of a tile by a vector, summed in float32."""
    return tl.sum(w.to(tl.float32) * x[None, :], 1)


@triton.jit
def dots(w1, w2, x1, x2, K2: tl.constexpr):
    """The two parts of a row's sum."""
    if K2 > 0:
        return along(w1, x1) + along(w2, x2)
    else:
        return along(w1, x1)


@triton.jit
def second(w, rows, ok, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr):
    """The second part of a weight's rows; a placeholder that nothing reads where there is none."""
    if K2 > 0:
        return tile(w, rows, ok, K, K1, K2)
    else:
        return ok


@triton.jit
def normed(x, weight, eps, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, OUT: tl.constexpr):
    """RMSNorm of a vector in two parts, float32 throughout, rounded once to OUT and widened again."""
    y1, w1 = vector(x, K, 0, K1), vector(weight, K, 0, K1)
    square = tl.sum(y1 * y1, 0)
    if K2 > 0:
        y2, w2 = vector(x, K, K1, K2), vector(weight, K, K1, K2)
        square += tl.sum(y2 * y2, 0)
    rstd = tl.rsqrt(square / K + eps)
    z1 = narrow(y1 * rstd * w1, OUT).to(tl.float32)
    if K2 > 0:
        return z1, narrow(y2 * rstd * w2, OUT).to(tl.float32)
    else:
        return z1, z1


@triton.jit
def keep(out, z1, z2, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, OUT: tl.constexpr):
    """Store a vector that is held in two parts."""
    cols = tl.arange(0, K1)
    tl.store(out + cols, narrow(z1, OUT), mask=cols < K)
    if K2 > 0:
        cols = K1 + tl.arange(0, K2)
        tl.store(out + cols, narrow(z2, OUT), mask=cols < K)


@triton.jit
def activated(gate, up, SILU: tl.constexpr, ACT: tl.constexpr):
    """silu(gate) rounded to SILU, times up, rounded to ACT; float32 in and out."""
    return narrow(narrow(gate * sigmoid(gate), SILU).to(tl.float32) * up, ACT).to(tl.float32)


@triton.jit
def conv_channels(raw, state, weight, out, c, ok, held, C: tl.constexpr, W: tl.constexpr, OUT: tl.constexpr):
    """One token of some channels: taps from the oldest to the newest, SiLU, and the carried inputs moved on by one.

    ok: which channels there are; held: of which of them there is a state.
    """
    acc = tl.zeros_like(c).to(tl.float32)
    for j in tl.static_range(W - 1):
        kept = tl.load(state + j * C + c, mask=held, other=0.0)
        acc += tl.load(weight + c * W + j, mask=ok, other=0.0).to(tl.float32) * kept.to(tl.float32)
        if j > 0:
            tl.store(state + (j - 1) * C + c, kept, mask=held)
    fresh = tl.load(raw + c, mask=ok, other=0.0)
    acc += tl.load(weight + c * W + W - 1, mask=ok, other=0.0).to(tl.float32) * fresh.to(tl.float32)
    tl.store(state + (W - 2) * C + c, narrow(fresh.to(tl.float32), state.dtype.element_ty), mask=held)
    tl.store(out + c, narrow(acc * sigmoid(acc), OUT), mask=ok)


@triton.jit
def gated(y, gate, weight, eps, D: tl.constexpr, OUT: tl.constexpr):
    """weight * norm(y) * sigmoid(gate) of one head, rounded once; float32 in, zero past the head's end.

    The squares are summed in float64, so that the order, which follows where y comes from, is lost in the rounding.
    """
    square = tl.sum((y * y).to(tl.float64), 0).to(tl.float32)
    y = y * tl.rsqrt(square / D + eps)
    return narrow(y * weight * sigmoid(gate), OUT)


@triton.jit
def choice_keys(logits, bias, E: tl.constexpr, BE: tl.constexpr):
    """Integers in the order of score + bias, of equal ones the lowest id first: [COPIES, BE], all rows alike.

    The logits may have been stored by other programs of this launch, so they are read past the first cache.
    """
    at = tl.arange(0, BE)[None, :] + tl.zeros([COPIES, 1], tl.int32)
    score = sigmoid(tl.load(logits + at, mask=at < E, other=0.0, cache_modifier=".cg").to(tl.float32))
    bits = (score + tl.load(bias + at, mask=at < E, other=0.0).to(tl.float32)).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(at < E, order * 65536 + (BE - 1 - at), FIRST)


@triton.jit
def routing(
    logits, bias, ids, weights, factor, E: tl.constexpr, BE: tl.constexpr, SLOTS: tl.constexpr,
    BEFORE: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Ids and float32 weights of all slots of one token.

    Every warp does all of it, on a row of its own, so that no step waits for another warp; all store the same. The
    chosen logits are read again when all are chosen, so that they wait for memory once.
    """
    same = tl.zeros([COPIES], tl.int32)
    key = choice_keys(logits, bias, E, BE)
    total, experts, found = tl.zeros([COPIES], tl.float32), (), ()
    for _ in tl.static_range(SLOTS):
        best = tl.max(key, 1)
        key = tl.where(key == best[:, None], FIRST, key)
        experts = experts + ((BE - 1 - (best & 65535)).to(tl.int32),)  # noqa: RUF005 (the compiler has no unpacking)
    for j in tl.static_range(SLOTS):
        found = found + (tl.load(logits + experts[j], cache_modifier=".cg"),)  # noqa: RUF005
    for j in tl.static_range(SLOTS):
        total += sigmoid(found[j].to(tl.float32))
        tl.store(ids + j + same, experts[j].to(tl.int64))
    for j in tl.static_range(SLOTS):
        weight = sigmoid(found[j].to(tl.float32))
        if BEFORE:
            weight = weight * factor
        if RENORMALIZE:
            weight = weight / (total + 1e-20)
        if not BEFORE:
            weight = weight * factor
        tl.store(weights + j + same, weight)


@triton.jit
def expert_parts(
    w13,
    expert,
    rows,
    D: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
):
    """Tiles of some rows of one expert's gate, then of its up."""
    ok, base = rows < I, w13 + expert.to(tl.int64) * 2 * I * D
    g1, g2 = tile(base, rows, ok, D, 0, K1), second(base, rows, ok, D, K1, K2)
    base += I * D
    return g1, g2, tile(base, rows, ok, D, 0, K1), second(base, rows, ok, D, K1, K2)


@triton.jit
def expert_rows(
    act, parts, x1, x2, slot, rows, K2: tl.constexpr, I: tl.constexpr,  # noqa: E741
    GATE_UP: tl.constexpr, SILU: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """The SwiGLU of those rows, stored for their slot."""
    gate = narrow(dots(parts[0], parts[1], x1, x2, K2), GATE_UP).to(tl.float32)
    up = narrow(dots(parts[2], parts[3], x1, x2, K2), GATE_UP).to(tl.float32)
    tl.store(act + slot * I + rows, narrow(activated(gate, up, SILU, ACT), ACT), mask=rows < I)


@triton.jit
def expert_tile(w, expert, slot, rows, SLOTS: tl.constexpr, D: tl.constexpr, I: tl.constexpr, START: tl.constexpr,  # noqa: E741
                WIDTH: tl.constexpr):  # fmt: skip
    """The same rows of the down projections of all chosen experts: [slots, rows, WIDTH]."""
    cols = START + tl.arange(0, WIDTH)
    ok = (slot < SLOTS)[:, None, None] & (rows < D)[None, :, None] & (cols < I)[None, None, :]
    at = (expert.to(tl.int64)[:, None, None] * D + rows[None, :, None]) * I + cols[None, None, :]
    return tl.load(w + at, mask=ok, other=0.0, eviction_policy="evict_first")


@triton.jit
def slot_vectors(act, slot, SLOTS: tl.constexpr, I: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):  # noqa: E741
    """The activations of all slots: [slots, 1, WIDTH] in float32."""
    cols = START + tl.arange(0, WIDTH)
    ok = (slot < SLOTS)[:, None] & (cols < I)[None, :]
    return tl.load(act + slot[:, None] * I + cols[None, :], mask=ok, other=0.0).to(tl.float32).expand_dims(1)


@triton.jit
def in_order(y, slot, SLOTS: tl.constexpr):
    """The sum of y [slots, rows] over its slots, first to last; taking a slot out by a mask is exact."""
    total = tl.sum(tl.where((slot == 0)[:, None], y, 0.0), 0)
    for j in tl.static_range(1, SLOTS):
        total += tl.sum(tl.where((slot == j)[:, None], y, 0.0), 0)
    return total


@triton.jit
def second_expert(w2, expert, slot, rows, SLOTS: tl.constexpr, D: tl.constexpr, I: tl.constexpr,  # noqa: E741
                  I1: tl.constexpr, I2: tl.constexpr):  # fmt: skip
    """The second part of the chosen experts' rows, or a placeholder."""
    if I2 > 0:
        return expert_tile(w2, expert, slot, rows, SLOTS, D, I, I1, I2)
    else:
        return slot


@triton.jit
def act_parts(act, slot, SLOTS: tl.constexpr, I: tl.constexpr, I1: tl.constexpr, I2: tl.constexpr):  # noqa: E741
    """The activations of all slots in two parts."""
    a1 = slot_vectors(act, slot, SLOTS, I, 0, I1)
    if I2 > 0:
        return a1, slot_vectors(act, slot, SLOTS, I, I1, I2)
    else:
        return a1, a1


@triton.jit
def routed_rows(
    a1, a2, first, rest, weight, slot, I2: tl.constexpr, SLOTS: tl.constexpr, DOWN: tl.constexpr,
    SCALED: tl.constexpr, ROUTED: tl.constexpr,
):  # fmt: skip
    """Some rows of the routed sum, from their tiles, rounded as the recipe names it and widened again."""
    acc = tl.sum(first.to(tl.float32) * a1, 2)
    if I2 > 0:
        acc += tl.sum(rest.to(tl.float32) * a2, 2)
    y = narrow(narrow(acc, DOWN).to(tl.float32) * weight[:, None], SCALED).to(tl.float32)
    return narrow(in_order(y, slot, SLOTS), ROUTED).to(tl.float32)


@triton.jit
def absorb_columns(x, w, out, cols, N: tl.constexpr, BN: tl.constexpr, M: tl.constexpr, OUT: tl.constexpr):
    """Some columns of x [N] by w [N, M]: the query of one head in the latent."""
    n = tl.arange(0, BN)
    ok = (n < N)[:, None] & (cols < M)[None, :]
    tile_ = tl.load(w + n[:, None] * M + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    y = tl.sum(tile_ * tl.load(x + n, mask=n < N, other=0.0).to(tl.float32)[:, None], 0)
    tl.store(out + cols, narrow(y, OUT), mask=cols < M)


# --- each operation as a launch of its own ---


def gemv(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """One vector x [..., K] by weight [N, K] -> [..., N], summed in float32 and rounded once to `out_dtype`."""
    require("row linear", x=x, weight=weight)
    n, k = weight.shape
    expect("row linear", {"x": (x.reshape(-1), (k,))})
    out = torch.empty(*x.shape[:-1], n, dtype=out_dtype, device=x.device)
    rows = rows_of(k)
    gemv_kernel[(triton.cdiv(n, rows), 1)](
        x.contiguous(), weight, out, n, 0, 0, 0, **split(k), BN=rows, OUT=format_of(out_dtype), PDL=False,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def gemv_per_head(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """One vector a head, x [H, K] by weight [H, N, K] (rows contiguous) -> [H, N]."""
    require("row per head", x=x, weight=weight)
    (heads, n, k), rows = weight.shape, rows_of(weight.shape[2])
    expect("row per head", {"x": (x, (heads, k))})
    if weight.stride()[1:] != (k, 1):
        raise UsageError("row per head: the rows of the weight must be contiguous")
    out = torch.empty(heads, n, dtype=out_dtype, device=x.device)
    gemv_kernel[(triton.cdiv(n, rows), heads)](
        x.contiguous(), weight, out, n, k, weight.stride(0), n, **split(k), BN=rows, OUT=format_of(out_dtype),
        PDL=False, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def gemv_kernel(
    x, weight, out, n, x_step, w_step, out_step, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    BN: tl.constexpr, OUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN rows; the second axis of the grid is the head."""
    head, rows = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    weight, x, ok = weight + head * w_step, x + head * x_step, rows < n
    w1, w2 = tile(weight, rows, ok, K, 0, K1), second(weight, rows, ok, K, K1, K2)
    enter(PDL)
    x1, x2 = parts_of(x, K, K1, K2)
    tl.store(out + head * out_step + rows, narrow(dots(w1, w2, x1, x2, K2), OUT), mask=ok)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out_dtype: torch.dtype) -> Tensor:
    """weight * x * rsqrt(mean(x^2) + eps) over the last dimension, rounded once: x [..., D], weight [D]."""
    require("row norm", x=x, weight=weight)
    width = x.shape[-1]
    expect("row norm", {"weight": (weight, (width,))})
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    norm_kernel[(x.numel() // width,)](
        x.contiguous(), weight, out, eps, **split(width), OUT=format_of(out_dtype), PDL=False, num_warps=WARPS
    )
    return out


@triton.jit
def norm_kernel(
    x, weight, out, eps, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, OUT: tl.constexpr, PDL: tl.constexpr
):
    enter(PDL)
    at = tl.program_id(0).to(tl.int64) * K
    z1, z2 = normed(x + at, weight, eps, K, K1, K2, OUT)
    keep(out + at, z1, z2, K, K1, K2, OUT)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, *, eps: float, out_dtype: torch.dtype) -> Tensor:
    """weight * norm(x) * sigmoid(gate), rounded once: x, gate [..., V], weight [V]."""
    require("row gated norm", x=x, weight=weight, gate=gate)
    width = x.shape[-1]
    expect("row gated norm", {"weight": (weight, (width,)), "gate": (gate, tuple(x.shape))})
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _gated_kernel[(x.numel() // width,)](
        x.contiguous(), weight, gate.contiguous(), out, eps, D=width, BD=block(width), OUT=format_of(out_dtype),
        num_warps=DELTA_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(x, weight, gate, out, eps, D: tl.constexpr, BD: tl.constexpr, OUT: tl.constexpr):
    at, cols = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BD)
    y, g, w = vector(x + at, D, 0, BD), vector(gate + at, D, 0, BD), vector(weight, D, 0, BD)
    tl.store(out + at + cols, gated(y, g, w, eps, D, OUT), mask=cols < D)


def silu_and_mul(gate: Tensor, up: Tensor, *, silu: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    """silu(gate) rounded to `silu`, times up, rounded to `out_dtype`: gate, up [..., I], halves of one tensor too."""
    require("row swiglu", gate=gate, up=up)
    out = torch.empty(gate.shape, dtype=out_dtype, device=gate.device)
    gate, up = (x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous() for x in (gate, up))
    rows, width = gate.shape
    _act_kernel[(rows, triton.cdiv(width, CHANNELS))](
        gate, up, out, width, gate.stride(0), up.stride(0), B=CHANNELS, SILU=format_of(silu),
        ACT=format_of(out_dtype), num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _act_kernel(gate, up, out, width, gate_step, up_step, B: tl.constexpr, SILU: tl.constexpr, ACT: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    g = tl.load(gate + row * gate_step + at, mask=at < width, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_step + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, narrow(activated(g, u, SILU, ACT), ACT), mask=at < width)
