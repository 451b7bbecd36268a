"""Implementation inductor: our own lines compiled with every store of a recipe, and what a compiler leaves out."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny import build, casts, prompt, ragged, relative
from torch import Tensor

from harness.engines.compiling import Compiling
from harness.engines.local import LocalEngine
from harness.observe import observe
from variants import decode
from variants.axes import (
    ElementwiseAxes,
    Execution,
    ExecutionAxes,
    Gemm,
    Impl,
    ImplAxes,
    KdaAxes,
    KdaCore,
    MlaAxes,
    MlaCore,
    MoeAxes,
    NormAxes,
    NormRounding,
    NormVariance,
    Order,
    Router,
    SiteOverride,
    Store,
    Stream,
    Variant,
)
from variants.errors import DeviceError, UsageError
from variants.kernels import OPERATIONS, check_environment, has
from variants.ops import conv, inductor, kda, moe, native_library, norm
from variants.recipe import resolve

AXES = tuple(axis for axis in OPERATIONS if has(axis, Impl.inductor))
COMPILED = ImplAxes(**dict.fromkeys(AXES, Impl.inductor))
F32 = Variant(
    gemm=Gemm.f32,
    kda=KdaAxes(prefill=KdaCore.recurrent, decode=KdaCore.recurrent),
    mla=MlaAxes(prefill=MlaCore.dense_f32, decode=MlaCore.dense_f32),
    moe=MoeAxes(router=Router.f32),
    execution=ExecutionAxes(mode=Execution.incremental),
)
BF16 = replace(
    F32,
    stream=Stream.bf16,
    gemm=Gemm.bf16,
    norm=NormAxes(variance=NormVariance.stored, rounding=NormRounding.twice),
    elementwise=ElementwiseAxes(swiglu=Order.stepwise, beta=Store.bf16),
)
bf16 = torch.bfloat16
FLOAT32_BOUND = 4e-6  # sums in another order and another exp, through three layers


@cache
def tiny() -> Any:
    return casts()


def logits(variant: Variant, prompts: list[list[int]]) -> Tensor:
    """[B, T, V] of forced tokens through prefill and decode."""
    forced = torch.full((len(prompts),), 5)
    return torch.stack([r.logits for r in decode.steps(build(variant, tiny()), prompts, 2, lambda *_: forced)], 1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def through_bf16(x: Tensor) -> Tensor:
    return x.to(bf16)


@pytest.mark.parametrize("axis", AXES)
def test_each_compiled_operation_computes_what_torch_computes(axis: str) -> None:
    """One axis at a time, in float32, K != V and no width a power of two, over rows of unequal length."""
    rows = ragged([5, 2])
    got = logits(replace(F32, impl=ImplAxes(**{axis: Impl.inductor})), rows)
    assert relative(got, logits(F32, rows)) < FLOAT32_BOUND


def test_every_store_that_a_recipe_names_is_made() -> None:
    """A norm rounded twice and a silu stored in bf16, compiled: the bits of the same lines run one by one."""
    x, weight = drawn(9, 96), drawn(96, seed=1)
    got = inductor.rms_norm(x, weight, 1e-5, between=bf16, out=bf16)
    assert got.equal(norm.rms_norm(x, weight, 1e-5, between=through_bf16).to(bf16))
    assert got.equal(inductor.rms_norm(x, weight, 1e-5, between=bf16, out=bf16, value=x.clone()))
    gate, up = drawn(9, 64).to(bf16), drawn(9, 64, seed=2).to(bf16)
    got = inductor.silu_and_mul(gate, up, accum=torch.float32, between=bf16, out=bf16)
    assert got.equal((norm.SILU["silu"](gate.float()).to(bf16).float() * up.float()).to(bf16))


def test_a_compiler_left_to_itself_leaves_out_the_store_on_the_way() -> None:
    """Lines that store silu in bf16, under torch.compile as it comes, give the bits of the recipe that rounds once."""

    def lines(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate.float()).to(bf16) * up

    gate, up = drawn(64, 64).to(bf16), drawn(64, 64, seed=2).to(bf16)
    alone = torch.compile(lines, fullgraph=True)(gate, up)
    once = inductor.silu_and_mul(gate, up, accum=torch.float32, between=None, out=bf16)
    assert alone.equal(once)
    assert not alone.equal(lines(gate, up)), "the two roundings differ somewhere in four thousand values"


def test_nor_is_a_norm_rounded_twice_by_it() -> None:
    """The same of a norm that stores what it normalised before the weight: `norm.rounding=once` is what comes of it."""

    def lines(x: Tensor, weight: Tensor) -> Tensor:
        return norm.rms_norm(x, weight, 1e-5, between=through_bf16).to(bf16)

    x, weight = drawn(64, 64), drawn(64, seed=1)
    alone = torch.compile(lines, fullgraph=True)(x, weight)
    assert alone.equal(inductor.rms_norm(x, weight, 1e-5, between=None, out=bf16))
    assert not alone.equal(lines(x, weight))


def test_a_token_of_the_delta_rule_with_its_gates() -> None:
    """One step over rows, K != V, against the recurrence in float64."""
    q, k, f = (drawn(5, 3, 8, seed=s) for s in range(3))
    v, beta, state = drawn(5, 3, 6, seed=4), drawn(5, 3, seed=5), drawn(5, 3, 8, 6, seed=6)
    gate = (-drawn(3, 1, seed=7).exp(), drawn(3, 8, seed=8))
    kept = (None, None, None, None)
    got = inductor.delta_step((q, k, v, f, beta), gate, state, scale=0.3, eps=1e-6, stores=kept)
    q, k, v, f, beta, state = (x.double() for x in (q, k, v, f, beta, state))
    g = kda.decay_gate(f, *(x.double() for x in gate))
    operands = (kda.l2norm(q) * 0.3, kda.l2norm(k), v, g, torch.sigmoid(beta))
    q, k, v, g, beta = (x.unsqueeze(1) for x in operands)
    o, after = kda.recurrent(q, k, v, g, beta, state)
    assert relative(got[0], o[:, 0]) < 1e-6
    assert relative(got[1], after) < 1e-6


def test_convolution_and_router() -> None:
    """The sum over taps with SiLU, and choice and weights, equal torch's within float32; ids exactly."""
    window, weight = drawn(2, 7, 10), drawn(10, 4, seed=1)
    got = inductor.short_conv(window, weight, between=None, out=None)
    assert relative(got, norm.silu_lanes(conv.taps(window.double(), weight.double()))) < 1e-6
    lg, bias = drawn(6, 16), drawn(16, seed=3).abs()
    for weigh, by in moe.WEIGHTS.items():
        ids, weights = inductor.route(lg, bias, k=3, factor=2.4, renormalize=True, weigh=weigh, between=None)
        scores = torch.sigmoid(lg)
        assert ids.equal(moe.top_k_lowest_id(scores + bias, 3))
        assert relative(weights, by(scores.gather(-1, ids), 2.4, True)) < 1e-6


