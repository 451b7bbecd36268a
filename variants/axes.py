"""The axes of a variant: every choice of arithmetic, order and execution that a run can make, typed and frozen.

A YAML file in conf/variant/ names only what differs from the defaults here, which are the campaign's `f64_islands`.
A setting that would have no effect is refused, so that a name never promises what does not happen.
"""

from dataclasses import dataclass, field
from enum import Enum

from variants.errors import UsageError


class Stream(Enum):
    """The residual stream. `bf16`: the buffers are bf16. `bf16_in_place`: float32 buffers rounded at every store."""

    f64 = "f64"
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    bf16_in_place = "bf16_in_place"


class Store(Enum):
    """What is done to a value where it is stored: kept as it was computed, or rounded (buffers of that dtype)."""

    keep = "keep"
    f64 = "f64"
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"


class NormVariance(Enum):
    """Which residual sum RMSNorm sees: before the store rounds it, after, or before for the variance alone."""

    pre_store = "pre_store"
    stored = "stored"
    mixed = "mixed"


class NormRounding(Enum):
    """RMSNorm output rounded once at the end, or also before the weight is applied."""

    once = "once"
    twice = "twice"


class KvNormEps(Enum):
    """eps of kv_a_layernorm: the config's rms_norm_eps, or the 1e-6 that the transformers library fixes."""

    config = "config"
    eps_1e6 = "eps_1e6"


class Gemm(Enum):
    """Operands and output of every linear. `bf16_f32out` sums in float32 and keeps it; `bf16` is the library's own."""

    f64 = "f64"
    f32 = "f32"
    f16 = "f16"
    bf16_f32out = "bf16_f32out"
    bf16 = "bf16"


class KdaCore(Enum):
    """The delta rule: on the host in float64 or float32 (islands), on the device step by step, or in chunks.

    `recurrent` sums over keys elementwise; `recurrent_gemv` writes the same sums as matrix-vector products.
    """

    island_f64 = "island_f64"
    island_f32 = "island_f32"
    recurrent = "recurrent"
    recurrent_gemv = "recurrent_gemv"
    chunk = "chunk"


class MlaCore(Enum):
    """Softmax attention: host float64 island; dense; one key at a time; tiles of keys; over the latent (absorbed)."""

    island_f64 = "island_f64"
    dense_f32 = "dense_f32"
    dense_bf16 = "dense_bf16"
    online_f32 = "online_f32"
    flash = "flash"
    absorbed = "absorbed"
    sdpa = "sdpa"


class KvCache(Enum):
    """What is carried of MLA: the latent, expanded again at every step, or keys and values expanded once."""

    latent = "latent"
    expanded = "expanded"


class Router(Enum):
    """Router logits: float64, float32, bf16 operands with float32 logits, or bf16 operands and logits."""

    f64 = "f64"
    f32 = "f32"
    bf16_f32out = "bf16_f32out"
    bf16 = "bf16"


class RouterScale(Enum):
    """The routed scaling factor is applied before the weights are normalised (vLLM) or after (transformers)."""

    before = "before"
    after = "after"


class Experts(Enum):
    """Experts one after the other, or one grouped product over tokens sorted by expert."""

    loop = "loop"
    grouped = "grouped"


class Order(Enum):
    """Rounded once at the end of an elementwise chain, or after each of its steps."""

    once = "once"
    stepwise = "stepwise"


class Param(Enum):
    """A parameter used as the checkpoint stores it, or rounded to bf16 when it is loaded."""

    as_stored = "as_stored"
    bf16 = "bf16"


class Execution(Enum):
    """The whole prefix again at every step, or state carried from step to step."""

    recompute = "recompute"
    incremental = "incremental"


@dataclass(frozen=True, kw_only=True)
class NormAxes:
    variance: NormVariance = NormVariance.pre_store
    rounding: NormRounding = NormRounding.once
    kv_eps: KvNormEps = KvNormEps.config


@dataclass(frozen=True, kw_only=True)
class KdaAxes:
    """`inputs` rounds q, k and v where they enter the core; `qk_norm` is where the L2-normalised q and k are stored."""

    prefill: KdaCore = KdaCore.island_f64
    decode: KdaCore = KdaCore.island_f64
    chunk_size: int = 64
    inputs: Store = Store.keep
    outputs: Store = Store.keep
    state: Store = Store.keep
    conv_state: Store = Store.keep


@dataclass(frozen=True, kw_only=True)
class MlaAxes:
    """`inputs` rounds q, k and v where they enter the core; tiles are rows of queries by rows of keys."""

    prefill: MlaCore = MlaCore.island_f64
    decode: MlaCore = MlaCore.island_f64
    inputs: Store = Store.keep
    outputs: Store = Store.keep
    probs: Store = Store.keep
    kv_cache: Store = Store.keep
    cache: KvCache = KvCache.latent
    tile_q: int = 128
    tile_k: int = 128
    kv_splits: int = 1


