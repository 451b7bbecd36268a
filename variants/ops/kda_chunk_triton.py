"""The delta rule in chunks of 64 tokens as Triton kernels: prefill, over a packed batch and state slots.

The reference is `variants.ops.kda.chunk` with its hooks. Every value that an engine rounds on the way has its dtype in
`Rounding`, named as the site in `variants.sites.CHUNK_SITES`; what is not named there is float32. `VLLM` and `FLA` are
the roundings of two engines: the same places, another scale, another precision of the merge.
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from dataclasses import dataclass, fields
from enum import Enum

import torch
import triton
from torch import Tensor

from variants.errors import UsageError
from variants.ops import kda_chunk_kernels_triton as kernels
from variants.ops.kda_triton import PLAIN, Fused, check, dense_batch, gate_operands
from variants.ops.launch_triton import Precision, Ragged, block, format_of

F32, BF16 = torch.float32, torch.bfloat16


class ScaleAt(Enum):
    """Where the query's scale is applied.

    query: q * scale, rounded to kda_q_scaled, is the query everywhere. product: rounded so for the output alone; the
    scores multiply it in float32, before the sum left of a diagonal block and after it inside. sum: after every sum.
    """

    query = 0
    product = 1
    sum = 2


class Cumsum(Enum):
    """How the log-decay is summed inside a chunk: a scan, or a product with a triangle of ones."""

    scan = 0
    dot = 1


@dataclass(frozen=True)
class Rounding:
    """The arithmetic inside a chunk. A product's operands of one narrow dtype are multiplied exactly and summed in
    float32; any other pair is widened and taken at a `Precision`: `scores` for the blocks left of the diagonal of
    k k' and q k', `merge` for the inverse, `products` for the rest.

    q_l2norm: what q and k are rounded to where the norm is fused. base2: decays are kept in base 2.
    """

    q_l2norm: torch.dtype = F32
    kda_v_beta: torch.dtype = F32
    kda_k_beta: torch.dtype = F32
    kda_ainv: torch.dtype = F32
    kda_u: torch.dtype = F32
    kda_w: torch.dtype = F32
    kda_kg: torch.dtype = F32
    kda_h: torch.dtype = F32
    kda_v_new: torch.dtype = F32
    kda_q_scaled: torch.dtype = F32
    kda_qg: torch.dtype = F32
    kda_aqk: torch.dtype = F32
    scores: Precision = Precision.ieee
    merge: Precision = Precision.ieee
    products: Precision = Precision.ieee
    scale_at: ScaleAt = ScaleAt.query
    cumsum: Cumsum = Cumsum.scan
    base2: bool = False


_SITES = [f.name for f in fields(Rounding) if f.type is torch.dtype or f.default is F32]
_NARROW = dict.fromkeys(_SITES, BF16)
VLLM = Rounding(**_NARROW, scores=Precision.tf32, scale_at=ScaleAt.product, cumsum=Cumsum.dot, base2=True)
FLA = Rounding(**_NARROW, scores=Precision.tf32, merge=Precision.tf32, scale_at=ScaleAt.sum, base2=True)


@dataclass(frozen=True)
class Tiles:
    """Shapes of the launches: widths of blocks, warps, stages. They move speed and the order of float32 sums; one set
    for every batch and length, so that a sequence's bits depend on nothing beside it."""

    decay_k: int = 32
    decay_warps: int = 2
    scores_k: int = 32
    scores_warps: int = 1
    scores_unroll: int = 4
    solve_d: int = 128
    solve_warps: int = 4
    state_v: int = 32
    state_warps: int = 4
    state_stages: int = 3
    output_k: int = 64
    output_v: int = 64
    output_warps: int = 4
    output_stages: int = 2


NARROW_TILES = Tiles()
WIDE_TILES = Tiles(solve_d=32, solve_warps=8, state_v=16, state_warps=8, state_stages=2, output_k=32, output_warps=8)
NORMALIZE_ROWS = 8
MAX_CHUNK_K = 256


def tiles_for(rounding: Rounding) -> Tiles:
    """Small tiles where a product holds float32 operands, which need twice the memory of a tile and more registers."""
    wide = F32 in (rounding.kda_ainv, rounding.kda_h, rounding.kda_w, rounding.kda_v_new, rounding.kda_qg)
    return WIDE_TILES if wide else NARROW_TILES


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    chunk_size: int = kernels.CHUNK,
    batch: Ragged | None = None,
    fused: Fused = PLAIN,
    rounding: Rounding = Rounding(),
    out_dtype: torch.dtype = F32,
) -> tuple[Tensor, Tensor]:
    """The delta rule in chunks, rounded inside as `rounding` says and at the output once to `out_dtype`.

    Operands, `batch`, state and what is returned are as in `kda_triton.recurrent`, here with K up to 256. All roundings
    are ties_to_even. chunk_size must be 64. A sequence's chunks begin at its first token.
    """
    check("kda chunk", (q, k, v, g, beta), state, batch)
    if chunk_size != kernels.CHUNK or q.shape[-1] > MAX_CHUNK_K:
        raise UsageError(
            f"kda chunk: the kernels take chunk_size {kernels.CHUNK} and K up to {MAX_CHUNK_K}, got {chunk_size} and "
            f"{q.shape[-1]}; choose impl torch"
        )
    if batch is None:
        batch, state = dense_batch(*q.shape[:2], str(q.device)), state.clone()
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    if fused.normalize:
        q, k = _normalized(q, k, rounding.q_l2norm)
    run = _Run(q, k, v, beta, state, batch, fused, rounding, tiles_for(rounding))
    total = run.decay(g)
    a, aqk = run.scores(total)
    u, w, kg = run.solve(a, total)
    h, v_new = run.carry(u, w, kg, total)
    return run.output(total, h, aqk, v_new, out_dtype), state


