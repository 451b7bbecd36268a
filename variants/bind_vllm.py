"""vLLM's kernels bound to a recipe: each function here is an entry of `variants.kernels.KERNELS`.

They read and write bfloat16 alone, with the float32 that vLLM has at the same places. A prompt is one piece and has two
tokens or more: vLLM runs a prompt of one token through its decode kernels, on a state that it does not clear.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from variants.batch import Batch
from variants.binding import Binder
from variants.dtypes import DType
from variants.errors import UsageError
from variants.ops import vllm_kda, vllm_load, vllm_mla, vllm_moe, vllm_norm
from variants.ops.linear import gemm_flat
from variants.packing import packed, unpacked
from variants.recipe import Rule
from variants.state import State, carried_keys, put

BF16 = torch.bfloat16
ABSORBED_UP_TO = 512  # queries of a prompt; FLASH_ATTN_MLA expands longer ones


def linear(rule: Rule) -> Callable[[Tensor, Tensor], Tensor]:
    """cuBLAS as vLLM calls it."""
    return gemm_flat


def rms_norm(b: Binder, site: str, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The first layer's norm and that of the latent have no residual; all others are of a sum."""
    vllm_load.module("_custom_ops")
    of_sum = site != "kv_a_norm" and (site, b.layer) != ("input_norm", 0)
    narrow = weight.to(BF16)
    return lambda kept, _: vllm_norm.rms_norm(kept, narrow, eps, of_sum=of_sum)


def gated_rms_norm(b: Binder, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    if eps != vllm_norm.GATED_EPS:
        raise UsageError(
            f"impl.norms=vllm: vLLM's o_norm has eps {vllm_norm.GATED_EPS}, the checkpoint {eps}; choose torch"
        )
    narrow = weight.to(BF16)
    return lambda o, gate: vllm_norm.gated_rms_norm(o, narrow, gate)


def silu_and_mul(b: Binder) -> Callable[[Tensor, Tensor], Tensor]:
    vllm_load.module("_custom_ops")
    return lambda gate, up: vllm_norm.silu_and_mul(torch.cat([gate, up], -1))


def short_conv(b: Binder, weight: Tensor) -> Callable[[Tensor, Batch, State], Tensor]:
    layer, decode = b.layer, b.phase == "decode"
    round_conv, carry = b.at("short_conv", DType.bf16), b.at("conv_state")

    def run(raw: Tensor, batch: Batch, state: State) -> Tensor:
        _check_prompts(batch, decode)
        x = packed(raw, batch)[0]
        before, starts = state.conv[layer][batch.index], None if decode else _starts(batch)
        y, after = vllm_kda.short_conv(x, weight, before, cu_seqlens=starts)
        y = round_conv(unpacked(y.unsqueeze(0), batch))
        put(state.conv, layer, batch, carry(after))
        return y

    return run


def delta_rule(b: Binder, gate: tuple[Tensor, Tensor]) -> Callable[..., Tensor]:
    core, layer, decode = vllm_kda.CORES[b.rule("kda_core").algorithm], b.layer, b.phase == "decode"
    more = {"a_log": gate[0].reshape(-1).contiguous(), "dt_bias": gate[1].reshape(-1).contiguous()}
    round_core, carry = b.at("kda_core", DType.bf16), b.at("kda_state")

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch, state: State) -> Tensor:
        _check_prompts(batch, decode)
        operands = tuple(packed(x, batch) for x in (q, k, v, g, beta))
        o, after = core(operands, state.recurrent[layer][batch.index], cu_seqlens=_starts(batch), **more)
        o = round_core(unpacked(o, batch))
        put(state.recurrent, layer, batch, carry(after))
        return o

    return run


def flash(b: Binder) -> Callable[[Tensor, Tensor, Tensor, Batch], Tensor]:
    scale = b.config.mla_scale

    def run(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        _check_prompts(batch, decode=False)
        q, k, v = (packed(x, batch)[0] for x in (q, k, v))
        o = vllm_mla.flash(q, k, v, scale=scale, queries=_queries(batch))
        return unpacked(o.unsqueeze(0), batch)

    return run


def absorb(b: Binder) -> Callable[[Tensor, Tensor], Tensor]:
    return vllm_mla.absorb


def expand(b: Binder) -> Callable[[Tensor, Tensor], Tensor]:
    return vllm_mla.expand


def absorbed(b: Binder) -> Callable[[Tensor, Tensor, Batch, State], Tensor]:
    """One token a sequence by the Triton kernel, or any number by FlashAttention, as the rule's options say."""
    flash_attention = "flash_attention" in dict(b.rule("mla_core").options)
    scale, layer, decode = b.config.mla_scale, b.layer, b.phase == "decode"

    def run(q_latent: Tensor, q_pe: Tensor, batch: Batch, state: State) -> Tensor:
        _check_prompts(batch, decode)
        ends = [s + n for s, n in zip(batch.starts, batch.lengths, strict=True)]
        held = vllm_mla.pages(carried_keys(state.latent[layer], batch), ends)
        q, q_pe = (packed(x, batch)[0] for x in (q_latent, q_pe))
        o = vllm_mla.absorbed(q, q_pe, held, scale=scale, queries=_queries(batch) if flash_attention else None)
        return unpacked(o.unsqueeze(0), batch)

    return run


def route(b: Binder, bias: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    c, narrow = b.config, bias.to(BF16)
    vllm_load.module("_custom_ops")

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        return vllm_moe.route(
            logits, narrow, k=c.experts_per_token, factor=c.routed_scaling_factor, renormalize=c.renormalize
        )

    return run


def experts(b: Binder, w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, ids, weights: vllm_moe.experts(x, w13, w2, ids, weights)


def _starts(batch: Batch) -> Tensor:
    """int32 [N + 1]: where each row's tokens begin in the packed batch."""
    sums = torch.tensor([0, *batch.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return sums.to(batch.positions.device)


def _queries(batch: Batch) -> vllm_mla.Queries:
    return vllm_mla.Queries(_starts(batch), max(batch.lengths))


def _check_prompts(batch: Batch, decode: bool) -> None:
    if decode:
        return
    if any(batch.starts):
        raise UsageError("impl vllm runs a prompt in one piece; set execution.prefill_piece=0 and mode=incremental")
    if min(batch.lengths) < 2 or max(batch.lengths) > ABSORBED_UP_TO:
        raise UsageError(
            f"impl vllm runs prompts of 2 to {ABSORBED_UP_TO} tokens, got {batch.lengths}: vLLM runs others through "
            "other kernels; choose other prompts, or impl torch"
        )
