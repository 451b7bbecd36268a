"""What ran is read off the run: every named variant does what it declares, and a lie is caught wherever it is told."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import ODD, casts, oracle, plain, prompt
from torch import Tensor

from harness.compose import groups, named_variant
from harness.implementations import FUNCTIONS, SITE_FUNCTIONS, expected_function
from harness.observe import Observed, _defined, contradictions, observe
from variants.axes import (
    Gemm,
    ImplAxes,
    KdaAxes,
    KdaCore,
    MlaAxes,
    MlaCore,
    SiteOverride,
    Store,
    Stream,
    Variant,
)
from variants.checkpoint import load_checkpoint
from variants.dtypes import DType, round_to, store_as
from variants.ops import conv, kda, linear, mla, moe, norm
from variants.recipe import Recipe, Rule, resolve
from variants.rounding import NoProbe, RoundAt
from variants.sites import ALL_SITES
from variants.weights import Casts

OPS = {"conv": conv, "kda": kda, "linear": linear, "mla": mla, "moe": moe, "norm": norm}
F32 = plain(Stream.f32, Gemm.f32)
BF16 = plain(Stream.bf16, Gemm.bf16)
LENGTH = 19  # long enough that no value fits a narrow format by chance


@functools.cache
def shipped() -> Casts:
    return Casts(load_checkpoint(Path(__file__).parents[1] / "assets" / "kimi-linear-12m"))


@functools.cache
def tiny() -> Casts:
    return casts()


def seen(variant: Variant, *, wrap: NoProbe | None = None, length: int = LENGTH) -> Observed:
    return observe(resolve(variant, ODD), tiny(), prompt(length), wrap=wrap)


@pytest.mark.parametrize("name", [n for n in groups()["variant"] if named_variant(n).impl == ImplAxes()])
def test_every_named_variant_does_what_it_declares(name: str) -> None:
    """On the shipped checkpoint, nothing that was seen contradicts the recipe, in prefill or after it.

    Variants in kernels are watched on a small model in test_impl.py: this one takes the interpreter minutes.
    """
    made = shipped()
    recipe = resolve(named_variant(name), made.checkpoint.config)
    observed = observe(recipe, made, [1, 905, 77, 3000, 12, 44, 2000])
    made.drop()
    assert observed.contradictions == ()
    phases = {key.split("@")[0].rsplit(".", 1)[1] for key in observed.places}
    assert phases == ({"prefill"} if recipe.execution.mode.name == "recompute" else {"prefill", "decode"})


CLEAN: dict[str, Variant] = {
    "f32": F32,
    "bf16": BF16,
    "oracle": oracle(),
    "f16": plain(Stream.f16, Gemm.f16),
    "batch-invariant": plain(Stream.f32, Gemm.bf16_f32out, mla=MlaCore.island_f64, batch_invariant=True),
    "absorbed": replace(F32, mla=MlaAxes(prefill=MlaCore.flash, decode=MlaCore.absorbed, tile_q=3, tile_k=4)),
    "absorbed rows": plain(Stream.f32, Gemm.f32, mla=MlaCore.absorbed, batch_invariant=True),
    "chunk rows": replace(F32, kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent), batch_invariant=True),
    "gemv": plain(Stream.f32, Gemm.f32, kda=KdaCore.recurrent_gemv),
    "sdpa": plain(Stream.f32, Gemm.f32, mla=MlaCore.sdpa),
    "two rows": replace(F32, execution=replace(F32.execution, batch=2)),
    "stores": replace(BF16, kda=replace(BF16.kda, state=Store.bf16, conv_state=Store.bf16, inputs=Store.bf16)),
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_is_done_as_declared_is_not_accused(name: str) -> None:
    """Forms that no named variant uses observe without contradiction as well."""
    assert seen(CLEAN[name]).contradictions == ()


class Lie(NoProbe):
    """Does something at one site that the recipe does not say, or leaves undone what it says."""

    def __init__(self, site: str, does: Callable[[Tensor], Tensor], *, instead: bool = False) -> None:
        self.site, self.does, self.instead = site, does, instead

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        if site != self.site:
            return rounding
        if self.instead or rounding is None:
            return self.does
        return lambda x: self.does(rounding(x))


WATCHED = ["input_norm", "q_proj", "conv_sum", "short_conv", "conv_state", "q_l2norm", "kda_v", "decay_gate",
           "kda_core", "kda_state", "o_norm", "o_proj", "attn_residual", "kv_a_norm", "kv_cache", "kv_b_proj", "mla_q",
           "mla_k", "mla_v", "mla_scores", "mla_probs", "mla_core", "mlp_in", "router", "router_scores", "expert_act",
           "expert_out", "routed", "shared_act", "combine", "final_norm", "lm_head_in", "lm_head"]  # fmt: skip


def in_bf16(x: Tensor) -> Tensor:
    return round_to(x, DType.bf16)


@pytest.mark.parametrize("site", WATCHED)
def test_a_rounding_that_was_not_declared_is_caught(site: str) -> None:
    """Values rounded to bf16 in their float32 buffer: the finding names the site and the format."""
    found = seen(F32, wrap=Lie(site, in_bf16)).contradictions
    assert any(f" {site}" in line and "fit bf16" in line and "undeclared rounding" in line for line in found), found


@pytest.mark.parametrize("site", ["attn_residual", "q_proj", "o_norm", "kda_core", "mla_core", "lm_head", "routed"])
def test_a_store_that_was_declared_and_not_done_is_caught(site: str) -> None:
    """A float32 buffer, or unrounded values, where the recipe says bf16."""
    wide = seen(plain(Stream.bf16, Gemm.bf16_f32out), wrap=Lie("attn_residual", lambda x: x.float(), instead=True))
    assert any("attn_residual: stored as f32, declared bf16" in line for line in wide.contradictions)
    variant = replace(F32, override={site: _bf16()})
    assert seen(variant).contradictions == ()
    found = seen(variant, wrap=Lie(site, lambda x: x, instead=True)).contradictions
    assert any(f" {site}" in line and "declared bf16" in line for line in found), found


def _bf16():
    from variants.axes import SiteOverride

    return SiteOverride(output=Store.bf16)


def test_an_in_place_store_that_keeps_its_precision_is_caught() -> None:
    """The buffer is float32 as declared, but its values are not those of bf16."""
    variant = plain(Stream.bf16_in_place, Gemm.bf16_f32out)
    assert seen(variant).contradictions == ()
    found = seen(variant, wrap=Lie("mlp_residual", lambda x: x, instead=True)).contradictions
    assert any("mlp_residual: values are f32, declared rounded to bf16" in line for line in found)


def chunk_under_another_name(*inputs: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return kda.chunk(*inputs, chunk_size=4)


def float32_under_another_name(*inputs: Tensor, **more: object) -> tuple[Tensor, Tensor]:
    o, state = kda.recurrent(*(x.float() for x in inputs), **more)
    return o.double(), state.double()


def foreign(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **_: object):
    return (v * 2).expand(*q.shape[:3], -1), state * 1


def taps_reversed(window: Tensor, weight: Tensor) -> Tensor:
    return conv.conv1d(window, weight)


@pytest.mark.parametrize(
    ("table", "name", "function", "variant", "said"),
    [
        (kda.CORES, "recurrent", chunk_under_another_name, F32, "ran kda.chunk:f32, declared kda.recurrent"),
        (kda.CORES, "recurrent", foreign, F32, "ran nothing, declared kda.recurrent"),
        (kda.CORES, "island_f64", float32_under_another_name, Variant(), "kda.recurrent ran in f32, declared f64"),
        (conv.CONV, "taps", taps_reversed, F32, "ran conv.conv1d:f32, declared conv.taps"),
        (mla.CORES, "dense_f32", functools.partial(mla.tiles, tile_q=1, tile_k=1), F32,
         "ran mla.tiles:f32, declared mla.dense"),
        (mla.CORES, "island_f64", functools.partial(mla.tiles, tile_q=1, tile_k=1), Variant(),
         "ran mla.tiles:f64, declared mla.dense"),
        (linear.LINEAR, "gemm", linear.gemm_rows, F32, "ran linear.gemm_rows:f32, declared linear.gemm"),
        (moe.SUM, "sum_loop", moe.sum_grouped, F32, "ran moe.sum_grouped:f32, declared moe.sum_loop"),
        (moe.WEIGHTS, "scale_after", moe.weights_before, F32, "ran moe.weights_before:f32, declared moe.weights_after"),
    ],
)  # fmt: skip
def test_another_operation_under_a_declared_name_is_caught(
    monkeypatch: pytest.MonkeyPatch, table: dict, name: str, function: Callable, variant: Variant, said: str
) -> None:
    """The tables do not vouch for themselves: what was called is seen on the stack of what was dispatched."""
    monkeypatch.setitem(table, name, function)
    assert any(said in line for line in seen(variant).contradictions)


def test_another_norm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that calls another function of ours in place of its gated norm."""
    monkeypatch.setitem(norm.GATED, "sigmoid", lambda x, w, gate, *, eps: norm.rms_norm(x, w, eps) * gate)
    assert any("ran norm.rms_norm:f32, declared norm.gated_rms_norm" in line for line in seen(F32).contradictions)