def test_one_kernel_serves_all_rows_and_all_cuts() -> None:
    """Rows alone and together, cut out of a wider tensor, of odd strides: the same bits, nothing compiled anew."""
    x, weight = drawn(64, 96), drawn(96, seed=1)

    def norm_of(y: Tensor) -> Tensor:
        return inductor.rms_norm(y, weight, 1e-5, between=None, out=None)

    whole = norm_of(x)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert all(norm_of(x[i : i + 1])[0].equal(whole[i]) for i in range(64))
    wide = torch.cat([drawn(64, 5, seed=9), x], 1)[:, 5:]
    assert norm_of(wide).equal(whole)
    odd = torch.empty_strided((1, 96), (999, 1)).copy_(x[3:4])
    assert norm_of(odd)[0].equal(whole[3])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_it_runs_in_the_model_and_is_seen_to_run() -> None:
    """The stores of a bf16 recipe are made at every site (nothing contradicts it), in a batch of unequal rows too."""
    variant = replace(BF16, impl=replace(COMPILED, kda=Impl.torch))
    seen = observe(resolve(variant, tiny().checkpoint.config), tiny(), prompt(7))
    assert seen.contradictions == ()
    ran = {x.split("/")[0] for place in seen.places.values() for x in place.launches}
    assert {"inductor.rms_norm", "inductor.short_conv", "inductor.silu_and_mul", "inductor.route"} <= ran
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("variants.binding.Binder.kernel", lambda *_: None)
        found = observe(resolve(variant, tiny().checkpoint.config), tiny(), prompt(7)).contradictions
    assert any("declared inductor" in line for line in found), "torch ran where compiled lines were declared"


