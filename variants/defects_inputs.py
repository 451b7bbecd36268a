"""Planted defects of what enters the delta rule: short convolution, L2 norm of q and k, beta."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.defects_delta import previous, scaled
from variants.defects_kinds import (
    AtSite,
    Defect,
    Family,
    InBlock,
    InParameter,
    Kind,
    Mechanism,
    Needs,
    Run,
    Target,
    Visit,
    wrap,
)
from variants.layers import KdaBlock
from variants.model import Layer
from variants.ops.kda import L2_EPS

CONV_WEIGHTS = "self_attn.[qkv]_conv1d.weight"


def _reversed_taps(weight: Tensor, t: Target) -> Tensor:
    """Taps [C, 1, W] from the newest to the oldest in the hit channels."""
    return t.blend(t.channels(weight.shape[0]).view(-1, 1, 1), weight.flip(-1), weight)


def _oldest_tap(weight: Tensor, t: Target) -> Tensor:
    return torch.cat([weight[..., :1] * t.factor, weight[..., 1:]], -1)


def _window(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Target, Visit], Tensor]:
    """A fault in the hit channels of the carried inputs [B, W - 1, C]."""
    return lambda x, t, _: t.blend(t.channels(x.shape[-1]), change(x), x)


def _block(change: Callable[[KdaBlock, Target], None]) -> InBlock:
    def planted(layer: Layer, t: Target) -> None:
        assert isinstance(layer.attention, KdaBlock)
        change(layer.attention, t)

    return InBlock(planted)


def _history_lost(block: KdaBlock, t: Target) -> None:
    """The carried inputs are read as zeros at the hit hand-overs."""

    def around(conv: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def call(window: Tensor, weight: Tensor) -> Tensor:
            lost = window.clone()
            lost[:, : weight.shape[-1] - 1] = 0
            return conv(t.blend(t.rows(window), lost, window), weight)

        return call

    wrap(block, "conv", around)


def _one_late(block: KdaBlock, t: Target) -> None:
    """The hit channels see every input one token late."""

    def around(conv: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def call(window: Tensor, weight: Tensor) -> Tensor:
            late = torch.cat([torch.zeros_like(window[:, :1]), window[:, :-1]], 1)
            return conv(t.blend(t.channels(window.shape[-1]), late, window), weight)

        return call

    wrap(block, "conv", around)


def _not_activated(block: KdaBlock, t: Target) -> None:
    wrap(block, "silu", lambda f: lambda x: t.blend(t.channels(x.shape[-1]), x, f(x)))


def _steep_silu(block: KdaBlock, t: Target) -> None:
    wrap(block, "silu", lambda _: lambda x: x * torch.sigmoid(x * t.factor))


Norm = Callable[[Tensor, Target], Tensor]


def _l2(norm: Norm, *sites: str) -> AtSite:
    """Another norm over q or k [B, T, H, K], read again from the short convolution's output."""

    def change(x: Tensor, t: Target, visit: Visit) -> Tensor:
        width = x.shape[2] * x.shape[3]
        start = 0 if visit.site == "q_l2norm" else width
        return norm(visit.seen["short_conv"][..., start : start + width].to(x.dtype).view_as(x), t)

    return AtSite(sites, change, reads=("short_conv",))


def _square(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True)


def _other_eps(x: Tensor, t: Target) -> Tensor:
    return x / torch.sqrt(_square(x) + L2_EPS * t.factor)


def _at_tokens(wrong: Callable[[Tensor], Tensor]) -> Norm:
    return lambda x, t: t.blend(t.tokens(x), wrong(x), x / torch.sqrt(_square(x) + L2_EPS))


def _clamped(x: Tensor) -> Tensor:
    return x / _square(x).sqrt().clamp_min(L2_EPS)


def _mean(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + L2_EPS) * x.shape[-1] ** -0.5


def _over_heads(x: Tensor) -> Tensor:
    return x / torch.sqrt(_square(x).sum(-2, keepdim=True) + L2_EPS)


