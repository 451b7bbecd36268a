"""How vLLM's kernels differ from what `variants.impl_rules` says of kernels in general, axis by axis of `ImplAxes`.

They read and write bfloat16 and nothing else, so a recipe that stores anything wider between them is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from variants.axes import Execution, Impl, KdaCore, MlaCore, Order, Param, RouterScale, Variant
from variants.impl_rules_bf16 import check_stores, check_variance, scores_inside
from variants.kernels import refuse
from variants.recipe import Rule

Rules = dict[str, Rule]
PHASES = ("prefill", "decode")
WIDE = ("router_weights", "decay_gate", "kda_state", "conv_state")  # float32 in vLLM too, or as the products give it
KEYS_A_TILE = {"triton": 32, "flash": 64}


def refined(axis: str, v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """The rules that change when an axis is set to vllm, after the general ones; raises UsageError where it cannot."""
    if axis in ("conv", "kda", "mla") and v.execution.mode is not Execution.incremental:
        refuse(axis, Impl.vllm, "it carries state from step to step, one row a slot; set execution.mode=incremental")
    out = _AXES[axis](v, rules) if axis in _AXES else {}
    check_stores(axis, Impl.vllm, {**rules, **out}, wide=WIDE, start="vllm_exact")
    return out


def _norms(v: Variant, _: Mapping[str, Rule]) -> Rules:
    check_variance(v, Impl.vllm)
    return {}


def _kda(v: Variant, _: Mapping[str, Rule]) -> Rules:
    if (v.kda.prefill, v.kda.decode) != (KdaCore.chunk, KdaCore.recurrent):
        refuse(
            "kda",
            Impl.vllm,
            "it prefills in chunks and decodes step by step; set kda.prefill=chunk and kda.decode=recurrent",
        )
    return {}


def _mla(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """A prompt over the latent is FLASH_ATTN_MLA's way; TRITON_MLA expands prompts."""
    flash = v.mla.prefill is MlaCore.absorbed
    tile = ("tile_k", KEYS_A_TILE["flash" if flash else "triton"])
    options = (tile, ("kv_splits", 1), *([("flash_attention", 3)] if flash else []))
    out = {
        f"mla_core.{p}": replace(rules[f"mla_core.{p}"], impl="vllm", options=options)
        for p in PHASES
        if getattr(v.mla, p) is MlaCore.absorbed
    }
    return {**out, "q_latent": replace(rules["q_latent"], impl="vllm")}


def _experts(v: Variant, _: Mapping[str, Rule]) -> Rules:
    if v.moe.weighting is not Order.once:
        refuse("experts", Impl.vllm, "it weights the product with w2 before it is rounded; set moe.weighting=once")
    return {}


def _router(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    if v.moe.router_scale is not RouterScale.before or v.params.correction_bias is not Param.bf16:
        refuse("router", Impl.vllm, "it scales before it divides and holds the bias in bf16; set "
                                    "moe.router_scale=before and params.correction_bias=bf16")  # fmt: skip
    return scores_inside(Impl.vllm, rules)


_AXES: dict[str, Callable[[Variant, Mapping[str, Rule]], Rules]] = {
    "norms": _norms,
    "kda": _kda,
    "mla": _mla,
    "experts": _experts,
    "router": _router,
}
