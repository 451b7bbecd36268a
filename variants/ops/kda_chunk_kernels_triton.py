"""The five kernels of the chunked delta rule; `variants.ops.kda_chunk_triton` launches them and says what they compute.

A chunk is 64 tokens, a sub-block 16. `total` is the decay summed inside a chunk, in the unit of `power`; every
exponent below is `total` of a later token less `total` of an earlier one, so it is at or below zero.
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import triton
import triton.language as tl

from variants.ops.kda_triton import softplus_gate
from variants.ops.launch_triton import dot, narrow, sigmoid

CHUNK = 64
SUB = 16
BT = tl.constexpr(CHUNK)
BC = tl.constexpr(SUB)
PAIRS = 10  # blocks of 16 on and below the diagonal of a chunk
BLOCKS = tl.constexpr(PAIRS)
LOG2E = tl.constexpr(1.4426950408889634)
# where the query's scale enters (ScaleAt in kda_chunk_triton)
SCALE_QUERY = tl.constexpr(0)
SCALE_PRODUCT = tl.constexpr(1)
SCALE_SUM = tl.constexpr(2)


@triton.jit
def power(x, BASE2: tl.constexpr):
    """The decay of an exponent that is kept in base 2 or in base e."""
    if BASE2:
        return tl.exp2(x)
    else:
        return tl.exp(x)


@triton.jit
def _span(chunks, cu_seqlens, at):
    """First token and number of tokens of the chunk in row `at` of the table, and the sequence it belongs to."""
    n, c = tl.load(chunks + at * 2), tl.load(chunks + at * 2 + 1)
    begin, end = tl.load(cu_seqlens + n) + c * BT, tl.load(cu_seqlens + n + 1)
    return begin.to(tl.int64), tl.minimum(end - begin, BT), n


@triton.jit
def _tile(x, begin, head, rows, cols, mask, H: tl.constexpr, D: tl.constexpr):
    """x [tokens, H, D] at rows `begin + rows` and columns `cols`, zero outside the mask, in its own dtype."""
    return tl.load(x + ((begin + rows) * H + head)[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def normalize_kernel(q, k, q_out, k_out, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, OUT: tl.constexpr):
    """x * rsqrt(sum(x^2) + 1e-6) of q (grid axis 1 = 0) or k (1), rounded once to OUT."""
    at, cols = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    mask = (at < rows)[:, None] & (cols < D)[None, :]
    source, target = q, q_out
    if tl.program_id(1) == 1:
        source, target = k, k_out
    x = tl.load(source + at[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    tl.store(target + at[:, None] * D + cols[None, :], narrow(y, OUT), mask=mask)


@triton.jit
def decay_kernel(
    g, a_log, dt_bias, total, chunks, cu_seqlens,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, AS_DOT: tl.constexpr, BASE2: tl.constexpr,
):  # fmt: skip
    """total = the running sum of the log-decay inside each chunk, float32; the gate itself is fused in where GATE."""
    begin, size, _ = _span(chunks, cu_seqlens, tl.program_id(0))
    head, rows = tl.program_id(1), tl.arange(0, BT)
    cols = tl.program_id(2) * BK + tl.arange(0, BK)
    mask = (rows < size)[:, None] & (cols < K)[None, :]
    x = _tile(g, begin, head, rows, cols, mask, H, K).to(tl.float32)
    if GATE:
        bias = tl.load(dt_bias + head * K + cols, mask=cols < K, other=0.0)
        x = softplus_gate(x + bias[None, :], tl.load(a_log + head))
        x = tl.where(mask, x, 0.0)
    if AS_DOT:
        y = tl.dot((rows[:, None] >= rows[None, :]).to(tl.float32), x, input_precision="ieee")
    else:
        y = tl.cumsum(x, 0)
    if BASE2:
        y = y * LOG2E
    tl.store(total + ((begin + rows) * H + head)[:, None] * K + cols[None, :], y, mask=mask)


@triton.jit
def _invert(strict):
    """(I + strict)^-1 of one strictly lower 16x16 block, by forward substitution row by row in float32."""
    at = tl.arange(0, BC)
    x = -strict
    for i in range(1, BC):
        row = tl.sum(tl.where(at[:, None] == i, x, 0.0), 0)
        row = row + tl.sum(row[:, None] * tl.where(at[:, None] < i, x, 0.0), 0)
        x = tl.where(at[:, None] == i, row[None, :], x)
    return x + (at[:, None] == at[None, :]).to(tl.float32)


@triton.jit
def _left_scores(
    q, k, total, begin, size, head, row, col, scale,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, Q_SCALED: tl.constexpr,
    SCALE_AT: tl.constexpr, BASE2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """k k' and q k' of the 16 rows from `row` and the 16 earlier columns from `col`, as products at PRECISION: both
    factors are taken relative to the first of the rows."""
    rows, before = row + tl.arange(0, BC), col + tl.arange(0, BC)
    kk, qk = tl.zeros([BC, BC], tl.float32), tl.zeros([BC, BC], tl.float32)
    for start in range(0, K, BK):
        cols = start + tl.arange(0, BK)
        mask, past = (rows < size)[:, None] & (cols < K)[None, :], (cols < K)[None, :] & (before < row)[:, None]
        first = tl.load(total + ((begin + row) * H + head) * K + cols, mask=cols < K, other=0.0)[None, :]
        grown = power(tl.minimum(_tile(total, begin, head, rows, cols, mask, H, K) - first, 0.0), BASE2)
        left = power(tl.minimum(first - _tile(total, begin, head, before, cols, past, H, K), 0.0), BASE2)
        left = tl.trans(_tile(k, begin, head, before, cols, past, H, K).to(tl.float32) * left)
        query = _tile(q, begin, head, rows, cols, mask, H, K).to(tl.float32)
        if SCALE_AT == SCALE_QUERY:
            query = narrow(query * scale, Q_SCALED).to(tl.float32)
        elif SCALE_AT == SCALE_PRODUCT:
            query = query * scale
        kk += dot(_tile(k, begin, head, rows, cols, mask, H, K).to(tl.float32) * grown, left, PRECISION)
        qk += dot(query * grown, left, PRECISION)
    if SCALE_AT == SCALE_SUM:
        qk *= scale
    return kk, qk


@triton.jit
def _own_scores(
    q, k, total, begin, size, head, row, scale,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, Q_SCALED: tl.constexpr,
    SCALE_AT: tl.constexpr, BASE2: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """k k' below and q k' up to the diagonal of one 16x16 block, column by column: each pair has its own exponent."""
    at = tl.arange(0, BC)
    rows = row + at
    kk, qk = tl.zeros([BC, BC], tl.float32), tl.zeros([BC, BC], tl.float32)
    for start in range(0, K, BK):
        cols = start + tl.arange(0, BK)
        mask = (rows < size)[:, None] & (cols < K)[None, :]
        key = _tile(k, begin, head, rows, cols, mask, H, K).to(tl.float32)
        query = _tile(q, begin, head, rows, cols, mask, H, K).to(tl.float32)
        if SCALE_AT == SCALE_QUERY:
            query = narrow(query * scale, Q_SCALED).to(tl.float32)
        decay = _tile(total, begin, head, rows, cols, mask, H, K)
        for j in tl.range(0, BC, loop_unroll_factor=UNROLL):
            one = ((begin + row + j) * H + head) * K + cols
            here = (cols < K) & (row + j < size)
            other = tl.load(k + one, mask=here, other=0.0).to(tl.float32)[None, :]
            past = tl.load(total + one, mask=here, other=0.0)[None, :]
            other = other * power(tl.minimum(decay - past, 0.0), BASE2)  # above zero only where it is masked out
            column = at[None, :] == j
            kk += tl.where(column, tl.sum(key * other, 1)[:, None], 0.0)
            qk += tl.where(column, tl.sum(query * other, 1)[:, None], 0.0)
    if SCALE_AT != SCALE_QUERY:
        qk *= scale
    below = at[:, None] - at[None, :]
    return tl.where(below > 0, kk, 0.0), tl.where(below >= 0, qk, 0.0)


@triton.jit
def scores_kernel(
    q, k, total, beta, a, aqk, chunks, cu_seqlens, scale,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, Q_SCALED: tl.constexpr, AQK: tl.constexpr,
    SCALE_AT: tl.constexpr, SIGMOID: tl.constexpr, BASE2: tl.constexpr, PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One of the ten 16x16 blocks on and below the diagonal of a chunk: beta k k' into `a`, q k' into `aqk`.

    Both are [tokens, H, 64]; above the block diagonal they are neither written nor read. On it `a` holds the inverse of
    (I + beta k k'). a is float32.
    """
    begin, size, _ = _span(chunks, cu_seqlens, tl.program_id(0) // BLOCKS)
    pair, head = tl.program_id(0) % BLOCKS, tl.program_id(1)
    i = (pair >= 1).to(tl.int32) + (pair >= 3).to(tl.int32) + (pair >= 6).to(tl.int32)
    row, col = i * BC, (pair - i * (i + 1) // 2) * BC
    if row < size:
        at = tl.arange(0, BC)
        real = row + at < size
        b = tl.load(beta + (begin + row + at) * H + head, mask=real, other=0.0).to(tl.float32)
        if SIGMOID:
            b = sigmoid(b)
        if row == col:
            kk, qk = _own_scores(
                q, k, total, begin, size, head, row, scale, H, K, BK, Q_SCALED, SCALE_AT, BASE2, UNROLL
            )
            kk = _invert(kk * b[:, None])
        else:
            kk, qk = _left_scores(
                q, k, total, begin, size, head, row, col, scale, H, K, BK, Q_SCALED, SCALE_AT, BASE2, PRECISION
            )
            kk = kk * b[:, None]
        out = ((begin + row + at) * H + head)[:, None] * BT + col + at[None, :]
        tl.store(a + out, kk, mask=real[:, None])
        tl.store(aqk + out, narrow(qk, AQK), mask=real[:, None])


@triton.jit
def _lower(top, left, bottom):
    """The lower triangular [2N, 2N] of its blocks [N, N]: [[top, 0], [left, bottom]]."""
    n: tl.constexpr = top.shape[0]
    m: tl.constexpr = 2 * n
    first = tl.join(top, left).permute(2, 0, 1).reshape(m, n)
    second = tl.join(tl.zeros_like(top), bottom).permute(2, 0, 1).reshape(m, n)
    return tl.join(first, second).permute(0, 2, 1).reshape(m, m)


@triton.jit
def _block(a, begin, size, head, r, c, UNIT: tl.constexpr, H: tl.constexpr):
    """A chunk's scores at rows r and columns c, zero past its end; UNIT: there the identity, for a diagonal block."""
    real = (r < size)[:, None]
    x = tl.load(a + ((begin + r) * H + head)[:, None] * BT + c[None, :], mask=real, other=0.0)
    if UNIT:
        x = tl.where(real, x, (r[:, None] == c[None, :]).to(tl.float32))
    return x


@triton.jit
def _merge(a, begin, size, head, r, PRECISION: tl.constexpr, H: tl.constexpr):
    """The inverse of a diagonal block of 32, whose first 16 rows are r, from the inverses of its two blocks of 16."""
    top, bottom = _block(a, begin, size, head, r, r, True, H), _block(a, begin, size, head, r + BC, r + BC, True, H)
    left = _block(a, begin, size, head, r + BC, r, False, H)
    return _lower(top, -dot(dot(bottom, left, PRECISION), top, PRECISION), bottom)


@triton.jit
def solve_kernel(
    a, k, v, beta, total, u, w, kg, chunks, cu_seqlens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BD: tl.constexpr,
    AINV: tl.constexpr, V_BETA: tl.constexpr, K_BETA: tl.constexpr, U: tl.constexpr, W: tl.constexpr, KG: tl.constexpr,
    SIGMOID: tl.constexpr, BASE2: tl.constexpr, MERGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk's inverse from its blocks of 16, then u = inverse (beta v), w = inverse (beta k decay), kg."""
    begin, size, _ = _span(chunks, cu_seqlens, tl.program_id(0))
    head, rows = tl.program_id(1), tl.arange(0, BT)
    real = rows < size
    sub, half = tl.arange(0, BC), tl.arange(0, 2 * BC)
    top, bottom = _merge(a, begin, size, head, sub, MERGE, H), _merge(a, begin, size, head, sub + 2 * BC, MERGE, H)
    left = _block(a, begin, size, head, half + 2 * BC, half, False, H)
    left = -dot(dot(bottom, left, MERGE), top, MERGE)
    inverse = narrow(_lower(top, left, bottom), AINV)
    at = (begin + rows) * H + head
    b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    if SIGMOID:
        b = sigmoid(b)
    for start in range(0, V, BD):
        cols = start + tl.arange(0, BD)
        mask = real[:, None] & (cols < V)[None, :]
        x = narrow(_tile(v, begin, head, rows, cols, mask, H, V).to(tl.float32) * b[:, None], V_BETA)
        tl.store(u + at[:, None] * V + cols[None, :], narrow(dot(inverse, x, PRECISION), U), mask=mask)
    for start in range(0, K, BD):
        cols = start + tl.arange(0, BD)
        mask = real[:, None] & (cols < K)[None, :]
        d = _tile(total, begin, head, rows, cols, mask, H, K)
        last = tl.load(total + ((begin + size - 1) * H + head) * K + cols, mask=cols < K, other=0.0)
        key = _tile(k, begin, head, rows, cols, mask, H, K).to(tl.float32)
        x = narrow(key * b[:, None] * power(d, BASE2), K_BETA)
        tl.store(w + at[:, None] * K + cols[None, :], narrow(dot(inverse, x, PRECISION), W), mask=mask)
        x = key * power(tl.where(real[:, None], last[None, :] - d, 0.0), BASE2)
        tl.store(kg + at[:, None] * K + cols[None, :], narrow(x, KG), mask=mask)


@triton.jit
def state_kernel(
    w, u, kg, total, state, h, v_new, cu_seqlens, chunk_starts, slots,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STORED: tl.constexpr, V_NEW: tl.constexpr, BASE2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BV columns of one head's state over all chunks of one sequence: writes each chunk's h and v_new, then the state.

    h [chunks, H, K, V] is the state before the chunk as the products see it; the carried state stays float32.
    """
    n, head = tl.program_id(1) // H, tl.program_id(1) % H
    begin, slot = tl.load(cu_seqlens + n).to(tl.int64), tl.load(slots + n)
    length, live = (tl.load(cu_seqlens + n + 1) - begin).to(tl.int32), slot >= 0
    rows, keys, cols = tl.arange(0, BT), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    whole = (keys < K)[:, None] & (cols < V)[None, :]
    tile = keys[:, None] * V + cols[None, :]
    home = state + (slot.to(tl.int64) * H + head) * K * V + tile
    s = tl.load(home, mask=whole & live, other=0.0)
    at = tl.load(chunk_starts + n).to(tl.int64) * H + head
    for c in range(tl.cdiv(length, BT)):
        size = tl.minimum(length - c * BT, BT)
        first = begin + c * BT
        real = (rows < size)[:, None]
        seen = narrow(s, STORED)
        tl.store(h + (at + c * H) * K * V + tile, seen, mask=whole)
        x = _tile(w, first, head, rows, keys, real & (keys < K)[None, :], H, K)
        y = _tile(u, first, head, rows, cols, real & (cols < V)[None, :], H, V).to(tl.float32)
        fresh = narrow(y - dot(x, seen, PRECISION), V_NEW)
        out = ((first + rows) * H + head)[:, None] * V + cols[None, :]
        tl.store(v_new + out, fresh, mask=real & (cols < V)[None, :])
        last = tl.load(total + ((first + size - 1) * H + head) * K + keys, mask=keys < K, other=0.0)
        x = _tile(kg, first, head, rows, keys, real & (keys < K)[None, :], H, K)
        s = s * power(last, BASE2)[:, None] + dot(tl.trans(x), fresh, PRECISION)
    tl.store(home, s, mask=whole & live)


@triton.jit
def output_kernel(
    q, total, h, aqk, v_new, o, chunks, cu_seqlens, slots, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    Q_SCALED: tl.constexpr, QG: tl.constexpr, OUT: tl.constexpr,
    SCALE_AT: tl.constexpr, BASE2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = (q decay) h + aqk v_new for BV columns of one chunk, rounded once to OUT; zero where the slot is -1."""
    begin, size, n = _span(chunks, cu_seqlens, tl.program_id(1))
    head, rows = tl.program_id(2), tl.arange(0, BT)
    cols = tl.program_id(0) * BV + tl.arange(0, BV)
    real = (rows < size)[:, None]
    acc = tl.zeros([BT, BV], tl.float32)
    for start in range(0, K, BK):
        keys = start + tl.arange(0, BK)
        mask = real & (keys < K)[None, :]
        x = _tile(q, begin, head, rows, keys, mask, H, K).to(tl.float32)
        if SCALE_AT != SCALE_SUM:
            x = narrow(x * scale, Q_SCALED).to(tl.float32)
        x = narrow(x * power(_tile(total, begin, head, rows, keys, mask, H, K), BASE2), QG)
        seen = h + (tl.program_id(1).to(tl.int64) * H + head) * K * V + keys[:, None] * V + cols[None, :]
        acc += dot(x, tl.load(seen, mask=(keys < K)[:, None] & (cols < V)[None, :], other=0.0), PRECISION)
    if SCALE_AT == SCALE_SUM:
        acc *= scale
    written = real & ((rows // BC)[:, None] >= (rows // BC)[None, :])
    x = tl.load(aqk + ((begin + rows) * H + head)[:, None] * BT + rows[None, :], mask=written, other=0.0)
    acc += dot(x, _tile(v_new, begin, head, rows, cols, real & (cols < V)[None, :], H, V), PRECISION)
    acc = tl.where(tl.load(slots + n) >= 0, acc, 0.0)
    out = ((begin + rows) * H + head)[:, None] * V + cols[None, :]
    tl.store(o + out, narrow(acc, OUT), mask=real & (cols < V)[None, :])
