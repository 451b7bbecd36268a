"""Our forward against the live transformers library in this process, on the shipped checkpoint and on one it saved.

The library's bf16 moves with the CPU, its threads and its attention: nothing is compared with stored figures of it.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.compose import named_variant
from harness.engines.local import LocalEngine
from harness.engines.protocol import Engine, Prompts, Scored
from harness.golden import load_golden
from variants import decode
from variants.axes import Experts, KvNormEps, NormAxes, Store, Variant
from variants.checkpoint import load_checkpoint
from variants.weights import Casts

LIBRARY = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is optional")
FOLDER = Path(__file__).parents[1] / "assets" / "kimi-linear-12m"


@cache
def shipped() -> Casts:
    return Casts(load_checkpoint(FOLDER))


def library(folder: Path = FOLDER, **options: str):
    from harness.engines.transformers_engine import TransformersEngine

    return TransformersEngine.load(folder, **options)


@cache
def library_f32():
    return library(dtype="f32", attention="eager")


@cache
def library_bf16():
    return library(dtype="bf16", attention="eager")


def f32() -> Variant:
    """Our float32 with the eps that the library fixes for kv_a_layernorm."""
    return replace(named_variant("f32"), norm=NormAxes(kv_eps=KvNormEps.eps_1e6))


def local(variant: Variant, made: Casts | None = None, *, batch: int = 1) -> LocalEngine:
    variant = replace(variant, execution=replace(variant.execution, batch=batch))
    return LocalEngine(made or shipped(), variant, name="ours")


def battery(name: str) -> tuple[list[list[int]], np.ndarray]:
    golden = load_golden(name)
    return [list(p) for p in golden.prompts], golden.tokens[0]


def all_logits(scored: Scored) -> np.ndarray:
    assert scored.logits is not None
    return scored.logits


def argmax(scored: Scored) -> np.ndarray:
    return scored.top_ids[..., 0]


def own_run(ours: LocalEngine, tokens: Sequence[int], steps: int) -> np.ndarray:
    """Logits [T, V] of one greedy run."""
    runs = decode.steps(ours.model, [tokens], steps, lambda _, logits: decode.greedy(logits))
    return np.stack([r.logits[0].double().numpy() for r in runs])


def along_our_tokens(ours: LocalEngine, theirs: Engine, prompts: Prompts, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [N, T, V] of both along our own greedy tokens, which are then checked to be the library's choice.

    Where every forced argmax is the forced token, the library's own greedy run is these tokens, step by step.
    """
    a = np.stack([own_run(ours, p, steps) for p in prompts])
    tokens = a.argmax(-1)
    scored = theirs.score(prompts, tokens.tolist(), full_logits=True)  # pyright: ignore[reportCallIssue]
    assert np.array_equal(argmax(scored), tokens)
    return a, all_logits(scored)


@LIBRARY
def test_f32_is_the_librarys_f32_on_gate() -> None:
    """Every greedy token of 128, and every logit within 1e-4."""
    a, b = along_our_tokens(local(f32()), library_f32(), battery("gate")[0], 16)
    assert 0 < np.abs(a - b).max() < 1e-4  # two implementations, not one


@LIBRARY
def test_the_mirror_is_the_librarys_bf16_on_gate() -> None:
    """Every greedy token of 128, and nine rows of logits in ten bit for bit (all of them where this was written)."""
    a, b = along_our_tokens(local(named_variant("transformers_mirror")), library_bf16(), battery("gate")[0], 16)
    equal = int((a == b).all(-1).sum())
    print(f"{equal} of 128 rows of logits are bit-equal")
    assert equal >= 115


@LIBRARY
@pytest.mark.parametrize("change", ["once", "config_eps", "f32_beta", "exact_a_log"])
def test_a_mirror_that_misses_one_rounding_point_is_seen(change: str) -> None:
    """Each of these alone leaves few rows bit-equal: the count above can tell one rounding from another."""
    mirror = named_variant("transformers_mirror")
    changed = {
        "once": replace(mirror, norm=replace(mirror.norm, rounding=NormAxes().rounding)),
        "config_eps": replace(mirror, norm=replace(mirror.norm, kv_eps=KvNormEps.config)),
        "f32_beta": replace(mirror, elementwise=replace(mirror.elementwise, beta=Store.keep)),
        "exact_a_log": replace(mirror, params=Variant().params),
    }[change]
    prompts, forced = battery("gate")
    prompts, forced = prompts[:2], forced[:2]
    a, b = (all_logits(e.score(prompts, forced.tolist(), full_logits=True)) for e in (local(changed), library_bf16()))
    assert int((a == b).all(-1).sum()) <= 8  # of 32; 6 where a processor's products are in bf16 themselves


