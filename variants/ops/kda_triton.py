"""The delta rule step by step as one Triton kernel: decode and short prefills, over a packed batch and state slots.

The reference is `variants.ops.kda.recurrent`. All arithmetic is float32: what the recipe rounds are the inputs as they
arrive, the output once, and nothing else. Dimensions: B batch, T tokens, H heads, K key and V value width.
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from variants.errors import UsageError
from variants.ops.launch_triton import Ragged, block, expect, format_of, narrow, ragged, require, sigmoid

MAX_K = 512
PER_WARP = 1024  # values of the state that a warp holds
BLOCK_V = 8  # one width for every batch: the order of the sums over K follows the tile, so it must not follow the batch


@dataclass(frozen=True, eq=False)
class Fused:
    """What the kernel computes on the way in; the default takes q, k, g and beta as the reference does.

    normalize: q and k are raw, take their L2 norm (float32, unrounded). a_log [H, 1] and dt_bias [H, K]: g is the raw
    gate projection, take -exp(a_log) * softplus(g + dt_bias). sigmoid: beta is raw. scale: multiplies q.
    """

    normalize: bool = False
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    sigmoid: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.a_log is None) != (self.dt_bias is None):
            raise UsageError("a fused decay gate needs both a_log and dt_bias")


PLAIN = Fused()


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    batch: Ragged | None = None,
    fused: Fused = PLAIN,
    out_dtype: torch.dtype = torch.float32,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """The delta rule one token at a time, float32 inside, the output rounded once to `out_dtype` (ties_to_even).

    q, k, g [B, T, H, K]; v [B, T, H, V]; beta [B, T, H]: float32, bfloat16 or float16. state float32. Without `batch`:
    state [B, H, K, V], and a new state is returned. With `batch`: B is 1, T the packed tokens, state the pool
    [slots, H, K, V], which is updated in place and returned; slot -1 leaves it alone. A sequence's bits depend on
    nothing beside it. Any H, any K up to 512, any V.
    """
    check("kda recurrent", (q, k, v, g, beta), state, batch)
    b, t, h, k_dim = q.shape
    if batch is None:
        batch, state = dense_batch(b, t, str(q.device)), state.clone()
    out = torch.empty(v.shape, dtype=out_dtype, device=v.device)
    block_k = block(k_dim)
    a_log, dt_bias = gate_operands(fused, q)
    q, k, v, g = (_whole_tokens(x) for x in (q, k, v, g))
    _recurrent_kernel[(triton.cdiv(v.shape[-1], BLOCK_V), len(batch.lengths) * h)](
        q, k, v, g, beta.contiguous(), q.stride(1), k.stride(1), v.stride(1), g.stride(1),
        a_log, dt_bias, state, out, batch.cu_seqlens, batch.slots, fused.scale,
        H=h, K=k_dim, V=v.shape[-1], BK=block_k, BV=BLOCK_V, OUT=format_of(out_dtype),
        NORMALIZE=fused.normalize, GATE=fused.a_log is not None, SIGMOID=fused.sigmoid,
        num_warps=max(1, block_k * BLOCK_V // PER_WARP),
    )  # fmt: skip
    return out, state


def check(name: str, operands: tuple[Tensor, ...], state: Tensor, batch: Ragged | None) -> None:
    """Refuse what neither form of the delta rule can take."""
    q, k, v, g, beta = operands
    require(name, q=q, k=k, v=v, g=g, beta=beta)
    require(name, (torch.float32,), state=state)
    b, t, h, k_dim = q.shape
    if k_dim > MAX_K:
        raise UsageError(f"{name}: K is {k_dim}, the kernel takes 1 to {MAX_K}; choose impl torch")
    slots = b if batch is None else state.shape[0]
    expect(name, {
        "k": (k, (b, t, h, k_dim)), "g": (g, (b, t, h, k_dim)), "v": (v, (b, t, h, v.shape[-1])),
        "beta": (beta, (b, t, h)), "state": (state, (slots, h, k_dim, v.shape[-1])),
    })  # fmt: skip
    if not state.is_contiguous():
        raise UsageError(f"{name}: the state must be contiguous, as it is updated in place")
    if batch is not None and (b != 1 or t != batch.tokens):
        raise UsageError(f"{name}: a packed batch of {batch.tokens} tokens needs inputs [1, {batch.tokens}, ...]")


def _whole_tokens(x: Tensor) -> Tensor:
    """x [B, T, H, .], copied unless its tokens are each whole and evenly apart, as parts of one tensor are."""
    apart = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if apart and x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


@lru_cache(maxsize=64)
def dense_batch(rows: int, length: int, device: str) -> Ragged:
    """Rows of one length, each with the slot of its own number."""
    return ragged((length,) * rows, range(rows), device=device)


def gate_operands(fused: Fused, like: Tensor) -> tuple[Tensor, Tensor]:
    """a_log [H] and dt_bias [H * K] in float32, or a placeholder that the kernel never reads."""
    if fused.a_log is None or fused.dt_bias is None:
        return like, like
    expect("kda gate", {
        "a_log": (fused.a_log.reshape(-1), (like.shape[2],)),
        "dt_bias": (fused.dt_bias.reshape(-1), (like.shape[2] * like.shape[3],)),
    })  # fmt: skip
    require("kda gate", (torch.float32,), a_log=fused.a_log, dt_bias=fused.dt_bias)
    return fused.a_log.reshape(-1).contiguous(), fused.dt_bias.reshape(-1).contiguous()


@triton.jit
def softplus_gate(x, a):
    """-exp(a) * softplus(x); softplus(x) is x above 20, as in the reference."""
    return -tl.exp(a) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _token(q, k, v, g, beta, q_step, k_step, v_step, g_step, beta_step, token, in_k, in_v, live):
    """One token's operands as they lie in memory, from where its head lies in the first; zeros where not `live`."""
    qt = tl.load(q + token * q_step, mask=in_k & live, other=0.0)
    kt = tl.load(k + token * k_step, mask=in_k & live, other=0.0)
    gt = tl.load(g + token * g_step, mask=in_k & live, other=0.0)
    vt = tl.load(v + token * v_step, mask=in_v & live, other=0.0)
    bt = tl.load(beta + token * beta_step, mask=live, other=0.0)
    return qt, kt, vt, gt, bt


