"""Our decode kernels bound to a recipe (implementation `row`): each function is an entry of `variants.kernels.KERNELS`.

`variants.impl_rules_row` has seen to it that what they store is bf16; `variants.fused` joins the same operations.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from variants import bind_triton
from variants.axes import RouterScale
from variants.batch import Batch
from variants.binding import Binder
from variants.dtypes import DType
from variants.ops import kda_triton, row, row_mix_triton, row_triton
from variants.ops.moe_triton import Rounding
from variants.packing import packed, show_carried, unpacked
from variants.recipe import Rule
from variants.state import State

BF16 = torch.bfloat16


def linear(rule: Rule) -> Callable[[Tensor, Tensor], Tensor]:
    return row.linear


def rms_norm(b: Binder, site: str, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Of the stored sum: an unrounded one is refused by the rules."""
    return lambda kept, _: row_triton.rms_norm(kept, weight, eps, out_dtype=BF16)


def gated_rms_norm(b: Binder, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda o, gate: row_triton.gated_rms_norm(o, weight, gate, eps=eps, out_dtype=BF16)


def silu_and_mul(b: Binder) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(row_triton.silu_and_mul, silu=BF16, out_dtype=BF16)


def short_conv(b: Binder, weight: Tensor) -> Callable[[Tensor, Batch, State], Tensor]:
    layer, carry = b.layer, b.maybe("conv_state", b.rule("conv_state").storage)
    round_conv = b.at("short_conv", DType.bf16)

    def run(raw: Tensor, batch: Batch, state: State) -> Tensor:
        pool = state.conv[layer] = state.conv[layer].contiguous()
        x = packed(raw, batch)[0]
        y = row.short_conv(x, weight, pool, batch=batch.ragged, alone=batch.alone)
        y = round_conv(unpacked(y.unsqueeze(0), batch))
        show_carried(carry, pool, batch)
        return y

    return run


def delta_rule(b: Binder, gate: tuple[Tensor, Tensor]) -> Callable[..., Tensor]:
    if b.rule("kda_core").algorithm == "chunk":
        return bind_triton.delta_rule(b, gate)
    layer, carry = b.layer, b.maybe("kda_state", DType.f32)
    fused = kda_triton.Fused(normalize=True, a_log=gate[0], dt_bias=gate[1], sigmoid=True, scale=b.config.kda_scale)
    round_core = b.at("kda_core", DType.bf16)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch, state: State) -> Tensor:
        pool = state.recurrent[layer] = state.recurrent[layer].contiguous()
        operands = tuple(packed(x, batch) for x in (q, k, v, g, beta))
        o = row.delta_step(operands, pool, batch=batch.ragged, alone=batch.alone, fused=fused)
        o = round_core(unpacked(o, batch))
        show_carried(carry, pool, batch)
        return o

    return run


flash = bind_triton.flash
absorbed = bind_triton.absorbed


def absorb(b: Binder) -> Callable[[Tensor, Tensor], Tensor]:
    return row.absorb


def expand(b: Binder) -> Callable[[Tensor, Tensor], Tensor]:
    return row.expand


def route(b: Binder, bias: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    c, before = b.config, b.rule("router_weights").algorithm == f"scale_{RouterScale.before.name}"
    return partial(row_mix_triton.route, bias=bias, k=c.experts_per_token, factor=c.routed_scaling_factor,
                   renormalize=c.renormalize, before=before)  # fmt: skip


def experts(b: Binder, w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    rounding = expert_rounding(b)
    return lambda x, ids, weights: row.experts(x, w13, w2, ids, weights, rounding=rounding)


def expert_rounding(b: Binder) -> Rounding:
    """bf16 wherever an expert stores; the product with the down projection as its rule says."""
    down = b.rule("expert_down").output
    return Rounding(expert_gate_up=BF16, expert_silu=BF16, expert_act=BF16, expert_out=BF16, routed=BF16,
                    expert_down=torch.float32 if down is None else BF16)  # fmt: skip
