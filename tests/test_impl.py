"""Implementations as an axis: each kernel in the whole model, what it cannot do refused, what ran read off the run."""

import importlib
import os
import subprocess
import sys
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny import ODD, SMALL, build, casts, prompt, ragged, relative
from torch import Tensor

from harness.config import DeviceChoice
from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.implementations import KERNELS as EXPECTED
from harness.implementations import expected_function
from harness.inspect import make_oracle, model_stepper
from harness.local_replay import local_replay
from harness.observe import Observed, observe
from variants import decode, impl_rules, kernels
from variants.axes import (
    ChunkForm,
    ElementwiseAxes,
    Execution,
    ExecutionAxes,
    Experts,
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
    TileOrder,
    Variant,
)
from variants.dtypes import DType
from variants.errors import DeviceError, UsageError
from variants.kernels import KERNELS, OPERATIONS, check_environment, choices, has, kernel
from variants.layers import KdaBlock
from variants.model import Model
from variants.recipe import resolve
from variants.sites import CHUNK_SITES
from variants.weights import Weights

AXES = tuple(f.name for f in fields(ImplAxes))
OURS = tuple(a for a in AXES if has(a, Impl.triton))
ALL = ImplAxes(**dict.fromkeys(OURS, Impl.triton))
CARRIED = ExecutionAxes(mode=Execution.incremental)
STEPS = KdaAxes(prefill=KdaCore.recurrent, decode=KdaCore.recurrent)
CHUNKED = KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent)
TILES = MlaAxes(prefill=MlaCore.flash, decode=MlaCore.absorbed, tile_q=16, tile_k=16, kv_splits=2)
F32 = Variant(gemm=Gemm.f32, kda=STEPS, mla=TILES, moe=MoeAxes(router=Router.f32), execution=CARRIED)
BF16 = Variant(
    stream=Stream.bf16,
    gemm=Gemm.bf16,
    logits=Store.bf16,
    norm=NormAxes(variance=NormVariance.stored),
    kda=replace(CHUNKED, outputs=Store.bf16),
    mla=replace(TILES, outputs=Store.bf16, probs=Store.bf16),
    moe=MoeAxes(router=Router.bf16, expert_out=Store.bf16, experts=Experts.grouped),
    elementwise=ElementwiseAxes(swiglu=Order.stepwise),
    execution=CARRIED,
)
VLLM_CHUNKS = replace(CHUNKED, chunk_form=ChunkForm.vllm)
FLOAT32_BOUND = 4e-6  # the order of float32 sums is another one, through three layers


def with_impl(variant: Variant, **named: Impl) -> Variant:
    return replace(variant, impl=ImplAxes(**named))


@cache
def tiny() -> Any:
    return casts()


@cache
def small() -> Any:
    """One layer of each kind, one head: what a chunk costs under the interpreter goes with heads and layers."""
    return casts(SMALL)


def logits(variant: Variant, prompts: list[list[int]], *, steps: int = 2, made: Any = None) -> Tensor:
    """[B, T, V] of forced tokens through prefill and decode."""
    forced = torch.full((len(prompts),), 5)
    runs = decode.steps(build(variant, made or tiny()), prompts, steps, lambda *_: forced)
    return torch.stack([r.logits for r in runs], 1)


def seen(variant: Variant, length: int = 7) -> Observed:
    return observe(resolve(variant, SMALL), small(), prompt(length))


def test_every_axis_has_its_operations_and_its_rules() -> None:
    """Enum, table of kernels and table of rules name the same operations."""
    assert set(OPERATIONS) == set(impl_rules._AXES) == set(AXES)
    named = [op for ops in OPERATIONS.values() for op in ops]
    assert len(named) == len(set(named))
    assert {op for op, _ in KERNELS} == set(named)
    assert set(impl_rules.CHUNK_FORMS) == set(impl_rules.FORM_NUMBER) == set(ChunkForm)
    assert set(kernels.PACKAGES) == set(Impl) - {Impl.torch, Impl.native, Impl.inductor}
    assert all(choices(axis)[0] == "torch" for axis in AXES)


@pytest.mark.parametrize(("operation", "impl"), KERNELS, ids=str)
def test_every_entry_is_a_function_that_is_imported_when_it_is_asked_for(operation: str, impl: Impl) -> None:
    """Each line of the table leads to a function; no published package is imported by that."""
    assert callable(kernel(operation, impl.name))
    assert not {"fla", "vllm"} & set(sys.modules)


