"""Which combinations of axes are refused: a setting that would have no effect, and one that cannot run."""

from collections.abc import Iterator
from dataclasses import fields

from variants.axes import (
    ChunkForm,
    Execution,
    ExecutionAxes,
    Gemm,
    Graph,
    Impl,
    KdaCore,
    KvCache,
    MlaCore,
    NormRounding,
    NormVariance,
    Order,
    Preempt,
    Store,
    Stream,
    TileOrder,
    Variant,
)
from variants.errors import UsageError

Refusal = tuple[bool, str, str]
LATENT = {MlaCore.absorbed}
NO_ROWS = {MlaCore.dense_bf16, MlaCore.sdpa}
PAGED_ONLY = ("block_size", "pages", "token_budget", "prefill_batch", "fixed_rows", "prefix_cache", "preempt")
UNSHOWN = {MlaCore.dense_bf16, MlaCore.sdpa}


def check(v: Variant) -> None:
    """Refuse a combination in which a setting has no effect or cannot run; raises UsageError for the first found."""
    for group in (_sizes, _kda, _mla, _batch_invariant, _stream, _execution, _fused, _paged, _native):
        for bad, setting, why in group(v):
            if bad:
                raise UsageError(
                    f"variant: {setting} has no effect or cannot run: {why}; remove it or change the other setting"
                )


def _sizes(v: Variant) -> Iterator[Refusal]:
    at_least_one = {
        "kda.chunk_size": v.kda.chunk_size,
        "mla.tile_q": v.mla.tile_q,
        "mla.tile_k": v.mla.tile_k,
        "mla.kv_splits": v.mla.kv_splits,
        "execution.batch": v.execution.batch,
    }
    for name, value in at_least_one.items():
        yield value < 1, f"{name}={value}", "it must be at least 1"
    yield v.fused_gate_up and v.fused_projections, "fused_gate_up=true", "fused_projections joins gate and up already"
    yield (
        v.fused_gate_up and v.batch_invariant,
        "fused_gate_up=true",
        "batch_invariant names one order for each product",
    )
    yield v.reduced_sums and v.gemm is not Gemm.bf16, "reduced_sums=true", "it concerns products that give bf16"
    yield v.execution.prefill_piece < 0, f"execution.prefill_piece={v.execution.prefill_piece}", "0 means whole"
    run = v.execution
    for name, value, least in (("block_size", run.block_size, 1), ("pages", run.pages, 0),
                               ("token_budget", run.token_budget, 0), ("prefill_batch", run.prefill_batch, 1),
                               ("prefix_cache", run.prefix_cache, 0)):  # fmt: skip
        yield value < least, f"execution.{name}={value}", f"it must be at least {least}"


def _kda(v: Variant) -> Iterator[Refusal]:
    chunked = KdaCore.chunk in (v.kda.prefill, v.kda.decode)
    form, name = v.kda.chunk_form, f"kda.chunk_form={v.kda.chunk_form.name}"
    yield v.kda.chunk_size != 64 and not chunked, f"kda.chunk_size={v.kda.chunk_size}", "no chunk core"
    yield form is not ChunkForm.plain and not chunked, name, "no chunk core"


def _mla(v: Variant) -> Iterator[Refusal]:
    mla, cores = v.mla, {v.mla.prefill, v.mla.decode}
    tiled = {MlaCore.flash, MlaCore.absorbed}
    yield mla.tile_q != 128 and MlaCore.flash not in cores, f"mla.tile_q={mla.tile_q}", "no flash core"
    yield mla.tile_k != 128 and not tiled & cores, f"mla.tile_k={mla.tile_k}", "no flash or absorbed core"
    order = mla.tile_order
    ordered = order is not TileOrder.forward
    yield ordered and not tiled & cores, f"mla.tile_order={order.name}", "no flash or absorbed core"
    yield mla.kv_splits != 1 and not LATENT & cores, f"mla.kv_splits={mla.kv_splits}", "no absorbed core"
    yield (
        mla.cache is KvCache.expanded and bool(LATENT & cores),
        "mla.cache=expanded",
        "the absorbed core reads the latent",
    )
    yield (
        mla.decode is MlaCore.flash and v.execution.mode is not Execution.recompute,
        "mla.decode=flash",
        "flash tiles queries and decode has one; use absorbed with kv_splits",
    )
    yield (
        mla.probs is not Store.keep and cores <= UNSHOWN,
        f"mla.probs={mla.probs.name}",
        "dense_bf16 stores its probabilities in bf16 and sdpa shows none",
    )


def _batch_invariant(v: Variant) -> Iterator[Refusal]:
    if not v.batch_invariant:
        return
    yield v.fused_projections, "fused_projections=true", "batch_invariant names one order for each product"
    yield v.fused_elementwise, "fused_elementwise=true", "batch_invariant minds each element's place"
    backward = v.mla.tile_order is not TileOrder.forward
    yield backward, f"mla.tile_order={v.mla.tile_order.name}", "batch_invariant goes forward"
    yield v.mla.tile_q != 128, f"mla.tile_q={v.mla.tile_q}", "batch_invariant runs each query alone"
    for name, core in (("mla.prefill", v.mla.prefill), ("mla.decode", v.mla.decode)):
        yield core in NO_ROWS, f"batch_invariant=true with {name}={core.name}", "that core has no row-by-row form"
    for name, core in (("kda.prefill", v.kda.prefill), ("kda.decode", v.kda.decode)):
        gemv = core is KdaCore.recurrent_gemv
        yield gemv, f"batch_invariant=true with {name}={core.name}", "the library's products choose its order of sums"