def test_two_names_for_one_arithmetic_are_one_arm() -> None:
    """island_f32 on a CPU is what recurrent is there: other declarations, equal observations, equal hashes."""
    island = replace(F32, kda=KdaAxes(prefill=KdaCore.island_f32, decode=KdaCore.island_f32))
    a, b = seen(F32), seen(island)
    assert resolve(F32, ODD).hash != resolve(island, ODD).hash
    assert a.hash == b.hash
    assert a.as_dict() == b.as_dict()


DIFFERENT = {
    "a store": replace(F32, kda=replace(F32.kda, outputs=Store.bf16)),
    "a core": plain(Stream.f32, Gemm.f32, kda=KdaCore.island_f64),
    "a function": plain(Stream.f32, Gemm.f32, kda=KdaCore.recurrent_gemv),
    "an order of rows": plain(Stream.f32, Gemm.f32, batch_invariant=True),
    "joined projections": replace(F32, fused_projections=True),
    "fused elementwise": replace(F32, fused_elementwise=True),
    "rows together": replace(F32, execution=replace(F32.execution, batch=2)),
    "pieces": replace(F32, execution=replace(F32.execution, prefill_piece=4)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_two_arms_that_differ_are_told_apart(name: str) -> None:
    """Each of these runs something else somewhere, and its observation says so."""
    assert seen(DIFFERENT[name]).hash != seen(F32).hash


@pytest.mark.parametrize(("a", "b"), [(4, 16), (16, 64)])
def test_arms_that_differ_in_a_size_alone_are_told_apart(a: int, b: int) -> None:
    """Chunks of 4, 16 and 64 run the same functions in the same dtypes: the shapes of what ran tell them apart."""

    def chunks(size: int) -> Variant:
        return replace(F32, kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=size))

    assert seen(chunks(a)).hash != seen(chunks(b)).hash
    assert seen(chunks(a)).hash == seen(chunks(a)).hash


def test_a_record_holds_each_layer_once() -> None:
    """Layers that were seen to do the same are one entry, and every site of the model is in the record."""
    record = seen(F32).as_dict()
    entries = record["q_proj.prefill"]
    assert isinstance(entries, list)
    assert [e["layers"] for e in entries] == [[0, 2]]
    assert entries[0]["functions"] == ["linear.gemm:f32"]
    idle = {s for s in ALL_SITES if s.startswith("kda_") and s not in ("kda_v", "kda_core", "kda_state")}
    missing = {s for s in ALL_SITES if f"{s}.prefill" not in record} - idle - {"q_latent", "o_latent"}
    assert missing == set()


def test_every_declared_function_exists() -> None:
    """What a name stands for here is a function of variants.ops, and each core of the tables has its name."""
    names = {*FUNCTIONS.values(), *(f for site in SITE_FUNCTIONS.values() for f in site.values())}
    for name in names:
        module, function = name.split(".")
        assert callable(getattr(OPS[module], function))
    assert set(SITE_FUNCTIONS["kda_core"]) == set(kda.CORES)
    assert set(SITE_FUNCTIONS["mla_core"]) == {*mla.CORES, *mla.LATENT_CORES}
    for algorithm in (*linear.LINEAR, *conv.CONV, *moe.SUM, *moe.WEIGHTS):
        assert expected_function("any", Rule(algorithm=algorithm))


def test_looking_changes_no_bit() -> None:
    """The watched run chooses the token that the plain run chooses, from the same logits."""
    logits: list[Tensor] = []
    recipe: Recipe = resolve(BF16, ODD)
    observe(recipe, tiny(), prompt(LENGTH), wrap=Lie("lm_head", lambda x: logits.append(x.clone()) or x))
    from tiny import build

    from variants import decode

    runs = decode.steps(build(BF16, tiny()), [prompt(LENGTH)], 2, lambda _, x: decode.greedy(x))
    plainly = [store_as(r.logits, DType.f32) for r in runs]
    assert all(torch.equal(a[:, 0].float(), b) for a, b in zip(logits, plainly, strict=True))


def test_an_undefined_result_goes_back_to_torch() -> None:
    """A kernel of another library may leave one of its results undefined, which only C++ can hold."""
    x = torch.ones(2)
    out = _defined([x, None])
    assert isinstance(out, list)
    assert out[0] is x
    assert out[1].numel() == 0
    assert _defined([x])[0] is x  # pyright: ignore[reportIndexIssue]
    assert _defined(x) is x


def test_a_chunk_of_one_token_has_an_inverse_of_one_and_that_is_no_rounding() -> None:
    """Pieces of one token, chunks of one and a decode in chunks; in longer chunks both values are computed ones."""
    kda = KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, inputs=Store.bf16)
    pieces = replace(F32.execution, prefill_piece=1)
    alone = [replace(F32, kda=kda, execution=pieces), replace(F32, kda=replace(kda, chunk_size=1)),
             replace(F32, kda=replace(kda, decode=KdaCore.chunk))]  # fmt: skip
    for variant in alone:
        assert seen(variant).contradictions == ()
    rounds = SiteOverride(output=Store.bf16)
    lying = resolve(replace(F32, kda=kda), ODD)
    told = observe(resolve(replace(F32, kda=kda, override={"kda_kg": rounds}), ODD), tiny(), prompt(LENGTH))
    assert any("kda_kg" in line for line in contradictions(lying, told.places))