def test_every_expected_function_exists() -> None:
    """The observer's names are functions of variants.ops, written out apart from the table that binds."""
    for table in EXPECTED.values():
        for name in table.values():
            module, function = name.split(".")
            assert callable(getattr(importlib.import_module(f"variants.ops.{module}"), function))


@pytest.mark.parametrize("axis", OURS)
def test_each_kernel_computes_what_torch_computes(axis: str) -> None:
    """One operation at a time, in float32, K != V and no width a power of two: prefill and a carried step."""
    expected = logits(F32, [prompt(5)])
    got = logits(with_impl(F32, **{axis: Impl.triton}), [prompt(5)])
    assert 0 < relative(got, expected) < FLOAT32_BOUND, "another order of sums, and no more"


def test_all_kernels_together_over_ragged_rows() -> None:
    """Chunked prefill and decode of rows of other lengths: every row is what torch makes of it."""
    several = replace(F32, kda=CHUNKED, execution=ExecutionAxes(mode=Execution.incremental, batch=2))
    prompts = ragged([2, 4])
    got, expected = (logits(replace(several, impl=i), prompts, made=small()) for i in (ALL, ImplAxes()))
    assert relative(got, expected) < FLOAT32_BOUND


def test_a_bf16_engine_on_kernels_rounds_where_torch_does() -> None:
    """Every rounding of a bf16 engine is expressed: most logits have torch's bits, none is off by more than those."""
    got, expected = (logits(replace(BF16, impl=i), [prompt(6)], made=small()) for i in (ALL, ImplAxes()))
    assert got.dtype == expected.dtype == torch.bfloat16
    assert (got == expected).float().mean() > 0.9
    assert relative(got, expected) < 2**-6


def test_a_kernel_that_swallows_sites_says_so_and_rounds_there() -> None:
    """The recipe keeps the rule of a swallowed site and names the site at which its value comes out."""
    recipe = resolve(replace(BF16, impl=ALL), ODD)
    inside = {key: rule.inside for key, rule in recipe.rules.items() if rule.inside}
    assert inside["conv_sum"] == "short_conv"
    assert inside["beta"] == inside["decay_gate"] == inside["q_l2norm.prefill"] == "kda_core"
    assert inside["expert_act"] == "routed"
    assert inside["mla_probs.decode"] == "o_latent"
    assert recipe.rules["expert_act"].as_dict()["inside"] == "routed"
    assert recipe.rules["expert_act"].output is DType.bf16
    assert all("inside" not in r.as_dict() for r in resolve(BF16, ODD).rules.values())


def test_local_replay_allows_a_kernel_what_it_rounds_inside() -> None:
    """Held against float64, each kernel errs at the site where its value comes out by what its recipe rounds inside; a
    kernel that takes the decay gate of another layer is found there."""
    made, prompts = small(), [prompt(5)]
    recipe = resolve(replace(BF16, impl=ALL), SMALL)

    def replayed(patch: Any = None) -> Any:
        battery = Battery(prompts=prompts, continuations=[[5, 6]])
        weights = Weights(made, recipe.semantics, patch=patch)

        def mine(tap: Any) -> Any:
            return model_stepper(Model(SMALL, recipe, weights, probe=tap), battery)

        return local_replay(mine, make_oracle(made, recipe), recipe, prompts, battery.continuations)

    found = replayed()
    assert ("kda_core", 1, "prefill") in found.errors
    assert not any(key[0] in ("beta", "expert_act") for key in found.errors)
    assert found.excess() == []
    assert ("kda_core", 1, "decode") in replayed(lambda name, x: x * 1.2 if "A_log" in name else x).excess()


def test_kernels_run_over_pages() -> None:
    """Sequences that join and leave, in slots and pages, choose torch's tokens through the block table."""
    paged = replace(F32, execution=ExecutionAxes(mode=Execution.paged, batch=2, block_size=4))
    prompts = ragged([3, 5, 2])
    torch_, ours = (
        LocalEngine(small(), v, name="paged").generate(prompts, 3) for v in (paged, replace(paged, impl=ALL))
    )
    assert (torch_.tokens == ours.tokens).all()
    assert abs(torch_.gaps - ours.gaps).max() < 1e-5


