"""Our CPU kernels: right against float64, with bits that follow neither neighbours, threads, formats nor machine."""

import ctypes
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import ODD, SMALL, build, casts, oracle, prompt
from torch import Tensor

from harness.compose import named_variant
from variants import decode
from variants.axes import Execution, Experts, Gemm, Graph, Impl, KdaCore, KvCache, MlaCore, SiteOverride, Store, Variant
from variants.dtypes import DType
from variants.errors import DeviceError, EngineError, UsageError
from variants.fused_step import fused_step
from variants.model_config import ModelConfig
from variants.ops import kda, mla, moe, native, native_library, norm
from variants.ops.conv import taps
from variants.recipe import batch_dependent

ULP = DType.f32.unit_roundoff
WIDTHS = (1, 7, 16, 33, 130)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def near(got: Tensor, wanted: Tensor, *, units: float) -> None:
    """Every element within so many unit roundoffs of the largest one."""
    assert got.dtype == torch.float32
    assert got.shape == wanted.shape
    assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < units * ULP


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("n", [1, 9, 40])
def test_a_product(n: int, k: int) -> None:
    """Against float64, for both formats of a weight, which give the same bits where they hold the same values."""
    x, weight = draw(3, 2, k), draw(n, k, seed=1).bfloat16()
    got = native.linear(x, weight)
    near(got, torch.nn.functional.linear(x.double(), weight.double()), units=8)
    assert torch.equal(got, native.linear(x, weight.float()))


def test_a_product_knows_no_neighbours() -> None:
    """A row of eleven, a row alone, and the rows of half a weight: the same bits."""
    x, weight = draw(11, 130), draw(43, 130, seed=1)
    whole = native.linear(x, weight)
    assert torch.equal(whole, torch.cat([native.linear(row, weight) for row in x.split(1)]))
    assert torch.equal(whole, torch.cat([native.linear(x, part.contiguous()) for part in weight.split(20)], 1))


def test_norms_and_gates() -> None:
    """RMSNorm, its gated form and SwiGLU against float64."""
    for width in WIDTHS:
        x, gate, weight = draw(5, width), draw(5, width, seed=1, scale=4), draw(width, seed=2)
        wide = x.double(), weight.double()
        near(native.rms_norm(x, weight, 1e-5), norm.rms_norm(*wide, 1e-5), units=8)
        near(native.gated_rms_norm(x, weight, gate, 1e-5),
             norm.gated_rms_norm(*wide, gate.double().sigmoid(), eps=1e-5), units=8)  # fmt: skip
        near(native.silu_and_mul(gate, x), torch.nn.functional.silu(gate.double()) * wide[0], units=8)


def test_silu_at_its_ends() -> None:
    """Far out, at infinity, and where there is no number; each element of its own error, not of the largest's."""
    x = torch.cat([torch.linspace(-87, 87, 4001), torch.tensor([-200.0, 200.0, 0.0])])
    got, wanted = native.silu_and_mul(x, torch.ones_like(x)).double(), torch.nn.functional.silu(x.double())
    assert float(((got - wanted).abs() / wanted.abs().clamp_min(1e-30)).max()) < 8 * ULP
    ends = native.silu_and_mul(torch.tensor([torch.inf, torch.nan]), torch.ones(2))
    assert ends[0] == torch.inf
    assert ends[1].isnan()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_convolution_carries_its_inputs(width: int) -> None:
    """Ragged rows in slots of their own, the last one not to be touched; then one token more on what was carried."""
    raw, weight, pool = draw(2, 5, 37), draw(37, width, seed=1), draw(3, width - 1, 37, seed=2)
    lengths, slots, before = torch.tensor([5, 3]), torch.tensor([2, 0]), pool.clone()
    by_tap = weight.t().contiguous()
    got = native.short_conv(raw, by_tap, pool, (lengths, slots))
    for row, (n, slot) in enumerate(zip(lengths.tolist(), slots.tolist(), strict=True)):
        window = torch.cat([before[slot], raw[row, :n]]).double()
        near(got[row, :n], torch.nn.functional.silu(taps(window[None], weight.double())[0]), units=8)
        assert torch.equal(pool[slot], window[len(window) - width + 1 :].float() if width > 1 else pool[slot])
        assert not got[row, n:].any()
    assert torch.equal(pool[1], before[1])


def delta_inputs(b: int, t: int, heads: int, key: int, value: int) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    q, k, f = (draw(b, t, heads, key, seed=i) for i in range(3))
    gate = (-draw(heads, seed=5).exp(), draw(heads, key, seed=6))
    return [q, k, draw(b, t, heads, value, seed=3), f * 6, draw(b, t, heads, seed=4)], gate


