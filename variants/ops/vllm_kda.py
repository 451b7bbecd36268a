"""vLLM's kernels of Kimi delta attention: short convolution, and the delta rule in chunks and step by step.

The references are `variants.ops.conv` and `variants.ops.kda`. A packed batch of N sequences: cu_seqlens int32 [N + 1].
H heads, K key and V value width. vLLM keeps a state as [H, V, K] and never touches row 0 of its pools; both are dealt
with here, so states come and go as [N, H, K, V]. Roundings inside: NUMERICS A2 of the recipe's chunk form `vllm`.
"""

import torch
from torch import Tensor

from variants.ops import vllm_load

OPS = "third_party.flash_linear_attention.ops.kda"
CONV = "model_executor.layers.mamba.ops.causal_conv1d"
NO_SLOT = -1


def short_conv(raw: Tensor, weight: Tensor, state: Tensor, *, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolution and SiLU, rounded once: raw bf16 [tokens, C], weight f32 [C, W], state bf16 [N, W - 1, C].

    cu_seqlens: of N whole prompts, which have no inputs before them; None: one token a sequence, after its state.
    Returns [tokens, C] and the new state.
    """
    conv = vllm_load.module(CONV)
    pool = state.clone(memory_format=torch.contiguous_format)
    slots = torch.arange(pool.shape[0], dtype=torch.int32, device=pool.device)
    shared = {"activation": "silu", "null_block_id": NO_SLOT}
    if cu_seqlens is None:
        out = conv.causal_conv1d_update(  # writes over its input
            raw.clone(), pool.transpose(1, 2), weight, None, conv_state_indices=slots, validate_data=True, **shared
        )
        return out, pool
    known = torch.zeros(pool.shape[0], dtype=torch.bool, device=pool.device)
    out = conv.causal_conv1d_fn(
        raw.transpose(0, 1), weight, None, conv_states=pool.transpose(1, 2), has_initial_state=known,
        cache_indices=slots, query_start_loc=cu_seqlens, **shared,
    )  # fmt: skip
    return out.transpose(0, 1), pool


def chunk(
    operands: tuple[Tensor, ...], state: Tensor, *, a_log: Tensor, dt_bias: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule in chunks of 64, from raw q, k and gate.

    operands: q, k [1, T, H, K] and v [1, T, H, V] bf16, g bf16 [1, T, H, K] before the gate, beta f32 [1, T, H] after
    its sigmoid. a_log f32 [H], dt_bias f32 [H * K]. Returns o bf16 [1, T, H, V] and the new state.
    """
    q, k, v, g, beta = operands
    o, new = vllm_load.module(OPS).chunk_kda_with_fused_gate(
        q=q, k=k, v=v.contiguous(), raw_g=g, beta=beta, A_log=a_log, g_bias=dt_bias,
        initial_state=state.transpose(2, 3).contiguous(), output_final_state=True, use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return o, new.transpose(2, 3)


def recurrent(
    operands: tuple[Tensor, ...], state: Tensor, *, a_log: Tensor, dt_bias: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """As `chunk`, one token a sequence, everything in float32 but the output."""
    q, k, v, g, beta = operands
    ops, heads, width = vllm_load.module(OPS), g.shape[2], g.shape[3]
    decay = ops.fused_kda_gate(g.reshape(-1, heads * width), a_log, width, g_bias=dt_bias).unsqueeze(0)
    pool = torch.cat([torch.zeros_like(state[:1]), state]).transpose(2, 3).contiguous()
    rows = torch.arange(1, pool.shape[0], dtype=torch.int32, device=pool.device)
    o, _ = ops.fused_recurrent_kda(
        q=q, k=k, v=v, g=decay, beta=beta, initial_state=pool, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens,
        ssm_state_indices=rows,
    )  # fmt: skip
    return o, pool[1:].transpose(2, 3)


CORES = {"chunk": chunk, "recurrent": recurrent}
