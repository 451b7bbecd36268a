"""A recipe says what a variant means at every site; recipes compare, mix, rise in precision and take overrides."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import ODD, RECOMPUTE, build, casts, oracle, plain, prompt

from harness import compose
from harness.compose import groups
from variants import decode
from variants.axes import (
    Execution,
    ExecutionAxes,
    Gemm,
    KdaAxes,
    KdaCore,
    KvNormEps,
    MlaAxes,
    MlaCore,
    NormAxes,
    Param,
    ParamAxes,
    SiteOverride,
    Store,
    Stream,
    Variant,
)
from variants.checkpoint import load_config
from variants.dtypes import DType
from variants.errors import UsageError
from variants.model_config import ModelConfig
from variants.recipe import Recipe, difference, resolve
from variants.sites import ALL_SITES, CHUNK_SITES, PHASED, layer_sites, places

SHIPPED = load_config(Path(__file__).parents[1] / "assets" / "kimi-linear-12m")
F32 = plain(Stream.f32, Gemm.f32)
BF16 = plain(Stream.bf16, Gemm.bf16)

named_variant = cache(compose.named_variant)


def recipe(variant: Variant, config: ModelConfig = ODD) -> Recipe:
    return resolve(variant, config)


@pytest.mark.parametrize("name", groups()["variant"])
def test_a_recipe_has_one_rule_for_every_site(name: str) -> None:
    """Every place of the shipped model has a rule in both phases, and no rule stands for a site that is not there."""
    made = recipe(named_variant(name), SHIPPED)
    keys = {key for site in ALL_SITES for key in ([f"{site}.prefill", f"{site}.decode"] if site in PHASED else [site])}
    assert set(made.rules) == keys
    assert all(made.rule(site, layer, phase) for site, layer in places(SHIPPED) for phase in ("prefill", "decode"))


@pytest.mark.parametrize("name", groups()["variant"])
def test_a_gate_is_never_narrower_than_float32(name: str) -> None:
    """The log-decay of every named variant is computed and kept in float32 or more: bf16 would never forget."""
    rule = recipe(named_variant(name), SHIPPED).rules["decay_gate"]
    assert min(rule.accum.precision, rule.output.precision if rule.output else 53) >= DType.f32.precision


def test_named_variants_are_all_different() -> None:
    """No two files of conf/variant/ resolve to one recipe."""
    hashes = {name: recipe(named_variant(name), SHIPPED).hash for name in groups()["variant"]}
    assert len(set(hashes.values())) == len(hashes)


@pytest.mark.parametrize(
    ("name", "site", "expected"),
    [
        ("oracle", "q_proj", ("f64", "f64", "f64", "f64")),
        ("oracle", "lm_head", ("f64", "f64", "f64", "f64")),
        ("f32", "q_proj", ("f32", "f32", "f32", "f32")),
        ("f64_islands", "q_proj", ("bf16", "f32", "f32", "f32")),
        ("f64_islands", "kda_core.decode", ("keep", "f64", "f32", "f32")),
        ("f64_islands", "router", ("bf16", "bf16", "bf16", "bf16")),
        ("bf16_residual", "attn_residual", ("keep", "f32", "bf16", "f32")),
        ("bf16_stream", "attn_residual", ("keep", "f32", "bf16", "bf16")),
        ("bf16_stream", "o_proj", ("bf16", "f32", "bf16", "bf16")),
        ("bf16_islands", "kda_v", ("keep", "f32", "bf16", "bf16")),
        ("transformers_mirror", "beta", ("keep", "f32", "bf16", "bf16")),
        ("transformers_mirror", "mla_probs.decode", ("keep", "f32", "bf16", "bf16")),
        ("transformers_mirror", "router", ("f32", "f32", "f32", "f32")),
    ],
)
def test_what_an_axis_means_at_a_site(name: str, site: str, expected: tuple[str, ...]) -> None:
    """Operand, accumulation, values and buffer, as the campaign's table and the engines' sources have them."""
    rule = recipe(named_variant(name), SHIPPED).rules[site].as_dict()
    assert tuple(rule[f] for f in ("input", "accum", "output", "storage")) == expected


def test_products_in_float64_end_in_the_format_of_what_reads_them() -> None:
    """gemm=f64 in a float32 stream is a wider sum, declared as rounded once to float32."""
    rule = recipe(Variant(gemm=Gemm.f64)).rules["q_proj"]
    assert (rule.accum, rule.output, rule.storage) == (DType.f64, DType.f32, DType.f32)


def test_a_difference_is_a_row_for_each_field() -> None:
    """Equal recipes differ in nothing; one axis gives the rows of its sites and no other."""
    assert difference(recipe(F32), recipe(F32)) == []
    other = replace(F32, kda=replace(F32.kda, outputs=Store.bf16))
    rows = difference(recipe(F32), recipe(other))
    assert {(r["site"], r["field"]) for r in rows} == {
        (f"kda_core.{phase}", field) for phase in ("prefill", "decode") for field in ("output", "storage")
    }
    assert {(r["a"], r["b"]) for r in rows} == {("f32", "bf16")}


def test_fused_elementwise_names_every_site_that_it_changes() -> None:
    """The algorithm alone, at the norms, the convolution, the L2 norms and the decay gate, and no product."""
    rows = difference(recipe(F32), recipe(replace(F32, fused_elementwise=True)))
    assert {r["site"] for r in rows} == {
        "input_norm", "post_attn_norm", "final_norm", "kv_a_norm", "o_norm", "conv_sum", "decay_gate",
        *(f"{s}.{phase}" for s in ("q_l2norm", "k_l2norm") for phase in ("prefill", "decode")),
    }  # fmt: skip
    assert {r["field"] for r in rows} == {"algorithm"}
    assert all("_fused" in str(r["b"]) for r in rows)


def test_what_is_not_arithmetic_is_a_difference_too() -> None:
    """Parameters rounded on load, another eps and another execution stand beside the sites and change the hash."""
    changed = [
        replace(F32, params=ParamAxes(a_log=Param.bf16)),
        replace(F32, norm=NormAxes(kv_eps=KvNormEps.eps_1e6)),
        replace(F32, execution=ExecutionAxes(mode=Execution.incremental, batch=2)),
        replace(F32, execution=RECOMPUTE),
        replace(F32, tf32=True),
        replace(F32, fused_projections=True),
    ]
    assert all(len(difference(recipe(F32), recipe(v))) == 1 for v in changed)
    assert len({recipe(v).hash for v in [F32, *changed]}) == len(changed) + 1


def test_a_recipe_rises_in_precision_as_a_whole() -> None:
    """At float64 every narrower format is float64, what was kept stays kept, and the parameters stay as declared."""
    low = recipe(replace(BF16, params=ParamAxes(a_log=Param.bf16)))
    high = low.at_precision(DType.f64)
    assert high.semantics == low.semantics
    for key, rule in high.rules.items():
        formats = (rule.input, rule.accum, rule.output, rule.storage)
        assert set(formats) <= {None, DType.f64}
        before = low.rules[key]
        kept = [f is None for f in (before.input, before.accum, before.output, before.storage)]
        assert [f is None for f in formats] == kept
    assert recipe(oracle()).at_precision(DType.f32) == recipe(oracle())


def test_places_of_another_recipe_are_swapped_in_and_nowhere_else() -> None:
    """Both phases of the named places take the other's rules; all other places keep their own."""
    a, b = recipe(F32), recipe(BF16)
    mixed = a.with_places(b, [("kda_core", 0), ("router", 2)])
    for site, layer in places(ODD):
        for phase in ("prefill", "decode"):
            source = b if (site, layer) in {("kda_core", 0), ("router", 2)} else a
            assert mixed.rule(site, layer, phase) == source.rule(site, layer, phase)
    assert mixed.hash not in (a.hash, b.hash)


