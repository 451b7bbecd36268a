"""The transformers engine: its tokens are the library's, its scores are its own logits, its taps change nothing."""

import copy
import dataclasses
import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.engines.logits import greedy, log_softmax, ranked
from harness.engines.protocol import Engine
from variants.errors import DeviceError, EngineError, InputError, NeartieError, UsageError
from variants.sites import ALL_SITES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is optional")

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "assets" / "kimi-linear-12m"
PROMPTS = ([1, 905, 77, 3000, 12], [1, 44, 2000])


def load(path=CHECKPOINT, **options):
    from harness.engines.transformers_engine import TransformersEngine

    return TransformersEngine.load(path, **options)


def with_(engine, **fields):
    """The engine with fields of its loaded model replaced."""
    return type(engine)(dataclasses.replace(engine._loaded, **fields))


def full_logits(scored):
    """The logits of a score that was asked for them."""
    assert scored.logits is not None
    return scored.logits


@pytest.fixture(scope="module")
def f32():
    return load()


@pytest.fixture(scope="module")
def bf16():
    return load(dtype="bf16")


@pytest.fixture(scope="module")
def greedy_run(f32):
    return f32.generate(PROMPTS, 6)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random checkpoint of odd sizes that the library itself saved."""
    from harness.engines.transformers_load import modeling

    library = modeling("cpu")
    torch.manual_seed(7)
    config = library.KimiLinearConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5, num_local_experts=5, num_experts_per_tok=2, linear_head_dim=8, linear_num_heads=3,
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
        pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128,
        hidden_act="silu", head_dim=8,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    library.KimiLinearForCausalLM(config).save_pretrained(path, max_shard_size="10KB")
    return path


def test_f32_scores_109_of_128_on_the_vllm_gate(f32):
    """The library in float32 agrees with vLLM's bf16 tokens in exactly 109 places of the gate battery."""
    golden = np.load(ROOT / "assets" / "goldens" / "vllm-0.26.0-h200" / "gate.npz")
    prompts = [ids[:n].tolist() for ids, n in zip(golden["prompt_ids"], golden["prompt_len"], strict=True)]
    run = f32.generate(prompts, golden["token_ids"].shape[-1])
    assert int((run.tokens == golden["token_ids"][0]).sum()) == 109
    assert run.finite.all()


def test_tokens_are_those_of_the_librarys_own_greedy_search(f32, greedy_run):
    """Choosing tokens here gives what the library's `generate` gives with sampling off."""
    from harness.engines.transformers_load import quiet

    for prompt, tokens in zip(PROMPTS, greedy_run.tokens, strict=True):
        with quiet():
            out = f32._loaded.model.generate(
                torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None,
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            )  # fmt: skip
        assert out[0, len(prompt) :].tolist() == tokens.tolist()


def test_generation_has_one_time_a_token_and_counts_a_new_length_once(f32):
    """Times split at the first token; a shape, the prefill's (step -1) too, is first seen once in an engine's life."""
    engine = with_(f32)
    first = engine.generate([PROMPTS[0], PROMPTS[0]], 4)
    assert first.prefill_s.shape == (2,)
    assert [len(steps) for steps in first.decode_s] == [3, 3]
    assert first.first_seen == ((0, -1), (0, 0), (0, 1), (0, 2))
    assert engine.generate([PROMPTS[0]], 4).first_seen == ()
    assert first.prefill_tokens.tolist() == [5, 5]


def test_scoring_its_own_tokens_finds_them_first_with_the_same_gap(f32, greedy_run):
    """Teacher-forcing a greedy run through the decode path meets the same logits that chose it."""
    scored = f32.score(PROMPTS, greedy_run.tokens.tolist(), top_k=3, full_logits=True)
    assert scored.forced == "decode"
    assert np.array_equal(scored.top_ids[..., 0], greedy_run.tokens)
    assert np.array_equal(scored.token_logprobs, scored.top_logprobs[..., 0])
    two = np.sort(full_logits(scored).astype(np.float64), axis=-1)[..., -2:]
    assert np.array_equal(two[..., 1] - two[..., 0], greedy_run.gaps)


