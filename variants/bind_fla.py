"""The published kernels of fla bound to a recipe: each function here is an entry of `variants.kernels.KERNELS`.

These kernels store in the dtype that they read. Where the recipe stores wider, the operand is widened first (exact);
where it stores narrower, the site rounds the float32 result: once in either case.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from variants.batch import Batch
from variants.bind_triton import one_dtype
from variants.binding import Binder
from variants.dtypes import DType
from variants.errors import UsageError
from variants.ops import fla_kernels
from variants.ops.conv import next_state
from variants.packing import packed, unpacked
from variants.state import State, put


def rms_norm(b: Binder, site: str, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    rule, of_stored = b.rule(site), "_stored" in b.rule(site).algorithm
    return lambda kept, unrounded: fla_kernels.rms_norm(
        _widened(kept if of_stored else unrounded, rule.storage), weight, eps
    )


def gated_rms_norm(b: Binder, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    storage = b.rule("o_norm").storage
    return lambda o, gate: fla_kernels.gated_rms_norm(_widened(o, storage), weight, gate, eps=eps)


def short_conv(b: Binder, weight: Tensor) -> Callable[[Tensor, Batch, State], Tensor]:
    """The inputs that a slot carries are moved as torch moves them; the kernel computes the sum alone."""
    rule, layer, width = b.rule("short_conv"), b.layer, weight.shape[1]
    round_conv, carry = b.at("short_conv"), b.at("conv_state")

    def run(raw: Tensor, batch: Batch, state: State) -> Tensor:
        carried = state.conv[layer][batch.index]
        x = _widened(packed(raw, batch), rule.storage)
        y = fla_kernels.short_conv(x, weight, carried.to(x.dtype), cu_seqlens=_starts(batch))
        y = round_conv(unpacked(y, batch))
        window = torch.cat([carried.to(raw.dtype), raw], 1)
        put(state.conv, layer, batch, carry(next_state(window, list(batch.lengths), width - 1)))
        return y

    return run


def delta_rule(b: Binder, gate: tuple[Tensor, Tensor]) -> Callable[..., Tensor]:
    rule, layer, chunked = b.rule("kda_core"), b.layer, b.rule("kda_core").algorithm == "chunk"
    if chunked and rule.storage is not DType.bf16:
        raise UsageError("variant.impl.kda=fla: its chunks write bf16; set kda.outputs=bf16, or choose impl.kda=torch")
    gated = bool(b.rule("decay_gate").inside)
    more = {"scale": b.config.kda_scale, "normalize": bool(b.rule("q_l2norm").inside), "gate": gated}
    if gated:
        more |= {"A_log": gate[0].reshape(-1).contiguous(), "dt_bias": gate[1].reshape(-1).contiguous()}
    core = fla_kernels.chunk if chunked else fla_kernels.recurrent
    round_core, carry = b.at("kda_core", rule.storage if chunked else None), b.at("kda_state")

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch, state: State) -> Tensor:
        q, k, v, g, beta = (packed(x, batch) for x in (q, k, v, g, beta))
        if not chunked:
            q, k, v = one_dtype(q, k, _widened(v, rule.storage))
        before = state.recurrent[layer][batch.index].contiguous()
        o, after = core(q, k, v, g, beta, before, cu_seqlens=_starts(batch), **more)
        o = round_core(unpacked(o, batch))
        put(state.recurrent, layer, batch, carry(after))
        return o

    return run


def _widened(x: Tensor, storage: DType | None) -> Tensor:
    """x in float32 unless it already has the dtype in which the kernel's result is stored."""
    return x if storage is not None and x.dtype == storage.torch else x.float()


def _starts(batch: Batch) -> Tensor:
    return _cached_starts(batch.lengths, batch.positions.device)


@lru_cache(maxsize=64)
def _cached_starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode():
        return fla_kernels.starts(lengths, device)
