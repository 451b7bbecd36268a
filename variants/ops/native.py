"""Implementation `native`: float32 on the CPU by kernels of our own, any number of tokens, each with bits of its own.

Weights are read as they are stored, bfloat16 or float32: a bfloat16 is a float32 with the same bits in every sum. Rows
without a slot, and tokens behind a row's length, are not run and come out as zeros.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from variants.ops.native_library import Code, call


def narrow(weight: Tensor) -> int:
    """How a kernel reads a weight: 1 for bfloat16, 0 for float32."""
    return int(weight.dtype == torch.bfloat16)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x float32 [..., K] by weight [N, K] -> float32 [..., N]."""
    x = x.contiguous()
    n, k = weight.shape
    y = x.new_empty(*x.shape[:-1], n)
    call(Code.linear, (x, weight, y), (x.numel() // k, n, k, narrow(weight)))
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    x = x.contiguous()
    y = torch.empty_like(x)
    call(Code.rms_norm, (x, weight, y), (x.numel() // x.shape[-1], x.shape[-1]), (eps,))
    return y


def gated_rms_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """As `rms_norm` over [..., V], times the gate's sigmoid."""
    o, gate = o.contiguous(), gate.contiguous()
    y = torch.empty_like(o)
    call(Code.gated_rms_norm, (o, weight, gate, y), (o.numel() // o.shape[-1], o.shape[-1]), (eps,))
    return y


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    call(Code.silu_and_mul, (gate, up, y), (gate.numel(),))
    return y


def short_conv(raw: Tensor, taps: Tensor, pool: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """raw [B, T, C], taps [W, C] from the oldest, pool [slots, W - 1, C] moved on in place; SiLU of the sum [B, T, C].

    rows: lengths and slots of the rows, int64 [B] each.
    """
    raw = raw.contiguous()
    y = torch.zeros_like(raw)
    call(Code.short_conv, (raw, taps, pool, *rows, y), (*raw.shape, len(taps)))
    return y


def delta_rule(
    operands: Sequence[Tensor], gate: tuple[Tensor, Tensor], pool: Tensor, rows: tuple[Tensor, Tensor],
    numbers: tuple[float, float],
) -> Tensor:  # fmt: skip
    """One token after the other of each row: gate, L2 norms, decay, correction, read; pool moved on in place.

    operands: q, k [B, T, H, K], v [B, T, H, V], the gate's projection f [B, T, H, K], beta [B, T, H], all before their
    norms and sigmoids. gate: rate [H] (-exp(A_log)) and dt_bias [H, K]. pool [slots, H, K, V]. numbers: scale of the
    query, eps under the root. Returns o [B, T, H, V].
    """
    q, k, v, f, beta = (x.contiguous() for x in operands)
    b, t, heads, key = q.shape
    value = v.shape[-1]
    o = torch.zeros_like(v)
    sizes = (b, t, heads, key, value, 0, heads * key, heads * key, heads * value)
    call(Code.delta_rule, (q, k, v, f, beta, *gate, pool, *rows, o), sizes, numbers)
    return o


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """All scores of a query, one softmax, one sum: q [B, T, H, D], k [B, L, H, D], v [B, L, H, V], a query at position
    p sees keys 0..p -> [B, T, H, V]."""
    q, k, v, positions = (x.contiguous() for x in (q, k, v, positions))
    b, t, heads, width = q.shape
    o = q.new_empty(b, t, heads, v.shape[-1])
    call(Code.attention, (q, k, v, positions, o), (b, t, heads, width, v.shape[-1], k.shape[1]), (scale,))
    return o


def route(
    logits: Tensor, bias: Tensor, *, k: int, factor: float, renormalize: bool, before: bool
) -> tuple[Tensor, Tensor]:
    """The k experts of the largest biased sigmoids, equal ones by id, and their weights: [N, E] -> [N, k] each."""
    logits = logits.contiguous()
    n, count = logits.shape
    ids, weights = logits.new_empty(n, k, dtype=torch.int64), logits.new_empty(n, k)
    call(Code.route, (logits, bias, ids, weights), (n, count, k, int(renormalize), int(before)), (factor,))
    return ids, weights


def experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The routed sum, slots in order: x [N, D], ids and weights [N, k], w13 [E, 2 I, D], w2 [E, D, I] -> [N, D]."""
    x, ids, weights = (y.contiguous() for y in (x, ids, weights))
    (n, d), inner, k = x.shape, w2.shape[-1], ids.shape[1]
    y, scratch = torch.empty_like(x), x.new_empty(3 * inner + d)
    assert narrow(w13) == narrow(w2)
    call(Code.experts, (x, ids, weights, w13, w2, y, scratch), (n, d, inner, k, narrow(w13)))
    return y
