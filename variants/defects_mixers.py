"""Planted defects of latent attention, router and scales."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from variants.defects_delta import previous, scaled
from variants.defects_kinds import (
    AtSite,
    Defect,
    Family,
    InBlock,
    InParameter,
    Kind,
    Mechanism,
    Needs,
    Target,
    Visit,
    watch,
    wrap,
)
from variants.layers import KdaBlock, MlaBlock
from variants.mlp_layers import MoeBlock
from variants.model import Layer
from variants.state import Batch


def at_tokens(change: Callable[[Tensor], Tensor], *sites: str) -> AtSite:
    return AtSite(sites, lambda x, t, _: t.blend(t.tokens(x), change(x), x))


def _mla_scale(layer: Layer, t: Target) -> None:
    assert isinstance(layer.attention, MlaBlock)
    layer.attention.scale *= t.factor


def _width_scale(x: Tensor, t: Target, _: Visit) -> Tensor:
    """q as if the scale came from latent + rope width: the scale meets q and k in one product, so it may sit in q."""
    c = t.config
    wrong = (c.qk_head_dim / (c.kv_lora_rank + c.qk_rope_head_dim)) ** 0.5
    return t.blend(t.tokens(x), x * wrong, x)


def _sees(shift: int) -> InBlock:
    """The hit queries see one key more or one less; a first query keeps its own key."""

    def planted(layer: Layer, t: Target) -> None:
        def around(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(q: Tensor, fresh: Tensor, batch: Batch, *rest: Any) -> Tensor:
                seen = (batch.positions + shift).clamp_min(0)
                moved = t.blend(t.picked(t.clock.positions()), seen, batch.positions)
                return attend(q, fresh, replace(batch, positions=moved), *rest)

            return call

        wrap(layer.attention, "attend", around)

    return InBlock(planted)


def _no_rope_part(x: Tensor, t: Target, _: Visit) -> Tensor:
    """The channels after the latent left out of what is cached, in the hit ones."""
    width = t.config.qk_rope_head_dim
    low, k_pe = x[..., :-width], x[..., -width:]
    return torch.cat([low, t.blend(t.channels(width), torch.zeros_like(k_pe), k_pe)], -1)


def _router(change: Callable[[MoeBlock, Target], None]) -> InBlock:
    def planted(layer: Layer, t: Target) -> None:
        assert isinstance(layer.mlp, MoeBlock)
        change(layer.mlp, t)

    return InBlock(planted)


Weigh = Callable[[Tensor, float, bool], Tensor]


def _weigh(wrong: Callable[[Weigh, Tensor, float, bool], Tensor]) -> InBlock:
    """Another weighting of the chosen experts at the hit positions: chosen [N, k]."""

    def planted(block: MoeBlock, t: Target) -> None:
        wrap(block, "weigh", lambda f: lambda x, *o: t.blend(t.tokens(x), wrong(f, x, *o), f(x, *o)))

    return _router(planted)


def _bias_leaks(block: MoeBlock, t: Target) -> None:
    seen: dict[str, Tensor] = {}
    watch(block, "round_ids", seen)

    def around(weigh: Weigh) -> Weigh:
        def call(chosen: Tensor, factor: float, renormalize: bool) -> Tensor:
            biased = chosen + block.bias[seen["round_ids"]].to(chosen.dtype)
            return weigh(t.blend(t.tokens(chosen), biased, chosen), factor, renormalize)

        return call

    wrap(block, "weigh", around)


def _softmax(block: MoeBlock, t: Target) -> None:
    wrap(block, "sigmoid", lambda f: lambda x: t.blend(t.tokens(x), torch.softmax(x, -1), f(x)))


def _routed_scale(block: MoeBlock, t: Target) -> None:
    block.config = replace(block.config, routed_scaling_factor=block.config.routed_scaling_factor * t.factor)


def _no_bias(bias: Tensor, t: Target) -> Tensor:
    return t.blend(t.channels(bias.shape[0]), torch.zeros_like(bias), bias)


def _last_left_out(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], torch.zeros_like(x[:, -1:])], -1)


def _next_expert(x: Tensor, t: Target, _: Visit) -> Tensor:
    return t.blend(t.tokens(x), (x + 1) % t.config.num_experts, x)


def _kda_scale(layer: Layer, t: Target) -> None:
    assert isinstance(layer.attention, KdaBlock)
    layer.attention.scale *= t.factor


def _first_block(x: Tensor, t: Target, _: Visit) -> Tensor:
    """The first eighth of the channels off by a factor: one block of a weight's block-wise scale."""
    n = x.shape[-1] // 8
    return torch.cat([x[..., :n] * t.factor, x[..., n:]], -1)


def _row(needs: Needs, family: Family, site: str, name: str, *rest: Any, **more: Any) -> Defect:
    kind, mechanism, text = rest
    assert isinstance(mechanism, Mechanism)
    return Defect(name=name, family=family, site=site, kind=kind, mechanism=mechanism, text=text, needs=needs, **more)


