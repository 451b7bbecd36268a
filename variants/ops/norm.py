"""RMSNorm, plain and gated; the variance and the product with the weight are in the dtype of the input given here."""

from collections.abc import Callable

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
    y = (x if value is None else value) * rstd
    if between is not None:
        y = between(y).to(x.dtype)
    return weight * y


def gated_rms_norm(x: Tensor, weight: Tensor, open_gate: Tensor, *, eps: float) -> Tensor:
    """weight * norm(x) * open_gate, unrounded; x and the gate's sigmoid [..., V], weight [V], all of one dtype."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return weight * (x * rstd) * open_gate


def sigmoid_lanes(x: Tensor) -> Tensor:
    """Logistic function whose bits do not depend on where an element lies in its tensor, nor on threads.

    torch's own ends each thread's run in a scalar tail that rounds differently from the vectors; exp, sum and quotient
    one by one do not.
    """
    return 1.0 / (1.0 + torch.exp(-x))


def silu_lanes(x: Tensor) -> Tensor:
    """x * sigmoid(x), with the same care for an element's place as `sigmoid_lanes`."""
    return x / (1.0 + torch.exp(-x))


SIGMOID = {"sigmoid": torch.sigmoid, "sigmoid_lanes": sigmoid_lanes}
SILU = {"silu": F.silu, "silu_lanes": silu_lanes}
