"""vLLM's kernels in our model: what is handed to them, what is refused, and what happens where vLLM is not there."""

import os
import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType, SimpleNamespace

import fake_vllm
import pytest
import torch
from tiny import ODD, build, casts, forced, prompt, ragged, relative

from harness.compose import named_variant
from harness.observe import contradictions, observe
from harness.rounding_noise import twin
from variants.axes import (
    Execution,
    Impl,
    ImplAxes,
    KdaCore,
    MlaCore,
    NormVariance,
    Param,
    RouterScale,
    Store,
    Variant,
)
from variants.dtypes import DType
from variants.errors import DeviceError, UsageError
from variants.model import Model
from variants.ops import kda, mla, norm, vllm_kda, vllm_load, vllm_mla, vllm_norm
from variants.ops.linear import gemm, gemm_flat
from variants.recipe import Recipe, resolve
from variants.weights import Weights

EXACT, FLASH = named_variant("vllm_exact"), named_variant("vllm_exact_flash")
# Two orders of sums in bf16 products and cores: a few roundings of 2^-9 each, over values of one size.
BF16_ORDER = 0.06


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's entry points in plain torch."""
    fake_vllm.register()
    monkeypatch.setattr(vllm_load, "module", fake_vllm.module)


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def by_torch(v: Variant) -> Variant:
    """The same rounding points by torch's functions, as far as it has them."""
    chunk_form = type(v.kda.chunk_form).plain
    return replace(v, impl=ImplAxes(), kda=replace(v.kda, chunk_form=chunk_form), reduced_sums=False)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("variant", [EXACT, FLASH], ids=["triton_mla", "flash_attn_mla"])
def test_whole_model_is_the_recipe(variant: Variant) -> None:
    """Through prefill and decode every operation reads and writes what the same recipe by torch does."""
    made, tokens = casts(), [prompt(5, seed=9)]
    ours = forced(build(variant, made), [prompt(9)], tokens)
    plain = forced(build(by_torch(variant), made), [prompt(9)], tokens)
    assert relative(ours, plain) < BF16_ORDER
    other = forced(build(variant, made), [prompt(9, seed=3)], tokens)
    assert relative(other, plain) > BF16_ORDER


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("variant", [EXACT, FLASH], ids=["triton_mla", "flash_attn_mla"])
def test_ragged_batch_is_each_row_alone(variant: Variant) -> None:
    """A row's state goes to its own slot and its keys to its own pages, whatever runs beside it."""
    made, rows = casts(), ragged([2, 5, 3])
    tokens = [prompt(4, seed=70 + i) for i in range(3)]
    together = forced(build(variant, made), rows, tokens)
    alone = torch.cat([forced(build(variant, made), [r], [t]) for r, t in zip(rows, tokens, strict=True)])
    assert relative(together, alone) < BF16_ORDER


@pytest.mark.usefixtures("engine")
def test_what_ran_is_what_was_declared() -> None:
    """Each site is seen with the function of ours that calls vLLM's kernel; torch's in its place is reported."""
    made = casts()
    recipe = resolve(EXACT, ODD)
    seen = observe(recipe, made, prompt(4))
    assert seen.contradictions == ()
    assert seen.places["kda_core.prefill@0"].functions
    assert any("silu_and_mul" in f for f in seen.places["shared_act.decode@1"].functions)
    lying = replace(recipe, rules={**recipe.rules, "short_conv": replace(recipe.rules["short_conv"], impl="fla")})
    assert any("short_conv" in line for line in contradictions(lying, seen.places))


@pytest.mark.usefixtures("engine")
def test_conv_carries_its_inputs() -> None:
    """A prompt and single tokens after it give what one longer prompt gives, bit for bit, and the same last inputs."""
    raw, weight, none = bf16(9, 6), torch.randn(6, 4), torch.zeros(1, 3, 6, dtype=torch.bfloat16)
    whole, last = vllm_kda.short_conv(raw, weight, none, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32))
    part, state = vllm_kda.short_conv(raw[:7], weight, none, cu_seqlens=torch.tensor([0, 7], dtype=torch.int32))
    steps = [part]
    for t in (7, 8):
        y, state = vllm_kda.short_conv(raw[t : t + 1], weight, state, cu_seqlens=None)
        steps.append(y)
    assert torch.equal(torch.cat(steps), whole)
    assert torch.equal(state, last)
    assert torch.equal(state[0], raw[-3:])
    assert not none.any(), "the state that was given is left alone"


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("core", ["chunk", "recurrent"])
def test_delta_rule_keeps_the_orientation_of_states(core: str) -> None:
    """States come and go as [N, H, K, V] though vLLM's are [H, V, K]; no sequence has row 0 of its pool."""
    h, k, v, n = 2, 5, 7, 3
    operands = (bf16(1, n, h, k), bf16(1, n, h, k, seed=1), bf16(1, n, h, v, seed=2), bf16(1, n, h, k, seed=3),
                torch.rand(1, n, h))  # fmt: skip
    state, a_log, dt_bias = torch.randn(n, h, k, v), torch.randn(h), torch.randn(h * k)
    before = state.clone()
    o, after = vllm_kda.CORES[core](
        operands, state, a_log=a_log, dt_bias=dt_bias, cu_seqlens=torch.arange(n + 1, dtype=torch.int32)
    )
    q, key, value, g, beta = (x.float().transpose(0, 1) for x in operands)
    decay = kda.decay_gate(g, kda.decay_rate(a_log.view(h, 1)), dt_bias.view(h, k))
    expected, new = kda.recurrent(kda.l2norm(q) * k**-0.5, kda.l2norm(key), value, decay, beta, state)
    assert relative(after, new) < 1e-5  # the fake's chunks sum in another order
    assert relative(o.transpose(0, 1), expected) < 2**-8
    assert torch.equal(state, before)


