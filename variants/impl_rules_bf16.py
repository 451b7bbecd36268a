"""What kernels that store bf16 between operations, vLLM's and our `row`, ask of a recipe alike."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from variants.axes import Impl, NormVariance, Variant
from variants.dtypes import DType
from variants.kernels import refuse
from variants.recipe import Rule

Rules = dict[str, Rule]


def check_stores(axis: str, impl: Impl, rules: Mapping[str, Rule], *, wide: Collection[str], start: str) -> None:
    """Raises UsageError for a place of the implementation that does not store bf16, those of `wide` left out.

    start: the named variant that a user is told to start from.
    """
    for key, rule in rules.items():
        if rule.impl == impl.name and not rule.inside and key not in wide and rule.storage is not DType.bf16:
            held = rule.storage.name if rule.storage else "what it computes"
            refuse(axis, impl, f"it stores bf16 at {key}, the recipe {held}; start from variant {start}")


def check_variance(v: Variant, impl: Impl) -> None:
    """Raises UsageError for norms whose variance is not of the rounded sum."""
    if v.norm.variance is not NormVariance.stored:
        refuse("norms", impl, "its variance is of the rounded sum; set norm.variance=stored")


def scores_inside(impl: Impl, rules: Mapping[str, Rule]) -> Rules:
    """Scores, choice and weights are one kernel, whose scores nobody sees."""
    scores = replace(rules["router_scores"], impl=impl.name, inside="router_weights")
    return {"router_scores": scores, "router_weights": replace(rules["router_weights"], impl=impl.name)}
