"""Sigmoid router and experts. N tokens, E experts, k chosen, D hidden, I expert width."""

from collections.abc import Callable

import torch
from torch import Tensor

Linear = Callable[[Tensor, Tensor], Tensor]


def top_k_lowest_id(choice: Tensor, k: int) -> Tensor:
    """The k largest of each row in decreasing order, equal values by increasing id: choice [N, E] -> int64 [N, k]."""
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :k]


def weights_before(chosen: Tensor, factor: float, renormalize: bool) -> Tensor:
    """Routed weights with the scaling factor applied before the normalisation; chosen: unbiased scores [N, k]."""
    scaled = chosen * factor
    return scaled / (chosen.sum(-1, keepdim=True) + 1e-20) if renormalize else scaled


def weights_after(chosen: Tensor, factor: float, renormalize: bool) -> Tensor:
    """Routed weights with the scaling factor applied after the normalisation; chosen: unbiased scores [N, k]."""
    return (chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if renormalize else chosen) * factor


WEIGHTS = {"scale_before": weights_before, "scale_after": weights_after}


def sum_loop(outputs: Tensor, ids: Tensor, round_each: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Sum of the chosen experts' outputs in increasing order of expert id: outputs [N, k, D], ids [N, k] -> [N, D]."""
    order = ids.argsort(-1).unsqueeze(-1)
    return _sum_slots(outputs.take_along_dim(order, 1), round_each)


def sum_grouped(outputs: Tensor, ids: Tensor, round_each: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Sum in the order of the slots, the highest score first."""
    return _sum_slots(outputs, round_each)


def _sum_slots(outputs: Tensor, round_each: Callable[[Tensor], Tensor] | None) -> Tensor:
    total = outputs[:, 0]
    for j in range(1, outputs.shape[1]):
        total = total + outputs[:, j]
        if round_each is not None:
            total = round_each(total)
    return total


SUM = {"sum_loop": sum_loop, "sum_grouped": sum_grouped}
