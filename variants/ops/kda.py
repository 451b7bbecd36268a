"""Kimi delta attention: decay gate, L2 norm, and the delta rule step by step and in chunks.

Everything here computes in the dtype of its inputs, so float64 inputs give the reference and the same lines give any
other precision. Dimensions: B batch, T tokens, H heads, K key and V value width. Source: Kimi Linear technical report.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.ops.norm import constant

SOFTPLUS_LINEAR_ABOVE = 20.0
L2_EPS = 1e-6
PAIRS = 8  # a last chunk is cut to a multiple of this: a GPU orders the sums of very few results in another way
BLOCK = 16  # tokens of a block of scores, as vLLM's kernels have them
Hooks = Mapping[str, Callable[[Tensor], Tensor]]


def decay_rate(a_log: Tensor) -> Tensor:
    """-exp(A_log), of any shape: what a head's softplus is multiplied by, the same at every token."""
    return -torch.exp(a_log)


def decay_gate(f: Tensor, rate: Tensor, dt_bias: Tensor) -> Tensor:
    """Log-decay per key channel: rate * softplus(f + dt_bias), always at or below zero.

    f [B, T, H, K]; rate [H, 1] (`decay_rate`); dt_bias [H, K], one value a channel. softplus(x) is x above 20.
    """
    x = f + dt_bias
    return rate * torch.where(x > SOFTPLUS_LINEAR_ABOVE, x, torch.log(1.0 + torch.exp(x)))


def decay_gate_fused(f: Tensor, rate: Tensor, dt_bias: Tensor) -> Tensor:
    """As `decay_gate` by the library's softplus, which takes log1p and so keeps what a sum with 1 loses."""
    return rate * F.softplus(f + dt_bias, threshold=SOFTPLUS_LINEAR_ABOVE)


