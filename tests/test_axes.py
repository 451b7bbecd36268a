"""A setting that has no effect, or cannot run, is refused with one line that names it."""

import dataclasses
from enum import Enum
from typing import Any

import pytest

from harness.compose import groups, named_variant
from variants import axes
from variants.axes import (
    ElementwiseAxes,
    Execution,
    ExecutionAxes,
    Gemm,
    Graph,
    Impl,
    ImplAxes,
    KdaAxes,
    KdaCore,
    KvCache,
    MlaAxes,
    MlaCore,
    MoeAxes,
    NormAxes,
    NormRounding,
    NormVariance,
    Order,
    SiteOverride,
    Store,
    Stream,
    TileOrder,
    Variant,
)
from variants.errors import UsageError
from variants.ops import kda, mla
from variants.rules import GEMM, KDA_ACCUM, MLA_ACCUM, ROUTER, STREAM

CARRIED = ExecutionAxes(mode=Execution.incremental)
FUSED = dataclasses.replace(CARRIED, fused=True)
IMPLS = [f.name for f in dataclasses.fields(ImplAxes)]
NATIVE = ImplAxes(**dict.fromkeys(IMPLS, Impl.native))
ABSORBED = MlaAxes(prefill=MlaCore.absorbed, decode=MlaCore.absorbed)
NARROW = MlaAxes(prefill=MlaCore.dense_bf16, decode=MlaCore.dense_bf16)


def tiled(**more: Any) -> MlaAxes:
    return MlaAxes(prefill=MlaCore.flash, decode=MlaCore.flash, **more)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kda": KdaAxes(chunk_size=32)}, "kda.chunk_size=32"),
    ({"kda": KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.chunk, chunk_size=0)}, "kda.chunk_size=0"),
    ({"mla": MlaAxes(tile_q=64)}, "mla.tile_q=64"),
    ({"mla": dataclasses.replace(ABSORBED, tile_q=64)}, "mla.tile_q=64"),
    ({"mla": MlaAxes(tile_k=64)}, "mla.tile_k=64"),
    ({"mla": tiled(tile_k=0)}, "mla.tile_k=0"),
    ({"mla": tiled(kv_splits=2)}, "mla.kv_splits=2"),
    ({"mla": MlaAxes(tile_order=TileOrder.backward)}, "mla.tile_order=backward"),
    ({"batch_invariant": True, "mla": dataclasses.replace(ABSORBED, tile_order=TileOrder.backward)},
     "mla.tile_order=backward"),
    ({"moe": MoeAxes(weighting=Order.once)}, "moe.weighting=once"),
    ({"mla": MlaAxes(kv_splits=4)}, "mla.kv_splits=4"),
    ({"mla": MlaAxes(cache=KvCache.expanded)}, "mla.cache=expanded"),
    ({"mla": dataclasses.replace(ABSORBED, cache=KvCache.expanded), "execution": CARRIED}, "mla.cache=expanded"),
    ({"mla": tiled(), "execution": CARRIED}, "mla.decode=flash"),
    ({"mla": dataclasses.replace(NARROW, probs=Store.bf16), "gemm": Gemm.bf16}, "mla.probs=bf16"),
    ({"mla": MlaAxes(prefill=MlaCore.sdpa, decode=MlaCore.sdpa, probs=Store.bf16)}, "mla.probs=bf16"),
    ({"mla": MlaAxes(prefill=MlaCore.dense_f32)}, "kda.decode or mla.decode unlike prefill"),
    ({"kda": KdaAxes(decode=KdaCore.recurrent)}, "kda.decode or mla.decode unlike prefill"),
    ({"kda": KdaAxes(state=Store.bf16)}, "kda.state=bf16"),
    ({"kda": KdaAxes(conv_state=Store.bf16)}, "kda.conv_state=bf16"),
    ({"execution": ExecutionAxes(prefill_piece=64)}, "execution.prefill_piece"),
    ({"execution": ExecutionAxes(mode=Execution.incremental, prefill_piece=-1)}, "execution.prefill_piece=-1"),
    ({"execution": ExecutionAxes(batch=0)}, "execution.batch=0"),
    ({"elementwise": ElementwiseAxes(swiglu=Order.stepwise)}, "elementwise.swiglu=stepwise"),
    ({"elementwise": ElementwiseAxes(swiglu=Order.stepwise), "stream": Stream.bf16}, "elementwise.swiglu=stepwise"),
    ({"norm": NormAxes(variance=NormVariance.stored)}, "norm.variance=stored"),
    ({"norm": NormAxes(variance=NormVariance.mixed), "stream": Stream.f64}, "norm.variance=mixed"),
    ({"norm": NormAxes(rounding=NormRounding.twice)}, "norm.rounding=twice"),
    ({"norm": NormAxes(rounding=NormRounding.twice), "stream": Stream.bf16_in_place}, "norm.rounding=twice"),
    ({"batch_invariant": True, "fused_projections": True}, "fused_projections=true"),
    ({"batch_invariant": True, "fused_elementwise": True}, "fused_elementwise=true"),
    ({"batch_invariant": True, "mla": tiled(tile_q=64)}, "mla.tile_q=64"),
    ({"batch_invariant": True, "mla": NARROW}, "batch_invariant=true with mla.prefill=dense_bf16"),
    ({"batch_invariant": True, "mla": MlaAxes(decode=MlaCore.sdpa), "execution": CARRIED},
     "batch_invariant=true with mla.decode=sdpa"),
    ({"batch_invariant": True, "kda": KdaAxes(prefill=KdaCore.recurrent_gemv), "execution": CARRIED},
     "batch_invariant=true with kda.prefill=recurrent_gemv"),
    ({"execution": FUSED}, "execution.fused=true with impl.kda=torch"),
    ({"execution": FUSED, "impl": dataclasses.replace(NATIVE, mla=Impl.row)},
     "execution.fused=true with impl row and native"),
    ({"execution": FUSED, "impl": NATIVE}, "execution.fused=true with mla.cache=latent"),
    ({"execution": FUSED, "impl": ImplAxes(**dict.fromkeys(IMPLS, Impl.row))}, "execution.fused=true"),
    ({"execution": FUSED, "override": {"kda_core": SiteOverride(output=Store.bf16)}}, "execution.fused=true"),
    ({"execution": dataclasses.replace(FUSED, batch=2), "impl": NATIVE, "mla": MlaAxes(cache=KvCache.expanded)},
     "execution.fused=true"),
    ({"execution": dataclasses.replace(CARRIED, graph=Graph.cuda)}, "execution.graph=cuda"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "named"), REFUSED, ids=[f"{n}-{i}" for i, (_, n) in enumerate(REFUSED)])