@pytest.mark.usefixtures("engine")
def test_norm_of_a_sum_adds_nothing() -> None:
    """The kernel that adds and normalises gives the norm of what it is given; signed zeros and the input stay."""
    x = bf16(3, 8)
    x[0, 0], x[0, 1] = 0.0, -0.0
    kept, weight = x.clone(), bf16(8, seed=4)
    y = vllm_norm.rms_norm(x, weight, 1e-5, of_sum=True)
    assert torch.equal(y, vllm_norm.rms_norm(x, weight, 1e-5, of_sum=False))
    assert torch.equal(torch.signbit(y[0, :2]), torch.signbit(x[0, :2] * weight[:2]))
    assert torch.equal(x.view(torch.int16), kept.view(torch.int16))


@pytest.mark.usefixtures("engine")
def test_gated_norm_leaves_its_input() -> None:
    """vLLM's gated norm writes over its input; ours hands it a copy."""
    x, gate, weight = bf16(1, 3, 2, 8), bf16(1, 3, 2, 8, seed=1), bf16(8, seed=2)
    kept = x.clone()
    y = vllm_norm.gated_rms_norm(x, weight, gate)
    expected = norm.gated_rms_norm(x.float(), weight.float(), torch.sigmoid(gate.float()), eps=1e-5)
    assert torch.equal(y, expected.bfloat16())
    assert torch.equal(x, kept)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("flash", [False, True], ids=["triton", "flash"])
@pytest.mark.parametrize("keys", [1, 127, 128, 130])
def test_pages_hold_the_latent(flash: bool, keys: int) -> None:
    """Attention over pages of 128 is attention over the latent, at and around a page's end."""
    h, r, p, n = 2, 6, 3, 2
    latent = bf16(n, keys, r + p)
    lengths = [keys, max(1, keys - 1)]
    q, q_pe = bf16(n, h, r, seed=1), bf16(n, h, p, seed=2)
    queries = vllm_mla.Queries(torch.arange(n + 1, dtype=torch.int32), 1) if flash else None
    o = vllm_mla.absorbed(q, q_pe, vllm_mla.pages(latent, lengths), scale=0.3, queries=queries)
    for i, length in enumerate(lengths):
        k = latent[i, :length].float().unsqueeze(1).expand(-1, h, -1).unsqueeze(0)
        row = torch.cat([q[i], q_pe[i]], -1).float().view(1, 1, h, r + p)
        expected = mla.dense(row, k, k[..., :r], torch.tensor([[length - 1]]), scale=0.3)
        assert torch.equal(o[i], expected[0, 0].bfloat16())


def test_products_by_head_and_layouts() -> None:
    """Into and out of the latent is a product for each head; only where its result lies in memory differs."""
    x, weight = torch.randn(2, 3, 4, 5), torch.randn(4, 5, 6)
    into, out = vllm_mla.absorb(x, weight), vllm_mla.expand(x, weight)
    assert relative(into, mla.per_head(x, weight)) < 1e-6
    assert torch.equal(into, out)
    assert out.is_contiguous()
    assert not into.is_contiguous()


def test_flat_product_is_the_product() -> None:
    """Rows brought into two dimensions give the values of the library's product in three."""
    x, weight = torch.randn(1, 4, 10)[..., 2:7], torch.randn(3, 5)
    assert relative(gemm_flat(x, weight), gemm(x, weight)) < 1e-6
    assert gemm_flat(x, weight).shape == (1, 4, 3)