def test_a_shape_is_run_before_it_is_timed_and_what_compiles_is_in_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape of prompts runs once ahead; a step that still had to compile is listed apart from the steady ones."""
    engine = LocalEngine(small(), with_impl(F32, router=Impl.triton), name="kernels", device=DeviceChoice(threads=1))
    ran: list[int] = []
    real = decode.steps

    def counted(model: Any, prompts: Any, steps: int, choose: Any) -> Any:
        ran.append(steps)

        def late(t: int, logits: Tensor) -> Any:
            if steps == 5 and t == 2 and len(ran) == 3:
                engine.compiling._one()  # the step before this one compiled
            return choose(t, logits)

        return real(model, prompts, steps, late)

    monkeypatch.setattr(decode, "steps", counted)
    generation = engine.generate([prompt(4), prompt(6), prompt(4, seed=2)], 5)
    assert ran == [2, 2, 5, 5, 5], "two shapes ahead of three prompts"
    assert (0, 1) in generation.first_seen
    assert engine.compiling.count == 1


@pytest.mark.parametrize("form", [ChunkForm.vllm, ChunkForm.fla])
def test_a_form_of_chunks_names_every_rounding_inside(form: ChunkForm) -> None:
    """vLLM's and fla's kernels store each intermediate in bf16; the recipe says so, and which of the two it is."""
    variant = with_impl(replace(BF16, kda=replace(BF16.kda, chunk_form=form)), kda=Impl.triton)
    recipe = resolve(variant, ODD)
    assert {recipe.rules[s].output for s in CHUNK_SITES} == {DType.bf16}
    assert recipe.rules["q_l2norm.prefill"].output is DType.bf16
    assert recipe.rules["kda_core.prefill"].option("form") == impl_rules.FORM_NUMBER[form]
    plain = logits(with_impl(BF16, kda=Impl.triton), [prompt(9)], steps=1, made=small())
    assert 0 < relative(logits(variant, [prompt(9)], steps=1, made=small()), plain) < 2**-4


def test_the_form_of_chunks_in_torch_is_the_kernels() -> None:
    """torch in vLLM's form rounds where the kernel in that form does, and is nearer to it than to the plain core."""
    torch_, kernel, plain = (
        logits(v, [prompt(70)], steps=1, made=small()).float()
        for v in (
            replace(F32, kda=VLLM_CHUNKS),
            with_impl(replace(F32, kda=VLLM_CHUNKS), kda=Impl.triton),
            replace(F32, kda=CHUNKED),
        )
    )
    assert relative(torch_, kernel) < 0.2 * relative(torch_, plain)
    raised = resolve(replace(F32, kda=VLLM_CHUNKS), ODD).at_precision(DType.f32).rules["kda_core.prefill"]
    assert dict(raised.options) == {"chunk_size": 64}, "TF32 products are no float32"


def test_no_kernel_has_float64_and_a_raised_recipe_runs_on_torch() -> None:
    """The rungs of ladder and oracle: in float64 torch computes and nothing is swallowed, in float32 kernels do."""
    form = replace(BF16, kda=replace(BF16.kda, chunk_form=ChunkForm.vllm), impl=ALL)
    recipe = resolve(form, ODD)
    assert recipe.at_precision(DType.f64).implementations == {"torch"}
    assert not any(r.inside for r in recipe.at_precision(DType.f64).rules.values())
    raised = recipe.at_precision(DType.f32)
    assert raised.implementations == {"torch", "triton"}
    assert dict(raised.rules["kda_core.prefill"].options) == {"chunk_size": 64}, "TF32 products are no float32"