def test_f32_scores_109_of_128_on_gate() -> None:
    """Against vLLM's tokens: what the library and llama.cpp score too."""
    prompts, golden = battery("gate")
    assert int((local(named_variant("f32")).generate(prompts, 16).tokens == golden).sum()) == 109


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sharded checkpoint of odd sizes, biases not zero, that the library itself saved."""
    from harness.engines.transformers_load import modeling

    kimi = modeling("cpu")
    config = kimi.KimiLinearConfig(
        vocab_size=97, hidden_size=44, intermediate_size=60, moe_intermediate_size=21, num_hidden_layers=5,
        num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=23, qk_nope_head_dim=14, qk_rope_head_dim=6,
        v_head_dim=10, num_local_experts=5, num_experts_per_tok=2, n_shared_experts=2, linear_head_dim=13,
        linear_num_heads=3, linear_conv_kernel_dim=4, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, first_k_dense_replace=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("saved")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = kimi.KimiLinearForCausalLM(config)
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.3)
            elif name.endswith("norm.weight"):
                tensor.normal_(mean=1, std=0.3)
            elif name.endswith("weight") and "kv_a_proj" not in name:
                tensor.mul_(8)  # drawn at 0.02 the logits would all be alike; the latents stay small
            if name.endswith("weight"):
                tensor.copy_(tensor.bfloat16())  # what bf16 holds, so that only A_log is rounded when it is loaded
    model.save_pretrained(path, max_shard_size="60KB")
    return path


PROMPTS = [[5, 17, 60, 33, 8], [91], [int(7 * i % 90) + 3 for i in range(70)]]
FORCED = [[9, 40, 77, 13], [60, 3, 4, 5], [88, 21, 50, 12]]


@LIBRARY
def test_f32_is_the_librarys_f32_on_a_checkpoint_that_it_saved(saved: Path) -> None:
    """Odd sizes, many shards, prompts of 1, 5 and 70 tokens: every token, and every logit within 1e-4."""
    assert len(list(saved.glob("model-*.safetensors"))) > 5
    theirs = library(saved, dtype="f32", attention="eager", experts="eager")
    a, b = along_our_tokens(local(f32(), Casts(load_checkpoint(saved))), theirs, PROMPTS, 12)
    assert np.abs(b).max() > 1
    assert np.abs(a - b).max() < 1e-4


@LIBRARY
def test_another_eps_of_the_latent_norm_is_seen(saved: Path) -> None:
    """With the config's eps the same logits are not within the bound: small latents tell 1e-6 from 1e-5."""
    theirs = library(saved, dtype="f32", attention="eager", experts="eager")
    ours = local(named_variant("f32"), Casts(load_checkpoint(saved)))
    a, b = (all_logits(e.score(PROMPTS, FORCED, full_logits=True)) for e in (ours, theirs))
    assert np.abs(a - b).max() > 1e-4


@LIBRARY
def test_the_mirror_with_experts_summed_in_bf16_is_the_librarys_eager_bf16(saved: Path) -> None:
    """The same checkpoint in bf16, experts one by one and rounded after each: every argmax, and most rows' bits."""
    theirs = library(saved, dtype="bf16", attention="eager", experts="eager")
    mirror = named_variant("transformers_mirror")
    eager = replace(mirror, moe=replace(mirror.moe, experts=Experts.loop, expert_sum=Store.bf16))
    a, b = (e.score(PROMPTS, FORCED, full_logits=True) for e in (local(eager, Casts(load_checkpoint(saved))), theirs))
    assert np.array_equal(argmax(a), argmax(b))
    assert int((all_logits(a) == all_logits(b)).all(-1).sum()) >= 10


@LIBRARY
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_f32_is_the_librarys_f32_on_wide() -> None:
    """Every greedy token of 4096, free-running and forced along vLLM's, and every logit within 1e-4."""
    prompts, forced = battery("wide")
    for start in range(0, len(prompts), 16):
        rows = slice(start, start + 16)
        a, b = along_our_tokens(local(f32()), library_f32(), prompts[rows], 64)
        assert np.abs(a - b).max() < 1e-4
        x, y = (e.score(prompts[rows], forced[rows].tolist(), full_logits=True) for e in (local(f32()), library_f32()))
        assert np.array_equal(argmax(x), argmax(y))
        assert np.abs(all_logits(x) - all_logits(y)).max() < 1e-4


@LIBRARY
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_mirror_is_the_librarys_bf16_on_wide() -> None:
    """Forced argmaxes of 4096 positions: at least 99.5 in a hundred, bit-equal rows counted."""
    prompts, forced = battery("wide")
    mirror, same, equal = local(named_variant("transformers_mirror")), 0, 0
    for start in range(0, len(prompts), 16):
        rows = slice(start, start + 16)
        a, b = (e.score(prompts[rows], forced[rows].tolist(), full_logits=True) for e in (mirror, library_bf16()))
        same += int((argmax(a) == argmax(b)).sum())
        equal += int((all_logits(a) == all_logits(b)).all(-1).sum())
    print(f"{equal} of 4096 rows of logits are bit-equal")
    print(f"{same} of 4096 argmaxes are equal")
    assert same >= 0.995 * forced.size


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_f32_scores_2957_of_4096_on_wide() -> None:
    """Against vLLM's tokens, as three implementations agree; rows run together change no token of it."""
    prompts, golden = battery("wide")
    for batch in (1, 16):
        run = local(named_variant("f32"), batch=batch).generate(prompts, 64)
        assert int((run.tokens == golden).sum()) == 2957, batch
