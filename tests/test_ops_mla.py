"""Latent attention against a definition in plain loops over float64: dense, tiled, row by row, over the latent."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tiny import relative
from torch import Tensor

from variants.checkpoint import load_config
from variants.ops import mla

F64 = torch.float64


class Inputs(NamedTuple):
    """q [B, T, H, D], k [B, L, H, D], v [B, L, H, V], positions [B, T]."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor


Core = Callable[[Inputs, float], Tensor]
# B, T, L, H, D, V: one key, one query at the end, a whole prefill, a piece in the middle, rows at different places
SHAPES = [(1, 1, 1, 1, 1, 1), (2, 1, 7, 3, 5, 6), (1, 13, 13, 2, 8, 8), (2, 5, 17, 1, 12, 4), (3, 4, 11, 2, 3, 7)]


def drawn(b: int, t: int, n: int, h: int, d: int, v: int) -> Inputs:
    random = torch.Generator().manual_seed(b + 10 * t + 100 * n + h)
    q, k, values = (torch.randn(s, generator=random, dtype=F64) for s in ((b, t, h, d), (b, n, h, d), (b, n, h, v)))
    last = n - 1 - torch.arange(b)  # later rows end earlier: what lies behind their last query must not be seen
    return Inputs(q, k, values, (last.clamp_min(t - 1)).unsqueeze(1) - t + 1 + torch.arange(t))


def defined(x: Inputs, scale: float) -> Tensor:
    """Softmax over keys 0..p of scale * q.k, number by number, and the mean of the values under it."""
    b, t, h, _ = x.q.shape
    out = torch.zeros(b, t, h, x.v.shape[-1], dtype=F64)
    for i, j, head in torch.cartesian_prod(*(torch.arange(n) for n in (b, t, h))).tolist():
        q, seen = x.q[i, j, head].tolist(), range(int(x.positions[i, j]) + 1)
        scores = [scale * sum(a * c for a, c in zip(q, x.k[i, n, head].tolist(), strict=True)) for n in seen]
        weights = [math.exp(s - max(scores)) for s in scores]
        for n in seen:
            out[i, j, head] += weights[n] / sum(weights) * x.v[i, n, head]
    return out


def tiled(tile_q: int, tile_k: int, *, rows: bool = False, **more: int) -> Core:
    sizes: dict[str, object] = {"tile_q": tile_q, "tile_k": tile_k, **more}
    core: Callable[..., Tensor] = mla.rows if rows else mla.tiles
    return lambda x, s: core(*x, scale=s, **sizes)


def dense(x: Inputs, scale: float) -> Tensor:
    return mla.dense(*x, scale=scale)


CORES: dict[str, Core] = {
    "dense": dense,
    "sdpa": lambda x, s: mla.sdpa(*x, scale=s),
    "one key at a time": tiled(1, 1),
    "tiles 4 x 3": tiled(4, 3),
    "tiles 128 x 128": tiled(128, 128),
    "tiles 4 x 3 backward": tiled(4, 3, backward=1),
    "rows": tiled(1, 5, rows=True),
}


def worst(core: Core) -> float:
    inputs = [drawn(*s) for s in SHAPES]
    return max(relative(core(x, 0.6), defined(x, 0.6)) for x in inputs)


def shifted(x: Inputs, by: int) -> Inputs:
    return x._replace(positions=(x.positions + by).clamp_min(0))


def no_max(x: Inputs, scale: float) -> Tensor:
    scores = torch.einsum("bthd,blhd->bhtl", x.q, x.k) * scale
    weights = scores.exp() * mla.visible(x.positions, x.k.shape[1])
    return torch.einsum("bhtl,blhv->bthv", weights / (weights.sum(-1, keepdim=True) + 0.1), x.v)


