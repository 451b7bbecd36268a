"""From axes to rules: one table for each group of sites; the only place where an axis value becomes arithmetic."""

from dataclasses import dataclass

from variants.axes import Gemm, KdaCore, MlaCore, NormRounding, Order, Router, Store, Stream, TileOrder, Variant
from variants.dtypes import DType, widest
from variants.model_config import ModelConfig
from variants.recipe import Rule
from variants.sites import CHUNK_SITES

GEMM: dict[Gemm, tuple[DType, DType, DType]] = {
    Gemm.f64: (DType.f64, DType.f64, DType.f64),
    Gemm.f32: (DType.f32, DType.f32, DType.f32),
    Gemm.f16: (DType.f16, DType.f16, DType.f16),
    Gemm.bf16_f32out: (DType.bf16, DType.f32, DType.f32),
    Gemm.bf16: (DType.bf16, DType.bf16, DType.bf16),
}
ROUTER: dict[Router, tuple[DType, DType, DType]] = {
    Router.f64: (DType.f64, DType.f64, DType.f64),
    Router.f32: (DType.f32, DType.f32, DType.f32),
    Router.bf16_f32out: (DType.bf16, DType.f32, DType.f32),
    Router.bf16: (DType.bf16, DType.bf16, DType.bf16),
}
# (values, storage) of the residual stream and of what is written beside it.
STREAM: dict[Stream, tuple[DType, DType]] = {
    Stream.f64: (DType.f64, DType.f64),
    Stream.f32: (DType.f32, DType.f32),
    Stream.f16: (DType.f16, DType.f16),
    Stream.bf16: (DType.bf16, DType.bf16),
    Stream.bf16_in_place: (DType.bf16, DType.f32),
}
KDA_ACCUM: dict[KdaCore, DType | None] = {
    KdaCore.island_f64: DType.f64,
    KdaCore.island_f32: DType.f32,
    KdaCore.recurrent: None,
    KdaCore.recurrent_gemv: None,
    KdaCore.chunk: None,
}
MLA_ACCUM: dict[MlaCore, DType | None] = {
    MlaCore.island_f64: DType.f64,
    MlaCore.dense_f32: DType.f32,
    MlaCore.dense_bf16: DType.bf16,
    MlaCore.online_f32: DType.f32,
    MlaCore.flash: None,
    MlaCore.absorbed: None,
    MlaCore.sdpa: None,
}
INVARIANT_TILE = 64


@dataclass(frozen=True)
class Formats:
    """The formats that recur in a variant: of elementwise arithmetic, of products, and of stored activations."""

    variant: Variant

    @property
    def compute(self) -> DType:
        return DType.f64 if self.variant.stream is Stream.f64 else DType.f32

    @property
    def gemm(self) -> tuple[DType, DType, DType]:
        """Operand, accumulation and output of products; wider sums than elementwise arithmetic end in its format."""
        return self._within(GEMM[self.variant.gemm])

    @property
    def router(self) -> tuple[DType, DType, DType]:
        return self._within(ROUTER[self.variant.moe.router])

    def _within(self, formats: tuple[DType, DType, DType]) -> tuple[DType, DType, DType]:
        operand, accum, output = formats
        return operand, accum, min(output, self.compute, key=lambda d: d.precision)

    @property
    def activation(self) -> DType:
        """What is stored between two operations of a block: the narrow dtype where products give it, else `compute`."""
        narrow = self.gemm[2].precision < DType.f32.precision
        return self.gemm[2] if narrow else self.compute

    @property
    def normed(self) -> DType:
        """What RMSNorm writes: the stream's buffer dtype (an in-place stream keeps its float32 buffers)."""
        return STREAM[self.variant.stream][1]

    @property
    def product(self) -> str:
        """How a product with a weight runs: the library's, row by row, or on weights that lie by columns."""
        if self.variant.batch_invariant:
            return "gemm_rows"
        return "gemm_columns" if self.variant.weights_by_column else "gemm"

    def lanes(self, algorithm: str) -> str:
        """The elementwise function itself, or the one whose bits do not depend on an element's place."""
        return f"{algorithm}_lanes" if self.variant.batch_invariant else algorithm

    def fused(self, algorithm: str) -> str:
        """The function step by step, or in as few calls of the library as it has."""
        return f"{algorithm}_fused" if self.variant.fused_elementwise else algorithm

    def norm(self, *variance: str) -> str:
        """RMSNorm: how it is computed, which sum its variance sees, and whether it is rounded twice."""
        twice = ("twice",) if self.variant.norm.rounding is NormRounding.twice else ()
        return "_".join((self.fused("rms_norm"), *variance, *twice))

    def stored(self, store: Store, computed: DType | None = None) -> DType | None:
        return computed if store is Store.keep else DType[store.name]


