"""vLLM's RMSNorm and SiLU kernels: registered CUDA operations, float32 inside.

The references are `variants.ops.norm`. Everything is bfloat16 on a CUDA device; nothing given is changed.
"""

import torch
from torch import Tensor

from variants.ops import vllm_load

GATED_EPS = 1e-5  # vLLM's own for the gated norm, whatever the config says


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, of_sum: bool) -> Tensor:
    """weight * norm(x) over the last dimension, rounded once; x [..., D] may be a slice of wider rows, weight [D].

    of_sum: x is a residual sum as it was rounded, and the kernel is the one that adds and normalises: x is given to it
    as the residual, to which -0 is added, the one addend that changes no bit.
    """
    rows = x.flatten(0, -2)
    if of_sum:
        out = torch.full_like(rows, -0.0, memory_format=torch.contiguous_format)
        torch.ops._C.fused_add_rms_norm(out, rows.clone(memory_format=torch.contiguous_format), weight, eps)
    else:
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        torch.ops._C.rms_norm(out, rows, weight, eps)
    return out.view(x.shape)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """weight * norm(x) * sigmoid(gate), rounded once; x, gate [..., V], the gate before its sigmoid. eps is 1e-5."""
    kda = vllm_load.module("third_party.flash_linear_attention.ops.kda")
    own = x.clone(memory_format=torch.contiguous_format)  # it writes over its input
    return kda.rms_norm_gated(own, gate, weight, None, activation="sigmoid", eps=GATED_EPS)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) rounded, times up, rounded again: gate_up [..., 2 I], gate first -> [..., I]."""
    rows = gate_up.flatten(0, -2)
    out = torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    torch.ops._C.silu_and_mul(out, rows)
    return out.view(*gate_up.shape[:-1], -1)