LONG = {"exercise": "a prompt of more than four tokens; with one key a softmax depends on neither scale nor mask"}
TOKENS = {"exercise": "a prompt of more than four tokens"}
SETS = {"exercise": "a position whose expert scores lie nearer to each other than the fault in the bias"}
A, R, S = Family.mla, Family.router, Family.scaling
N = Needs
MLA = (
    _row(N.mla, A, "mla_core", "mla_scaled", Kind.scale, InBlock(_mla_scale), "softmax scale off by a factor",
         case="P13", **LONG),
    _row(N.mla, A, "mla_q", "mla_scale_of_latent", Kind.extent, AtSite(("mla_q",), _width_scale),
         "softmax scale from the latent's width, applied to q", case="P13", also=("mla_core",), **LONG),
    _row(N.mla, A, "mla_core", "mla_own_key_unseen", Kind.extent, _sees(-1), "a query does not see its own key",
         **LONG),
    _row(N.mla, A, "mla_core", "mla_next_key_seen", Kind.extent, _sees(1), "a query sees the key after its own",
         exercise="a prefill of more than four tokens"),
    _row(N.mla, A, "kv_cache", "mla_cache_not_written", Kind.extent, at_tokens(torch.zeros_like, "kv_cache"),
         "zeros cached for a token", case="P27", **TOKENS),
    _row(N.mla, A, "kv_cache", "mla_cache_of_previous", Kind.extent, AtSite(("kv_cache",), previous),
         "the token before cached again", exercise="a prefill of more than four tokens"),
    _row(N.mla, A, "kv_cache", "mla_rope_part_left_out", Kind.extent, AtSite(("kv_cache",), _no_rope_part),
         "channels after the latent left out of the keys"),
    _row(N.mla, A, "mla_core", "mla_denominator", Kind.scale, AtSite(("mla_core",), scaled),
         "softmax sum off by a factor"),
)  # fmt: skip
ROUTER = (
    _row(N.moe, R, "router_weights", "router_bias_leaks", Kind.extent, _router(_bias_leaks),
         "mixing weights from the biased scores", case="P16", exercise="a bias that differs between chosen experts"),
    _row(N.moe, R, "router_ids", "router_bias_scaled", Kind.scale,
         InParameter("block_sparse_moe.gate.e_score_correction_bias", scaled), "selection bias off by a factor",
         **SETS),
    _row(N.moe, R, "router_ids", "router_bias_left_out", Kind.extent,
         InParameter("block_sparse_moe.gate.e_score_correction_bias", _no_bias), "no selection bias", **SETS),
    _row(N.moe, R, "router_weights", "router_last_expert_lost", Kind.extent,
         at_tokens(_last_left_out, "router_weights"), "last chosen expert left out", **TOKENS),
    _row(N.moe, R, "router_weights", "router_weights_swapped", Kind.extent,
         at_tokens(lambda x: x.flip(-1), "router_weights"), "weights of the chosen experts in another order", **TOKENS),
    _row(N.moe, R, "router_ids", "router_expert_off_by_one", Kind.extent, AtSite(("router_ids",), _next_expert),
         "the expert after the chosen one", **TOKENS),
    _row(N.moe, R, "router_scores", "router_softmax", Kind.extent, _router(_softmax), "softmax for sigmoid",
         case="P16", **TOKENS),
    _row(N.moe, R, "router_weights", "router_not_renormalised", Kind.extent,
         _weigh(lambda f, x, factor, _: f(x, factor, False)), "weights not renormalised", case="P14", **TOKENS),
    _row(N.moe, R, "router", "router_logits_scaled", Kind.scale, AtSite(("router",), scaled),
         "router logits off by a factor"),
)  # fmt: skip
SCALES = (
    _row(N.moe, S, "router_weights", "routed_scale", Kind.scale, _router(_routed_scale),
         "routed scaling factor off", case="P14"),
    _row(N.moe, S, "router_weights", "routed_scale_twice", Kind.extent,
         _weigh(lambda f, x, factor, renormalize: f(x, factor, renormalize) * factor),
         "routed scaling factor applied twice", case="P14", **TOKENS),
    _row(N.moe, S, "router_weights", "routed_scale_left_out", Kind.extent,
         _weigh(lambda f, x, factor, renormalize: f(x, 1.0, renormalize)),
         "routed scaling factor not applied", case="P14", **TOKENS),
    _row(N.kda, S, "kda_core", "kda_scale", Kind.scale, InBlock(_kda_scale), "scale of q in the delta rule off"),
    _row(N.moe, S, "shared_down", "shared_expert_scaled", Kind.scale,
         AtSite(("shared_down",), scaled), "shared expert off by a factor"),
    _row(N.any, S, "o_proj", "o_proj_scaled", Kind.scale, AtSite(("o_proj",), scaled),
         "output projection off by a factor"),
    _row(N.moe, S, "expert_out", "expert_out_scaled", Kind.scale, AtSite(("expert_out",), scaled),
         "weighted expert outputs off by a factor"),
    _row(N.kda, S, "q_proj", "q_proj_block_scaled", Kind.scale, AtSite(("q_proj",), _first_block),
         "one block of a weight's scale off by a factor"),
    _row(N.kda, S, "o_norm", "o_norm_scaled", Kind.scale, InParameter("self_attn.o_norm.weight", scaled),
         "weight of the gated norm off by a factor"),
)  # fmt: skip
TABLE = (*MLA, *ROUTER, *SCALES)