def test_a_single_pass_is_another_thing_within_rounding(f32, greedy_run):
    """One pass over prompt and tokens takes the chunked form: other bits, the same values within 1e-4 in float32."""
    tokens = greedy_run.tokens.tolist()
    forced = f32.score(PROMPTS, tokens, top_k=2, full_logits=True)
    single = f32.score_single_pass(PROMPTS, tokens, top_k=2, full_logits=True)
    assert single.forced == "single_pass"
    assert not np.array_equal(full_logits(forced), full_logits(single))
    assert np.abs(full_logits(forced) - full_logits(single)).max() < 1e-4
    assert np.abs(forced.token_logprobs - single.token_logprobs).max() < 1e-4


def test_rows_of_unequal_length_end_in_nan(f32):
    """Past a row's end ids are -1 and values NaN, and a forced token's logprob does not depend on later ones."""
    scored = f32.score(PROMPTS, [[5, 6, 7], [5]], top_k=2)
    assert np.isnan(scored.token_logprobs[1]).tolist() == [False, True, True]
    assert scored.top_ids[1, 1:].tolist() == [[-1, -1], [-1, -1]]
    alone = f32.score(PROMPTS[:1], [[5]], top_k=2)
    assert alone.token_logprobs[0, 0] == scored.token_logprobs[0, 0]
    assert scored.logits is None


def test_stop_at_eos_ends_a_row_after_the_token(f32, greedy_run):
    """A row keeps the end-of-sequence token it emitted; what follows is -1, with no gap."""
    row = greedy_run.tokens[0].tolist()
    engine = with_(f32, config=dataclasses.replace(f32._loaded.config, eos_token_id=row[2]))
    end = row.index(row[2])
    stopped = engine.generate(PROMPTS[:1], 6, stop_at_eos=True)
    assert stopped.tokens[0].tolist() == row[: end + 1] + [-1] * (5 - end)
    assert np.isnan(stopped.gaps[0, end + 1 :]).all()
    assert np.array_equal(engine.generate(PROMPTS[:1], 6).tokens[0], row)
    without = with_(f32, config=dataclasses.replace(f32._loaded.config, eos_token_id=None))
    with pytest.raises(UsageError, match="eos_token_id"):
        without.generate(PROMPTS, 2, stop_at_eos=True)


def test_ties_go_to_the_lowest_id():
    """Equal logits: the greedy choice and the ranking both take the lower id, and the gap is 0."""
    row = np.array([0.5, 2.0, -1.0, 2.0, 0.5])
    assert greedy(row) == (1, 0.0, True)
    ids, logprobs = ranked(log_softmax(row), 4)
    assert ids.tolist() == [1, 3, 0, 4]
    assert logprobs[0] == logprobs[1]
    with pytest.raises(UsageError, match="top_k"):
        ranked(log_softmax(row), 6)


def test_log_softmax_is_a_log_of_probabilities():
    """The probabilities sum to 1 and shifting all logits by 1000 changes none by more than float64 rounding."""
    row = np.array([0.25, -3.0, 7.5])
    assert abs(np.exp(log_softmax(row)).sum() - 1.0) < 1e-15
    assert np.abs(log_softmax(row + 1000.0) - log_softmax(row)).max() < 1e-12


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_row_is_flagged(bad):
    """One NaN or infinity among the logits: flagged, no gap, no ranking."""
    row = np.array([0.0, bad, 1.0])
    choice = greedy(row)
    assert not choice.finite
    assert np.isnan(choice.gap_nats)
    ids, logprobs = ranked(log_softmax(row), 2)
    assert ids.tolist() == [-1, -1]
    assert np.isnan(logprobs).all()


