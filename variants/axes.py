"""The axes of a variant: every choice of arithmetic, order and execution that a run can make, typed and frozen.

A YAML file in conf/variant/ names only what differs from the defaults here, which are the campaign's `f64_islands`.
A setting that would have no effect is refused, so that a name never promises what does not happen.
"""

from dataclasses import dataclass, field, fields

from variants.choices import (
    ChunkForm,
    Execution,
    Experts,
    Gemm,
    Graph,
    Impl,
    KdaCore,
    KvCache,
    KvNormEps,
    L2NormEps,
    MlaCore,
    NormRounding,
    NormVariance,
    Order,
    Param,
    Preempt,
    Router,
    RouterScale,
    Status,
    Store,
    Stream,
    TileOrder,
)


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

    fused: operations of a decode step share launches, and every value keeps its bits; graph: how they are launched,
    under paged execution one graph for each number of rows that a decode is filled up to (`filled`).

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

    def filled(self, rows: int) -> int:
        """Rows of a paged decode of so many sequences: filled up to `batch`, or for a graph to a power of two."""
        if self.fixed_rows:
            return self.batch
        return min(1 << (rows - 1).bit_length(), self.batch) if self.graph is Graph.cuda else rows


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
