"""The whole forward: against an independent float64 definition, and bit for bit between its ways of being run."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import plain_model
import pytest
import torch
from tiny import (
    FORCED,
    FORMATS,
    INCREMENTAL,
    ODD,
    RECOMPUTE,
    SMALL,
    build,
    casts,
    every_logit,
    forced,
    oracle,
    plain,
    prompt,
    ragged,
    relative,
)
from torch import Tensor

from variants.axes import (
    Execution,
    ExecutionAxes,
    Experts,
    KdaAxes,
    KdaCore,
    KvCache,
    KvNormEps,
    L2NormEps,
    MlaAxes,
    MlaCore,
    MoeAxes,
    NormAxes,
    Router,
    RouterScale,
    Variant,
)
from variants.checkpoint import load_checkpoint
from variants.checkpoint_write import write_checkpoint
from variants.model import Model
from variants.weights import Casts, Patch

CONFIGS = {"odd": ODD, "small": SMALL}
made = cache(lambda name: casts(CONFIGS[name]))


@cache
def defined(name: str, length: int) -> Tensor:
    checkpoint = made(name).checkpoint
    return plain_model.logits(checkpoint.tensors, checkpoint.config, prompt(length))


def steps_of(model: Model, tokens: Sequence[int], first: int) -> Tensor:
    """[T - first + 1, vocab]: prefill of `first` tokens, then the rest one by one."""
    return forced(model, [tokens[:first]], [[*tokens[first:], 0]])[0]


def mla(core: MlaCore, **more: object) -> MlaAxes:
    decoding = MlaCore.absorbed if core is MlaCore.flash else core
    return MlaAxes(prefill=core, decode=decoding, **more)  # pyright: ignore[reportArgumentType]


F64 = oracle()
MANY = {
    "oracle": F64,
    "islands": replace(F64, kda=KdaAxes()),
    "gemv": oracle(kda=KdaCore.recurrent_gemv),
    "chunk 5": replace(F64, kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=5)),
    "chunk 64 at every step": replace(F64, kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.chunk)),
    "absorbed": replace(F64, mla=mla(MlaCore.absorbed)),
    "absorbed in splits": replace(F64, mla=mla(MlaCore.absorbed, tile_k=2, kv_splits=3)),
    "flash": replace(F64, mla=mla(MlaCore.flash, tile_q=3, tile_k=4)),
    "sdpa": replace(F64, mla=mla(MlaCore.sdpa)),
    "expanded cache": replace(F64, mla=replace(F64.mla, cache=KvCache.expanded)),
    "joined projections": replace(F64, fused_projections=True),
    "fused elementwise": replace(F64, fused_elementwise=True),
    "grouped experts": replace(F64, moe=MoeAxes(router=Router.f64, experts=Experts.grouped)),
    "scaled before": replace(F64, moe=MoeAxes(router=Router.f64, router_scale=RouterScale.before)),
    "batch-invariant": replace(F64, batch_invariant=True),
    "recompute": replace(F64, execution=RECOMPUTE),
    "pieces of 3": replace(F64, execution=ExecutionAxes(mode=Execution.incremental, prefill_piece=3)),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("variant", MANY)
def test_every_form_is_the_definition_in_float64(variant: str, config: str) -> None:
    """Cores, caches, orders and executions are one function: within 1e-12 of plain loops, by prefill and by steps."""
    model = build(MANY[variant], made(config))
    for length in (1, 17):
        if "pieces" not in variant:
            assert relative(every_logit(model, prompt(length)), defined(config, length)) < 1e-12
    assert relative(steps_of(model, prompt(17), 11), defined(config, 17)[10:]) < 1e-12


def test_a_model_without_shared_experts_loads_and_is_the_definition(tmp_path: Path) -> None:
    """`num_shared_experts: 0` is a geometry like any other: written, read back, within 1e-12 of plain loops."""
    config = replace(ODD, num_shared_experts=0)
    write_checkpoint(casts(config).checkpoint, tmp_path)
    read = load_checkpoint(tmp_path)
    assert not [name for name in read.tensors if "shared" in name]
    exact = plain_model.logits(read.tensors, read.config, prompt(9))
    assert relative(every_logit(build(F64, Casts(read)), prompt(9)), exact) < 1e-12


def scaled(part: str, factor: float) -> Patch:
    return lambda name, x: x * factor if part in name else x


@pytest.mark.parametrize(
    "part",
    ["A_log", "dt_bias", "conv1d", "o_norm", "f_b_proj", "g_a_proj", "b_proj", "kv_a_layernorm", "kv_b_proj",
     "experts.1.w2", "shared_experts", "gate.weight", "input_layernorm", "model.norm", "embed"],
)  # fmt: skip
def test_a_parameter_off_by_a_millionth_is_seen(part: str) -> None:
    """The comparison with the definition rejects one part in 10^6 of any parameter by a wide margin."""
    model = build(F64, made("odd"), patch=scaled(part, 1 + 1e-6))
    assert relative(every_logit(model, prompt(17)), defined("odd", 17)) > 1e-10


def test_a_patch_that_changes_nothing_changes_no_bit() -> None:
    """A patched model whose patch returns each tensor as it came gives the plain model's logits."""
    patched = build(F64, made("odd"), patch=lambda _, x: x)
    assert torch.equal(every_logit(patched, prompt(9)), every_logit(build(F64, made("odd")), prompt(9)))