def _normalized(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=dtype, device=q.device), torch.empty(k.shape, dtype=dtype, device=k.device)
    rows = q.numel() // q.shape[-1]
    kernels.normalize_kernel[(triton.cdiv(rows, NORMALIZE_ROWS), 2)](
        q, k, *out, rows, D=q.shape[-1], BD=block(q.shape[-1]), BR=NORMALIZE_ROWS, OUT=format_of(dtype), num_warps=4
    )
    return out


@dataclass(frozen=True)
class _Run:
    """One call's operands; each method is one launch. Scratch is [B, T, H, .] as the inputs are."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    state: Tensor
    batch: Ragged
    fused: Fused
    rounding: Rounding
    tiles: Tiles

    @property
    def dims(self) -> dict[str, int]:
        return {"H": self.q.shape[2], "K": self.q.shape[3]}

    @property
    def where(self) -> tuple[Tensor, Tensor]:
        return self.batch.chunks, self.batch.cu_seqlens

    def scratch(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*self.q.shape[:3], width, dtype=dtype, device=self.q.device)

    def decay(self, g: Tensor) -> Tensor:
        total, r = self.scratch(self.q.shape[3], F32), self.rounding
        a_log, dt_bias = gate_operands(self.fused, self.q)
        heads, width = self.dims.values()
        kernels.decay_kernel[(len(self.batch.chunks), heads, triton.cdiv(width, self.tiles.decay_k))](
            g, a_log, dt_bias, total, *self.where, **self.dims, BK=self.tiles.decay_k,
            GATE=self.fused.a_log is not None, AS_DOT=r.cumsum is Cumsum.dot, BASE2=r.base2,
            num_warps=self.tiles.decay_warps,
        )  # fmt: skip
        return total

    def scores(self, total: Tensor) -> tuple[Tensor, Tensor]:
        r = self.rounding
        a, aqk = self.scratch(kernels.CHUNK, F32), self.scratch(kernels.CHUNK, r.kda_aqk)
        blocks = len(self.batch.chunks) * kernels.PAIRS
        kernels.scores_kernel[(blocks, self.q.shape[2])](
            self.q, self.k, total, self.beta, a, aqk, *self.where, self.fused.scale, **self.dims,
            BK=self.tiles.scores_k, Q_SCALED=format_of(r.kda_q_scaled), AQK=format_of(r.kda_aqk),
            SCALE_AT=r.scale_at.value, SIGMOID=self.fused.sigmoid, BASE2=r.base2, PRECISION=r.scores.value,
            UNROLL=self.tiles.scores_unroll, num_warps=self.tiles.scores_warps, num_stages=1,
        )  # fmt: skip
        return a, aqk

    def solve(self, a: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r, width, v_width = self.rounding, self.q.shape[3], self.v.shape[3]
        u, w, kg = self.scratch(v_width, r.kda_u), self.scratch(width, r.kda_w), self.scratch(width, r.kda_kg)
        kernels.solve_kernel[(len(self.batch.chunks), self.q.shape[2])](
            a, self.k, self.v, self.beta, total, u, w, kg, *self.where, **self.dims, V=v_width, BD=self.tiles.solve_d,
            AINV=format_of(r.kda_ainv), V_BETA=format_of(r.kda_v_beta), K_BETA=format_of(r.kda_k_beta),
            U=format_of(r.kda_u), W=format_of(r.kda_w), KG=format_of(r.kda_kg), SIGMOID=self.fused.sigmoid,
            BASE2=r.base2, MERGE=r.merge.value, PRECISION=r.products.value,
            num_warps=self.tiles.solve_warps,
        )  # fmt: skip
        return u, w, kg

    def carry(self, u: Tensor, w: Tensor, kg: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        r, (heads, width), v_width = self.rounding, self.dims.values(), self.v.shape[3]
        h = torch.empty(len(self.batch.chunks), heads, width, v_width, dtype=r.kda_h, device=self.q.device)
        v_new = self.scratch(v_width, r.kda_v_new)
        kernels.state_kernel[(triton.cdiv(v_width, self.tiles.state_v), len(self.batch.lengths) * heads)](
            w, u, kg, total, self.state, h, v_new, self.batch.cu_seqlens, self.batch.chunk_starts, self.batch.slots,
            **self.dims, V=v_width, BK=block(width), BV=self.tiles.state_v, STORED=format_of(r.kda_h),
            V_NEW=format_of(r.kda_v_new), BASE2=r.base2, PRECISION=r.products.value,
            num_warps=self.tiles.state_warps, num_stages=self.tiles.state_stages,
        )  # fmt: skip
        return h, v_new

    def output(self, total: Tensor, h: Tensor, aqk: Tensor, v_new: Tensor, dtype: torch.dtype) -> Tensor:
        r, v_width = self.rounding, self.v.shape[3]
        o = self.scratch(v_width, dtype)
        kernels.output_kernel[(triton.cdiv(v_width, self.tiles.output_v), len(self.batch.chunks), self.q.shape[2])](
            self.q, total, h, aqk, v_new, o, *self.where, self.batch.slots, self.fused.scale, **self.dims, V=v_width,
            BK=self.tiles.output_k, BV=self.tiles.output_v, Q_SCALED=format_of(r.kda_q_scaled), QG=format_of(r.kda_qg),
            OUT=format_of(dtype), SCALE_AT=r.scale_at.value, BASE2=r.base2, PRECISION=r.products.value,
            num_warps=self.tiles.output_warps, num_stages=self.tiles.output_stages,
        )  # fmt: skip
        return o