def test_a_setting_without_effect_is_refused(settings: dict[str, Any], named: str) -> None:
    """One line that begins with the setting, says why, and what to do."""
    with pytest.raises(UsageError) as refused:
        Variant(**settings)
    message = str(refused.value)
    assert message.startswith(f"variant: {named} has no effect or cannot run: ")
    assert message.endswith("remove it or change the other setting")
    assert "\n" not in message
    assert len(message) < 200


TAKEN: list[dict[str, Any]] = [
    {"kda": KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.chunk, chunk_size=32)},
    {"mla": tiled(tile_q=64, tile_k=32)},
    {"mla": MlaAxes(prefill=MlaCore.flash, decode=MlaCore.absorbed, tile_q=64, kv_splits=4), "execution": CARRIED},
    {"mla": MlaAxes(cache=KvCache.expanded), "execution": CARRIED},
    {"kda": KdaAxes(state=Store.bf16, conv_state=Store.bf16), "execution": CARRIED},
    {"execution": ExecutionAxes(mode=Execution.incremental, prefill_piece=64, batch=3)},
    {"elementwise": ElementwiseAxes(swiglu=Order.stepwise), "gemm": Gemm.bf16},
    {"norm": NormAxes(variance=NormVariance.stored, rounding=NormRounding.twice), "stream": Stream.bf16},
    {"norm": NormAxes(rounding=NormRounding.twice), "gemm": Gemm.bf16},
    {"mla": tiled(tile_order=TileOrder.backward)},
    {"moe": MoeAxes(weighting=Order.once), "gemm": Gemm.bf16},
    {"batch_invariant": True, "mla": ABSORBED},
    {"batch_invariant": True, "kda": KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.chunk)},
]


@pytest.mark.parametrize("settings", TAKEN, ids=range(len(TAKEN)))
def test_the_same_settings_are_taken_where_they_have_an_effect(settings: dict[str, Any]) -> None:
    """Each refusal above is of a combination, not of an axis value."""
    assert Variant(**settings)


@pytest.mark.parametrize("name", groups()["variant"])
def test_every_named_variant_stands(name: str) -> None:
    """Each file of conf/variant/ composes to a Variant, which refuses itself where a setting is idle."""
    assert isinstance(named_variant(name), Variant)


@pytest.mark.parametrize(
    ("table", "enum"),
    [(GEMM, axes.Gemm), (ROUTER, axes.Router), (STREAM, axes.Stream), (KDA_ACCUM, KdaCore), (MLA_ACCUM, MlaCore)],
)
def test_every_axis_value_has_its_row(table: dict[Enum, object], enum: type[Enum]) -> None:
    """Table and Enum name the same values."""
    assert set(table) == set(enum)


def test_every_core_has_its_function() -> None:
    """Each core of an axis has an implementation under its name, the row-by-row forms under theirs."""
    assert {c.name for c in KdaCore} | {"chunk_rows"} == set(kda.CORES)
    with_rows = {c.name for c in MlaCore} - {"dense_bf16", "sdpa"}
    names = {c.name for c in MlaCore} | {f"{name}_rows" for name in with_rows}
    assert names == set(mla.CORES) | set(mla.LATENT_CORES)


def test_enum_members_are_named_as_their_values() -> None:
    """A YAML file sets an Enum by its member name: name and value may not differ."""
    enums = [e for e in vars(axes).values() if isinstance(e, type) and issubclass(e, Enum) and e is not Enum]
    assert len(enums) >= 14
    assert all(member.name == member.value for enum in enums for member in enum)
