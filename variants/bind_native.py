"""Our CPU kernels bound to a recipe (implementation `native`): each is an entry of `variants.kernels.KERNELS`.

`variants.impl_rules_native` has seen to it that all is float32; `variants.native_step` joins the same operations.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from variants.axes import RouterScale
from variants.batch import Batch
from variants.binding import Binder
from variants.dtypes import DType
from variants.ops import kda, native
from variants.packing import seen, show_carried
from variants.recipe import Rule
from variants.state import State


def linear(rule: Rule) -> Callable[[Tensor, Tensor], Tensor]:
    return native.linear


def rms_norm(b: Binder, site: str, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Of the sum, which the stream keeps as it is."""
    return lambda _, unrounded: native.rms_norm(unrounded, weight, eps)


def gated_rms_norm(b: Binder, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda o, gate: native.gated_rms_norm(o, weight, gate, eps)


def silu_and_mul(b: Binder) -> Callable[[Tensor, Tensor], Tensor]:
    return native.silu_and_mul


def taps(weight: Tensor) -> Tensor:
    """The convolution's weight [C, W] as the kernel reads it: [W, C]."""
    return weight.t().contiguous()


def gate_parameters(gate: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias as the kernel reads them: the rate [H] and dt_bias [H, K]."""
    return kda.decay_rate(gate[0]).reshape(-1).contiguous(), gate[1].contiguous()


def delta_numbers(b: Binder) -> tuple[float, float]:
    """The query's scale, and the eps under the root of the L2 norms."""
    return b.config.kda_scale, b.recipe.semantics.l2_eps or kda.L2_EPS


def scales_before(b: Binder) -> bool:
    """Whether the routed scaling factor is applied before the weights are normalised."""
    return b.rule("router_weights").algorithm == f"scale_{RouterScale.before.name}"


def rows_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Lengths and slots of the rows, int64 [B] each."""
    return torch.tensor(batch.lengths), torch.tensor(batch.slots)


def short_conv(b: Binder, weight: Tensor) -> Callable[[Tensor, Batch, State], Tensor]:
    layer, carry, by_tap = b.layer, b.maybe("conv_state", b.rule("conv_state").storage), taps(weight)
    round_conv = b.at("short_conv", DType.f32)

    def run(raw: Tensor, batch: Batch, state: State) -> Tensor:
        pool = state.conv[layer] = state.conv[layer].contiguous()
        y = round_conv(native.short_conv(raw, by_tap, pool, rows_of(batch)))
        show_carried(carry, pool, batch)
        return y

    return run


def delta_rule(b: Binder, gate: tuple[Tensor, Tensor]) -> Callable[..., Tensor]:
    layer, carry, parameters = b.layer, b.maybe("kda_state", DType.f32), gate_parameters(gate)
    round_core, numbers = b.at("kda_core", DType.f32), delta_numbers(b)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch, state: State) -> Tensor:
        pool = state.recurrent[layer] = state.recurrent[layer].contiguous()
        o = round_core(native.delta_rule((q, k, v, g, beta), parameters, pool, rows_of(batch), numbers))
        show_carried(carry, pool, batch)
        return o

    return run


def flash(b: Binder) -> Callable[[Tensor, Tensor, Tensor, Batch], Tensor]:
    scale = b.config.mla_scale
    return lambda q, k, v, batch: native.attention(q, k, v, seen(batch), scale)


def route(b: Binder, bias: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    c = b.config
    return partial(native.route, bias=bias, k=c.experts_per_token, factor=c.routed_scaling_factor,
                   renormalize=c.renormalize, before=scales_before(b))  # fmt: skip


def experts(b: Binder, w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, ids, weights: native.experts(x, ids, weights, w13, w2)