def test_the_eps_of_the_latent_norm_is_an_axis() -> None:
    """With kv_eps at 1e-6 the model is the definition with that eps, and plainly not the other."""
    checkpoint = made("odd").checkpoint
    model = build(replace(F64, norm=NormAxes(kv_eps=KvNormEps.eps_1e6)), made("odd"))
    other = plain_model.logits(checkpoint.tensors, checkpoint.config, prompt(17), kv_eps=1e-6)
    assert relative(every_logit(model, prompt(17)), other) < 1e-12
    assert relative(every_logit(model, prompt(17)), defined("odd", 17)) > 1e-9


def test_the_eps_of_the_l2_norm_is_an_axis() -> None:
    """With l2_eps from the config the model is the definition with that eps, and plainly not the other."""
    checkpoint = made("odd").checkpoint
    model = build(replace(F64, kda=replace(F64.kda, l2_eps=L2NormEps.config)), made("odd"))
    other = plain_model.logits(checkpoint.tensors, checkpoint.config, prompt(17), l2_eps=1e-5)
    assert relative(every_logit(model, prompt(17)), other) < 1e-12
    assert relative(every_logit(model, prompt(17)), defined("odd", 17)) > 1e-9


CORES = {
    "dense": {},
    "island": {"kda": KdaCore.island_f64, "mla": MlaCore.island_f64},
    "online": {"mla": MlaCore.online_f32},
    "absorbed": {"kda": KdaCore.island_f32, "mla": MlaCore.absorbed},
}


def invariant(formats: str, cores: str, **more: object) -> Variant:
    return plain(*FORMATS[formats], batch_invariant=True, **{**CORES[cores], **more})  # pyright: ignore


@pytest.mark.parametrize(("cores", "config"), [*((cores, "odd") for cores in CORES), ("dense", "small")])
@pytest.mark.parametrize("formats", FORMATS)
def test_recompute_and_carried_state_give_the_same_bits(formats: str, cores: str, config: str) -> None:
    """With batch-invariant products and attention, in every format: prefixes run again are the state carried on."""
    prompts, forced_ids = ragged([5, 1, 9]), [c[:3] for c in FORCED]
    model = build(invariant(formats, cores), made(config))
    carried = forced(model, prompts, forced_ids)
    again = forced(build(invariant(formats, cores, execution=RECOMPUTE), made(config)), prompts, forced_ids)
    assert torch.equal(carried, again)
    alone = [
        forced(build(invariant(formats, cores), made(config)), [p], [c])
        for p, c in zip(prompts, forced_ids, strict=True)
    ]
    assert torch.equal(carried, torch.cat(alone))


@pytest.mark.parametrize("cores", CORES)
def test_without_invariance_recompute_is_carried_state_to_rounding(cores: str) -> None:
    """In float64 within 1e-12 relative, whatever order the library chose for each number of rows."""
    cores_ = {"mla": MlaCore.island_f64, **CORES[cores]}
    if cores_["mla"] is MlaCore.online_f32:
        cores_["mla"] = MlaCore.sdpa
    if cores_.get("kda") is KdaCore.island_f32:
        cores_["kda"] = KdaCore.recurrent
    carried, again = (
        forced(build(oracle(**{**cores_, "execution": e}), made("odd")), ragged([5, 1, 13]), FORCED)
        for e in (INCREMENTAL, RECOMPUTE)
    )
    assert relative(again, carried) < 1e-12
