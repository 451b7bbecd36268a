"""Causal depthwise short convolution over carried inputs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def taps(window: Tensor, weight: Tensor) -> Tensor:
    """Sum over the taps from the oldest to the newest, one multiply and one add each.

    window [B, T + W - 1, C]: the W - 1 inputs before the piece, then the piece. weight [C, W], oldest tap first.
    Returns [B, T, C] in the dtype of both; each output has the same order of sum whatever T is.
    """
    width = weight.shape[-1]
    length = window.shape[1] - width + 1
    out = window[:, :length] * weight[:, 0]
    for j in range(1, width):
        out = out + window[:, j : j + length] * weight[:, j]
    return out


def taps_fused(window: Tensor, weight: Tensor) -> Tensor:
    """As `taps`; of a single token the products are made at once and summed over the taps by the library."""
    if window.shape[1] > weight.shape[-1]:
        return taps(window, weight)
    return (window * weight.t()).sum(1, keepdim=True)


def conv1d(window: Tensor, weight: Tensor) -> Tensor:
    """As `taps`, by the library's grouped convolution in the dtype of the operands."""
    out = F.conv1d(window.transpose(1, 2), weight.unsqueeze(1), groups=weight.shape[0])
    return out.transpose(1, 2).contiguous()  # the sums that follow have their bits from the strides


def next_state(window: Tensor, lengths: list[int], keep: int) -> Tensor:
    """The last `keep` real inputs of each row: window [B, keep + T, C], lengths [B] -> [B, keep, C]."""
    if len(set(lengths)) == 1:
        return window[:, lengths[0] : lengths[0] + keep]
    return torch.stack([row[n : n + keep] for row, n in zip(window, lengths, strict=True)])


CONV = {"taps": taps, "taps_fused": taps_fused, "conv1d": conv1d}
