"""What implementation `row`, our decode kernels, asks of a recipe beyond what `variants.impl_rules` says of kernels.

They store bf16 between operations and sum in float32: the arithmetic of a bf16 engine, which a fused step keeps too.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from variants.axes import Experts, Impl, KdaCore, MlaCore, Store, Variant
from variants.dtypes import DType
from variants.impl_rules_bf16 import check_stores, check_variance, scores_inside
from variants.kernels import refuse
from variants.recipe import Rule

Rules = dict[str, Rule]
# what stays float32, or as it arrives
WIDE = ("router_weights", "kda_state", "conv_state")


def refined(axis: str, v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """The rules that change when an axis is set to row, after the general ones; raises UsageError where it cannot."""
    out = _AXES[axis](v, rules) if axis in _AXES else {}
    check_stores(axis, Impl.row, {**rules, **out}, wide=WIDE, start="fast_decode")
    return out


def _norms(v: Variant, _: Mapping[str, Rule]) -> Rules:
    check_variance(v, Impl.row)
    return {}


def _kda(v: Variant, _: Mapping[str, Rule]) -> Rules:
    if v.kda.decode is not KdaCore.recurrent or v.kda.inputs is not Store.keep:
        refuse(
            "kda",
            Impl.row,
            "it decodes step by step on q, k and v as they come; set kda.decode=recurrent, kda.inputs=keep",
        )
    return {}


def _mla(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """The products into and out of the latent are matrix-vector products too."""
    if (v.mla.prefill, v.mla.decode) != (MlaCore.flash, MlaCore.absorbed):
        refuse(
            "mla",
            Impl.row,
            "it prefills in tiles and decodes over the latent; set mla.prefill=flash, mla.decode=absorbed",
        )
    return {key: replace(rules[key], impl="row") for key in ("q_latent", "mla_core.decode")}


def _experts(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    inner = (rules[s].output for s in ("expert_gate_up", "expert_silu", "expert_act", "expert_out"))
    narrow = all(f is DType.bf16 for f in inner) and rules["expert_down"].output in (None, DType.bf16)
    if v.moe.experts is not Experts.grouped or rules["routed"].option("round_each") or not narrow:
        refuse("experts", Impl.row, "it stores each value in bf16 and sums slots first to last, rounded once; start "
                                    "from variant fast_decode")  # fmt: skip
    return {}


def _router(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """Scores, choice and weights are one kernel, whose scores nobody sees."""
    return scores_inside(Impl.row, rules)


def _swiglu(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    if any(rules[f"{n}_silu"].output is not DType.bf16 for n in ("mlp", "shared")):
        refuse("swiglu", Impl.row, "it rounds after SiLU too; set elementwise.swiglu=stepwise")
    return {}


_AXES: dict[str, Callable[[Variant, Mapping[str, Rule]], Rules]] = {
    "norms": _norms,
    "kda": _kda,
    "mla": _mla,
    "experts": _experts,
    "router": _router,
    "swiglu": _swiglu,
}
