"""Implementation `row`: one token of one sequence by our matrix-vector kernels, more by the library and by tiles.

Each function chooses by the number of rows alone; the order of a sum follows that number, as it does in the library.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.ops import conv_triton, kda_triton, mla, moe_triton, row_mix_triton, row_slots_triton, row_triton
from variants.ops.launch_triton import Ragged
from variants.ops.moe_triton import Rounding

ALIGNED = 8  # bf16 values in the 16 bytes that the library's grouped product asks of every row


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] by weight [N, K], both bf16, summed in float32 and rounded once to bf16."""
    if x.numel() == weight.shape[1]:
        return row_triton.gemv(x, weight, out_dtype=x.dtype)
    return F.linear(x, weight)


def short_conv(raw: Tensor, weight: Tensor, pool: Tensor, *, batch: Ragged, alone: bool) -> Tensor:
    """As `conv_triton.short_conv`, in bf16: raw [tokens, C], pool [slots, W - 1, C]; alone: one token is all there is,
    rows that fill a batch up counted too."""
    if alone:
        return row_mix_triton.short_conv(raw[0], weight, pool, batch.slots, out_dtype=raw.dtype).unsqueeze(0)
    return conv_triton.short_conv(raw, weight, pool, batch=batch, out_dtype=raw.dtype)


def delta_step(
    operands: tuple[Tensor, ...], pool: Tensor, *, batch: Ragged, alone: bool, fused: kda_triton.Fused
) -> Tensor:
    """One token of each row: q, k, v, g, beta as `kda_triton.recurrent` takes them, raw; o in bf16. alone: as above."""
    q, k, v, g, beta = operands
    if not alone:
        return kda_triton.recurrent(q, k, v, g, beta, pool, batch=batch, fused=fused, out_dtype=v.dtype)[0]
    gate = kda_triton.gate_operands(fused, q)
    alone_ = tuple(x[0, 0] for x in operands)
    return row_mix_triton.delta_step(alone_, pool, batch.slots, gate, fused.scale, out_dtype=v.dtype)[None, None]


def absorb(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, T, H, N] by each head's weight [H, N, M] -> [B, T, H, M], in bf16."""
    if x.shape[:2] == (1, 1):
        return row_mix_triton.absorb(x[0, 0], weight, out_dtype=x.dtype)[None, None]
    return mla.per_head(x, weight)


def expand(x: Tensor, weight: Tensor) -> Tensor:
    """As `absorb` out of the latent; the weight [H, R, V] lies by columns."""
    if x.shape[:2] == (1, 1):
        return row_mix_triton.expand(x[0, 0], weight.transpose(1, 2), out_dtype=x.dtype)[None, None]
    return mla.per_head(x, weight)


def experts(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, *, rounding: Rounding) -> Tensor:
    """The routed sum as `moe_triton.experts`: slots first to last, every rounding bf16 but that of the down product.

    More rows than one go through the library's grouped product where rows are aligned and it rounds as the recipe says.
    """
    if x.shape[0] == 1:
        return row_mix_triton.experts(x, w13, w2, ids, weights, rounding=rounding)
    aligned = x.shape[1] % ALIGNED == w2.shape[2] % ALIGNED == 0
    if aligned and rounding.expert_down is torch.bfloat16:
        return _grouped(x, w13, w2, ids, weights)
    return moe_triton.experts(x, w13, w2, ids, weights, rounding=rounding)


def _grouped(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    place, source, ends = row_slots_triton.by_expert(ids, w13.shape[0])
    both = F.grouped_mm(x[source], w13.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, -1)
    act = row_triton.silu_and_mul(gate, up, silu=x.dtype, out_dtype=x.dtype)
    down = F.grouped_mm(act, w2.transpose(1, 2), offs=ends)
    return row_slots_triton.weighted_sum(down, place, weights)
