"""Our Triton kernels bound to a recipe: each function here is an entry of `variants.kernels.KERNELS`.

A binding reads the rules of its place, turns them into the kernel's own description of its roundings, and refuses with
one line what the kernel cannot round; what a kernel swallows is said in `variants.impl_rules`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from variants.axes import ChunkForm
from variants.batch import Batch
from variants.binding import Binder
from variants.dtypes import DType, widest
from variants.errors import UsageError
from variants.impl_rules import FORM_NUMBER
from variants.ops import conv_triton, kda_chunk_triton, kda_triton, linear_triton, mla_triton, moe_triton, norm_triton
from variants.ops.launch_triton import FORMATS, Precision
from variants.packing import packed, seen, show_carried, unpacked
from variants.recipe import Rule
from variants.sites import CHUNK_SITES
from variants.state import State

FORMS = {
    ChunkForm.plain: kda_chunk_triton.Rounding(),
    ChunkForm.vllm: kda_chunk_triton.VLLM,
    ChunkForm.fla: kda_chunk_triton.FLA,
}


def linear(rule: Rule) -> Callable[[Tensor, Tensor], Tensor]:
    out, precision = stored("linear", rule), _precision(rule)
    return lambda x, weight: linear_triton.gemm(x, weight, precision=precision, out_dtype=out)


def rms_norm(b: Binder, site: str, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The kernel normalises the tensor that it is given: the stored sum, or the sum before its store."""
    rule = b.rule(site)
    how = norm_triton.NormRule(out_dtype=stored(site, rule), twice=rule.algorithm.endswith("_twice"))
    of_stored = "_stored" in rule.algorithm
    return lambda kept, unrounded: norm_triton.rms_norm(kept if of_stored else unrounded, weight, eps, rule=how)


def gated_rms_norm(b: Binder, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    out = stored("o_norm", b.rule("o_norm"))
    return lambda o, gate: norm_triton.gated_rms_norm(o, weight, gate, eps=eps, out_dtype=out)


def short_conv(b: Binder, weight: Tensor) -> Callable[[Tensor, Batch, State], Tensor]:
    rule, layer, carry = b.rule("short_conv"), b.layer, b.maybe("conv_state", b.rule("conv_state").storage)
    out, round_conv = stored("short_conv", rule), b.at("short_conv", rule.storage)

    def run(raw: Tensor, batch: Batch, state: State) -> Tensor:
        pool = state.conv[layer] = state.conv[layer].contiguous()
        y = conv_triton.short_conv(packed(raw, batch)[0], weight, pool, batch=batch.ragged, out_dtype=out)
        y = round_conv(unpacked(y.unsqueeze(0), batch))
        show_carried(carry, pool, batch)
        return y

    return run


def delta_rule(b: Binder, gate: tuple[Tensor, Tensor]) -> Callable[..., Tensor]:
    rule, scale, layer = b.rule("kda_core"), b.config.kda_scale, b.layer
    a_log, dt_bias = gate if b.rule("decay_gate").inside else (None, None)
    fused = kda_triton.Fused(
        normalize=bool(b.rule("q_l2norm").inside), a_log=a_log, dt_bias=dt_bias, sigmoid=bool(b.rule("beta").inside),
        scale=scale,
    )  # fmt: skip
    more: dict[str, object] = {"fused": fused, "out_dtype": stored("kda_core", rule)}
    core: Callable[..., tuple[Tensor, Tensor]] = kda_triton.recurrent
    if rule.algorithm == "chunk":
        core, more["rounding"] = kda_chunk_triton.chunk, chunk_rounding(b)
    round_core, carry = b.at("kda_core", rule.storage), b.maybe("kda_state", DType.f32)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch, state: State) -> Tensor:
        pool = state.recurrent[layer] = state.recurrent[layer].contiguous()
        operands = (packed(x, batch) for x in (q, k, v, g, beta))
        o = round_core(unpacked(core(*operands, pool, batch=batch.ragged, **more)[0], batch))
        show_carried(carry, pool, batch)
        return o

    return run


