"""Latent attention as Triton kernels: flash prefill over expanded keys, and split decode over pages of the latent.

The references are `variants.ops.mla.tiles` and `absorbed`. Scores, softmax and sums are float32; what is rounded on the
way is named: the probabilities before their product (`probs`) and the output. A query's bits depend on its own keys,
the tile sizes and the number of splits alone (batch-invariant).
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from variants.errors import UsageError
from variants.ops.launch_triton import Precision, block, dot, enter, expect, format_of, narrow, require

HEADS = 16  # query heads that share one tile of the latent
MAX_RANK = 512
MERGED = 128  # values of the latent that a program of the merge takes
RUN_LAUNCH = {"num_warps": 8, "num_stages": 3}
LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Softmax:
    """probs: dtype of the probabilities in their product; precision: of products that hold float32; base2: exponents
    in base 2, the scale multiplied by log2(e) first; out_dtype: of the output, rounded once."""

    probs: torch.dtype = torch.float32
    precision: Precision = Precision.ieee
    base2: bool = False
    out_dtype: torch.dtype = torch.float32


PLAIN = Softmax()


def tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    tile_q: int,
    tile_k: int,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Online softmax over tiles of `tile_k` keys for tiles of `tile_q` queries; q at position p sees keys 0..p.

    q [B, T, H, D]; k [B, L, H, D]; v [B, L, H, V]; positions integer [B, T], every one under L. One dtype for the
    three: float32, bfloat16 or float16. Tiles are powers of two, 16 or more. D and V up to 256. Returns [B, T, H, V].
    """
    require("mla flash", q=q, k=k, v=v)
    b, t, h, d = q.shape
    keys = k.shape[1]
    expect("mla flash", {
        "k": (k, (b, keys, h, d)), "v": (v, (b, keys, h, v.shape[-1])), "positions": (positions, (b, t)),
    })  # fmt: skip
    _expect_tiles("mla flash", tile_q=tile_q, tile_k=tile_k)
    if max(d, v.shape[-1]) > 256:
        raise UsageError(f"mla flash: D {d} and V {v.shape[-1]} must be at most 256; choose impl torch")
    whole = 1 << (d.bit_length() - 1)  # 192 is 128 + 64: two products, nothing padded
    out = torch.empty(b, t, h, v.shape[-1], dtype=softmax.out_dtype, device=q.device)
    single = torch.float32 in (q.dtype, softmax.probs)
    try:
        _flash_kernel[(triton.cdiv(t, tile_q), h, b)](
            q.contiguous(), k.contiguous(), v.contiguous(), positions.to(torch.int32).contiguous(), out, t, keys, scale,
            H=h, D=d, V=v.shape[-1], D1=max(16, whole), D2=block(d - whole) if d > max(16, whole) else 0,
            BV=block(v.shape[-1]), BM=tile_q, BN=tile_k, PROBS=format_of(softmax.probs), BASE2=softmax.base2,
            PRECISION=softmax.precision.value, OUT=format_of(softmax.out_dtype),
            num_warps=8 if tile_q > (16 if single else 64) else 4, num_stages=1 if single else 2,
        )  # fmt: skip
    except OutOfResources as error:
        raise UsageError(
            f"mla flash: tiles of {tile_q} queries and {tile_k} keys of {q.dtype} need more shared memory than the "
            f"device has ({error}); take smaller tiles"
        ) from error
    return out


