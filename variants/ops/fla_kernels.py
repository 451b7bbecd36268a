"""The published kernels of flash-linear-attention (fla-core 0.6.0) under the argument names of our own.

An optional dependency, imported when a kernel is called. Each sums in float32 and stores in the dtype of what it reads,
ties_to_even. The package would choose tiles by timing the first call of a shape, so that two processes may sum in
another order; here each kernel keeps the first of its tiles.
"""

import sys
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """The delta rule one token at a time, all of it in float32; the output in the dtype of v.

    q, k, g [1, T, H, K], v [1, T, H, V], beta [1, T, H], state float32 [N, H, K, V]. more: scale, cu_seqlens, A_log and
    dt_bias, and what the kernel takes raw (`raw`). Returns o [1, T, H, V] and the new state.
    """
    return _of("fla.ops.kda", "fused_recurrent_kda")(
        q, k, v, g, beta, initial_state=state, output_final_state=True, **raw(**more)
    )


def chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """The delta rule in chunks of 64, everything inside a chunk stored in the dtype of q, k and v; as `recurrent`."""
    return _of("fla.ops.kda", "chunk_kda")(
        q, k, v, g, beta, initial_state=state, output_final_state=True, **raw(**more)
    )


def raw(*, normalize: bool, gate: bool, **more: Any) -> dict[str, Any]:
    """The kernels' own names of what they take raw: q and k before their L2 norm, g before its softplus."""
    return {"use_qk_l2norm_in_kernel": normalize, "use_gate_in_kernel": gate, **more}


def short_conv(raw: Tensor, weight: Tensor, carried: Tensor, *, cu_seqlens: Tensor) -> Tensor:
    """Each token's sum over its taps and SiLU: raw [1, T, C], weight [C, W], carried [N, W - 1, C], oldest first."""
    kept = pad(
        carried.transpose(1, 2), (1, 0)
    ).contiguous()  # its cache holds W inputs, of which the oldest is not read
    y, _ = _of("fla.modules.causal_conv1d", "causal_conv1d")(
        raw, weight, initial_state=kept, activation="silu", cu_seqlens=cu_seqlens
    )
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps): x [..., D], weight [D]."""
    return _of("fla.modules.norm.layernorm", "rms_norm")(x, weight, None, eps=eps)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, *, eps: float) -> Tensor:
    """rms_norm(x) * sigmoid(gate): x, gate [..., V], weight [V]."""
    return _of("fla.modules.norm.fused_norm_gate", "rms_norm_gated")(
        x, gate, weight, None, activation="sigmoid", eps=eps
    )


def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each sequence of a packed batch begins, and the end: int64 [N + 1]."""
    return torch.tensor([0, *lengths], device=device).cumsum(0)


@cache
def _of(module: str, name: str) -> Any:
    """A function of the package, once no kernel that is loaded with it is left to choose its tiles by time."""
    function = getattr(import_module(module), name)
    for loaded in [m for n, m in sys.modules.items() if n.startswith("fla.")]:
        for kernel in list(vars(loaded).values()):
            _keep_first_tiles(kernel)
    return function


def _keep_first_tiles(kernel: Any) -> None:
    while kernel is not None and hasattr(kernel, "fn"):
        if isinstance(getattr(kernel, "configs", None), list):
            kernel.configs = kernel.configs[:1]
        kernel = kernel.fn
