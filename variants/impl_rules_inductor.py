"""What implementation `inductor`, our own lines compiled by torch.compile, is at each axis of a recipe.

The lines are those of torch's implementation, so that formats and algorithms stay what they are. What changes is that
the values on the way through one compiled operation are no more seen; a store that the recipe has there is still made.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from variants.axes import Impl, KdaCore, Variant
from variants.kernels import refuse
from variants.recipe import Rule

Rules = dict[str, Rule]
NAME = Impl.inductor.name
PHASES = ("prefill", "decode")


def compiled(axis: str, v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """The rules of an axis that is set to inductor. Raises UsageError for what it has not."""
    if v.batch_invariant:
        refuse(axis, Impl.inductor, "a compiler orders each sum its own way; set batch_invariant=false")
    return _AXES[axis](v, rules)


def _at(rules: Mapping[str, Rule], *sites: str, inside: str = "") -> Rules:
    return {site: replace(rules[site], impl=NAME, inside=inside) for site in sites}


def _norms(_: Variant, rules: Mapping[str, Rule]) -> Rules:
    return _at(rules, *(k for k, r in rules.items() if r.algorithm.startswith("rms_norm")), "o_norm")


def _conv(_: Variant, rules: Mapping[str, Rule]) -> Rules:
    if rules["conv_sum"].algorithm != "taps":
        refuse("conv", Impl.inductor, "of the library's convolution it compiles nothing; set elementwise.conv=once")
    return _at(rules, "conv_sum", inside="short_conv") | _at(rules, "short_conv")


def _swiglu(_: Variant, rules: Mapping[str, Rule]) -> Rules:
    out: Rules = {}
    for name in ("mlp", "shared"):
        out |= _at(rules, f"{name}_silu", inside=f"{name}_act") | _at(rules, f"{name}_act")
    return out


def _router(_: Variant, rules: Mapping[str, Rule]) -> Rules:
    return _at(rules, "router_scores", inside="router_weights") | _at(rules, "router_weights")


def _kda(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    if (v.kda.prefill, v.kda.decode) != (KdaCore.recurrent, KdaCore.recurrent):
        refuse("kda", Impl.inductor, "it goes token by token; set kda.prefill and kda.decode to recurrent")
    if len({rules[k].accum for k in ("decay_gate", "beta", *(f"kda_core.{p}" for p in PHASES))}) > 1:
        refuse("kda", Impl.inductor, "it computes in one dtype throughout; set stream to that of kda's core")
    norms = [f"{site}.{phase}" for site in ("q_l2norm", "k_l2norm") for phase in PHASES]
    inside = _at(rules, *norms, "decay_gate", "beta", inside="kda_core")
    return inside | _at(rules, *(f"kda_core.{phase}" for phase in PHASES))


_AXES: dict[str, Callable[[Variant, Mapping[str, Rule]], Rules]] = {
    "norms": _norms,
    "conv": _conv,
    "swiglu": _swiglu,
    "router": _router,
    "kda": _kda,
}
