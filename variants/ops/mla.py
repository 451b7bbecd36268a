"""Latent attention without position encoding: dense, in tiles of keys with an online softmax, and over the latent.

Everything computes in the dtype of its inputs. B batch, T queries, L keys, H heads, D key and V value width, R latent
rank. A query at position p sees keys 0..p. Softmax scale is the caller's (from the key's width, never the latent's).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Hooks = Mapping[str, Callable[[Tensor], Tensor]]


def visible(positions: Tensor, keys: int) -> Tensor:
    """Which keys each query sees: positions [B, T] -> bool [B, 1, T, keys]."""
    index = torch.arange(keys, device=positions.device)
    return (index <= positions.unsqueeze(-1)).unsqueeze(1)


def dense(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float, at: Hooks | None = None, **_: object
) -> Tensor:
    """All scores, one softmax, one product. q [B, T, H, D], k [B, L, H, D], v [B, L, H, V] -> [B, T, H, V].

    In a dtype under float32 the scores are stored in it and the softmax runs in float32, as eager attention does.
    """
    at = at or {}
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if q.shape[2] > 1 or q.shape[0] > 1:
        scores = scores.masked_fill(~visible(positions, k.shape[2]), float("-inf"))
    scores = _at(at, "mla_scores", scores)
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    probs = _at(at, "mla_probs", torch.softmax(wide, -1))
    return torch.matmul(probs.to(v.dtype), v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float, **_: object) -> Tensor:
    """torch's fused attention with an explicit mask; which kernel runs is torch's choice for the device and dtype."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = visible(positions, k.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2)


def tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    tile_q: int,
    tile_k: int,
    backward: int = 0,
    at: Hooks | None = None,
) -> Tensor:
    """Online softmax over tiles of `tile_k` keys for each tile of `tile_q` queries; shapes as `dense`.

    Keys are filled up to whole tiles, so the shape of each product is fixed and a tile that a query does not see
    changes none of its bits. backward: from the last tile to the first.
    """
    k, v = _whole_tiles(k, tile_k), _whole_tiles(v, tile_k)
    out = [
        _online(q[:, i : i + tile_q], k, v, positions[:, i : i + tile_q], scale, tile_k, at or {}, bool(backward))
        for i in range(0, q.shape[1], tile_q)
    ]
    return torch.cat(out, 1)


def rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    tile_q: int,
    tile_k: int,
    at: Hooks | None = None,
) -> Tensor:
    """As `tiles`, each query and batch row alone: a query's bits depend on nothing beside it (batch-invariant)."""
    k, v = _whole_tiles(k, tile_k), _whole_tiles(v, tile_k)
    b, t = q.shape[:2]
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    for i in range(b):
        keys, values = _alone(k[i : i + 1]), _alone(v[i : i + 1])
        for j in range(t):
            one = (slice(i, i + 1), slice(j, j + 1))
            out[one] = _online(_alone(q[one]), keys, values, positions[one], scale, tile_k, at or {})
    return out


def _alone(x: Tensor) -> Tensor:
    """A copy in memory of its own: a library may choose its order of sums by strides and alignment."""
    return x.clone(memory_format=torch.contiguous_format)


def _whole_tiles(x: Tensor, size: int) -> Tensor:
    """[B, L, H, D] filled up with zeros to a multiple of `size` keys."""
    fill = -x.shape[1] % size
    return torch.cat([x, x.new_zeros(x.shape[0], fill, *x.shape[2:])], 1) if fill else x


def _starts(seen: Tensor, tile: int, backward: bool) -> list[int]:
    """Where the tiles begin that some query sees, in the order in which they are read: seen [B, 1, T, keys]."""
    starts = [s for s in range(0, seen.shape[-1], tile) if bool(seen[..., s : s + tile].any())]
    return starts[::-1] if backward else starts


