"""RMSNorm, plain and gated; the variance and the product with the weight are in the dtype of the input given here."""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    value: Tensor | None = None,
    between: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, unrounded.

    x, weight: the dtype to compute in. value: normalised in place of x when the variance is of another tensor than the
    value (variance before the store, value after). between: a rounding applied before the weight.
    """
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return _weighted(x if value is None else value, rstd, weight, between)


def rms_norm_fused(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    value: Tensor | None = None,
    between: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """As `rms_norm` in fewer calls: the sum is scaled by 1/n and added to eps in one step (one rounding or two)."""
    return _weighted(x if value is None else value, _rstd_fused(x, eps), weight, between)


def _weighted(x: Tensor, rstd: Tensor, weight: Tensor, between: Callable[[Tensor], Tensor] | None) -> Tensor:
    y = x * rstd
    return weight * (y if between is None else between(y).to(y.dtype))


def gated_rms_norm(x: Tensor, weight: Tensor, open_gate: Tensor, *, eps: float) -> Tensor:
    """weight * norm(x) * open_gate, unrounded; x and the gate's sigmoid [..., V], weight [V], all of one dtype."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return weight * (x * rstd) * open_gate


def gated_rms_norm_fused(x: Tensor, weight: Tensor, open_gate: Tensor, *, eps: float) -> Tensor:
    """As `gated_rms_norm`, its variance as in `rms_norm_fused`."""
    return weight * (x * _rstd_fused(x, eps)) * open_gate


def _rstd_fused(x: Tensor, eps: float) -> Tensor:
    square = (x * x).sum(-1, keepdim=True)
    return torch.rsqrt(torch.add(constant(eps, x.dtype, x.device), square, alpha=1 / x.shape[-1]))


@lru_cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor of no dimension, made once: a Python number is wrapped anew by every operation."""
    return torch.tensor(value, dtype=dtype, device=device)


def sigmoid_lanes(x: Tensor) -> Tensor:
    """Logistic function whose bits do not depend on where an element lies in its tensor, nor on threads.

    torch's own ends each thread's run in a scalar tail that rounds differently from the vectors; exp, sum and quotient
    one by one do not.
    """
    return 1.0 / (1.0 + torch.exp(-x))


def silu_lanes(x: Tensor) -> Tensor:
    """x * sigmoid(x), with the same care for an element's place as `sigmoid_lanes`."""
    return x / (1.0 + torch.exp(-x))


SIGMOID = {"sigmoid": torch.sigmoid, "sigmoid_lanes": sigmoid_lanes, "sigmoid_fused": torch.sigmoid}
GATED = {"sigmoid": gated_rms_norm, "sigmoid_lanes": gated_rms_norm, "sigmoid_fused": gated_rms_norm_fused}
SILU = {"silu": F.silu, "silu_lanes": silu_lanes}


def norm_of(algorithm: str) -> Callable[..., Tensor]:
    """The function of a norm's algorithm, which goes on with the variance's source and the number of roundings."""
    return rms_norm_fused if algorithm.startswith("rms_norm_fused") else rms_norm
