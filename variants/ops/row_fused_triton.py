"""The launches of a fused decode step: operations of `row_triton` and `row_mix_triton` joined, no rounding moved.

Norms, activations and residual adds are computed by the launch that reads or writes them; products that do not wait for
each other share a grid. Everything stored between two operations is bfloat16, as the plain launches store it.
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from variants.ops.launch_triton import enter, narrow
from variants.ops.row_triton import (
    absorb_columns,
    act_parts,
    activated,
    conv_channels,
    dots,
    expert_parts,
    expert_rows,
    expert_tile,
    keep,
    normed,
    parts_of,
    routed_rows,
    routing,
    second,
    second_expert,
    tile,
    vector,
)

BF16 = tl.constexpr(tl.bfloat16)
# what a product reads: a vector, the norm of one, or the activation of gate and up that lie one after the other
AS_IS, NORMED, ACTIVATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOWEST = tl.constexpr(-(2**62))
LAST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _operand(x, norm, eps, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, READ: tl.constexpr):
    if READ == NORMED:
        return normed(x, norm, eps, K, K1, K2, BF16)
    elif READ == ACTIVATED:
        z1 = activated(vector(x, K, 0, K1), vector(x + K, K, 0, K1), BF16, BF16)
        if K2 > 0:
            return z1, activated(vector(x, K, K1, K2), vector(x + K, K, K1, K2), BF16, BF16)
        else:
            return z1, z1
    else:
        return parts_of(x, K, K1, K2)


@triton.jit
def _rows(
    x, norm, weight, out, rows, n, eps, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, READ: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some rows of a product, rounded to bfloat16 and stored."""
    ok = rows < n
    w1, w2 = tile(weight, rows, ok, K, 0, K1), second(weight, rows, ok, K, K1, K2)
    enter(PDL)
    x1, x2 = _operand(x, norm, eps, K, K1, K2, READ)
    tl.store(out + rows, narrow(dots(w1, w2, x1, x2, K2), BF16), mask=ok)