def absorbed(
    q: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    positions: Tensor,
    *,
    scale: float,
    tile_k: int,
    kv_splits: int,
    rank: int,
    block_table: Tensor | None = None,
    whole_tiles: bool = True,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Attention over the latent, its keys cut into `kv_splits` runs merged by their log-sum-exp.

    q [B, T, H, R], R = rank; q_pe [B, T, H, P]; latent [B, L, R + P], or pages [pages, page, R + P] with block_table
    int32 [B, n] of page numbers, where page is the block size. positions integer [B, T]; -1 marks padding, whose
    output is zero. A run holds whole tiles of `tile_k` keys, or, without `whole_tiles`, an equal share of the query's
    keys. Returns o_latent [B, T, H, R] in softmax.out_dtype; the runs' partial results are float32.
    """
    require("mla absorbed", q=q, q_pe=q_pe, latent=latent)
    b, t, h, r = q.shape
    p = q_pe.shape[-1]
    expect("mla absorbed", {
        "q": (q, (b, t, h, rank)), "q_pe": (q_pe, (b, t, h, p)), "positions": (positions, (b, t)),
        "latent": (latent, (*latent.shape[:2], rank + p)),
    })  # fmt: skip
    _expect_tiles("mla absorbed", tile_k=tile_k)
    if not 1 <= rank <= MAX_RANK or p < 1 or kv_splits < 1:
        raise UsageError(f"mla absorbed: rank 1 to {MAX_RANK}, P and kv_splits 1 or more, got {rank}, {p}, {kv_splits}")
    if block_table is None:
        block_table = torch.arange(b, dtype=torch.int32, device=q.device).unsqueeze(1)
    runs = torch.empty(b * t, h, kv_splits, r, dtype=torch.float32, device=q.device)
    lse = torch.empty(b * t, h, kv_splits, dtype=torch.float32, device=q.device)
    where = positions.to(torch.int32).contiguous()
    run_kernel[(b * t, triton.cdiv(h, HEADS), kv_splits)](
        q.contiguous(), q_pe.contiguous(), latent.contiguous(), block_table.to(torch.int32).contiguous(), where,
        runs, lse, block_table.shape[1], t, scale, PAGE=latent.shape[1], H=h, R=r, P=p, QP=p, BH=HEADS, BR=block(r),
        BP=block(p), BN=tile_k, SPLITS=kv_splits, WHOLE=whole_tiles, PROBS=format_of(softmax.probs),
        BASE2=softmax.base2, PRECISION=softmax.precision.value, PDL=False, **RUN_LAUNCH,
    )  # fmt: skip
    out = torch.empty(b, t, h, r, dtype=softmax.out_dtype, device=q.device)
    merge_kernel[(b * t * h, triton.cdiv(r, MERGED))](
        runs, lse, out, R=r, BR=MERGED, SPLITS=kv_splits, BS=block(kv_splits), BASE2=softmax.base2,
        OUT=format_of(softmax.out_dtype), PDL=False, num_warps=4,
    )  # fmt: skip
    return out


def _expect_tiles(name: str, **sizes: int) -> None:
    for label, size in sizes.items():
        if size < 16 or size & (size - 1):
            raise UsageError(f"{name}: {label} is {size}, expected a power of two of 16 or more")


@triton.jit
def _power(x, BASE2: tl.constexpr):
    if BASE2:
        return tl.exp2(x)
    else:
        return tl.exp(x)


@triton.jit
def _online(scores, seen, top, total, BASE2: tl.constexpr):
    """One step of the online softmax: probabilities, the factor for what was summed, the new maximum and sum."""
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p, shrink = _power(scores - safe[:, None], BASE2), _power(top - safe, BASE2)
    return p, shrink, new, total * shrink + tl.sum(p, 1)


@triton.jit
def _flash_kernel(
    q, k, v, positions, out, t, keys, scale,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PROBS: tl.constexpr, BASE2: tl.constexpr, PRECISION: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """BM queries of one head of one row."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    m, low, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D1), tl.arange(0, BV)
    real = m < t
    position = tl.load(positions + row * t + m, mask=real, other=-1)
    at = (row * t + m) * H + head
    x1 = tl.load(q + at[:, None] * D + low[None, :], mask=real[:, None] & (low < D)[None, :], other=0.0)
    if D2 > 0:
        high = D1 + tl.arange(0, D2)
        x2 = tl.load(q + at[:, None] * D + high[None, :], mask=real[:, None] & (high < D)[None, :], other=0.0)
    if BASE2:
        scale = scale * LOG2E
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    for start in range(0, tl.max(position, 0) + 1, BN):
        n = start + tl.arange(0, BN)
        inside = n < keys
        place = (row * keys + n) * H + head
        y = tl.load(k + place[:, None] * D + low[None, :], mask=inside[:, None] & (low < D)[None, :], other=0.0)
        scores = dot(x1, tl.trans(y), PRECISION)
        if D2 > 0:
            y = tl.load(k + place[:, None] * D + high[None, :], mask=inside[:, None] & (high < D)[None, :], other=0.0)
            scores += dot(x2, tl.trans(y), PRECISION)
        p, shrink, top, total = _online(scores * scale, n[None, :] <= position[:, None], top, total, BASE2)
        y = tl.load(v + place[:, None] * V + cols[None, :], mask=inside[:, None] & (cols < V)[None, :], other=0.0)
        acc = acc * shrink[:, None] + dot(narrow(p, PROBS), y, PRECISION)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at[:, None] * V + cols[None, :], narrow(acc, OUT), mask=real[:, None] & (cols < V)[None, :])