def _online(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, tile: int, at: Hooks, backward: bool = False
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = visible(positions, k.shape[2])
    top = q.new_full((*q.shape[:3], 1), float("-inf"))
    total, acc = q.new_zeros(top.shape), q.new_zeros(*q.shape[:3], v.shape[-1])
    for start in _starts(seen, tile, backward):
        span = slice(start, start + tile)
        scores = (torch.matmul(q, k[:, :, span].transpose(2, 3)) * scale).masked_fill(~seen[..., span], float("-inf"))
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = torch.where(new.isinf(), torch.zeros_like(new), new) if backward else new
        p, shrink = torch.exp(scores - safe), torch.exp(top - safe)
        total = total * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + torch.matmul(_at(at, "mla_probs", p), v[:, :, span])
        top = new
    return (acc / total).transpose(1, 2)


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
    backward: int = 0,
    at: Hooks | None = None,
) -> Tensor:
    """Attention over the latent itself: keys are [latent | k_pe], values the latent; returns o_latent [B, T, H, R].

    q [B, T, H, R] (query times the key half of kv_b_proj), q_pe [B, T, H, P], latent [B, L, R + P]. Keys are cut into
    `kv_splits` runs of whole tiles; each run has its own online softmax and the runs are merged in order by their
    log-sum-exp. backward: each run from its last tile to its first.
    """
    keys = _whole_tiles(latent.unsqueeze(2), tile_k)
    query = torch.cat([q, q_pe], -1)
    tiles_each = -(-(keys.shape[1] // tile_k) // kv_splits)
    out: Tensor | None = None
    for start in range(0, keys.shape[1], tiles_each * tile_k):
        run = keys[:, start : start + tiles_each * tile_k]
        out_, lse_ = _latent_run(query, run, positions - start, scale, tile_k, rank, at or {}, bool(backward))
        if out is None:
            out, lse = out_, lse_
        else:
            out, lse = _merge(out, lse, out_, lse_)
    assert out is not None
    return out


def absorbed_rows(
    q: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    positions: Tensor,
    *,
    scale: float,
    tile_k: int,
    kv_splits: int,
    rank: int,
    at: Hooks | None = None,
) -> Tensor:
    """As `absorbed`, each query alone over the keys that it sees: splits fall as they do when it is decoded."""
    rows_ = []
    for i, row in enumerate(positions.tolist()):
        for j, position in enumerate(row):
            one = (slice(i, i + 1), slice(j, j + 1))
            seen = _alone(latent[i : i + 1, : position + 1])
            rows_.append(
                absorbed(q[one], q_pe[one], seen, positions[one], scale=scale, tile_k=tile_k, kv_splits=kv_splits,
                         rank=rank, at=at)
            )  # fmt: skip
    return torch.cat(rows_).view(*q.shape[:3], rank)


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """A product for each head: x [B, T, H, N] by weight [H, N, M] -> [B, T, H, M]."""
    return torch.einsum("bthn,hnm->bthm", x, weight)


def per_head_rows(x: Tensor, weight: Tensor) -> Tensor:
    """As `per_head`, one token at a time (batch-invariant)."""
    tokens = x.reshape(-1, 1, 1, *x.shape[2:]).unbind(0)
    return torch.cat([per_head(_alone(token), weight) for token in tokens]).view(*x.shape[:3], -1)


def _latent_run(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    scale: float,
    tile: int,
    rank: int,
    at: Hooks,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    """One run of keys [B, L, 1, R + P] under an online softmax: o [B, T, H, R] and log-sum-exp [B, T, H, 1]."""
    q = query.transpose(1, 2)
    seen = visible(positions, keys.shape[1])
    top = q.new_full((*q.shape[:3], 1), float("-inf"))
    total, acc = q.new_zeros(top.shape), q.new_zeros(*q.shape[:3], rank)
    starts = range(0, keys.shape[1], tile)
    for start in reversed(starts) if backward else starts:
        k = keys[:, start : start + tile].transpose(1, 2)
        mask = seen[..., start : start + tile]
        scores = (torch.matmul(q, k.transpose(2, 3)) * scale).masked_fill(~mask, float("-inf"))
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = torch.where(new.isinf(), torch.zeros_like(new), new)
        p, shrink = torch.exp(scores - safe), torch.exp(top - safe)
        total = total * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + torch.matmul(_at(at, "mla_probs", p), k[..., :rank])
        top = new
    empty = total == 0
    out = acc / torch.where(empty, torch.ones_like(total), total)
    return out.transpose(1, 2), (top + torch.log(total)).transpose(1, 2)


def _merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    top = torch.maximum(a_lse, b_lse)
    wa, wb = torch.exp(a_lse - top), torch.exp(b_lse - top)
    return (a * wa + b * wb) / (wa + wb), top + torch.log(wa + wb)


def _at(at: Hooks, site: str, x: Tensor) -> Tensor:
    return at[site](x).to(x.dtype) if site in at else x


CORES = {
    "island_f64": dense,
    "dense_f32": dense,
    "dense_bf16": dense,
    "sdpa": sdpa,
    "online_f32": tiles,
    "flash": tiles,
    "island_f64_rows": rows,
    "dense_f32_rows": rows,
    "online_f32_rows": rows,
    "flash_rows": rows,
}
LATENT_CORES = {"absorbed": absorbed, "absorbed_rows": absorbed_rows}
PER_HEAD = {"bmm": per_head, "bmm_rows": per_head_rows}
ISLANDS = ("island_f64", "island_f64_rows")