MUTANTS: dict[str, Core] = {
    "sees the next key": lambda x, s: dense(shifted(x, 1), s),
    "misses its own key": lambda x, s: dense(shifted(x, -1), s),
    "no mask": lambda x, s: dense(shifted(x, 99), s),
    "scale left out": lambda x, s: dense(x, 1.0),
    "scale twice": lambda x, s: dense(x, s * s),
    "positions of the first row": lambda x, s: dense(x._replace(positions=x.positions[:1].expand_as(x.positions)), s),
    "keys of the first head": lambda x, s: dense(x._replace(k=x.k[:, :, :1].expand_as(x.k)), s),
    "denominator with an offset": no_max,
    "float32": lambda x, s: dense(Inputs(x.q.float(), x.k.float(), x.v.float(), x.positions), s).double(),
}


@pytest.mark.parametrize("core", CORES)
def test_a_core_is_its_definition(core: str) -> None:
    """To the rounding of float64: one key, primes, pieces, rows that end at different places, V != D."""
    assert worst(CORES[core]) < 2e-15


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_core_is_seen(mutant: str) -> None:
    """Each mutant is farther from the definition than any order of float64 sums could be."""
    assert worst(MUTANTS[mutant]) > 1e-8


def test_what_lies_behind_a_query_changes_no_bit() -> None:
    """Other keys and values behind the last position of each row, even infinite scores, leave the output as it was."""
    x = drawn(2, 3, 17, 2, 8, 6)
    behind = torch.arange(17) > x.positions.max(-1, keepdim=True).values
    assert bool(behind.any())
    other = x._replace(k=x.k.masked_fill(behind[..., None, None], 1e200), v=x.v.masked_fill(behind[..., None, None], 7))
    for core in CORES.values():
        assert torch.equal(core(other, 0.6), core(x, 0.6))


@pytest.mark.parametrize("tile", [1, 3, 64])
def test_a_tile_that_is_not_seen_changes_no_bit(tile: int) -> None:
    """Tiles are whole and of fixed shape: the keys that a cache holds beyond a query cost time and no bit."""
    x = drawn(1, 4, 40, 2, 8, 6)._replace(positions=torch.tensor([[3, 4, 5, 6]]))
    short = x._replace(k=x.k[:, :7], v=x.v[:, :7])
    for core in (tiled(1, tile, rows=True), tiled(4, tile)):
        assert torch.equal(core(x, 0.6), core(short, 0.6))


def test_one_key_says_nothing_about_the_scale() -> None:
    """A scale from the latent's width for the key's is invisible with one key and gross from two on, at 192 and 576."""
    config = load_config(Path(__file__).parents[1] / "assets" / "kimi-linear-12m")
    assert config.mla_scale == 192**-0.5
    assert config.kv_lora_rank + config.qk_rope_head_dim == 576
    for keys, least in ((1, 0.0), (2, 0.03), (5, 0.03)):
        x = drawn(1, 1, keys, 2, 192, 128)
        error = relative(dense(x, 576**-0.5), dense(x, config.mla_scale))
        assert error >= least
        assert (error == 0) == (keys == 1)


class Latent(NamedTuple):
    """q [B, T, H, N + P], latent [B, L, R + P], weight of kv_b_proj as w_k [H, N, R] and w_v [H, V, R]."""

    q: Tensor
    latent: Tensor
    w_k: Tensor
    w_v: Tensor
    positions: Tensor

    @property
    def expanded(self) -> Inputs:
        low, k_pe = self.latent.split([self.w_k.shape[2], self.latent.shape[2] - self.w_k.shape[2]], -1)
        k = torch.einsum("blr,hnr->blhn", low, self.w_k)
        k = torch.cat([k, k_pe.unsqueeze(2).expand(*k.shape[:3], -1)], -1)
        return Inputs(self.q, k, torch.einsum("blr,hvr->blhv", low, self.w_v), self.positions)


def latent(b: int, t: int, n: int) -> Latent:
    random = torch.Generator().manual_seed(n)
    h, nope, pe, rank, v = 3, 7, 5, 13, 6
    q, low, w_k, w_v = (
        torch.randn(s, generator=random, dtype=F64)
        for s in ((b, t, h, nope + pe), (b, n, rank + pe), (h, nope, rank), (h, v, rank))
    )
    return Latent(q, low, w_k, w_v, drawn(b, t, n, 1, 1, 1).positions)