@triton.jit
def _recurrent_kernel(
    q, k, v, g, beta, q_step, k_step, v_step, g_step, a_log, dt_bias, state, o, cu_seqlens, slots, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, OUT: tl.constexpr,
    NORMALIZE: tl.constexpr, GATE: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of one head's state [K, V] over all tokens of one sequence, in registers throughout."""
    n, head = tl.program_id(1) // H, tl.program_id(1) % H
    begin, slot = tl.load(cu_seqlens + n), tl.load(slots + n)
    length, live = tl.load(cu_seqlens + n + 1) - begin, slot >= 0
    first = begin.to(tl.int64) * H + head
    rows, cols = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_k, in_v = rows < K, cols < V
    home = state + (slot.to(tl.int64) * H + head) * K * V + rows[:, None] * V + cols[None, :]
    whole = in_k[:, None] & in_v[None, :] & live
    s = tl.load(home, mask=whole, other=0.0)
    if GATE:
        a = tl.load(a_log + head)
        bias = tl.load(dt_bias + head * K + rows, mask=in_k, other=0.0)
    q, k, g, v, beta = q + head * K + rows, k + head * K + rows, g + head * K + rows, v + head * V + cols, beta + head
    token = begin.to(tl.int64)
    qt, kt, vt, gt, bt = _token(q, k, v, g, beta, q_step, k_step, v_step, g_step, H, token, in_k, in_v, live)
    for t in range(length):
        # the next token's loads are in flight while this one is computed
        more = live & (t + 1 < length)
        after = token + t + 1
        qn, kn, vn, gn, bn = _token(q, k, v, g, beta, q_step, k_step, v_step, g_step, H, after, in_k, in_v, more)
        query, key, decay, b = qt.to(tl.float32), kt.to(tl.float32), gt.to(tl.float32), bt.to(tl.float32)
        if NORMALIZE:
            query = query / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
            key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
        if GATE:
            decay = softplus_gate(decay + bias, a)
        if SIGMOID:
            b = sigmoid(b)
        query = query * scale
        s = s * tl.exp(decay)[:, None]
        error = (vt.to(tl.float32) - tl.sum(s * key[:, None], 0)) * b
        s = s + key[:, None] * error[None, :]
        out = tl.sum(s * query[:, None], 0)
        tl.store(o + (first + t * H) * V + cols, narrow(out, OUT), mask=in_v)
        qt, kt, vt, gt, bt = qn, kn, vn, gn, bn
    tl.store(home, s, mask=whole)