def l2norm(x: Tensor, *, eps: float = L2_EPS) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension: eps is inside the root and on the sum, not on the mean."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def l2norm_fused(x: Tensor, *, eps: float = L2_EPS) -> Tensor:
    """As `l2norm`, multiplied by the reciprocal root."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + constant(eps, x.dtype, x.device))


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **_: object
) -> tuple[Tensor, Tensor]:
    """The delta rule one token at a time: decay the state, then correct it by the error of its own prediction.

    q, k [B, T, H, K] (q already scaled); v [B, T, H, V]; g [B, T, H, K] log-decay; beta [B, T, H]; state [B, H, K, V].
    Returns o [B, T, H, V] and the new state; both sums over K are elementwise products summed over that dimension.
    """
    out, product = [], torch.empty_like(state)
    steps = (x.unsqueeze(-1).unbind(1) for x in (q, k, g.exp(), beta))
    for query, key, decay, strength, value in zip(*steps, v.unbind(1), strict=True):
        state = state * decay if not out else state.mul_(decay)  # the first makes a copy; the caller's stays as it is
        error = (value - torch.mul(state, key, out=product).sum(-2)).mul_(strength)
        state.add_(torch.mul(key, error.unsqueeze(-2), out=product))
        out.append(torch.mul(state, query, out=product).sum(-2))
    return torch.stack(out, 1), state


def recurrent_gemv(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **_: object
) -> tuple[Tensor, Tensor]:
    """As `recurrent`, the state read once a token for both sums: k and q, decayed, are two rows of one product.

    o = q^T (D S + k e^T) is taken as (D q)^T S + (q . k) e, so the order of roundings is its own.
    """
    shape, decay = state.shape, g.exp()
    rows = torch.stack([k * decay, q * decay], -2)
    overlap = (q * k).sum(-1, keepdim=True)
    flat = state.reshape(-1, *shape[2:])
    out = []
    steps = (x.unbind(1) for x in (rows, k, v, decay, overlap, beta))
    for row, key, value, fade, share, strength in zip(*steps, strict=True):
        seen = torch.bmm(row.reshape(-1, 2, shape[2]), flat).view(*shape[:2], 2, shape[3])
        predicted, read = seen.unbind(2)
        error = (value - predicted) * strength.unsqueeze(-1)
        out.append(torch.addcmul(read, share, error))
        flat = flat * fade.reshape(-1, shape[2], 1)
        flat.addcmul_(key.reshape(-1, shape[2], 1), error.reshape(-1, 1, shape[3]))
    return torch.stack(out, 1), flat.view(shape)


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    chunk_size: int,
    form: int = 0,
    at: Hooks | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule in chunks (the WY form): the same function as `recurrent`, another order of sums.

    Shapes as `recurrent`, any T: the last chunk is filled up with tokens that change nothing (k, v, beta and g zero).
    Every exponent is a difference of cumulative log-decays from a later to an earlier token, hence at or below zero,
    so nothing overflows however strong the decay. at: roundings of named intermediates (`variants.sites.CHUNK_SITES`).
    form: not 0 for scores as vLLM's kernels take them (`in_blocks`), of a query that is not rounded before.
    """
    length = q.shape[1]
    q, k, v, g, beta = (_chunked(x, chunk_size) for x in (q, k, v, g, beta))
    at = at or {}
    out = []
    for n in range(q.shape[1]):
        real = min(chunk_size, -(-(length - n * chunk_size) // PAIRS) * PAIRS)
        o, state = _one_chunk(q[:, n], k[:, n], v[:, n], g[:, n], beta[:, n], state, at, real, form)
        out.append(o)
    return torch.cat(out, 2)[:, :, :length].transpose(1, 2), state


def _chunked(x: Tensor, size: int) -> Tensor:
    """[B, T, H, ...] -> [B, N, H, size, ...], filled up with zeros; contiguous, as bits follow strides."""
    fill = -x.shape[1] % size
    if fill:
        x = torch.cat([x, x.new_zeros(x.shape[0], fill, *x.shape[2:])], 1)
    return x.unflatten(1, (-1, size)).transpose(2, 3).contiguous()


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, at: Hooks, real: int, form: int
) -> tuple[Tensor, Tensor]:
    """One chunk of C tokens: q, k [B, H, C, K], v [B, H, C, V], state [B, H, K, V] -> o [B, H, C, V], state.

    real: all tokens from there on are filling; their pairs are zero and are not computed.
    """
    total = g.cumsum(-2)
    k_beta, v_beta = k * beta.unsqueeze(-1), v * beta.unsqueeze(-1)
    pairs = None if form else decay_pairs(total[..., :real, :])
    overlap = _over_pairs(k_beta, k, pairs) if pairs is not None else in_blocks(k, k, total, real) * beta.unsqueeze(-1)
    inverse = _at(at, "kda_ainv", unit_lower_inverse(overlap.tril(-1), real))
    u = _at(at, "kda_u", inverse @ _at(at, "kda_v_beta", v_beta))
    w = _at(at, "kda_w", inverse @ _at(at, "kda_k_beta", k_beta * total.exp()))
    h = _at(at, "kda_h", state)
    v_new = u - w @ h
    v_seen = _at(at, "kda_v_new", v_new)
    scaled = _at(at, "kda_q_scaled", q)
    scores = _over_pairs(scaled, k, pairs) if pairs is not None else in_blocks(q, k, total, real)
    scores = _at(at, "kda_aqk", scores.tril())
    o = _at(at, "kda_qg", scaled * total.exp()) @ h + scores @ v_seen
    last = total[..., -1:, :]
    kg = _at(at, "kda_kg", k * (last - total).exp())
    return o, state * last.exp().transpose(-1, -2) + kg.transpose(-1, -2) @ v_seen


def _over_pairs(a: Tensor, b: Tensor, pairs: Tensor) -> Tensor:
    """sum over K of a_i b_j pairs_ij for a, b [B, H, C, K], pairs [B, H, n, n, K] -> [B, H, C, C], zero from n on."""
    size, real = a.shape[-2], pairs.shape[-2]
    sums = (a[..., :real, :].unsqueeze(-2) * b[..., :real, :].unsqueeze(-3) * pairs).sum(-1)
    return F.pad(sums, (0, size - real, 0, size - real)) if real < size else sums


def in_blocks(x: Tensor, k: Tensor, total: Tensor, real: int) -> Tensor:
    """x k' over the decay between them, in blocks of 16 tokens: x, k, total [B, H, C, K] float32 -> [B, H, C, C].

    A block on the diagonal takes each pair's own decay. One left of it is a product of operands cut to TF32, both
    relative to the first of its rows. Zero right of the diagonal blocks and from row `real` on.
    """
    out = x.new_zeros(*x.shape[:-1], x.shape[-2])
    for row in range(0, real, BLOCK):
        here = slice(row, min(row + BLOCK, real))
        rows, decay, first = x[..., here, :], total[..., here, :], total[..., row : row + 1, :]
        left = tf32(k[..., :row, :] * (first - total[..., :row, :]).exp())
        out[..., here, :row] = tf32(rows * (decay - first).exp()) @ left.transpose(-1, -2)
        out[..., here, here] = _over_pairs(rows, k[..., here, :], decay_pairs(decay))
    return out


def tf32(x: Tensor) -> Tensor:
    """float32 with the last 13 bits of each fraction cut off: what a TF32 product reads of an operand."""
    assert x.dtype == torch.float32
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def chunk_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    chunk_size: int,
    form: int = 0,
    at: Hooks | None = None,
) -> tuple[Tensor, Tensor]:
    """As `chunk`, each row of the batch alone and in memory of its own (batch-invariant)."""
    rows = zip(*(x.split(1) for x in (q, k, v, g, beta, state)), strict=True)
    done = [chunk(*(x.clone() for x in row), chunk_size=chunk_size, form=form, at=at) for row in rows]
    return torch.cat([o for o, _ in done]), torch.cat([s for _, s in done])


def decay_pairs(total: Tensor) -> Tensor:
    """exp of the decay from token j to token i >= j, zero above the diagonal: [B, H, C, K] -> [B, H, C, C, K]."""
    difference = total.unsqueeze(-2) - total.unsqueeze(-3)
    above = torch.ones(difference.shape[-3:-1], dtype=torch.bool, device=total.device).triu(1)
    return difference.masked_fill(above.unsqueeze(-1), float("-inf")).exp()


def unit_lower_inverse(strict: Tensor, real: int | None = None) -> Tensor:
    """(I + strict)^-1 for strictly lower triangular [..., C, C], by forward substitution row by row.

    real: rows from there on are zero; left out: none is known to be.
    """
    inverse = -strict
    for i in range(1, strict.shape[-1] if real is None else real):
        row = inverse[..., i, :i].clone()
        inverse[..., i, :i] = row + (row.unsqueeze(-1) * inverse[..., :i, :i]).sum(-2)
    return inverse + torch.eye(strict.shape[-1], dtype=strict.dtype, device=strict.device)


def _at(at: Hooks, site: str, x: Tensor) -> Tensor:
    return at[site](x).to(x.dtype) if site in at else x


GATES = {"softplus": decay_gate, "softplus_fused": decay_gate_fused}
L2NORM = {"l2norm": l2norm, "l2norm_fused": l2norm_fused}
CORES = {
    "island_f64": recurrent,
    "island_f32": recurrent,
    "recurrent": recurrent,
    "recurrent_gemv": recurrent_gemv,
    "chunk": chunk,
    "chunk_rows": chunk_rows,
}
ISLANDS = ("island_f64", "island_f32")