@triton.jit
def project_kernel(
    x, norm, weight, out, stream, best, n, eps, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    BN: tl.constexpr, READ: tl.constexpr, RESIDUAL: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A product with what it reads made on the way in; a program takes every so many blocks of BN rows.

    The next block is under way while one is summed. RESIDUAL: the product is added to the stream instead of stored.
    TOP: the largest result and its row are kept in `best`.
    """
    pid, step = tl.program_id(0), tl.num_programs(0)
    rows = pid * BN + tl.arange(0, BN)
    w1, w2 = tile(weight, rows, rows < n, K, 0, K1), second(weight, rows, rows < n, K, K1, K2)
    top = tl.full([BN], LOWEST, tl.int64)
    enter(PDL)
    x1, x2 = _operand(x, norm, eps, K, K1, K2, READ)
    for block in range(pid, tl.cdiv(n, BN), step):
        after, ok = (block + step) * BN + tl.arange(0, BN), rows < n
        n1, n2 = tile(weight, after, after < n, K, 0, K1), second(weight, after, after < n, K, K1, K2)
        y = narrow(dots(w1, w2, x1, x2, K2), BF16)
        if RESIDUAL:
            y = narrow(tl.load(stream + rows, mask=ok, other=0.0).to(tl.float32) + y.to(tl.float32), BF16)
            tl.store(stream + rows, y, mask=ok)
        else:
            tl.store(out + rows, y, mask=ok)
        if TOP:
            bits = y.to(tl.float32).to(tl.int32, bitcast=True)
            bits = tl.where(bits == -2147483648, 0, bits)  # minus zero is zero
            order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
            top = tl.maximum(top, tl.where(ok, order * 4294967296 + (LAST_ID - rows), LOWEST))
        rows, w1, w2 = after, n1, n2
    if TOP:
        tl.atomic_max(best, tl.max(top, 0), sem="relaxed")


@triton.jit
def gates_conv_kernel(
    proj, f_b, g_b, f, g, conv_w, conv_state, mixed, n_f, n_g,
    F_AT: tl.constexpr, G_AT: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, BN: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The second products of both low-rank gates, and the short convolution of q, k and v: each its own programs."""
    pid = tl.program_id(0)
    f_programs, g_programs = tl.cdiv(n_f, BN), tl.cdiv(n_g, BN)
    if pid < f_programs:
        _rows(proj + F_AT, f_b, f_b, f, pid * BN + tl.arange(0, BN), n_f, 0.0, K, K1, K2, AS_IS, PDL)
    elif pid < f_programs + g_programs:
        rows = (pid - f_programs) * BN + tl.arange(0, BN)
        _rows(proj + G_AT, g_b, g_b, g, rows, n_g, 0.0, K, K1, K2, AS_IS, PDL)
    else:
        c = (pid - f_programs - g_programs) * BC + tl.arange(0, BC)
        enter(PDL)
        conv_channels(proj, conv_state, conv_w, mixed, c, c < C, c < C, C, W, BF16)


@triton.jit
def latent_kernel(
    q, w_k, q_latent, kv, norm, cache, position, eps, w_step,
    HEADS: tl.constexpr, QK: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, R1: tl.constexpr,
    R2: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each head's query taken into the latent, and the token's own latent normed and put into the cache."""
    pid, blocks = tl.program_id(0), tl.cdiv(R, BM)
    enter(PDL)
    if pid < HEADS * blocks:
        head, cols = (pid // blocks).to(tl.int64), (pid % blocks) * BM + tl.arange(0, BM)
        absorb_columns(q + head * QK, w_k + head * w_step, q_latent + head * R, cols, N, BN, R, BF16)
    else:
        z1, z2 = normed(kv, norm, eps, R, R1, R2, BF16)
        home, cols = cache + tl.load(position).to(tl.int64) * (R + P), tl.arange(0, BP)
        keep(home, z1, z2, R, R1, R2, BF16)
        tl.store(home + R + cols, tl.load(kv + R + cols, mask=cols < P, other=0.0), mask=cols < P)


@triton.jit
def router_kernel(
    x, norm, weight, out, kept, bias, ids, weights, arrived, n, eps, factor,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, BN: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    SLOTS: tl.constexpr, BEFORE: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Router logits beside the shared expert's gate and up; who ends the last of the router's blocks chooses.

    `arrived` counts those blocks, and is zero again when the launch is over. The normed stream is stored too.
    """
    pid, step = tl.program_id(0), tl.num_programs(0)
    rows = pid * BN + tl.arange(0, BN)
    w1, w2 = tile(weight, rows, rows < n, K, 0, K1), second(weight, rows, rows < n, K, K1, K2)
    enter(PDL)
    x1, x2 = _operand(x, norm, eps, K, K1, K2, NORMED)
    if pid == step - 1:
        keep(kept, x1, x2, K, K1, K2, BF16)
    for block in range(pid, tl.cdiv(n, BN), step):
        after = (block + step) * BN + tl.arange(0, BN)
        n1, n2 = tile(weight, after, after < n, K, 0, K1), second(weight, after, after < n, K, K1, K2)
        tl.store(out + rows, narrow(dots(w1, w2, x1, x2, K2), BF16), mask=rows < n)
        if block * BN < E:
            tl.debug_barrier()
            before = tl.atomic_add(arrived, 1, sem="acq_rel")
            if before == tl.cdiv(E, BN) - 1:
                routing(out, bias, ids, weights, factor, E, BE, SLOTS, BEFORE, RENORMALIZE)
                tl.store(arrived, 0)
        rows, w1, w2 = after, n1, n2


@triton.jit
def experts_up_kernel(
    x, w13, act, raw, shared_w, shared, ids, first, D: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    I: tl.constexpr, BN: tl.constexpr, S: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, BD: tl.constexpr,  # noqa: E741
    SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The shared expert's down projection in the first programs; gate and up of the chosen experts in the others."""
    pid, blocks = tl.program_id(0), tl.cdiv(I, BN)
    if pid < first:
        below = pid * BD + tl.arange(0, BD)
        v1, v2 = tile(shared_w, below, below < D, S, 0, S1), second(shared_w, below, below < D, S, S1, S2)
        enter(PDL)
        s1, s2 = _operand(raw, raw, 0.0, S, S1, S2, ACTIVATED)
        for block in range(pid, tl.cdiv(D, BD), first):
            next_ = (block + first) * BD + tl.arange(0, BD)
            n1, n2 = tile(shared_w, next_, next_ < D, S, 0, S1), second(shared_w, next_, next_ < D, S, S1, S2)
            tl.store(shared + below, narrow(dots(v1, v2, s1, s2, S2), BF16), mask=below < D)
            below, v1, v2 = next_, n1, n2
    else:
        enter(PDL)
        at, step = pid - first, tl.num_programs(0) - first
        slot, rows = at // blocks, (at % blocks) * BN + tl.arange(0, BN)
        g1, g2, u1, u2 = expert_parts(w13, tl.load(ids + slot), rows, D, K1, K2, I)
        x1, x2 = parts_of(x, D, K1, K2)
        for block in range(at, SLOTS * blocks, step):
            after = block + step
            there = after < SLOTS * blocks
            slot2 = tl.where(there, after // blocks, 0)
            rows2 = tl.where(there, (after % blocks) * BN, I) + tl.arange(0, BN)  # none where there is no block
            h1, h2, v1, v2 = expert_parts(w13, tl.load(ids + slot2), rows2, D, K1, K2, I)
            expert_rows(act, (g1, g2, u1, u2), x1, x2, slot, rows, K2, I, BF16, BF16, BF16)
            slot, rows, g1, g2, u1, u2 = slot2, rows2, h1, h2, v1, v2


@triton.jit
def experts_down_kernel(
    act, w2, ids, weights, shared, stream, D: tl.constexpr, I: tl.constexpr, SLOTS: tl.constexpr,  # noqa: E741
    BN: tl.constexpr, BS: tl.constexpr, I1: tl.constexpr, I2: tl.constexpr, SHARED: tl.constexpr, DOWN: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The routed sum, the shared expert's output and the residual stream, added in this order.

    The choice was made by the launch before the last, which is over when this one begins: the chosen rows are under way
    before the wait.
    """
    pid, step, slot = tl.program_id(0), tl.num_programs(0), tl.arange(0, BS)
    rows = pid * BN + tl.arange(0, BN)
    expert = tl.load(ids + slot, mask=slot < SLOTS, other=0, cache_modifier=".cg")
    weight = tl.load(weights + slot, mask=slot < SLOTS, other=0.0, cache_modifier=".cg")
    first = expert_tile(w2, expert, slot, rows, SLOTS, D, I, 0, I1)
    rest = second_expert(w2, expert, slot, rows, SLOTS, D, I, I1, I2)
    enter(PDL)
    a1, a2 = act_parts(act, slot, SLOTS, I, I1, I2)
    for block in range(pid, tl.cdiv(D, BN), step):
        after, ok = (block + step) * BN + tl.arange(0, BN), rows < D
        first2 = expert_tile(w2, expert, slot, after, SLOTS, D, I, 0, I1)
        rest2 = second_expert(w2, expert, slot, after, SLOTS, D, I, I1, I2)
        before = tl.load(stream + rows, mask=ok, other=0.0).to(tl.float32)
        y = routed_rows(a1, a2, first, rest, weight, slot, I2, SLOTS, DOWN, SCALED, BF16)
        if SHARED:
            y = narrow(y + tl.load(shared + rows, mask=ok, other=0.0).to(tl.float32), BF16).to(tl.float32)
        tl.store(stream + rows, narrow(before + y, BF16), mask=ok)
        rows, first, rest = after, first2, rest2


@triton.jit
def act_kernel(raw, act, n, B: tl.constexpr, PDL: tl.constexpr):
    """The activation of gate and up that lie one after the other."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    enter(PDL)
    gate = tl.load(raw + at, mask=at < n, other=0.0).to(tl.float32)
    up = tl.load(raw + n + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(act + at, narrow(activated(gate, up, BF16, BF16), BF16), mask=at < n)


@triton.jit
def embed_kernel(token, table, stream, D: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr):
    """The row of the embedding that a token on the device names."""
    enter(PDL)
    cols = tl.program_id(0) * BD + tl.arange(0, BD)
    row = table + tl.load(token).to(tl.int64) * D
    tl.store(stream + cols, narrow(tl.load(row + cols, mask=cols < D, other=0.0).to(tl.float32), BF16), mask=cols < D)


@triton.jit
def finish_kernel(best, token, position, taken, count, capacity, PDL: tl.constexpr):
    """The token of the largest logit, written where the next step reads it and into the list of those taken."""
    enter(PDL)
    found = LAST_ID - (tl.load(best) & 0xFFFFFFFF)
    tl.store(token, found)
    at = tl.load(count)
    tl.store(taken + at % capacity, found)
    tl.store(count, at + 1)
    tl.store(position, tl.load(position) + 1)
    tl.store(best, tl.full([], LOWEST, tl.int64))