def _beta(change: Callable[[Tensor], Tensor]) -> AtSite:
    return AtSite(("beta",), lambda x, t, _: t.blend(t.tokens(x), change(x), x))


def _row(family: Family, site: str, name: str, kind: Kind, mechanism: Mechanism, text: str, **more: Any) -> Defect:
    return Defect(name=name, family=family, site=site, kind=kind, mechanism=mechanism, text=text,
                  needs=Needs.kda, **more)  # fmt: skip


TOKENS = {"exercise": "a prompt of more than four tokens"}
CARRIED = {"run": (Run.carried,), "exercise": "a sequence carried over at least three steps"}
C, L, B = Family.conv, Family.l2norm, Family.beta
Q, K = "q_l2norm", "k_l2norm"
CONV = (
    _row(C, "conv_sum", "conv_taps_reversed", Kind.extent, InParameter(CONV_WEIGHTS, _reversed_taps),
         "oldest input multiplied by the newest tap", case="P10"),
    _row(C, "conv_sum", "conv_oldest_tap_scaled", Kind.scale, InParameter(CONV_WEIGHTS, _oldest_tap),
         "the oldest tap off by a factor", exercise="a prompt of at least four tokens"),
    _row(C, "conv_sum", "conv_history_lost", Kind.extent, _block(_history_lost),
         "carried inputs read as zeros at a hand-over", case="P10", **CARRIED),
    _row(C, "conv_sum", "conv_one_late", Kind.extent, _block(_one_late), "every input seen one token late"),
    _row(C, "conv_state", "conv_state_activated", Kind.extent, AtSite(("conv_state",), _window(F.silu)),
         "activated values carried in place of raw inputs", case="P10"),
    _row(C, "conv_state", "conv_state_reversed", Kind.extent, AtSite(("conv_state",), _window(lambda x: x.flip(1))),
         "carried inputs from the newest to the oldest", case="P10"),
    _row(C, "short_conv", "conv_not_activated", Kind.extent, _block(_not_activated), "SiLU left out"),
    _row(C, "short_conv", "conv_silu_steep", Kind.scale, _block(_steep_silu), "slope inside SiLU off by a factor"),
)  # fmt: skip
L2NORM = (
    _row(L, Q, "l2_eps_q", Kind.eps, _l2(_other_eps, Q), "eps of q's norm off by a factor", case="P06"),
    _row(L, K, "l2_eps_k", Kind.eps, _l2(_other_eps, K), "eps of k's norm off by a factor", case="P06"),
    _row(L, K, "l2_clamped", Kind.extent, _l2(_at_tokens(_clamped), K), "norm clamped at eps, not eps in the root",
         case="P06", **TOKENS),
    _row(L, K, "l2_eps_on_mean", Kind.extent, _l2(_at_tokens(_mean), K), "eps added to the mean, K times too large",
         case="P06", **TOKENS),
    _row(L, K, "l2_left_out", Kind.extent, _l2(_at_tokens(lambda x: x), K), "k not normalised", **TOKENS),
    _row(L, K, "l2_over_heads", Kind.extent, _l2(_at_tokens(_over_heads), K), "one norm for all heads", **TOKENS),
    _row(L, Q, "l2_q_scaled", Kind.scale, AtSite((Q,), scaled), "q off by a factor after its norm"),
)  # fmt: skip
BETA = (
    _row(B, "beta", "beta_scaled", Kind.scale, AtSite(("beta",), scaled), "beta off by a factor"),
    _row(B, "beta", "beta_doubled", Kind.extent, _beta(lambda x: 2 * x), "beta in 0..2", **TOKENS),
    _row(B, "beta", "beta_heads_swapped", Kind.extent, _beta(lambda x: x.flip(-1)), "another head's beta", **TOKENS),
    _row(B, "beta", "beta_left_out", Kind.extent, _beta(torch.ones_like), "beta taken as one", **TOKENS),
    _row(B, "beta", "beta_of_previous_token", Kind.extent, AtSite(("beta",), previous), "beta of the token before",
         exercise="a prefill of more than four tokens"),
)  # fmt: skip
TABLE = (*CONV, *L2NORM, *BETA)