def test_a_nan_weight_is_named_in_every_token_it_reaches(f32):
    """A NaN in the head makes every logit row non-finite: flagged in generation and in scoring, and nothing raises."""
    model = copy.deepcopy(f32._loaded.model)
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    engine = with_(f32, model=model)
    run = engine.generate(PROMPTS[:1], 3)
    assert not run.finite.any()
    assert (run.tokens != 3).all()
    assert not engine.score(PROMPTS[:1], [[4, 5]]).finite.any()


def test_loading_in_bf16_rounds_a_log_and_says_so(bf16, f32):
    """The six A_log tensors are the only float32 tensors that a bf16 load rounds, and the record names them."""
    layers = (0, 1, 2, 4, 5, 6)
    assert bf16.provenance["parameters_rounded"] == [f"model.layers.{i}.self_attn.A_log" for i in layers]
    assert f32.provenance["parameters_rounded"] == []
    assert bf16.provenance["parameter_dtypes"] == ["bfloat16", "float32"]


def test_at_precision_keeps_what_loading_rounded(bf16, f32):
    """Upcasting a bf16 load keeps the rounded A_log, unlike a float32 load, and runs in the wider dtype."""

    def a_log(engine):
        return engine._loaded.model.model.layers[0].self_attn.forget_gate.A_log

    wide = bf16.at_precision("f32")
    assert torch.equal(a_log(wide), a_log(bf16).float())
    assert not torch.equal(a_log(wide), a_log(f32))
    assert {p.dtype for p in wide._loaded.model.parameters()} == {torch.float32}
    assert a_log(bf16).dtype == torch.bfloat16
    assert wide.info.dtype == "f32"
    assert wide.provenance["parameters_loaded_as"] == "bf16"


def test_the_ladder_falls_with_the_unit_roundoff(bf16):
    """Same parameters, error against the f64 run: float32 lies over a thousand times below bf16."""
    logits = {
        dtype: full_logits(bf16.at_precision(dtype).score(PROMPTS[:1], [[9, 8, 7]], full_logits=True))
        for dtype in ("bf16", "f32", "f64")
    }
    error = {dtype: np.abs(logits[dtype] - logits["f64"]).max() for dtype in ("bf16", "f32")}
    assert logits["f64"].dtype == np.float64
    assert 0.0 < error["f32"] < error["bf16"] / 1000.0


def test_f64_says_what_it_does_not_compute_in_f64(f32):
    """The engine's own description owns up to the float32 islands inside the library's float64, and they are there."""
    wide = f32.at_precision("f64")
    assert wide.info.dtype == "f64, but KDA cores, gates, norms, eager softmax and the router in f32"
    with wide.record() as taps:
        wide.score(PROMPTS[:1], [[5]])
    dtypes = {site: taps.passes(site, layer)[0].dtype for site, layer in taps.places}
    islands = {site for site, dtype in dtypes.items() if dtype == torch.float32}
    assert islands == {"decay_gate", "kda_state", "router", "router_weights"}
    for site, layer in (("kda_core", 0), ("o_norm", 0), ("mla_probs", 3)):
        value = taps.passes(site, layer)[0]
        assert torch.equal(value, value.float().double()), site
    assert f32.at_precision("f32") is f32


@pytest.mark.parametrize(("engine_dtype", "asked"), [("f32", "bf16"), ("bf16", "f16"), ("f32", "fp8")])
def test_a_narrower_or_unknown_precision_is_refused(engine_dtype, asked, request):
    """Narrowing would round the parameters anew, so it is a load, not a step of the ladder."""
    with pytest.raises(UsageError, match=asked):
        request.getfixturevalue(engine_dtype).at_precision(asked)