@dataclass(frozen=True, kw_only=True)
class MoeAxes:
    """`expert_out` is where each chosen expert's weighted output is stored, `expert_sum` the running sum over them."""

    router: Router = Router.bf16
    router_scale: RouterScale = RouterScale.after
    experts: Experts = Experts.loop
    expert_out: Store = Store.keep
    expert_sum: Store = Store.keep


@dataclass(frozen=True, kw_only=True)
class ElementwiseAxes:
    conv: Order = Order.once
    swiglu: Order = Order.once
    beta: Store = Store.keep


@dataclass(frozen=True, kw_only=True)
class ParamAxes:
    a_log: Param = Param.as_stored
    dt_bias: Param = Param.as_stored
    correction_bias: Param = Param.as_stored
    weights: Param = Param.as_stored


@dataclass(frozen=True, kw_only=True)
class ExecutionAxes:
    """`prefill_piece` tokens at a time (0: the whole prompt); `batch` rows run together."""

    mode: Execution = Execution.recompute
    prefill_piece: int = 0
    batch: int = 1


@dataclass(frozen=True, kw_only=True)
class SiteOverride:
    """What a named variant changes at one site beyond its axes; an empty list of layers means all of them."""

    input: Store = Store.keep
    output: Store = Store.keep
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A full choice of arithmetic; see `variants.recipe.resolve` for what it binds at each site."""

    stream: Stream = Stream.f32
    gemm: Gemm = Gemm.bf16_f32out
    batch_invariant: bool = False
    fused_projections: bool = False
    tf32: bool = False
    norm: NormAxes = field(default_factory=NormAxes)
    kda: KdaAxes = field(default_factory=KdaAxes)
    mla: MlaAxes = field(default_factory=MlaAxes)
    moe: MoeAxes = field(default_factory=MoeAxes)
    elementwise: ElementwiseAxes = field(default_factory=ElementwiseAxes)
    params: ParamAxes = field(default_factory=ParamAxes)
    logits: Store = Store.f32
    execution: ExecutionAxes = field(default_factory=ExecutionAxes)
    override: dict[str, SiteOverride] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)


def check(v: Variant) -> None:
    """Refuse a combination in which a setting has no effect or cannot run; raises UsageError."""
    cores = (v.kda.prefill, v.kda.decode)
    mla = (v.mla.prefill, v.mla.decode)
    flash = {MlaCore.flash, MlaCore.absorbed}
    recompute = v.execution.mode is Execution.recompute
    one_dtype = v.gemm in (Gemm.bf16, Gemm.f16) or v.stream is Stream.bf16
    _refuse(
        v.kda.chunk_size != 64 and KdaCore.chunk not in cores, f"kda.chunk_size={v.kda.chunk_size}", "no chunk core"
    )
    _refuse(v.mla.tile_q != 128 and MlaCore.flash not in mla, f"mla.tile_q={v.mla.tile_q}", "no flash core")
    _refuse(v.mla.tile_k != 128 and not flash & set(mla), f"mla.tile_k={v.mla.tile_k}", "no flash or absorbed core")
    _refuse(
        v.mla.kv_splits != 1 and MlaCore.absorbed not in mla, f"mla.kv_splits={v.mla.kv_splits}", "no absorbed core"
    )
    _refuse(
        v.mla.cache is KvCache.expanded and (recompute or MlaCore.absorbed in mla),
        "mla.cache=expanded",
        "recompute carries no cache and the absorbed core reads the latent",
    )
    _refuse(v.mla.decode is MlaCore.flash, "mla.decode=flash", "flash tiles queries; use absorbed with kv_splits")
    _refuse(
        recompute and (v.kda.decode, v.mla.decode) != (v.kda.prefill, v.mla.prefill),
        "kda.decode or mla.decode unlike prefill",
        "execution.mode=recompute never decodes; set both alike",
    )
    _refuse(
        recompute and v.execution.prefill_piece != 0, "execution.prefill_piece", "recompute passes the prefix whole"
    )
    _refuse(v.elementwise.swiglu is Order.stepwise and not one_dtype, "elementwise.swiglu=stepwise", "no narrow dtype")
    _refuse(v.batch_invariant and v.fused_projections, "fused_projections", "batch_invariant names one order for each")
    sizes = {
        "kda.chunk_size": v.kda.chunk_size,
        "mla.tile_q": v.mla.tile_q,
        "mla.tile_k": v.mla.tile_k,
        "mla.kv_splits": v.mla.kv_splits,
        "execution.batch": v.execution.batch,
    }
    for name, value in sizes.items():
        _refuse(value < 1, f"{name}={value}", "it must be at least 1")
    _refuse(v.execution.prefill_piece < 0, f"execution.prefill_piece={v.execution.prefill_piece}", "0 means whole")


def _refuse(bad: bool, setting: str, why: str) -> None:
    if bad:
        raise UsageError(
            f"variant: {setting} has no effect or cannot run: {why}; remove it or change the other setting"
        )
