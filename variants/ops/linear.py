"""Products with a weight: the library's own, or row by row so that a row's sum never depends on its neighbours."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gemm(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] by weight [N, K] -> [..., N], in the dtype of both; the order of the sum is the library's and may
    depend on the number of rows."""
    return F.linear(x, weight)


def gemm_rows(x: Tensor, weight: Tensor) -> Tensor:
    """As `gemm`, one row at a time: the same bits for a row whatever stands beside it (batch-invariant).

    Each row is copied to memory of its own: a library may choose its order of sums by the alignment of an address.
    """
    rows = x.reshape(-1, 1, x.shape[-1]).unbind(0)
    out = torch.cat([F.linear(row.clone(), weight) for row in rows])
    return out.view(*x.shape[:-1], -1)


def gemm_columns(x: Tensor, weight: Tensor) -> Tensor:
    """As `gemm`, with a weight [N, K] that lies in memory by columns where N > K (`Casts.by_columns`).

    One row of many short sums streams such a weight two to three times as fast; the order of the sums is another one.
    """
    return F.linear(x, weight)


def gemm_flat(x: Tensor, weight: Tensor) -> Tensor:
    """As `gemm`, the rows one after another in two dimensions: a library may choose its order of sums by the layout."""
    return F.linear(x.flatten(0, -2).contiguous(), weight).unflatten(0, x.shape[:-1])


LINEAR = {"gemm": gemm, "gemm_rows": gemm_rows, "gemm_columns": gemm_columns}