def test_another_execution_is_the_same_arithmetic() -> None:
    """`with_execution` changes how a recipe is run and no rule."""
    changed = recipe(F32).with_execution(batch=7, prefill_piece=64)
    assert changed.rules == recipe(F32).rules
    assert (changed.execution.batch, changed.execution.prefill_piece) == (7, 64)


def overridden(base: Variant, site: str, **change: object) -> Variant:
    return replace(base, override={site: SiteOverride(**change)})  # pyright: ignore[reportArgumentType]


OVERRIDES = [(site, layer) for layer in range(3) for site in layer_sites(ODD, layer)]
IDLE = {*CHUNK_SITES, "q_latent", "o_latent", "router_ids"}
CHANGED_SITES = sorted({site for site, _ in OVERRIDES} - IDLE)


def final_logits(variant: Variant) -> torch.Tensor:
    """All logits of a prompt and three forced tokens in a model with large values at every site."""
    model = build(variant, casts())
    forced = torch.tensor([[5], [11], [7], [9]])
    runs = decode.steps(model, [prompt(9)], 4, lambda t, _: forced[t])
    return torch.cat([r.logits for r in runs])


base_logits = cache(lambda: final_logits(F32))


@pytest.mark.parametrize("site", CHANGED_SITES)
def test_an_override_changes_its_site_and_really_changes_values(site: str) -> None:
    """The recipe differs in that site's exceptions alone, and the logits are other ones."""
    variant = overridden(F32, site, output=Store.bf16)
    rows = difference(recipe(F32), recipe(variant))
    assert rows
    assert all(str(r["site"]).startswith("exceptions") for r in rows)
    changed = {key for key, _ in recipe(variant).exceptions}
    assert changed <= {site, f"{site}.prefill", f"{site}.decode"}
    assert not torch.equal(final_logits(variant), base_logits())