DENSE = replace(F32, mla=MlaAxes(prefill=MlaCore.dense_f32, decode=MlaCore.dense_f32))
REFUSED: list[tuple[Variant, str, str]] = [
    (F32, "swiglu=triton", "there is none; choose torch, row, vllm"),
    (F32, "experts=fla", "there is none; choose torch, triton"),
    (replace(F32, kda=KdaAxes()), "kda=triton", "no island_f64; set kda.prefill to recurrent or chunk"),
    (replace(F32, kda=replace(STEPS, state=Store.bf16)), "kda=triton", "set kda.state=f32 or keep"),
    (replace(F32, kda=replace(CHUNKED, chunk_size=32)), "kda=triton", "set kda.chunk_size=64"),
    (replace(F32, kda=CHUNKED), "kda=fla", "its chunks round as fla does; set kda.chunk_form to that"),
    (replace(F32, kda=replace(CHUNKED, chunk_form=ChunkForm.fla)), "kda=fla", "set kda.inputs=bf16, or gemm=bf16"),
    (DENSE, "mla=triton", "no dense_f32; set mla.prefill to flash or absorbed"),
    (replace(F32, mla=replace(TILES, tile_order=TileOrder.backward)), "mla=triton", "set mla.tile_order=forward"),
    (replace(BF16, elementwise=ElementwiseAxes(conv=Order.stepwise)), "conv=triton", "set elementwise.conv=once"),
    (replace(BF16, norm=NormAxes(variance=NormVariance.mixed)), "norms=triton", "set norm.variance=stored"),
    (replace(BF16, norm=NormAxes(rounding=NormRounding.twice)), "norms=fla", "set norm.rounding=once"),
    (replace(F32, weights_by_column=True), "linear=triton", "weights_by_column"),
    *((replace(F32, fused_elementwise=True), f"{x}=triton", "fused_elementwise") for x in ("norms", "conv", "kda")),
    (replace(F32, gemm=Gemm.f64), "linear=triton", "no kernel multiplies float64"),
    (replace(F32, moe=MoeAxes(router=Router.f64), stream=Stream.f64), "router=triton", "multiplies float64"),
    (replace(F32, gemm=Gemm.f64, stream=Stream.f64), "experts=triton", "no kernel multiplies float64"),
    (replace(F32, stream=Stream.f64), "norms=triton", "set stream to f32 or narrower"),
    (replace(F32, stream=Stream.f64), "kda=triton", "set stream to f32 or narrower"),
]


@pytest.mark.parametrize(
    ("variant", "setting", "why"), REFUSED, ids=[f"{s}-{i}" for i, (_, s, _) in enumerate(REFUSED)]
)
def test_what_a_kernel_cannot_round_is_refused_with_what_would_work(variant: Variant, setting: str, why: str) -> None:
    """One line of exit code 2 before anything is loaded: the setting, the reason, what to set instead."""
    axis, name = setting.split("=")
    with pytest.raises(UsageError) as refused:
        resolve(with_impl(variant, **{axis: Impl[name]}), ODD)
    message = str(refused.value)
    assert message.startswith(f"variant.impl.{setting}: ")
    assert why in message
    assert message.endswith(f"or choose impl.{axis}=torch")
    assert "\n" not in message


def test_an_override_inside_a_kernel_that_keeps_float32_is_refused() -> None:
    """A rounding that the kernel has is taken and changes values; one that it has not stops."""
    bf16 = SiteOverride(output=Store.bf16)
    taken = replace(with_impl(F32, experts=Impl.triton), override={"expert_act": bf16})
    assert relative(logits(taken, [prompt(4)]), logits(replace(taken, override={}), [prompt(4)])) > 1e-5
    with pytest.raises(UsageError, match=r"override.decay_gate at layer 0: impl triton computes it inside kda_core"):
        resolve(replace(with_impl(F32, kda=Impl.triton), override={"decay_gate": bf16}), ODD)
    apart = replace(with_impl(replace(F32, kda=CHUNKED), kda=Impl.triton), override={"q_l2norm.prefill": bf16})
    with pytest.raises(UsageError, match="override both alike"):
        build(apart, tiny())


def test_a_form_of_chunks_needs_a_kernel_that_has_it() -> None:
    """torch has vLLM's form alone, in chunks of 64 and float32; without a chunk core a form has no effect."""
    other = (replace(CHUNKED, chunk_form=ChunkForm.fla), replace(CHUNKED, chunk_form=ChunkForm.vllm, chunk_size=32))
    for refused in (*(replace(F32, kda=k) for k in other), replace(F32, kda=VLLM_CHUNKS, stream=Stream.f64)):
        with pytest.raises(UsageError, match=r"kda.chunk_form=\w+: torch has vllm's.*impl.kda=triton"):
            resolve(refused, ODD)
    with pytest.raises(UsageError, match=r"kda.chunk_form=vllm .*no chunk core"):
        replace(F32, kda=replace(STEPS, chunk_form=ChunkForm.vllm), impl=ALL)