def test_paged_rows_without_a_slot_are_left_alone() -> None:
    """The delta rule over a decode that is filled up: rows that nobody owns write nowhere."""
    run = ExecutionAxes(mode=Execution.paged, batch=3, fixed_rows=True, block_size=4)
    paged = replace(F32, execution=run, impl=COMPILED)
    rows = ragged([5, 2])
    assert relative(logits(paged, rows), logits(F32, rows)) < FLOAT32_BOUND


def test_a_store_by_override_is_made_inside() -> None:
    """An override of a swallowed site is no promise that is not kept: it changes the bits as torch's own does."""
    override = {"shared_silu": SiteOverride(output=Store.bf16)}
    plain, rounded = replace(F32, impl=COMPILED), replace(F32, impl=COMPILED, override=override)
    rows = [prompt(5)]
    got = logits(rounded, rows)
    assert relative(got, logits(plain, rows)) > 10 * FLOAT32_BOUND
    assert relative(got, logits(replace(F32, override=override), rows)) < FLOAT32_BOUND


def test_what_it_has_not_is_refused_in_one_line() -> None:
    """Chunks, the library's convolution, rows of their own bits, and operations that nothing compiles."""
    config = tiny().checkpoint.config

    def refused(variant: Variant, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            resolve(variant, config)

    only = {axis: ImplAxes(**{axis: Impl.inductor}) for axis in AXES}
    refused(replace(F32, impl=only["kda"], kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent)), "recurrent")
    refused(replace(BF16, impl=only["conv"], elementwise=ElementwiseAxes(conv=Order.stepwise)), "conv=once")
    refused(replace(F32, impl=only["norms"], batch_invariant=True), "batch_invariant=false")
    refused(replace(F32, impl=ImplAxes(linear=Impl.inductor)), "there is none")


def test_what_it_needs_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler gets one line; a failure of torch.compile too."""
    monkeypatch.setattr(native_library.shutil, "which", lambda _: None)
    with pytest.raises(DeviceError, match="compiler"):
        check_environment(frozenset({"inductor"}), "cpu")
    monkeypatch.setattr(inductor, "_stored", lambda *_: torch._dynamo.graph_break())
    with pytest.raises(DeviceError, match=r"torch\.compile failed on silu_and_mul"):
        inductor.silu_and_mul(drawn(2, 7), drawn(2, 7), accum=torch.float32, between=bf16, out=None)


@pytest.mark.parametrize("switch", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_compiler_that_is_switched_off_is_refused(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile would give back the lines as they are, and a row would call them compiled."""
    monkeypatch.setenv(switch, "1")
    with pytest.raises(DeviceError, match=f"{switch}=1 switches it off"):
        LocalEngine(tiny(), replace(F32, impl=COMPILED), name="tiny")
    LocalEngine(tiny(), F32, name="tiny")


def test_waiting_for_the_compiler_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A gate says that it compiles, and how long that took."""
    compiling = Compiling(("inductor",))
    for width in (33, 35):
        with compiling.watch():
            inductor.gated_rms_norm(drawn(2, 3, width), drawn(2, 3, width), drawn(width), 1e-5, out=None)
    said = capsys.readouterr().err
    assert said.count("compiling kernels (impl inductor)") == 1
    assert said.count("1 kernels ready") == 2
