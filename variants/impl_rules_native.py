"""What implementation `native`, our CPU kernels, asks of a recipe beyond what `variants.impl_rules` says of kernels.

They are float32 throughout, token by token: the arithmetic of `f32`, each sum in an order of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from variants.axes import Experts, Impl, KdaCore, MlaCore, Variant
from variants.dtypes import DType
from variants.impl_rules_bf16 import scores_inside
from variants.kernels import refuse
from variants.recipe import Rule
from variants.sites import rule_key

Rules = dict[str, Rule]


def refined(axis: str, v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """The rules that change when an axis is set to native, after the general ones; UsageError where it cannot be."""
    out = _AXES[axis](v, rules) if axis in _AXES else {}
    for key, rule in {**rules, **out}.items():  # torch's own too: what they store is what a kernel reads
        formats = (rule.input, rule.accum, rule.output, rule.storage)
        if any(f not in (None, DType.f32) for f in formats):
            other = next(f.name for f in formats if f not in (None, DType.f32))
            refuse(axis, Impl.native, f"it is float32 throughout, the recipe has {other} at {key}; keep the formats of "
                                      "f32_native")  # fmt: skip
    return out


def _kda(v: Variant, _: Mapping[str, Rule]) -> Rules:
    if (v.kda.prefill, v.kda.decode) != (KdaCore.recurrent, KdaCore.recurrent):
        refuse("kda", Impl.native, "it goes token by token; set kda.prefill and kda.decode to recurrent")
    return {}


def _mla(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """Scores and probabilities stay inside the one kernel."""
    if (v.mla.prefill, v.mla.decode) != (MlaCore.dense_f32, MlaCore.dense_f32):
        refuse("mla", Impl.native, "it takes all scores and one softmax; set mla.prefill and mla.decode to dense_f32")
    keys = [rule_key(site, phase) for site in ("mla_scores", "mla_probs") for phase in ("prefill", "decode")]
    return {key: replace(rules[key], impl=Impl.native.name, inside="mla_core") for key in keys}


def _experts(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    if v.moe.experts is not Experts.grouped or rules["routed"].option("round_each"):
        refuse("experts", Impl.native, "it sums slots first to last; set moe.experts=grouped")
    return {}


def _router(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """Scores, choice and weights are one kernel, whose scores nobody sees."""
    return scores_inside(Impl.native, rules)


_AXES: dict[str, Callable[[Variant, Mapping[str, Rule]], Rules]] = {
    "kda": _kda,
    "mla": _mla,
    "experts": _experts,
    "router": _router,
}