def absorbed(x: Latent, scale: float, *, splits: int, tile: int, rows: bool) -> Tensor:
    core, per_head = (mla.absorbed_rows, mla.per_head_rows) if rows else (mla.absorbed, mla.per_head)
    rank = x.w_k.shape[2]
    q, q_pe = x.q.split([x.w_k.shape[1], x.q.shape[-1] - x.w_k.shape[1]], -1)
    low = core(per_head(q, x.w_k), q_pe, x.latent, x.positions, scale=scale, tile_k=tile, kv_splits=splits, rank=rank)
    return per_head(low, x.w_v.transpose(1, 2))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("splits", "tile"), [(1, 128), (1, 1), (2, 3), (3, 4), (7, 1), (40, 2)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 7), (1, 13, 13), (3, 4, 17)])
def test_attention_over_the_latent_is_attention(
    shape: tuple[int, int, int], splits: int, tile: int, rows: bool
) -> None:
    """Absorbed products, tiles, and runs merged by their log-sum-exp give what expanded keys and values give."""
    x = latent(*shape)
    expected = defined(x.expanded, 0.3)
    assert relative(absorbed(x, 0.3, splits=splits, tile=tile, rows=rows), expected) < 5e-15
    assert relative(absorbed(x, 0.25, splits=splits, tile=tile, rows=rows), expected) > 1e-3 or shape == (1, 1, 1)


def test_a_merge_that_forgets_the_weights_of_its_runs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs merged by their plain mean are far from attention, and only where there are two runs."""
    x = latent(2, 1, 7)
    monkeypatch.setattr(mla, "_merge", lambda a, a_lse, b, b_lse: ((a + b) / 2, a_lse))
    assert relative(absorbed(x, 0.3, splits=1, tile=3, rows=False), defined(x.expanded, 0.3)) < 5e-15
    assert relative(absorbed(x, 0.3, splits=2, tile=3, rows=False), defined(x.expanded, 0.3)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(dtype: torch.dtype) -> None:
    """The row-by-row forms: whatever batch, piece and cache stand around a query, its bits are the same."""
    x = drawn(3, 4, 23, 3, 7, 5)
    x = Inputs(x.q.to(dtype), x.k.to(dtype), x.v.to(dtype), x.positions)
    whole = tiled(1, 8, rows=True)(x, 0.3)
    y = latent(3, 4, 23)
    y = Latent._make([*(z.to(dtype) for z in y[:4]), y.positions])
    low = absorbed(y, 0.3, splits=3, tile=4, rows=True)
    for i in range(3):
        for j in range(4):
            p = int(x.positions[i, j]) + 1
            one = Inputs(
                x.q[i : i + 1, j : j + 1], x.k[i : i + 1, :p], x.v[i : i + 1, :p], x.positions[i : i + 1, j : j + 1]
            )
            assert torch.equal(tiled(1, 8, rows=True)(one, 0.3)[0, 0], whole[i, j])
            alone = Latent(y.q[i : i + 1, j : j + 1], y.latent[i : i + 1, :p], y.w_k, y.w_v, one.positions)
            assert torch.equal(absorbed(alone, 0.3, splits=3, tile=4, rows=True)[0, 0], low[i, j])


def test_scores_and_probabilities_pass_their_hooks() -> None:
    """A dense core hands both to the hooks, a tiled one its unnormalised probabilities; what they return is used."""
    x = drawn(1, 3, 5, 2, 4, 4)
    for core, sites in ((mla.dense, {"mla_scores", "mla_probs"}), (mla.tiles, {"mla_probs"})):
        seen: set[str] = set()

        def hook(site: str, seen: set[str] = seen) -> Callable[[Tensor], Tensor]:
            return lambda y: seen.add(site) or y * (0.0 if site == "mla_probs" else 1.0)

        hooks = {site: hook(site) for site in ("mla_scores", "mla_probs")}
        sizes = {} if core is mla.dense else {"tile_q": 2, "tile_k": 2}
        out = core(*x, scale=0.6, at=hooks, **sizes)
        assert seen == sites
        assert not bool(out.any())