def test_what_kernels_did_is_seen_and_contradicts_nothing() -> None:
    """Launches are read off Triton, at the site whose value the kernel returns, with the dtypes of its tensors."""
    observed = seen(replace(BF16, impl=ALL))
    assert observed.contradictions == ()
    assert observed.places["q_proj.decode@1"].launches == {"linear_triton.gemm/_gemm_kernel:bf16"}
    assert observed.places["kda_core.decode@1"].launches == {"kda_triton.recurrent/_recurrent_kernel:bf16,f32"}
    assert observed.places["routed.prefill@0"].launches >= {"moe_triton.experts/_up_kernel:bf16"}
    assert not {k for k in observed.places if k.startswith(("conv_sum", "decay_gate", "expert_act"))}
    assert observed.hash != seen(BF16).hash


def test_torch_under_the_name_of_a_kernel_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that declares triton and ran torch is contradicted at the site, in both phases."""
    real = KdaBlock._bind_core

    def torch_anyway(self: KdaBlock, b: Any) -> None:
        real(self, b)
        self.delta_rule, self.raw = self._delta_rule, set()

    monkeypatch.setattr(KdaBlock, "_bind_core", torch_anyway)
    found = seen(with_impl(F32, kda=Impl.triton)).contradictions
    assert "layer 1 kda_core.decode: ran kda.recurrent, declared kda_triton.recurrent (impl triton)" in found


def test_a_kernel_under_the_name_of_torch_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other way round: a launch at a place that was declared as torch's."""
    from variants.ops import linear, linear_triton

    monkeypatch.setitem(linear.LINEAR, "gemm", linear_triton.gemm)
    found = seen(F32).contradictions
    assert "layer 1 q_proj: ran linear_triton.gemm/_gemm_kernel, declared impl torch" in found


def test_two_forms_of_one_kernel_are_two_arms() -> None:
    """They launch the same kernels on the same dtypes; the settings of the launches tell them apart."""
    a, b = (
        seen(with_impl(replace(BF16, kda=replace(BF16.kda, chunk_form=f)), kda=Impl.triton))
        for f in (ChunkForm.vllm, ChunkForm.fla)
    )
    assert a.hash != b.hash


def test_an_implementation_that_is_not_there_is_one_line_of_exit_code_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package, no device, no interpreter: each stops before the first token, and says what would work."""
    with pytest.raises(DeviceError, match=r"impl fla needs the package fla, .*neartie\[fla\], or choose torch"):
        check_environment(frozenset({"fla"}), "cuda:0")
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    with pytest.raises(DeviceError, match="impl fla needs a CUDA device, got cpu"):
        check_environment(frozenset({"fla", "torch"}), "cpu")
    monkeypatch.setattr("variants.ops.launch_triton.INTERPRETED", False)
    with pytest.raises(DeviceError, match="set TRITON_INTERPRET=1 before the start"):
        check_environment(frozenset({"triton"}), "cpu")
    with pytest.raises(DeviceError, match="needs a CUDA device"):
        LocalEngine(tiny(), replace(F32, impl=ALL), name="kernels", device=DeviceChoice())
    check_environment(frozenset({"torch"}), "cpu")
    check_environment(frozenset({"triton"}), "cuda:0")


def test_the_command_line_ends_with_4_without_a_device() -> None:
    """In a process of its own, without the interpreter: one line on stderr."""
    words = ["variant=f32", "variant.impl.linear=triton"]
    code = (
        "import sys; from harness.compose import load; from harness.engines import make_engine; "
        "from experiments.outcome import Contained\n"
        "whole = Contained('')\nwith whole: make_engine(load(sys.argv[1:]))\nprint(whole.message); sys.exit(whole.code)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, check=False
    )
    if torch.cuda.is_available():
        assert done.returncode == 0
    else:
        assert done.returncode == 4
        assert "impl triton needs a CUDA device, got cpu" in done.stdout


def test_expected_functions_of_swallowed_sites_are_none() -> None:
    """A swallowed site has no function of its own; the site at which it comes out has the kernel's."""
    recipe = resolve(replace(F32, impl=ALL), ODD)
    assert expected_function("beta", recipe.rule("beta", 0)) == ""
    assert expected_function("kda_core", recipe.rule("kda_core", 0)) == "kda_triton.recurrent"
    assert expected_function("q_proj", recipe.rule("q_proj", 0)) == "linear_triton.gemm"
