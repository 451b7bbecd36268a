"""The axes of a variant: every choice of arithmetic, order and execution that a run can make, typed and frozen.

A YAML file in conf/variant/ names only what differs from the defaults here, which are the campaign's `f64_islands`.
A setting that would have no effect is refused, so that a name never promises what does not happen.
"""

from dataclasses import dataclass, field, fields
from enum import Enum


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


class L2NormEps(Enum):
    """eps under the root of the L2 norm of q and k: 1e-6, or the config's rms_norm_eps as llama.cpp has it."""

    eps_1e6 = "eps_1e6"
    config = "config"


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
    """Softmax attention: host float64 island; dense; one key at a time; tiles of keys; over the latent (absorbed).

    `sdpa` is the library's own fused attention, in float32.
    """

    island_f64 = "island_f64"
    dense_f32 = "dense_f32"
    dense_bf16 = "dense_bf16"
    online_f32 = "online_f32"
    flash = "flash"
    absorbed = "absorbed"
    sdpa = "sdpa"


class ChunkForm(Enum):
    """How the chunked core rounds inside: nothing but what `override` names, or as vLLM's or fla's kernels do.

    The engines' forms round every site inside a chunk to bf16, take some products at TF32 and place the query's scale
    their own way. torch has vLLM's form, in products whose operands are cut to TF32; fla's is that of kernels alone.
    """

    plain = "plain"
    vllm = "vllm"
    fla = "fla"


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


class TileOrder(Enum):
    """Which end of the keys an online softmax begins at: the first token's tile, or the last one's."""

    forward = "forward"
    backward = "backward"


class Param(Enum):
    """A parameter used as the checkpoint stores it, or rounded to bf16 when it is loaded."""

    as_stored = "as_stored"
    bf16 = "bf16"


class Impl(Enum):
    """Who computes an operation: torch, our Triton kernels, fla's, or vLLM's.

    `row`: our decode kernels for one token of one sequence, for more the library's products and our tiled kernels.
    """

    torch = "torch"
    triton = "triton"
    row = "row"
    fla = "fla"
    vllm = "vllm"


class Status(Enum):
    """What is known of a named variant; `measured_negative`: it scored under what it changes, in the campaign and here.

    No arithmetic: it stays a variant like any other.
    """

    open = "open"
    measured_negative = "measured_negative"


class Execution(Enum):
    """The whole prefix again at every step, or state carried from step to step: in slots, or in slots and pages."""

    recompute = "recompute"
    incremental = "incremental"
    paged = "paged"


class Graph(Enum):
    """Launches of a decode step one by one, or all of them replayed as one CUDA graph."""

    off = "off"
    cuda = "cuda"


class Preempt(Enum):
    """What a sequence that has to give its pages up does later: it runs again, or comes back from the host."""

    recompute = "recompute"
    offload = "offload"


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
    chunk_form: ChunkForm = ChunkForm.plain
    inputs: Store = Store.keep
    outputs: Store = Store.keep
    state: Store = Store.keep
    conv_state: Store = Store.keep
    l2_eps: L2NormEps = L2NormEps.eps_1e6


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
    tile_order: TileOrder = TileOrder.forward
    kv_splits: int = 1


@dataclass(frozen=True, kw_only=True)
class MoeAxes:
    """`expert_out` is where each chosen expert's weighted output is stored, `expert_sum` the running sum over them.

    `weighting`: the down product is rounded before it is weighted, as products are, or once, after the weight.
    """

    router: Router = Router.bf16
    router_scale: RouterScale = RouterScale.after
    experts: Experts = Experts.loop
    weighting: Order = Order.stepwise
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
class ImplAxes:
    """The implementation of each operation; `variants.kernels.KERNELS` says which there are.

    `router`: triton has its product alone, and choice and weights stay torch's; vllm has all of it.
    """

    kda: Impl = Impl.torch
    mla: Impl = Impl.torch
    conv: Impl = Impl.torch
    norms: Impl = Impl.torch
    experts: Impl = Impl.torch
    router: Impl = Impl.torch
    linear: Impl = Impl.torch
    swiglu: Impl = Impl.torch

    def all_are(self, impl: Impl) -> bool:
        return all(getattr(self, f.name) is impl for f in fields(self))


@dataclass(frozen=True, kw_only=True)
class ExecutionAxes:
    """`prefill_piece` tokens at a time (0: the whole prompt); `batch` rows run together.

    fused: operations of a decode step share launches, and every value keeps its bits; graph: how they are launched.

    The rest is of paged execution: `block_size` tokens a page; `pages` in all (0: enough for `batch` sequences);
    `token_budget` tokens a step (0: no limit); `prefill_batch` prompts in one pass; `fixed_rows` fills each decode up
    to `batch` rows; `prefix_cache` state snapshots are kept for prompts that begin alike.
    """

    mode: Execution = Execution.recompute
    prefill_piece: int = 0
    batch: int = 1
    fused: bool = False
    graph: Graph = Graph.off
    block_size: int = 64
    pages: int = 0
    token_budget: int = 0
    prefill_batch: int = 1
    fixed_rows: bool = False
    prefix_cache: int = 0
    preempt: Preempt = Preempt.recompute


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
    fused_gate_up: bool = False
    reduced_sums: bool = False
    fused_elementwise: bool = False  # norms, decay gate, convolution: in as few calls of the library as they have
    weights_by_column: bool = False
    tf32: bool = False
    norm: NormAxes = field(default_factory=NormAxes)
    kda: KdaAxes = field(default_factory=KdaAxes)
    mla: MlaAxes = field(default_factory=MlaAxes)
    moe: MoeAxes = field(default_factory=MoeAxes)
    elementwise: ElementwiseAxes = field(default_factory=ElementwiseAxes)
    params: ParamAxes = field(default_factory=ParamAxes)
    impl: ImplAxes = field(default_factory=ImplAxes)
    logits: Store = Store.f32
    execution: ExecutionAxes = field(default_factory=ExecutionAxes)
    override: dict[str, SiteOverride] = field(default_factory=dict)
    status: Status = field(default=Status.open, compare=False)

    def __post_init__(self) -> None:
        from variants.axes_check import check  # it reads the Enums above

        check(self)