@pytest.mark.parametrize(("key", "value"), [(7, 11), (128, 130), (1, 1)])
def test_the_delta_rule(key: int, value: int) -> None:
    """Against the reference in float64 over ragged rows; the slots' states too, and nobody else's."""
    operands, (rate, bias) = delta_inputs(2, 6, 3, key, value)
    pool = draw(3, 3, key, value, seed=7, scale=0.1)
    lengths, slots, before = torch.tensor([6, 2]), torch.tensor([0, 2]), pool.clone()
    o = native.delta_rule(operands, (rate, bias), pool, (lengths, slots), (key**-0.5, 1e-6))
    for row, (n, slot) in enumerate(zip(lengths.tolist(), slots.tolist(), strict=True)):
        q, k, v, f, beta = (x[row : row + 1, :n].double() for x in operands)
        g = kda.decay_gate(f, rate.double()[:, None], bias.double())
        wanted, state = kda.recurrent(
            kda.l2norm(q) * key**-0.5, kda.l2norm(k), v, g, beta.sigmoid(), before[slot : slot + 1].double()
        )
        near(o[row : row + 1, :n], wanted, units=16)
        near(pool[slot : slot + 1], state, units=16)
    assert torch.equal(pool[1], before[1])


def test_the_decay_of_a_weak_gate_keeps_its_digits() -> None:
    """softplus of -9 is 1.2e-4, which 1 + e^x would give with three digits: over 1,000 tokens that adds up."""
    n = 1000
    q = k = torch.zeros(1, n, 1, 16)
    f, beta = torch.full((1, n, 1, 16), -9.0), torch.full((1, n, 1), -30.0)
    pool = torch.ones(1, 1, 16, 16)
    rows = (torch.tensor([n]), torch.tensor([0]))
    native.delta_rule([q, k, q, f, beta], (torch.tensor([-1.0]), torch.zeros(1, 16)), pool, rows, (1.0, 1e-6))
    exact = torch.exp(-n * torch.nn.functional.softplus(torch.tensor(-9.0, dtype=torch.float64)))
    assert abs(float(pool[0, 0, 0, 0]) / float(exact) - 1) < 300 * ULP  # a random walk of 1,000 roundings, some 20


def test_attention() -> None:
    """Against the reference in float64; a row that is not real (position -1) sees nothing and ruins nothing."""
    q, k, v = draw(2, 3, 2, 19), draw(2, 40, 2, 19, seed=1), draw(2, 40, 2, 35, seed=2)
    positions = torch.tensor([[4, 5, 39], [0, 16, 17]])
    wanted = mla.dense(q.double(), k.double(), v.double(), positions, scale=0.3)
    got = native.attention(q, k, v, positions, 0.3)
    near(got, wanted, units=8)
    positions[1, 2] = -1
    assert torch.equal(native.attention(q, k, v, positions, 0.3)[0], got[0])


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_the_router(renormalize: bool, before: bool) -> None:
    """Choice and weights as torch has them, equal scores by increasing id, the bias in the choice alone."""
    logits, bias = draw(50, 19), draw(19, seed=1, scale=0.3)
    ids, weights = native.route(logits, bias, k=4, factor=2.5, renormalize=renormalize, before=before)
    scores = logits.double().sigmoid()
    wanted = moe.top_k_lowest_id(scores + bias.double(), 4)
    assert torch.equal(ids, wanted)
    level = native.route(torch.full((1, 7), 0.3), torch.zeros(7), k=4, factor=1.0, renormalize=True, before=before)[0]
    assert level.tolist() == [[0, 1, 2, 3]]
    weigh = moe.weights_before if before else moe.weights_after
    near(weights, weigh(scores.gather(1, wanted), 2.5, renormalize), units=8)


def test_experts() -> None:
    """The routed sum against float64, a token alone and among others."""
    x, ids = draw(5, 23), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]])
    weights, w13, w2 = draw(5, 2, seed=1), draw(3, 18, 23, seed=2).bfloat16(), draw(3, 23, 9, seed=3).bfloat16()
    got = native.experts(x, ids, weights, w13, w2)
    gate, up = torch.einsum("nd,nkid->nki", x.double(), w13.double()[ids]).chunk(2, -1)
    out = torch.einsum("nki,nkdi->nkd", torch.nn.functional.silu(gate) * up, w2.double()[ids])
    near(got, (out * weights.double()[..., None]).sum(1), units=16)
    assert torch.equal(got[3:4], native.experts(x[3:4], ids[3:4], weights[3:4], w13, w2))