def chunk_rounding(b: Binder) -> kda_chunk_triton.Rounding:
    """The roundings inside a chunk: each site's dtype as its rule says, products and scale as the form of the core."""
    form = dict(b.rule("kda_core").options).get("form", 0)
    base = FORMS[next(f for f, number in FORM_NUMBER.items() if number == form)]
    dtypes = {site: _format(site, b.rule(site).output) for site in ("q_l2norm", "k_l2norm", *CHUNK_SITES)}
    if dtypes.pop("k_l2norm") is not dtypes["q_l2norm"]:
        raise UsageError(
            "variant.override: impl.kda=triton stores normalised q and k in one dtype; override both alike"
        )
    if not b.rule("q_l2norm").inside:
        dtypes.pop("q_l2norm")
    return replace(base, **dtypes)  # pyright: ignore[reportArgumentType]


def flash(b: Binder) -> Callable[[Tensor, Tensor, Tensor, Batch], Tensor]:
    rule, scale = b.rule("mla_core"), b.config.mla_scale
    tiles, softmax = dict(rule.options), _softmax(b, rule)

    def run(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q, k, v = one_dtype(q, k, v)
        return mla_triton.tiles(q, k, v, seen(batch), scale=scale, softmax=softmax, **tiles)

    return run


def absorbed(b: Binder) -> Callable[[Tensor, Tensor, Batch, State], Tensor]:
    """The latent is read page by page where it lies."""
    sizes, softmax = dict(b.rule("mla_core").options), _softmax(b, b.rule("o_latent"))
    layer, scale, rank = b.layer, b.config.mla_scale, b.config.kv_lora_rank

    def run(q_latent: Tensor, q_pe: Tensor, batch: Batch, state: State) -> Tensor:
        return mla_triton.absorbed(q_latent, q_pe, state.latent[layer], seen(batch), scale=scale, rank=rank,
                                   block_table=batch.block_table, softmax=softmax, tile_k=sizes["tile_k"],
                                   kv_splits=sizes["kv_splits"])  # fmt: skip

    return run


def experts(b: Binder, w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    routed = b.rule("routed")
    made = {s: _format(s, b.rule(s).output) for s in ("expert_gate_up", "expert_silu", "expert_down", "expert_out")}
    operand = b.rule("expert_down_in").output
    act = b.rule("expert_act").output
    narrow = [f for f in (operand, act) if f is not None]
    rounding = moe_triton.Rounding(
        **made,
        expert_act=_format("expert_act", min(narrow, key=lambda f: f.precision) if narrow else None),
        routed=stored("routed", routed),
        precision=_precision(b.rule("expert_gate_up")),
        round_each=bool(routed.option("round_each")),
        by_id=routed.algorithm == "sum_loop",
    )
    held = b.held("expert_gate_up").torch

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe_triton.experts(x.to(held), w13, w2, ids, weights.float(), rounding=rounding)

    return run


def one_dtype(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands as they are where all have one dtype, else in the widest of theirs: exact."""
    dtypes = {x.dtype for x in operands}
    if len(dtypes) == 1:
        return operands
    wide = widest(*(DType(str(d).removeprefix("torch.")) for d in dtypes)).torch
    return tuple(x.to(wide) for x in operands)


def stored(site: str, rule: Rule) -> torch.dtype:
    """The dtype in which a kernel stores what leaves it; it rounds to no other than that of its buffer."""
    if rule.output is not rule.storage:
        raise UsageError(
            f"{site}: impl {rule.impl} rounds to the dtype of its buffer, the recipe to another; choose torch"
        )
    return _format(site, rule.storage)


def _format(site: str, dtype: DType | None) -> torch.dtype:
    if dtype is None:
        return torch.float32
    if dtype.torch not in FORMATS:
        raise UsageError(f"{site}: impl triton stores f32, bf16 or f16, got {dtype.name}; choose impl torch for it")
    return dtype.torch


def _precision(rule: Rule) -> Precision:
    return Precision.tf32 if dict(rule.options).get("tf32") else Precision.ieee


def _softmax(b: Binder, rule: Rule) -> mla_triton.Softmax:
    probs = _format("mla_probs", b.rule("mla_probs").output)
    return mla_triton.Softmax(probs=probs, out_dtype=stored("mla_core", rule))