@triton.jit
def run_kernel(
    q, q_pe, pages, table, positions, runs, lse, table_width, t, scale,
    PAGE: tl.constexpr, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, QP: tl.constexpr, BH: tl.constexpr,
    BR: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, WHOLE: tl.constexpr,
    PROBS: tl.constexpr, BASE2: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BH heads of one query over one run of keys; QP values lie from one head's q_pe to the next."""
    enter(PDL)
    row, run = tl.program_id(0).to(tl.int64), tl.program_id(2)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    low, high = tl.arange(0, BR), tl.arange(0, BP)
    keys = tl.load(positions + row) + 1
    share = tl.cdiv(tl.cdiv(keys, BN), SPLITS) * BN if WHOLE else tl.cdiv(keys, SPLITS)
    begin, end = run * share, tl.minimum((run + 1) * share, keys)
    at, real = row * H + heads, (heads < H)[:, None]
    x = tl.load(q + at[:, None] * R + low[None, :], mask=real & (low < R)[None, :], other=0.0)
    x_pe = tl.load(q_pe + at[:, None] * QP + high[None, :], mask=real & (high < P)[None, :], other=0.0)
    if BASE2:
        scale = scale * LOG2E
    top, total = tl.full([BH], float("-inf"), tl.float32), tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, BR], tl.float32)
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        inside = n < end
        page = tl.load(table + (row // t) * table_width + n // PAGE, mask=inside, other=0).to(tl.int64)
        place = pages + ((page * PAGE + n % PAGE) * (R + P))[:, None]
        y = tl.load(place + low[None, :], mask=inside[:, None] & (low < R)[None, :], other=0.0)
        y_pe = tl.load(place + R + high[None, :], mask=inside[:, None] & (high < P)[None, :], other=0.0)
        scores = dot(x, tl.trans(y), PRECISION) + dot(x_pe, tl.trans(y_pe), PRECISION)
        p, shrink, top, total = _online(scores * scale, inside[None, :], top, total, BASE2)
        acc = acc * shrink[:, None] + dot(narrow(p, PROBS), y, PRECISION)
    total = tl.where(total == 0.0, 1.0, total)  # a run without keys: acc is zero and top is -inf
    acc = acc / total[:, None]
    size = top + (tl.log2(total) if BASE2 else tl.log(total))
    tl.store(runs + (at[:, None] * SPLITS + run) * R + low[None, :], acc, mask=real & (low < R)[None, :])
    tl.store(lse + at * SPLITS + run, size, mask=heads < H)


@triton.jit
def merge_kernel(
    runs, lse, out, R: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr, BASE2: tl.constexpr,
    OUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BR values of one head of one query: its runs, each by its share of the whole sum; empty ones are not read."""
    enter(PDL)
    at, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BR + tl.arange(0, BR)
    run = tl.arange(0, BS)
    size = tl.load(lse + at * SPLITS + run, mask=run < SPLITS, other=float("-inf"))
    top = tl.max(size, 0)
    weight = _power(size - tl.where(top == float("-inf"), 0.0, top), BASE2)
    place = runs + (at * SPLITS + run)[:, None] * R + cols[None, :]
    part = tl.load(place, mask=(weight > 0.0)[:, None] & (cols < R)[None, :], other=0.0)
    total = tl.sum(weight, 0)
    acc = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + at * R + cols, narrow(acc, OUT), mask=cols < R)