def test_threads_and_instruction_sets_move_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread and three; AVX-512, where this processor has it, and AVX2 as another processor would compile it."""
    if platform.machine() != "x86_64":
        pytest.skip("two instruction sets of x86-64 are compared")

    def everything() -> list[Tensor]:
        operands, gate = delta_inputs(1, 5, 3, 33, 70)
        rows, pool = (torch.tensor([5]), torch.tensor([0])), draw(1, 3, 33, 70, seed=8)
        o = native.delta_rule(operands, gate, pool, rows, (0.2, 1e-6))
        x, weight = draw(6, 130), draw(200, 130, seed=1)
        q, k = draw(1, 3, 2, 19), draw(1, 40, 2, 19, seed=1)
        conv = native.short_conv(draw(1, 5, 37), draw(4, 37, seed=1), draw(1, 3, 37, seed=2), rows)
        return [o, pool, native.linear(x, weight), native.linear(x, weight.bfloat16()), conv,
                native.rms_norm(x, draw(130), 1e-5), native.silu_and_mul(x * 20, x),
                native.attention(q, k, k, torch.tensor([[4, 20, 39]]), 0.3),
                *native.route(draw(9, 19), draw(19), k=4, factor=2.5, renormalize=True, before=False)]  # fmt: skip

    here = everything()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(here, everything(), strict=True))
    finally:
        torch.set_num_threads(threads)
    other = ctypes.CDLL(str(native_library.built("x86-64-v3")))
    other.neartie_run.argtypes = native_library.library().neartie_run.argtypes
    other.neartie_run.restype = None
    monkeypatch.setattr(native_library, "library", lambda: other)
    assert all(torch.equal(a, b) for a, b in zip(here, everything(), strict=True))


@cache
def fused(*, on: bool) -> Variant:
    return named_variant("f32_native" if on else "f32_native_plain")


def logits_of(variant: Variant, config: ModelConfig, prompts: Sequence[list[int]], *, dtype: torch.dtype) -> Tensor:
    """Of prefill and three forced tokens, rows together, after another sequence was in the slots: [steps, B, V]."""
    model = build(variant, casts(config, dtype=dtype))
    state, slots = model.new_state(slots=len(prompts), max_len=64), list(range(len(prompts)))
    decode.prefill(model, state, slots, [prompt(30 + i, seed=9) for i in slots])
    state.reset(slots)
    rows = [decode.prefill(model, state, slots, prompts)]
    rows += [decode.decode_one_token(model, state, slots, torch.tensor([t] * len(prompts))) for t in (5, 8, 13)]
    return torch.stack(rows)


@pytest.mark.parametrize(
    "config", [ODD, SMALL, replace(ODD, num_shared_experts=0)], ids=["K != V", "two", "none shared"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fused_step_is_the_plain_path(config: ModelConfig, dtype: torch.dtype) -> None:
    """Bit for bit, and as near to the oracle as torch's float32 is."""
    plain, joined = (logits_of(fused(on=on), config, [prompt(17)], dtype=dtype) for on in (False, True))
    assert torch.equal(plain, joined)
    library, exact = (logits_of(v, config, [prompt(17)], dtype=dtype) for v in (named_variant("f32"), oracle()))
    assert float((plain - exact).norm()) < 1.5 * float((library - exact).norm())


def test_rows_together_have_the_bits_of_each_alone() -> None:
    """Prompts of unlike lengths in one batch, in pieces and whole."""
    prompts = [prompt(17), prompt(3, seed=1), prompt(28, seed=2)]
    variant = fused(on=False)
    many = replace(variant, execution=replace(variant.execution, batch=3))
    pieces = replace(variant, execution=replace(variant.execution, batch=3, prefill_piece=5))
    alone = torch.cat([logits_of(variant, ODD, [p], dtype=torch.bfloat16) for p in prompts], 1)
    for together in (many, pieces):
        assert torch.equal(logits_of(together, ODD, prompts, dtype=torch.bfloat16), alone)


def test_the_step_chooses_and_goes_on() -> None:
    """Tokens fed back without Python are the plain path's greedy ones, the lowest id on ties."""
    made = casts(ODD)
    models = [build(fused(on=on), made) for on in (True, False)]
    states = [m.new_state(slots=2, max_len=64) for m in models]
    first = [decode.greedy(decode.prefill(m, s, [1], [prompt(9)])) for m, s in zip(models, states, strict=True)]
    step = fused_step(models[0], states[0], 1, models[0]._steps)
    step.begin(first[0], 9)
    step.run(6)
    wanted, token = [], first[1]
    for _ in range(6):
        token = decode.greedy(decode.decode_one_token(models[1], states[1], [1], token))
        wanted.append(int(token))
    assert step.taken(6) == wanted