@pytest.mark.parametrize("site", ["q_latent", "o_latent", "mla_probs.decode"])
def test_an_override_inside_the_absorbed_core_changes_values(site: str) -> None:
    """Sites that only attention over the latent has."""
    absorbed = replace(F32, mla=MlaAxes(prefill=MlaCore.absorbed, decode=MlaCore.absorbed))
    assert not torch.equal(final_logits(overridden(absorbed, site, output=Store.bf16)), final_logits(absorbed))


@pytest.mark.parametrize("site", CHUNK_SITES)
def test_an_override_inside_the_chunk_changes_values(site: str) -> None:
    """Every rounding point of a chunked kernel can be placed alone; the first chunk's state is zero, so two chunks."""
    chunked = replace(F32, kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=4))
    assert not torch.equal(final_logits(overridden(chunked, site, output=Store.bf16)), final_logits(chunked))


def test_an_override_of_one_layer_or_phase_leaves_the_others() -> None:
    """Only the named layer, only the named phase."""
    assert set(recipe(overridden(F32, "o_norm", output=Store.bf16, layers=(2,))).exceptions) == {("o_norm", 2)}
    decode_only = recipe(overridden(F32, "kda_core.decode", output=Store.bf16)).exceptions
    assert set(decode_only) == {("kda_core.decode", 0), ("kda_core.decode", 2)}


def test_the_operand_of_one_product_can_be_narrowed() -> None:
    """input=bf16 at one projection: its operand and weight pass bf16, the other projections' do not."""
    variant = overridden(F32, "q_proj", input=Store.bf16)
    assert {key for key, _ in recipe(variant).exceptions} == {"q_proj"}
    assert not torch.equal(final_logits(variant), base_logits())
    everywhere = replace(F32, gemm=Gemm.bf16_f32out)
    assert not torch.equal(final_logits(variant), final_logits(everywhere))


def test_f32_weights_are_rounded_to_the_operand_a_product_declares() -> None:
    """bf16 operands mean bf16 weights, also of a float32 checkpoint; as float32 operands they keep their bits."""
    made = casts(dtype=torch.float32)
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = made.checkpoint.tensors[name]
    assert not torch.equal(stored, stored.bfloat16().float())
    narrow = build(Variant(), made)
    assert torch.equal(narrow.weights.get(name, DType.f32, operand=DType.bf16), stored.bfloat16().float())
    assert torch.equal(narrow.weights.get(name, DType.f32, operand=DType.f32), stored)
    rounded = build(replace(Variant(), params=ParamAxes(weights=Param.bf16)), made)
    assert torch.equal(rounded.weights.get(name, DType.f32), stored.bfloat16().float())
    experts = [m.weights.experts("model.layers.1.block_sparse_moe", ("w2",), 5, DType.f32) for m in (narrow, rounded)]
    assert not torch.equal(*experts)
    assert torch.equal(experts[1], experts[0].bfloat16().float())


REFUSED = [
    (F32, "q_prj", {"output": Store.bf16}, "there is no such site"),
    (F32, "kda_core.warmup", {"output": Store.bf16}, "there is no such site"),
    (F32, "o_norm.decode", {"output": Store.bf16}, "there is no such site"),
    (F32, "o_norm", {"output": Store.bf16, "layers": (1,)}, "there is no such site in layers [1]"),
    (F32, "o_norm", {"output": Store.bf16, "layers": (0, 9)}, "there is no such site in layers [9]"),
    (F32, "o_norm", {}, "it names nothing that differs"),
    (F32, "o_norm", {"output": Store.f32}, "it names nothing that differs"),
    (F32, "o_norm", {"output": Store.f64}, "it is computed in f32"),
    (F32, "o_norm", {"input": Store.bf16}, "it has no operand of its own"),
    (BF16, "q_proj", {"input": Store.f32}, "it reads bf16 already"),
    (F32, "router_ids", {"output": Store.bf16}, "no value of this variant passes there"),
    (F32, "kda_ainv", {"output": Store.bf16}, "no value of this variant passes there"),
    (F32, "q_latent", {"output": Store.bf16}, "no value of this variant passes there"),
    (Variant(), "kda_core.decode", {"output": Store.bf16}, "no value of this variant passes there"),
    (Variant(), "kda_state", {"output": Store.bf16}, "no value of this variant passes there"),
]


@pytest.mark.parametrize(("base", "site", "change", "why"), REFUSED, ids=[f"{s}-{w[:12]}" for _, s, _, w in REFUSED])
def test_an_override_without_effect_is_refused(base: Variant, site: str, change: dict, why: str) -> None:
    """A misspelt site, a layer that has none, and a change of nothing are each one line."""
    with pytest.raises(UsageError, match=r"variant\.override\.") as refused:
        recipe(overridden(base, site, **change))
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