def test_taps_change_no_bit(bf16):
    """The logits of a run with every tap open equal those without, and closing leaves no hook and no stand-in."""
    forced = ([[5, 6, 7], [8, 9, 10]],)
    library = bf16._loaded.library
    before = (library.chunk_kimi_delta_attention, library.recurrent_kimi_delta_attention)
    plain = bf16.score(PROMPTS, *forced, full_logits=True)
    with bf16.record():
        tapped = bf16.score(PROMPTS, *forced, full_logits=True)
    assert np.array_equal(full_logits(plain), full_logits(tapped))
    assert (library.chunk_kimi_delta_attention, library.recurrent_kimi_delta_attention) == before
    modules = list(bf16._loaded.model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def test_taps_hold_the_values_of_their_sites(bf16):
    """Recorded values satisfy the library's own equations bit for bit, over prefill and decode joined along time."""
    with bf16.record() as taps:
        scored = bf16.score(PROMPTS[:1], [[5, 6, 7]], full_logits=True)
    head = 8
    assert torch.equal(taps.by_token("lm_head", head)[0].float(), torch.from_numpy(full_logits(scored)[0]))
    stream = taps.by_token("embed", -1)
    assert stream.shape == (1, len(PROMPTS[0]) + 2, 256)
    for layer in range(head):
        middle = taps.by_token("attn_residual", layer)
        assert torch.equal(middle, stream + taps.by_token("o_proj", layer))
        stream = taps.by_token("mlp_residual", layer)
        assert torch.equal(stream, middle + taps.by_token("combine" if layer else "mlp_down", layer))
    assert torch.equal(taps.by_token("beta", 0), torch.sigmoid(taps.by_token("b_proj", 0)))
    shared = torch.nn.functional.silu(taps.by_token("shared_gate", 1))
    assert torch.equal(taps.by_token("shared_act", 1), shared * taps.by_token("shared_up", 1))
    core, gate = taps.by_token("kda_core", 2), taps.by_token("g_b_proj", 2)
    norm = bf16._loaded.model.model.layers[2].self_attn.o_norm
    assert torch.equal(taps.by_token("o_norm", 2), norm(core, gate.view_as(core)))


def test_taps_have_the_shapes_that_they_promise(bf16):
    """Values by token are [B, T, ...], states and attention weights one a pass, every name a site of the model."""
    with bf16.record() as taps:
        bf16.score(PROMPTS[:1], [[5, 6]])
    tokens = len(PROMPTS[0]) + 1
    assert {site for site, _ in taps.places} <= set(ALL_SITES)
    assert taps.by_token("router_ids", 1).shape == (1, tokens, 2)
    assert taps.by_token("routed", 1).shape == (1, tokens, 256)
    assert taps.by_token("short_conv", 0).shape == (1, tokens, 768)
    assert [tuple(x.shape) for x in taps.passes("mla_probs", 3)] == [(1, 2, 5, 5), (1, 2, 1, 6)]
    assert [x.dtype for x in taps.passes("kda_state", 0)] == [torch.float32, torch.float32]
    with pytest.raises(UsageError, match="pass by pass"):
        taps.by_token("kda_state", 0)


def test_taps_record_only_what_was_asked_for(bf16):
    """Named sites alone are kept; an unknown name, or a site without a value, is refused."""
    with bf16.record(("o_proj",)) as taps:
        bf16.score(PROMPTS[:1], [[5]])
    assert taps.places == tuple(("o_proj", layer) for layer in range(8))
    with pytest.raises(UsageError, match="router"):
        taps.passes("router", 1)
    with pytest.raises(UsageError, match="o_porj"), bf16.record(("o_porj",)):
        pass


def test_experts_one_by_one_is_another_arithmetic(bf16):
    """The library's default sums a token's experts before it rounds; expert by expert gives other bits in bf16."""
    loop = load(dtype="bf16", experts="eager")
    assert bf16.provenance["experts"] == "grouped_mm"
    assert loop.provenance["experts"] == "eager"
    one, other = (full_logits(e.score(PROMPTS[:1], [[5]], full_logits=True)) for e in (bf16, loop))
    assert not np.array_equal(one, other)
    assert np.abs(one - other).max() < 1.0


def test_the_engine_obeys_the_protocol(f32, bf16):
    """It is an Engine, and says which model and tokenizer it read, by the bytes of their files."""
    assert isinstance(f32, Engine)
    info = f32.info
    assert info.model_sha256 == "48fb9054067923be9b419c85e3fda92c22ec7b37b07e0c44a636f3ed6617ccf5"
    assert info.tokenizer_sha256 == "e76678d5c63a8ae6fa66d15d990371a533601e329bb6944b7467d46382337c63"
    assert (info.precisions, info.taps, info.full_logits) == (("f32", "f64"), True, True)
    assert bf16.info.precisions == ("bf16", "f32", "f64")


def test_a_sharded_checkpoint_that_the_library_saved_runs_in_f16_and_sdpa(tiny):
    """Odd sizes, many shards, no tokenizer: f16 with sdpa attention lies near the eager float32 run."""
    assert len(list(tiny.glob("*.safetensors"))) > 1
    half = load(tiny, dtype="f16", attention="sdpa", experts="eager")
    assert half.provenance["attention"] == "sdpa"
    assert half.info.tokenizer_sha256 is None
    exact = full_logits(load(tiny).score([[1, 7, 9]], [[3, 4]], top_k=1, full_logits=True))
    near = full_logits(half.score([[1, 7, 9]], [[3, 4]], top_k=1, full_logits=True))
    assert 0.0 < np.abs(exact - near).max() < 1e-2


def test_shards_have_the_hash_that_the_loader_gives_them(tiny):
    """Engine and checkpoint loader name the same weights by the same SHA-256, in shards as in one file."""
    from variants.checkpoint import load_checkpoint

    assert load(tiny).info.model_sha256 == load_checkpoint(tiny).sha256


def test_a_grouped_product_of_unaligned_rows_is_refused(tiny):
    """PyTorch's grouped product would fail in the middle of a pass; the size and the way out are named first."""
    with pytest.raises(UsageError, match="moe_intermediate_size in multiples of 8, got 12; use experts='eager'"):
        load(tiny, dtype="f16")


def without_tensor(tiny, target, name):
    """A copy of the checkpoint in one file, less one tensor."""
    from safetensors.torch import load_file, save_file

    tensors = {key: value for file in tiny.glob("*.safetensors") for key, value in load_file(file).items()}
    del tensors[name]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((tiny / "config.json").read_bytes())


def test_a_missing_tensor_is_refused_where_the_library_would_invent_it(tiny, tmp_path):
    """The library fills a missing tensor with random numbers; here it is an input error that names it."""
    name = "model.layers.1.self_attn.o_proj.weight"
    without_tensor(tiny, tmp_path, name)
    with pytest.raises(InputError, match=f"missing keys.*{name}"):
        load(tmp_path)


def test_a_truncated_shard_is_an_input_error_of_one_line(tiny, tmp_path):
    """A shard cut short never reaches a forward pass."""
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = min(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(tiny, tmp_path):
    """A shard that the index lists and the folder lacks is an input error."""
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = max(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(InputError, match=shard.name):
        load(tmp_path)


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "error", "match"),
    [
        ([], 2, InputError, "no prompts"),
        ([[1], []], 2, InputError, "prompt 1 is empty"),
        ([[1, 4096]], 2, InputError, r"outside 0\.\.4095"),
        ([[1]], 0, UsageError, "max_tokens"),
    ],
)
def test_what_cannot_be_run_is_refused(f32, prompts, max_tokens, error, match):
    """No prompts, an empty prompt, an id of another tokenizer, no tokens: one line each, before any pass."""
    with pytest.raises(error, match=match):
        f32.generate(prompts, max_tokens)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"dtype": "f64"}, "dtype"), ({"attention": "flash"}, "attention"), ({"experts": "best"}, "experts")],
)
def test_an_unknown_option_is_refused_with_the_choices(options, match):
    """A misspelt option is a usage error that lists what would work."""
    with pytest.raises(UsageError, match=f"{match}: got .* expected one of"):
        load(**options)