def build_rules(variant: Variant, config: ModelConfig) -> dict[str, Rule]:
    """Every rule of a variant, keyed by site or "site.phase", in the order of the forward."""
    f = Formats(variant)
    return {
        **_stream_rules(f),
        **_linear_rules(f),
        **_kda_rules(f),
        **_mla_rules(f),
        **_mlp_rules(f),
        **_moe_rules(f),
        **_head_rules(f),
    }


def _out(dtype: DType | None, accum: DType, **more: object) -> Rule:
    return Rule(accum=accum, output=dtype, storage=dtype, **more)  # pyright: ignore[reportArgumentType]


def _stream_rules(f: Formats) -> dict[str, Rule]:
    values, storage = STREAM[f.variant.stream]
    add = Rule(accum=f.compute, output=values, storage=storage, algorithm="add")
    norm = _out(f.normed, f.compute, algorithm=f.norm(f.variant.norm.variance.name))
    return {
        "embed": Rule(accum=values, output=values, storage=storage, algorithm="gather"),
        "input_norm": norm,
        "attn_residual": add,
        "post_attn_norm": norm,
        "mlp_residual": add,
    }


def _linear(f: Formats, output: DType | None = None) -> Rule:
    operand, accum, natural = f.gemm
    return Rule(input=operand, accum=accum, output=output or natural, storage=output or natural, algorithm=f.product)


def _unrounded(f: Formats) -> Rule:
    """A product that is kept as it was summed: operands as narrow as they are, the sum in float32."""
    operand, accum, _ = f.gemm
    return Rule(input=operand, accum=widest(accum, DType.f32), algorithm=f.product)


def _operand(f: Formats) -> Rule:
    return _out(f.gemm[0], f.gemm[0], algorithm="operand")


def _linear_rules(f: Formats) -> dict[str, Rule]:
    """Products whose output stays inside a block, their operands, and `o_proj`, which writes the block's output."""
    inner = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj", "f_b_proj", "g_b_proj",
             "mla_q_proj", "kv_a_proj", "kv_b_proj")  # fmt: skip
    operands = ("attn_in", "f_b_in", "g_b_in", "kv_b_in", "o_proj_in", "mlp_in")
    return {**{s: _linear(f) for s in inner}, **{s: _operand(f) for s in operands}, "o_proj": _block_output(f)}


def _block_output(f: Formats) -> Rule:
    """A product that writes the block's output: in a structural narrow stream that buffer is narrow as well."""
    structural = f.variant.stream in (Stream.bf16, Stream.f16)
    return _linear(f, STREAM[f.variant.stream][0] if structural else None)


def _kda_rules(f: Formats) -> dict[str, Rule]:
    kda, e = f.variant.kda, f.variant.elementwise
    taps = f.fused("taps") if e.conv is Order.once else "conv1d"
    inputs = f.stored(kda.inputs)
    l2norm = _out(inputs, f.compute, algorithm=f.fused("l2norm"))
    return {
        "conv_state": _out(f.stored(kda.conv_state), f.compute, algorithm="copy"),
        "conv_sum": _out(None, f.compute, algorithm=taps)
        if e.conv is Order.once
        else _out(f.activation, f.activation, algorithm=taps),
        "short_conv": _out(f.activation, f.compute, algorithm=f.lanes("silu")),
        **{f"{s}.{p}": l2norm for s in ("q_l2norm", "k_l2norm") for p in _PHASES},
        "kda_v": _out(inputs, f.compute, algorithm="copy"),
        "decay_gate": _out(f.compute, f.compute, algorithm=f.fused("softplus")),
        "beta": _out(f.stored(e.beta, f.compute), f.compute, algorithm=f.lanes("sigmoid")),
        **{s: _out(None, f.compute, algorithm="chunk_inner") for s in CHUNK_SITES},
        "kda_core.prefill": _kda_core(f, kda.prefill),
        "kda_core.decode": _kda_core(f, kda.decode),
        "kda_state": _out(f.stored(kda.state), f.compute, algorithm="copy"),
        "o_norm": _out(f.activation, f.compute, algorithm=f.fused(f.lanes("sigmoid"))),
    }


_PHASES = ("prefill", "decode")


def _kda_core(f: Formats, core: KdaCore) -> Rule:
    accum = KDA_ACCUM[core] or f.compute
    options = (("chunk_size", f.variant.kda.chunk_size),) if core is KdaCore.chunk else ()
    name = "chunk_rows" if core is KdaCore.chunk and f.variant.batch_invariant else core.name
    output = f.stored(f.variant.kda.outputs, f.compute)
    return _out(output, accum, algorithm=name, options=options)


