"""`Variant.override`: rules of single sites that a named variant changes beyond its axes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from variants.axes import Execution, KdaCore, MlaCore, SiteOverride, Store, Variant
from variants.dtypes import DType
from variants.errors import UsageError
from variants.model_config import ModelConfig
from variants.recipe import Rule
from variants.sites import CHUNK_SITES, INTEGER, PHASED, places, rule_key

DENSE = (MlaCore.island_f64, MlaCore.dense_f32, MlaCore.dense_bf16)
LATENT_SITES, EXPANDED_SITES = ("q_latent", "o_latent"), ("kv_b_in", "kv_b_proj", "mla_k", "mla_v")


def exceptions(variant: Variant, config: ModelConfig, rules: Mapping[str, Rule]) -> dict[tuple[str, int], Rule]:
    """Rules by (key, layer) from `variant.override`, whose keys are a site or "site.phase".

    Raises UsageError for a site that this model or this variant does not have and for a change without effect.
    """
    silent, found = silent_keys(variant), {}
    for name, change in variant.override.items():
        layers = [layer for site, layer in places(config) if name in (site, *(f"{site}.{p}" for p in _phases(site)))]
        chosen = [n for n in layers if not change.layers or n in change.layers]
        keys = [k for k in rules if k == name or k.startswith(f"{name}.")]
        absent = set(change.layers) - set(layers)
        if not keys or not chosen or absent:
            _refuse(name, f"there is no such site in layers {sorted(absent) or 'of this model'}")
        if silent.issuperset(keys):
            _refuse(name, "no value of this variant passes there: its cores or its execution do without")
        found |= {(k, layer): _overridden(k, rules[k], change) for k in keys if k not in silent for layer in chosen}
    return found


def silent_keys(variant: Variant) -> frozenset[str]:
    """Keys of sites that a variant's cores or execution never use, or whose value it never reads again."""
    kda, mla = variant.kda, variant.mla
    cores = {"prefill": mla.prefill, "decode": mla.decode}
    keys: set[str] = set(INTEGER)
    if KdaCore.chunk not in (kda.prefill, kda.decode):
        keys.update(CHUNK_SITES)
    if MlaCore.absorbed not in cores.values():
        keys.update(LATENT_SITES)
    if set(cores.values()) == {MlaCore.absorbed}:
        keys.update(EXPANDED_SITES)
    keys |= {f"mla_scores.{p}" for p, core in cores.items() if core not in DENSE or variant.batch_invariant}
    keys |= {f"mla_probs.{p}" for p, core in cores.items() if core is MlaCore.sdpa}
    if variant.execution.mode is Execution.recompute:
        keys.update(("kda_state", "conv_state"), (rule_key(site, "decode") for site in PHASED))
    return frozenset(keys)


def _phases(site: str) -> tuple[str, ...]:
    return ("prefill", "decode") if site in PHASED else ()


def _overridden(key: str, rule: Rule, change: SiteOverride) -> Rule:
    new = rule
    if change.input is not Store.keep:
        operand = DType[change.input.name]
        if rule.input is None or operand.precision >= rule.input.precision:
            had = "has no operand of its own" if rule.input is None else f"reads {rule.input.name} already"
            _refuse(key, f"input={operand.name}: it {had}; a wider operand is set at the site that ends in _in")
        new = replace(new, input=operand)
    if change.output is not Store.keep:
        output = DType[change.output.name]
        if output.precision > rule.accum.precision:
            _refuse(key, f"output={output.name}: it is computed in {rule.accum.name}")
        new = replace(new, output=output, storage=output)
    if new == rule:
        _refuse(key, "it names nothing that differs from what the axes give")
    return new


def _refuse(name: str, why: str) -> NoReturn:
    raise UsageError(f"variant.override.{name} has no effect or cannot run: {why}; correct it or remove it")