@pytest.mark.parametrize("device", ["tpu9", "meta"])
def test_a_device_that_cannot_run_it_is_refused(device):
    """Only a CPU or a CUDA device that is there."""
    with pytest.raises(DeviceError, match=device):
        load(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused():
    """Asking for CUDA where there is none says so and names the CPU."""
    with pytest.raises(DeviceError, match="sees no CUDA device; use cpu"):
        load(device="cuda")


def test_a_failure_inside_the_library_is_one_line_that_names_the_prompt(f32):
    """What the library raises while it runs becomes an EngineError, and its log level is what it was."""
    from transformers.utils import logging

    model = copy.deepcopy(f32._loaded.model)
    model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(torch.zeros(5, 7))
    level = logging.get_verbosity()
    with pytest.raises(EngineError, match="transformers failed in prompt 0: ") as caught:
        with_(f32, model=model).generate(PROMPTS, 1)
    assert "\n" not in str(caught.value)
    assert logging.get_verbosity() == level


def run_python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new process whose imports come from `path` first, then the repository."""
    start = f"import sys; sys.path[:0] = [{str(path)!r}, {str(ROOT)!r}]; CHECKPOINT = {str(CHECKPOINT)!r}\n"
    return subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def fake_fla(tmp_path_factory):
    """A folder with an importable `fla` whose kernels die as the real ones do on a CPU."""
    root = tmp_path_factory.mktemp("site")
    kda = root / "fla" / "ops" / "kda"
    kda.mkdir(parents=True)
    (root / "fla" / "__init__.py").write_text("")
    (root / "fla" / "ops" / "__init__.py").write_text("")
    (kda / "__init__.py").write_text(
        "def chunk_kda(q, k, v, **options):\n"
        "    raise RuntimeError('0 active drivers')\n"
        "fused_recurrent_kda = chunk_kda\n"
    )
    return root


def test_fla_is_kept_out_on_a_cpu_and_importable_afterwards(fake_fla):
    """With fla importable the engine runs on PyTorch's kernels, and fla itself can still be imported by others."""
    done = run_python(
        """
        from harness.engines.transformers_engine import TransformersEngine
        engine = TransformersEngine.load(CHECKPOINT)
        print(engine.generate([[1, 905, 77]], 2).tokens.shape, set(engine.provenance["kernels"].values()))
        import fla.ops.kda
        print(fla.ops.kda.chunk_kda.__module__)
        """,
        fake_fla,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "(1, 2) {'transformers.models.kimi_linear.modeling_kimi_linear'}",
        "fla.ops.kda",
    ]


def test_a_library_that_already_bound_fla_is_refused_in_one_line(fake_fla):
    """Imported earlier with fla, the library would crash on a CPU; the engine says so before it runs."""
    done = run_python(
        """
        import transformers.models.kimi_linear.modeling_kimi_linear as library
        import torch
        x = torch.zeros(1, 1, 1, 8)
        try:
            library.chunk_kimi_delta_attention(x, x, x, g=x, beta=x[..., 0])
        except RuntimeError as error:
            print("the library alone:", error)
        from harness.engines.transformers_engine import TransformersEngine
        from variants.errors import DeviceError
        try:
            TransformersEngine.load(CHECKPOINT)
        except DeviceError as error:
            print(error)
        """,
        fake_fla,
    )
    alone, refused = done.stdout.splitlines()
    assert alone == "the library alone: 0 active drivers"
    assert "bound chunk_kimi_delta_attention to fla.ops.kda, which crashes on a CPU" in refused


def test_without_the_library_the_error_says_what_to_install(tmp_path):
    """transformers is optional: its absence is a device error with the command that helps."""
    done = run_python(
        """
        sys.modules["transformers"] = None
        from harness.engines.transformers_engine import TransformersEngine
        from variants.errors import DeviceError
        try:
            TransformersEngine.load(CHECKPOINT)
        except DeviceError as error:
            print(error.exit_code, error)
        """,
        tmp_path,
    )
    assert "4 the transformers library is not installed" in done.stdout, done.stderr
    assert "pip install 'neartie[transformers]'" in done.stdout


def test_every_refusal_is_a_neartie_error():
    """One class tells the command line that a failure is the user's to mend."""
    assert all(issubclass(error, NeartieError) for error in (DeviceError, EngineError, InputError, UsageError))
