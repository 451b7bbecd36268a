"""A batch-invariant product with a weight as a Triton kernel: one tile shape and one order of the sum for every M.

The reference is `variants.ops.linear.gemm`. A row's bits depend on nothing beside it: tiles never change with the
number of rows, K is never split, and rows of a tile do not meet.
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from variants.errors import UsageError
from variants.ops.launch_triton import Precision, dot, expect, format_of, narrow, require

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64


def gemm(
    x: Tensor, weight: Tensor, *, precision: Precision = Precision.ieee, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """x [..., K] by weight [N, K] -> [..., N], summed in float32 and rounded once to `out_dtype`.

    Operands of one narrow dtype are multiplied exactly; float32 operands at `precision`.
    """
    require("linear", x=x, weight=weight)
    if x.dtype != weight.dtype:
        raise UsageError(f"linear: x is {x.dtype} and weight {weight.dtype}; both must have one dtype")
    n, k = weight.shape
    expect("linear", {"x": (x, (*x.shape[:-1], k))})
    out = torch.empty(*x.shape[:-1], n, dtype=out_dtype, device=x.device)
    rows = x.numel() // k
    _gemm_kernel[(triton.cdiv(rows, BLOCK_M), triton.cdiv(n, BLOCK_N))](
        x.contiguous(), weight.contiguous(), out, rows, n,
        K=k, BM=BLOCK_M, BN=BLOCK_N, BK=BLOCK_K, PRECISION=precision.value, OUT=format_of(out_dtype),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _gemm_kernel(
    x, weight, out, m, n, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of the product, K from first to last."""
    rows, cols = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        inside = (start + depth < K)[None, :]
        a = tl.load(x + rows[:, None] * K + start + depth[None, :], mask=(rows < m)[:, None] & inside, other=0.0)
        b = tl.load(weight + cols[:, None].to(tl.int64) * K + start + depth[None, :], mask=(cols < n)[:, None] & inside,
                    other=0.0)  # fmt: skip
        acc += dot(a, tl.trans(b), PRECISION)
    tl.store(out + rows[:, None] * n + cols[None, :], narrow(acc, OUT), mask=(rows < m)[:, None] & (cols < n)[None, :])
