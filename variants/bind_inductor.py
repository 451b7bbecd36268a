"""Our own lines under torch.compile bound to a recipe (implementation `inductor`): entries of `kernels.KERNELS`.

What a compiled operation swallows is said in `variants.impl_rules_inductor`; a store that a recipe names in there is
made in there.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from variants.batch import NOBODY, Batch
from variants.binding import Binder
from variants.ops import inductor, kda
from variants.ops.conv import next_state
from variants.recipe import Rule
from variants.state import State, put


def rms_norm(b: Binder, site: str, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    rule = b.rule(site)
    source = rule.algorithm.removesuffix("_twice").rpartition("norm_")[2]
    between = rule.storage.torch if rule.algorithm.endswith("_twice") and rule.storage else None

    def run(stored: Tensor, unrounded: Tensor) -> Tensor:
        x = stored if source == "stored" else unrounded
        value = stored if source == "mixed" else None
        return inductor.rms_norm(x, weight, eps, between=between, out=_leaves(rule), value=value)

    return run


def gated_rms_norm(b: Binder, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    out = _leaves(b.rule("o_norm"))
    return lambda o, gate: inductor.gated_rms_norm(o, gate, weight, eps, out=out)


def silu_and_mul(b: Binder) -> Callable[[Tensor, Tensor], Tensor]:
    name = "shared" if b.config.moe_layers[b.layer] else "mlp"
    act, between = b.rule(f"{name}_act"), _inside(b.rule(f"{name}_silu"))
    return partial(inductor.silu_and_mul, accum=act.accum.torch, between=between, out=_leaves(act))


def short_conv(b: Binder, weight: Tensor) -> Callable[[Tensor, Batch, State], Tensor]:
    """The inputs that a slot carries are moved as torch moves them; what is compiled is the sum and its SiLU."""
    layer, keep = b.layer, weight.shape[1] - 1
    carry, round_conv = b.at("conv_state"), b.at("short_conv", b.rule("short_conv").storage)
    run = partial(inductor.short_conv, between=_inside(b.rule("conv_sum")), out=_leaves(b.rule("short_conv")))

    def convolve(raw: Tensor, batch: Batch, state: State) -> Tensor:
        window = torch.cat([state.conv[layer][batch.index].to(raw.dtype), raw], 1)
        put(state.conv, layer, batch, carry(next_state(window, list(batch.lengths), keep)))
        return round_conv(run(window, weight))

    return convolve


def delta_rule(b: Binder, gate: tuple[Tensor, Tensor]) -> Callable[..., Tensor]:
    """Token by token over the rows that have one."""
    layer, round_core, carry = b.layer, b.at("kda_core", b.rule("kda_core").accum), b.at("kda_state")
    eps = b.recipe.semantics.l2_eps or kda.L2_EPS
    stores = (_inside(b.rule("q_l2norm")), _inside(b.rule("k_l2norm")), _inside(b.rule("decay_gate")),
              _inside(b.rule("beta")))  # fmt: skip
    step = partial(inductor.delta_step, scale=b.config.kda_scale, eps=eps, stores=stores)
    parameters, accum = (kda.decay_rate(gate[0]), gate[1]), b.rule("kda_core").accum.torch

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch, state: State) -> Tensor:
        carried = state.recurrent[layer][batch.index].to(accum)
        o = carried.new_zeros(v.shape)
        for t in range(v.shape[1]):
            rows = _rows(batch, t)
            here = (q[rows, t], k[rows, t], v[rows, t], g[rows, t], beta[rows, t])
            o[rows, t], moved = step(here, parameters, carried[rows])
            carried = moved if isinstance(rows, slice) else carried.index_copy(0, rows, moved)
        o = round_core(o)
        put(state.recurrent, layer, batch, carry(carried))
        return o

    return run


def route(b: Binder, bias: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    c = b.config
    return partial(inductor.route, bias=bias, k=c.experts_per_token, factor=c.routed_scaling_factor,
                   renormalize=c.renormalize, weigh=b.rule("router_weights").algorithm,
                   between=_inside(b.rule("router_scores")))  # fmt: skip


def _rows(batch: Batch, t: int) -> slice | Tensor:
    """The rows of a batch that have a token at t, all of them as a slice."""
    real = [i for i, (n, s) in enumerate(zip(batch.lengths, batch.slots, strict=True)) if n > t and s != NOBODY]
    return slice(None) if len(real) == len(batch.lengths) else torch.tensor(real, device=batch.positions.device)


def _inside(rule: Rule) -> inductor.Store:
    return rule.output.torch if rule.output else None


def _leaves(rule: Rule) -> inductor.Store:
    """What the kernel stores as: the buffer's own format; a rounding into a wider buffer is left to the site."""
    return rule.storage.torch if rule.storage and rule.output is rule.storage else None
