"""vLLM's kernels of latent attention: FlashAttention 3 over expanded keys, and over pages of the latent its Triton
kernel or FlashAttention 3.

The references are `variants.ops.mla`. N sequences are packed: cu_seqlens int32 [N + 1], lens int32 [N] of all keys.
Pages hold 128 tokens, as vLLM's do for this model: FlashAttention chooses its tiles by that too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from variants.ops import vllm_load

PAGE = 128
FLASH = "vllm_flash_attn"


@dataclass(frozen=True, eq=False)
class Pages:
    """The latent of N sequences as pages bf16 [pages, 128, R + P], and which are whose: table int32 [N, pages each]."""

    latent: Tensor
    table: Tensor
    lens: Tensor
    longest: int


@dataclass(frozen=True, eq=False)
class Queries:
    """N sequences of a packed batch: where each begins, int32 [N + 1], and the longest."""

    starts: Tensor
    longest: int


def pages(latent: Tensor, lengths: Sequence[int]) -> Pages:
    """latent [N, L, R + P], of which each sequence's first `lengths` tokens count, filled up to whole pages."""
    rows, size, width = latent.shape
    each = -(-size // PAGE)
    whole = torch.nn.functional.pad(latent, (0, 0, 0, each * PAGE - size))
    table = torch.arange(rows * each, dtype=torch.int32, device=latent.device).view(rows, each)
    lens = torch.tensor(lengths, dtype=torch.int32, device=latent.device)
    return Pages(whole.reshape(-1, PAGE, width), table, lens, max(lengths))


def flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float, queries: Queries) -> Tensor:
    """Causal attention of whole prompts over their own keys: q, k bf16 [T, H, D], v [T, H, V] -> [T, H, V]."""
    attend = vllm_load.module(FLASH).flash_attn_varlen_func
    return attend(
        q=q, k=k, v=v, cu_seqlens_q=queries.starts, cu_seqlens_k=queries.starts, max_seqlen_q=queries.longest,
        max_seqlen_k=queries.longest, softmax_scale=scale, causal=True, return_softmax_lse=False, fa_version=3,
    )  # fmt: skip


def absorb(x: Tensor, weight: Tensor) -> Tensor:
    """Queries into the latent, a product for each head: x [B, T, H, N] by weight [H, N, R] -> [B, T, H, R].

    The result lies head after head, as vLLM has it: cuBLAS may choose its order of sums by the layout.
    """
    return torch.bmm(_by_heads(x), weight).transpose(0, 1).unflatten(0, x.shape[:2])


def expand(x: Tensor, weight: Tensor) -> Tensor:
    """Out of the latent, as `absorb`: x [B, T, H, R] by weight [H, R, V]; the result lies token after token."""
    out = torch.empty(*x.shape[:-1], weight.shape[-1], dtype=x.dtype, device=x.device)
    torch.bmm(_by_heads(x), weight, out=out.flatten(0, 1).transpose(0, 1))
    return out


def _by_heads(x: Tensor) -> Tensor:
    """[B, T, H, N] -> a view [H, B * T, N]."""
    return x.flatten(0, 1).transpose(0, 1)


def absorbed(q: Tensor, q_pe: Tensor, held: Pages, *, scale: float, queries: Queries | None) -> Tensor:
    """Attention over the latent: q bf16 [T, H, R] absorbed, q_pe [T, H, P] -> o_latent [T, H, R].

    queries: how the packed queries fall to sequences, for FlashAttention; None: one a sequence, by the Triton kernel.
    """
    return _triton(q, q_pe, held, scale) if queries is None else _flash(q, q_pe, held, scale, queries)


def _triton(q: Tensor, q_pe: Tensor, held: Pages, scale: float) -> Tensor:
    """vLLM chooses the number of runs of keys by the longest sequence: one for each 512 tokens, as a power of two."""
    own = vllm_load.module("v1.attention.backends.mla.triton_mla")
    (n, heads, rank), device = q.shape, q.device
    splits = own._compute_num_kv_splits(held.longest, own.current_platform.num_compute_units())
    o, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_zeros(n, heads)
    partial = torch.empty(n, heads, splits, rank + 1, dtype=torch.float32, device=device)
    keys = held.latent.unsqueeze(2)
    own.decode_attention_fwd(
        torch.cat([q, q_pe], -1), keys, keys[..., :rank], o, lse, held.table, held.lens, partial, splits, scale, PAGE,
        is_mla=True,
    )  # fmt: skip
    return o


def _flash(q: Tensor, q_pe: Tensor, held: Pages, scale: float, queries: Queries) -> Tensor:
    own, rank = vllm_load.module(FLASH), q.shape[-1]
    schedule = own.get_scheduler_metadata(
        batch_size=len(held.lens), max_seqlen_q=queries.longest, max_seqlen_k=held.longest, num_heads_q=q.shape[1],
        num_heads_kv=1, headdim=q_pe.shape[-1], cache_seqlens=held.lens, qkv_dtype=q.dtype, headdim_v=rank,
        page_size=PAGE, cu_seqlens_q=queries.starts, causal=True, num_splits=0,
    )  # fmt: skip
    return own.flash_attn_varlen_func(
        q=q_pe, k=held.latent[..., rank:].unsqueeze(-2), v=held.latent[..., :rank].unsqueeze(-2), q_v=q,
        max_seqlen_q=queries.longest, cu_seqlens_q=queries.starts, max_seqlen_k=held.longest, seqused_k=held.lens,
        block_table=held.table, softmax_scale=scale, causal=True, return_softmax_lse=False, fa_version=3,
        scheduler_metadata=schedule, num_splits=0,
    )  # fmt: skip