def test_a_patched_weight_is_read() -> None:
    """A planted fault in one matrix reaches the plain path and the fused step, in the same bits."""
    made = casts(ODD)

    def patch(name: str, x: Tensor) -> Tensor:
        return x * 1.5 if name.endswith("layers.2.self_attn.o_proj.weight") else x

    got = []
    for on, patched in ((False, patch), (True, patch), (True, None)):
        model = build(fused(on=on), made, patch=patched)
        state = model.new_state(slots=1, max_len=32)
        decode.prefill(model, state, [0], [prompt(5)])
        got.append(decode.decode_one_token(model, state, [0], torch.tensor([5])))
    assert torch.equal(got[0], got[1])
    assert not torch.equal(got[1], got[2])


def test_nothing_follows_the_batch() -> None:
    """The recipe of the paged form names no place whose bits follow it."""
    from variants.recipe import resolve

    assert batch_dependent(resolve(named_variant("paged_native"), ODD)) == {}


REFUSED = {
    "recurrent": {"kda": {"prefill": KdaCore.chunk}},
    "dense_f32": {"mla": {"decode": MlaCore.absorbed, "cache": KvCache.latent}},
    "grouped": {"moe": {"experts": Experts.loop}},
    "float32": {"gemm": Gemm.bf16},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_the_kernels_cannot_do_is_refused(word: str) -> None:
    """Another core, cache, sum or format: one line that names what would work."""
    from variants.recipe import resolve

    variant = fused(on=False)
    changed = {k: replace(getattr(variant, k), **v) if isinstance(v, dict) else v for k, v in REFUSED[word].items()}
    with pytest.raises(UsageError, match=word):
        resolve(replace(variant, **changed), ODD)


def test_what_a_kernel_would_misread_is_refused() -> None:
    """It sees an address alone: a narrow activation, a float64 one, a bias that is strided, another place for ids."""
    wide, weight = torch.ones(1, 32), torch.ones(4, 32)
    for call in (
        lambda: native.linear(wide.bfloat16(), weight),
        lambda: native.linear(wide.double(), weight),
        lambda: native.linear(wide, weight.t()),
        lambda: native.rms_norm(wide, torch.ones(32).bfloat16(), 1e-5),
        lambda: native.route(torch.ones(1, 4), torch.ones(8)[::2], k=2, factor=1.0, renormalize=True, before=False),
        lambda: native.experts(wide, torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 8, 32), torch.ones(1, 32, 4)),
    ):
        with pytest.raises(EngineError, match="impl native: operand"):
            call()


def test_a_step_goes_no_further_than_its_state() -> None:
    """Steps past the last cell, and a token that no table holds, are refused; a slot beside it stays as it was."""
    model = build(fused(on=True), casts(ODD))
    state = model.new_state(slots=2, max_len=12)
    decode.prefill(model, state, [0, 1], [prompt(9), prompt(9)])
    step = fused_step(model, state, 0, model._steps)
    step.begin(torch.tensor([3]), 9)
    with pytest.raises(UsageError, match="13 tokens does not fit max_len=12"):
        step.run(4)
    for token in (-1, ODD.vocab_size):
        with pytest.raises(UsageError, match=f"token id {token} is outside"):
            step.begin(torch.tensor([token]), 9)


@pytest.mark.parametrize(
    "override", [{"mla_k": SiteOverride(output=Store.bf16)}, {"q_proj": SiteOverride(input=Store.bf16)}]
)
def test_no_site_is_overridden(override: dict[str, SiteOverride]) -> None:
    """What one site stored narrower the next would read as float32."""
    with pytest.raises(UsageError, match="native is float32 throughout"):
        replace(fused(on=False), override=override)


def test_a_fused_step_wants_all_of_them() -> None:
    """One operation by torch, the latent cache, an override, a graph, two rows."""
    variant = fused(on=True)
    run = variant.execution
    for changed in (
        {"impl": replace(variant.impl, conv=Impl.torch)},
        {"mla": replace(variant.mla, cache=KvCache.latent)},
        {"execution": replace(run, graph=Graph.cuda)},
        {"execution": replace(run, batch=2)},
        {"execution": replace(run, mode=Execution.paged)},
    ):
        with pytest.raises(UsageError, match="execution"):
            replace(variant, **changed)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler, one that fails, a folder that cannot be written, a GPU: one line each with a way out."""
    from variants.kernels import check_environment

    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceError, match="CXX=no-such-compiler is no program"):
        native_library.built("x86-64")
    false = tmp_path / "false"
    false.write_text("#!/bin/sh\nexit 1\n")
    false.chmod(0o755)
    monkeypatch.setenv("CXX", str(false))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DeviceError, match="could not compile"):
        native_library.built()
    assert not list((tmp_path / "neartie").iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="set XDG_CACHE_HOME"):
        native_library.built()
    with pytest.raises(DeviceError, match="runs on the CPU"):
        check_environment(frozenset({"native"}), "cuda:0")
