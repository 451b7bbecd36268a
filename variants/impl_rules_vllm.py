"""How vLLM's kernels differ from what `variants.impl_rules` says of kernels in general, axis by axis of `ImplAxes`.

They read and write bfloat16 and nothing else, so a recipe that stores anything wider between them is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn

from variants.axes import Execution, KdaCore, MlaCore, NormVariance, Order, Param, RouterScale, Variant
from variants.dtypes import DType
from variants.errors import UsageError
from variants.recipe import Rule

Rules = dict[str, Rule]
PHASES = ("prefill", "decode")
WIDE = ("router_weights", "decay_gate", "kda_state", "conv_state")  # float32 in vLLM too, or as the products give it
KEYS_A_TILE = {"triton": 32, "flash": 64}


def refined(axis: str, v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """The rules that change when an axis is set to vllm, after the general ones; raises UsageError where it cannot."""
    if axis in ("conv", "kda", "mla") and v.execution.mode is not Execution.incremental:
        _refuse(axis, "it carries state from step to step, one row a slot; set execution.mode=incremental")
    out = _AXES[axis](v, rules) if axis in _AXES else {}
    for key, rule in {**rules, **out}.items():
        if rule.impl == "vllm" and not rule.inside and key not in WIDE and rule.storage is not DType.bf16:
            held = rule.storage.name if rule.storage else "what it computes"
            _refuse(axis, f"it stores bf16 at {key}, the recipe {held}; start from variant vllm_exact")
    return out


def _norms(v: Variant, _: Mapping[str, Rule]) -> Rules:
    if v.norm.variance is not NormVariance.stored:
        _refuse("norms", "its variance is of the rounded sum; set norm.variance=stored")
    return {}


def _kda(v: Variant, _: Mapping[str, Rule]) -> Rules:
    if (v.kda.prefill, v.kda.decode) != (KdaCore.chunk, KdaCore.recurrent):
        _refuse("kda", "it prefills in chunks and decodes step by step; set kda.prefill=chunk and kda.decode=recurrent")
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
        _refuse("experts", "it weights the product with w2 before it is rounded; set moe.weighting=once")
    return {}


def _router(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    if v.moe.router_scale is not RouterScale.before or v.params.correction_bias is not Param.bf16:
        _refuse("router", "it scales before it divides and holds the bias in bf16; set moe.router_scale=before and "
                          "params.correction_bias=bf16")  # fmt: skip
    scores = replace(rules["router_scores"], impl="vllm", inside="router_weights")
    return {"router_scores": scores, "router_weights": replace(rules["router_weights"], impl="vllm")}


def _refuse(axis: str, why: str) -> NoReturn:
    raise UsageError(f"variant.impl.{axis}=vllm: {why}, or choose impl.{axis}=torch")


_AXES: dict[str, Callable[[Variant, Mapping[str, Rule]], Rules]] = {
    "norms": _norms,
    "kda": _kda,
    "mla": _mla,
    "experts": _experts,
    "router": _router,
}