def _stream(v: Variant) -> Iterator[Refusal]:
    """Settings that only differ where something is stored narrower than it is computed."""
    once = v.moe.weighting is Order.once
    yield once and v.gemm not in (Gemm.bf16, Gemm.f16), "moe.weighting=once", "products are not narrow"
    narrow_products = v.gemm in (Gemm.bf16, Gemm.f16)
    wide_sum = v.stream in (Stream.f64, Stream.f32) and not v.override
    wide_norm = v.stream in (Stream.f64, Stream.f32, Stream.bf16_in_place) and not v.override
    swiglu, norm = v.elementwise.swiglu, v.norm
    yield swiglu is Order.stepwise and not narrow_products, "elementwise.swiglu=stepwise", "products are not narrow"
    yield (
        norm.variance is not NormVariance.pre_store and wide_sum,
        f"norm.variance={norm.variance.name}",
        f"stream={v.stream.name} does not round the sum",
    )
    yield (
        norm.rounding is NormRounding.twice and wide_norm and not narrow_products,
        "norm.rounding=twice",
        f"stream={v.stream.name} does not round what the norm writes",
    )


def _execution(v: Variant) -> Iterator[Refusal]:
    if v.execution.mode is not Execution.recompute:
        return
    yield (
        (v.kda.decode, v.mla.decode) != (v.kda.prefill, v.mla.prefill),
        "kda.decode or mla.decode unlike prefill",
        "execution.mode=recompute never decodes; set both alike",
    )
    yield v.execution.prefill_piece != 0, "execution.prefill_piece", "recompute passes the prefix whole"
    carried = {"kda.state": v.kda.state, "kda.conv_state": v.kda.conv_state}
    for name, store in carried.items():
        yield store is not Store.keep, f"{name}={store.name}", "execution.mode=recompute carries no state"
    yield v.mla.cache is KvCache.expanded, "mla.cache=expanded", "execution.mode=recompute carries no cache"


def _fused(v: Variant) -> Iterator[Refusal]:
    """A fused step and a graph: impl row in bf16, or (fused alone) impl native over expanded keys."""
    run, set_ = v.execution, "execution.fused=true"
    row, native = v.impl.all_are(Impl.row), v.impl.all_are(Impl.native)
    yield run.fused and bool(v.override), set_, "an override is of one operation alone, and a fused step joins them"
    other = (f"impl.{k}={i.name}" for k, i in vars(v.impl).items() if i not in (Impl.row, Impl.native))
    named, why = next(other, "impl row and native"), "all of impl must be row (fast_decode) or native (f32_native)"
    yield run.fused and not (row or native), f"{set_} with {named}", why
    narrow = (v.stream, v.gemm, v.logits) == (Stream.bf16, Gemm.bf16, Store.bf16)
    yield run.fused and row and not narrow, set_, "impl row joins operations where stream, gemm and logits are bf16"
    latent = v.mla.cache is not KvCache.expanded
    yield run.fused and native and latent, f"{set_} with mla.cache=latent", "impl native joins over mla.cache=expanded"
    alone = run.mode is Execution.incremental and run.batch == 1
    yield run.fused and not alone, set_, "it is one row; set execution.mode=incremental and batch=1"
    replayed = row and narrow and not v.override and (run.fused or run.mode is Execution.paged)
    yield (
        run.graph is not Graph.off and not replayed,
        "execution.graph=cuda",
        "it replays what fast_decode or paged_engine_graph runs, impl row in bf16",
    )


def _native(v: Variant) -> Iterator[Refusal]:
    native = any(getattr(v.impl, axis.name) is Impl.native for axis in fields(v.impl))
    yield bool(v.override) and native, f"override of {', '.join(v.override)}", "impl native is float32 throughout"


def _paged(v: Variant) -> Iterator[Refusal]:
    run, plain = v.execution, ExecutionAxes()
    for name in PAGED_ONLY:
        changed = getattr(run, name) != getattr(plain, name) and run.mode is not Execution.paged
        yield changed, f"execution.{name}={getattr(run, name)}", "only execution.mode=paged reads it"
    least = run.batch + run.prefill_piece - 1
    yield (
        run.token_budget != 0 and (run.prefill_piece == 0 or run.token_budget < least),
        f"execution.token_budget={run.token_budget}",
        f"a step takes batch - 1 tokens and one prefill_piece (above 0): {least} here",
    )
    yield (
        run.prefix_cache != 0 and (run.prefill_piece == 0 or run.prefill_piece % run.block_size != 0),
        f"execution.prefix_cache={run.prefix_cache}",
        f"a prefix ends where a piece does, at whole blocks: prefill_piece is no multiple of {run.block_size}",
    )
    yield (
        run.preempt is not Preempt.recompute and run.pages == 0,
        f"execution.preempt={run.preempt.name}",
        "pages=0 is enough for all, and nothing is preempted",
    )
    yield run.prefill_batch > run.batch, f"execution.prefill_batch={run.prefill_batch}", f"batch is {run.batch}"
    yield run.fixed_rows and run.batch == 1, "execution.fixed_rows=true", "batch is 1"