REFUSED = {
    "variance": replace(EXACT, norm=replace(EXACT.norm, variance=NormVariance.pre_store)),
    "prefills in chunks": replace(EXACT, kda=replace(EXACT.kda, decode=KdaCore.chunk)),
    "it has no dense_f32": replace(EXACT, mla=replace(EXACT.mla, decode=MlaCore.dense_f32)),
    "scales before": replace(EXACT, moe=replace(EXACT.moe, router_scale=RouterScale.after)),
    "bias in bf16": replace(EXACT, params=replace(EXACT.params, correction_bias=Param.as_stored)),
    "stores bf16 at kda_core": replace(EXACT, kda=replace(EXACT.kda, outputs=Store.f32)),
    "row a slot": replace(EXACT, execution=replace(EXACT.execution, mode=Execution.paged)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_other_roundings_are_refused(why: str) -> None:
    """A recipe that rounds elsewhere than vLLM's kernels do is refused in one line that says what would do."""
    with pytest.raises(UsageError, match=rf"impl\.\w+=vllm: [^\n]*{why.split(' at ')[0]}[^\n]*$"):
        resolve(REFUSED[why], ODD)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("length", [1, 513])
def test_prompts_that_vllm_runs_otherwise_are_refused(length: int) -> None:
    """A prompt of one token, or one above the length that FLASH_ATTN_MLA absorbs, takes kernels that are not these."""
    with pytest.raises(UsageError, match="prompts of 2 to 512 tokens"):
        forced(build(EXACT, casts()), [prompt(length)], [[3]])


@pytest.mark.usefixtures("engine")
def test_a_prompt_in_pieces_is_refused() -> None:
    """A later piece would run with context, which these bindings do not give the kernels."""
    pieces = replace(EXACT, execution=replace(EXACT.execution, prefill_piece=3))
    with pytest.raises(UsageError, match="one piece"):
        forced(build(pieces, casts()), [prompt(5)], [[3]])


def test_raised_recipe_leaves_the_kernels() -> None:
    """vLLM's kernels have bf16 alone: the same recipe in float32 or float64 is torch's, so ladder and oracle run."""
    for dtype in (DType.f32, DType.f64):
        assert resolve(EXACT, ODD).at_precision(dtype).implementations == {"torch"}


@pytest.mark.parametrize("variant", [EXACT, FLASH, named_variant("vllm_mirror")], ids=["triton", "flash", "mirror"])
def test_the_twin_in_float64_is_torchs_alone(variant: Variant) -> None:
    """It swallows no site, cuts nothing to TF32, and is the same function as the twin of those roundings by torch."""
    made, prompts, tokens = casts(), [prompt(9), prompt(3)], [prompt(2, seed=9), prompt(2)]
    recipe = twin(resolve(variant, ODD))
    assert recipe.implementations == {"torch"}
    assert not any(r.inside or dict(r.options).get("form") for r in recipe.rules.values())

    def run(r: Recipe) -> torch.Tensor:
        return forced(Model(ODD, r, Weights(made, r.semantics)), prompts, tokens)

    assert relative(run(recipe), run(twin(resolve(by_torch(variant), ODD)))) < 1e-12


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_load._prepare.cache_clear()
    monkeypatch.delenv(vllm_load.FIRST_CONFIG, raising=False)
    for name in vllm_load.QUIET:
        monkeypatch.setenv(name, "as it was")


def stand_in(monkeypatch: pytest.MonkeyPatch, *, version: str, installed: bool) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    switch = SimpleNamespace(is_installed=lambda: installed)
    for name in ("vllm", "vllm.triton_utils", "vllm._custom_ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.triton_utils.force_first_config", switch)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("unprepared")
def test_absent_vllm_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package there is no import error but one line and the exit code of the environment."""

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(DeviceError, match=r"needs vLLM 0\.26\.0"):
        vllm_load.module("_custom_ops")


@pytest.mark.usefixtures("unprepared")
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version rounds elsewhere, so it is no stand-in."""
    stand_in(monkeypatch, version="0.33.0", installed=True)
    with pytest.raises(DeviceError, match=r"got 0\.33\.0"):
        vllm_load.module("_custom_ops")


@pytest.mark.usefixtures("unprepared")
def test_tiles_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel's first configuration is asked for before vLLM is imported; where that is too late, refused."""
    stand_in(monkeypatch, version=vllm_load.VERSION, installed=True)
    assert vllm_load.module("_custom_ops") is sys.modules["vllm._custom_ops"]
    assert os.environ[vllm_load.FIRST_CONFIG] == "1"
    vllm_load._prepare.cache_clear()
    stand_in(monkeypatch, version=vllm_load.VERSION, installed=False)
    with pytest.raises(DeviceError, match="before the start"):
        vllm_load.module("_custom_ops")
    monkeypatch.setenv(vllm_load.FIRST_CONFIG, "0")
    with pytest.raises(DeviceError, match="got 0"):
        vllm_load.module("_custom_ops")


def test_axes_name_what_there_is() -> None:
    """The named variants give every operation to vLLM, and to nobody else."""
    for variant in (EXACT, FLASH):
        assert set(vars(variant.impl).values()) == {Impl.vllm}