def _mla_rules(f: Formats) -> dict[str, Rule]:
    mla = f.variant.mla
    inputs = f.stored(mla.inputs)
    narrow = f.activation if f.activation.precision < DType.f32.precision else None
    cores = (("prefill", mla.prefill), ("decode", mla.decode))
    bmm = "bmm_rows" if f.variant.batch_invariant else "bmm"
    return {
        "kv_a_norm": _out(f.activation, f.compute, algorithm=f.norm()),
        "kv_cache": _out(f.stored(mla.kv_cache), f.compute, algorithm="copy"),
        **{s: _out(inputs, f.compute, algorithm="copy") for s in ("mla_q", "mla_k", "mla_v")},
        "q_latent": _out(narrow, f.gemm[1], algorithm=bmm),
        **{f"mla_scores.{p}": _out(None, MLA_ACCUM[c] or f.compute, algorithm="inner") for p, c in cores},
        **{f"mla_probs.{p}": _softmax(f, c) for p, c in cores},
        "o_latent": _out(narrow, f.compute, algorithm=bmm),
        "mla_core.prefill": _mla_core(f, mla.prefill),
        "mla_core.decode": _mla_core(f, mla.decode),
    }


def _softmax(f: Formats, core: MlaCore) -> Rule:
    """The softmax of a narrow core runs in float32, and its probabilities are stored in the core's dtype."""
    accum = MLA_ACCUM[core] or f.compute
    output = accum if accum.precision < DType.f32.precision else f.stored(f.variant.mla.probs)
    return _out(output, widest(accum, DType.f32), algorithm="softmax")


def _mla_core(f: Formats, core: MlaCore) -> Rule:
    mla = f.variant.mla
    backward = (("backward", 1),) if mla.tile_order is TileOrder.backward else ()
    sizes = {
        MlaCore.flash: (("tile_q", mla.tile_q), ("tile_k", mla.tile_k), *backward),
        MlaCore.absorbed: (("tile_k", mla.tile_k), ("kv_splits", mla.kv_splits), *backward),
        MlaCore.online_f32: (("tile_q", 1), ("tile_k", 1)),
    }
    options, name = sizes.get(core, ()), core.name
    if f.variant.batch_invariant:
        name, options = f"{core.name}_rows", options or (("tile_q", 1), ("tile_k", INVARIANT_TILE))
    output = f.stored(mla.outputs, f.activation)
    accum = f.gemm[1] if core is MlaCore.absorbed else MLA_ACCUM[core] or f.compute  # the product after o_latent
    return _out(output, accum, algorithm=name, options=options)


def _mlp_rules(f: Formats) -> dict[str, Rule]:
    step = f.activation if f.variant.elementwise.swiglu is Order.stepwise else None
    rules: dict[str, Rule] = {}
    for name in ("mlp", "shared"):
        rules |= {f"{name}_gate": _linear(f), f"{name}_up": _linear(f)}
        rules |= {f"{name}_silu": _out(step, f.compute, algorithm=f.lanes("silu"))}
        rules |= {f"{name}_act": _out(f.activation, f.compute, algorithm="mul")}
        rules |= {f"{name}_down_in": _operand(f), f"{name}_down": _block_output(f)}
    return rules


def _moe_rules(f: Formats) -> dict[str, Rule]:
    moe = f.variant.moe
    operand, accum, output = f.router
    step = f.activation if f.variant.elementwise.swiglu is Order.stepwise else None
    narrow = f.activation if f.activation.precision < DType.f32.precision else None
    values = STREAM[f.variant.stream][0]
    structural = f.variant.stream in (Stream.bf16, Stream.f16)
    return {
        "router_in": _out(operand, operand, algorithm="operand"),
        "router": Rule(input=operand, accum=accum, output=output, storage=output, algorithm=f.product),
        "router_scores": _out(f.compute, f.compute, algorithm=f.lanes("sigmoid")),
        "router_ids": Rule(accum=f.compute, algorithm="top_k_lowest_id"),
        "router_weights": _out(f.compute, f.compute, algorithm=f"scale_{moe.router_scale.name}"),
        "expert_gate_up": _linear(f),
        "expert_silu": _out(step, f.compute, algorithm=f.lanes("silu")),
        "expert_act": _out(f.activation, f.compute, algorithm="mul"),
        "expert_down_in": _operand(f),
        "expert_down": _unrounded(f) if moe.weighting is Order.once else _linear(f),
        "expert_out": _out(f.stored(moe.expert_out, f.stored(moe.expert_sum)), f.compute, algorithm="mul"),
        "routed": _out(f.stored(moe.expert_sum, narrow), f.compute, algorithm=f"sum_{moe.experts.name}",
                       options=(("round_each", int(moe.expert_sum is not Store.keep)),)),
        "combine": _out(values if structural else f.compute, f.compute, algorithm="add"),
    }  # fmt: skip


def _head_rules(f: Formats) -> dict[str, Rule]:
    operand, accum, natural = f.gemm
    output = f.stored(f.variant.logits, natural)
    assert output is not None
    if output.precision > accum.precision:  # wider logits than the library's narrow product: sum and keep float32
        accum = output
    return {
        "final_norm": _out(f.normed, f.compute, algorithm=f.norm(f.variant.norm.variance.name)),
        "lm_head_in": _operand(f),
        "lm_head": Rule(input=operand, accum=accum, output=output, storage=output, algorithm=f.product),
    }
