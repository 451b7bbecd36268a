"""Tiny random models of awkward sizes, for tests: every width odd or prime, K != V, several experts."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from variants import decode
from variants.axes import (
    Execution,
    ExecutionAxes,
    Gemm,
    KdaAxes,
    KdaCore,
    MlaAxes,
    MlaCore,
    MoeAxes,
    Router,
    Store,
    Stream,
    Variant,
)
from variants.checkpoint_write import random_checkpoint
from variants.model import Model
from variants.model_config import LayerKind, ModelConfig
from variants.recipe import Rule, resolve
from variants.rounding import Probe, RoundAt, Step
from variants.weights import Casts, Patch, Weights

KDA, MLA = LayerKind.kda, LayerKind.mla

ODD = ModelConfig(
    vocab_size=67,
    hidden_size=23,
    rms_norm_eps=1e-5,
    layer_kinds=(KDA, MLA, KDA),
    moe_layers=(False, True, True),
    intermediate_size=19,
    kda_num_heads=3,
    kda_head_dim=7,
    kda_v_head_dim=11,
    conv_size=4,
    num_heads=3,
    kv_lora_rank=13,
    qk_nope_head_dim=7,
    qk_rope_head_dim=5,
    v_head_dim=6,
    num_experts=5,
    experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=9,
    routed_scaling_factor=2.5,
    renormalize=True,
    tie_word_embeddings=False,
    max_length=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# One of each kind of layer, one head, two shared experts, a convolution of two taps, weights not renormalised.
SMALL = replace(ODD, layer_kinds=(MLA, KDA), moe_layers=(True, False), kda_num_heads=1, kda_head_dim=8,
                kda_v_head_dim=8, conv_size=2, num_heads=1, num_shared_experts=2, experts_per_token=3,
                renormalize=False, hidden_size=16)  # fmt: skip


class Watcher:
    """A probe that changes nothing: under it nothing is launched or rounded at once that can be one by one."""

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        return rounding

    def begin(self, step: Step) -> None:
        return None


INCREMENTAL = ExecutionAxes(mode=Execution.incremental)
RECOMPUTE = ExecutionAxes(mode=Execution.recompute)


def plain(stream: Stream, gemm: Gemm, *, kda: KdaCore = KdaCore.recurrent, mla: MlaCore = MlaCore.dense_f32,
          execution: ExecutionAxes = INCREMENTAL, router: Router = Router.f32, **more: object) -> Variant:  # fmt: skip
    """A variant with the same cores in prefill and decode."""
    return Variant(
        stream=stream,
        gemm=gemm,
        kda=KdaAxes(prefill=kda, decode=kda),
        mla=MlaAxes(prefill=mla, decode=mla),
        moe=MoeAxes(router=router),
        execution=execution,
        **more,  # pyright: ignore[reportArgumentType]
    )


def oracle(**more: object) -> Variant:
    """Everything in float64 on carried state."""
    more = {"kda": KdaCore.recurrent, "mla": MlaCore.island_f64, "router": Router.f64, "logits": Store.f64, **more}
    return plain(Stream.f64, Gemm.f64, **more)  # pyright: ignore[reportArgumentType]


def casts(config: ModelConfig = ODD, *, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Casts:
    return Casts(random_checkpoint(config, seed=seed, dtype=dtype))


def build(variant: Variant, made: Casts, *, probe: Probe | None = None, patch: Patch | None = None) -> Model:
    config = made.checkpoint.config
    recipe = resolve(variant, config)
    return Model(config, recipe, Weights(made, recipe.semantics, patch=patch), probe=probe)


def prompt(length: int, *, seed: int = 0, vocab: int = ODD.vocab_size) -> list[int]:
    random = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, vocab, (length,), generator=random).tolist()


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value, as a float; infinite where anything is not finite."""
    difference = (a.double() - b.double()).abs().max() / b.double().abs().max()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def ragged(lengths: Sequence[int], **more: int) -> list[list[int]]:
    """Prompts of these lengths, each of other tokens."""
    return [prompt(n, seed=i + 1, **more) for i, n in enumerate(lengths)]


FORMATS = {
    "f64": (Stream.f64, Gemm.f64),
    "f32": (Stream.f32, Gemm.f32),
    "bf16_f32out": (Stream.f32, Gemm.bf16_f32out),
    "bf16 stream": (Stream.bf16, Gemm.bf16),
    "bf16 stream, f32 out": (Stream.bf16, Gemm.bf16_f32out),
    "bf16 in place": (Stream.bf16_in_place, Gemm.bf16_f32out),
    "f16": (Stream.f16, Gemm.f16),
}
FORCED = [prompt(4, seed=70 + i) for i in range(3)]


def every_logit(model: Model, tokens: Sequence[int]) -> Tensor:
    """[T, vocab] from one prefill."""
    state = model.new_state(slots=1, max_len=len(tokens))
    return model.forward(
        torch.tensor([list(tokens)]), state, slots=[0], lengths=[len(tokens)], phase="prefill", every=True
    )[0]


def forced(model: Model, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> Tensor:
    """[B, T, vocab] of prefill and forced tokens through the decode path."""
    tokens = torch.tensor(continuations)
    runs = decode.steps(model, prompts, tokens.shape[1], lambda t, _: tokens[:, t])
    return torch.stack([r.logits for r in runs], 1)
