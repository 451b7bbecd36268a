"""Planted defects of the delta rule: recurrent state, decay gate, chunk boundary and inverse."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    before,
    watch,
    wrap,
)
from variants.dtypes import round_to
from variants.layers import KdaBlock
from variants.model import Layer

Core = Callable[..., tuple[Tensor, Tensor]]
BOUND = -5.0  # lower bound of the bounded gate, which the Kimi-Linear release does not use
FORGETS = -200.0  # log of a decay that rounded to zero, kept finite so that chunks may take differences


def in_core(change: Callable[[Core, Target, KdaBlock], Core]) -> InBlock:
    """A fault around the delta rule of a layer."""

    def planted(layer: Layer, t: Target) -> None:
        block = layer.attention
        assert isinstance(block, KdaBlock)
        wrap(block, "core", lambda core: change(core, t, block))

    return InBlock(planted)


def carried(change: Callable[[Tensor], Tensor]) -> InBlock:
    """A fault in the state as it is read, at the hand-overs that are hit."""

    def around(core: Core, t: Target, block: KdaBlock) -> Core:
        def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **o: Any) -> Any:
            return core(q, k, v, g, beta, t.blend(t.rows(state), change(state), state), **o)

        return call

    return in_core(around)


def _not_written(core: Core, t: Target, block: KdaBlock) -> Core:
    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **o: Any) -> Any:
        out, new = core(q, k, v, g, beta, state, **o)
        return out, t.blend(t.rows(state), state, new)

    return call


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _decay_after_error(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, s: Tensor) -> Any:
    s = s * decay + k * ((v - (s * k).sum(-2, keepdim=True)) * beta)
    return s, (s * q).sum(-2)


def _no_prediction(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, s: Tensor) -> Any:
    s = s * decay + k * (v * beta)
    return s, (s * q).sum(-2)


def _right(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, s: Tensor) -> Any:
    s = s * decay
    s = s + k * ((v - (s * k).sum(-2, keepdim=True)) * beta)
    return s, (s * q).sum(-2)


def _output_before_update(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, s: Tensor) -> Any:
    return _right(q, k, v, decay, beta, s)[0], (s * decay * q).sum(-2)


def rule(wrong: Rule) -> InBlock:
    """Another rule at the hit positions; a step that has none runs the core as it is."""

    def around(core: Core, t: Target, block: KdaBlock) -> Core:
        def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor, **o: Any) -> Any:
            hit = t.tokens(q)
            if not bool(hit.any()):
                return core(q, k, v, g, beta, s, **o)
            out = []
            for i in range(q.shape[1]):
                at = (q[:, i, :, :, None], k[:, i, :, :, None], v[:, i, :, None], g[:, i, :, :, None].exp())
                b = beta[:, i, :, None, None]
                pair = zip(wrong(*at, b, s), _right(*at, b, s), strict=True)
                s, y = (t.blend(hit[:, i].view(-1, *[1] * (r.ndim - 1)), w, r) for w, r in pair)
                out.append(y)
            return torch.stack(out, 1), s

        return call

    return in_core(around)


def _pads_decay(core: Core, t: Target, block: KdaBlock) -> Core:
    """Tokens that fill up a row go on decaying its state, by the last real token's gate."""

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **o: Any) -> Any:
        lengths = torch.tensor(t.clock.step.lengths).unsqueeze(1)
        beyond = torch.arange(g.shape[1]) - lengths
        last = g.take_along_dim((lengths - 1)[..., None, None].to(g.device), 1)
        hit = t.picked(beyond) & (beyond >= 0)
        return core(q, k, v, t.blend(hit[..., None, None], last.expand_as(g), g), beta, state, **o)

    return call


def narrow_decay(core: Core, t: Target, block: KdaBlock) -> Core:
    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **o: Any) -> Any:
        decay = round_to(g.exp(), t.dtype)
        return core(q, k, v, decay.log().clamp_min(FORGETS), beta, state, **o)

    return call


def _bounded(layer: Layer, t: Target) -> None:
    """The gate of another model: bound * sigmoid(exp(A_log) (f + dt_bias)), at the hit channels."""
    block = layer.attention
    assert isinstance(block, KdaBlock)
    seen: dict[str, Tensor] = {}
    watch(block, "f_b", seen)

    def bounded(g: Tensor) -> Tensor:
        z = seen["f_b"].to(g.dtype).view_as(g) + block.dt_bias
        return t.blend(t.channels(g.shape[-1]), BOUND * torch.sigmoid(block.a_log.exp() * z), g)

    before(block, "round_g", bounded)


def previous(x: Tensor, t: Target, _: Visit) -> Tensor:
    """The value of the token before, at the hit positions; a step's first token keeps its own."""
    first = torch.arange(x.shape[1]).view(1, -1, *[1] * (x.ndim - 2)) > 0
    return t.blend(t.tokens(x) & first, x.roll(1, 1), x)


def scaled(x: Tensor, t: Target, _: Visit | None = None) -> Tensor:
    return x * t.factor


def per_head(bias: Tensor, t: Target) -> Tensor:
    """dt_bias [H * K] read once a head: the hit channels get their head's first."""
    rows = bias.view(t.config.kda_num_heads, -1)
    return t.blend(t.channels(rows.shape[1]), rows[:, :1].expand_as(rows), rows).reshape(bias.shape)


def _chunks(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Target, Visit], Tensor]:
    """A fault of the carried state in the chunks that are hit (the third of every eight, or the fourth alone)."""
    return lambda x, t, visit: change(x) if bool(t.picked(torch.tensor(visit.call))) else x


def _chunk_rows(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Target, Visit], Tensor]:
    """A fault in the hit tokens of every chunk: x [B, H, C, ...]."""
    return lambda x, t, _: t.blend(t.channels(x.shape[2]).unsqueeze(-1), change(x), x)


def _first_order(x: Tensor) -> Tensor:
    """I - A in place of (I + A)^-1."""
    return 2 * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) - torch.linalg.inv(x)


def _off_diagonal(x: Tensor, t: Target, _: Visit) -> Tensor:
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return eye + (x - eye) * t.factor


def _one_anchor(x: Tensor, t: Target, visit: Visit) -> Tensor:
    """Decays of a chunk from one anchor, exp(G_i) exp(-G_j): the second factor leaves what the format can hold."""
    if not bool(t.picked(torch.tensor(visit.call))):
        return x
    size = x.shape[-1]
    span = slice(visit.call * size, (visit.call + 1) * size)
    q, k, g = (_filled(visit.seen[s][:, span], size).to(x.dtype) for s in ("q_l2norm", "k_l2norm", "decay_gate"))
    total = g.cumsum(-2)
    scale = t.config.kda_scale
    return ((q * scale * total.exp()) @ (k * (-total).exp()).transpose(-1, -2)).tril()


def _filled(x: Tensor, size: int) -> Tensor:
    """[B, up to C, H, K] -> [B, H, C, K], zeros at the end."""
    return torch.cat([x, x.new_zeros(x.shape[0], size - x.shape[1], *x.shape[2:])], 1).transpose(1, 2)


def _row(name: str, family: Family, site: str, kind: Kind, mechanism: Mechanism, text: str, **more: Any) -> Defect:
    return Defect(name=name, family=family, site=site, kind=kind, mechanism=mechanism, text=text,
                  needs=Needs.kda, **more)  # fmt: skip


BOTH = {"also": ("kda_state",)}
READ = {
    **BOTH,
    "run": (Run.carried,),
    "exercise": "a sequence carried over at least three steps; the state of a first step is zero",
}
CHUNK = {
    **BOTH,
    "run": (Run.chunk,),
    "exercise": "a prompt of more than three whole chunks, for the fault in the fourth",
}
TOKENS = {**BOTH, "exercise": "a prompt of more than four tokens"}
G = Family.gate
STATE = (
    _row("state_transposed", Family.state, "kda_core", Kind.extent, carried(lambda s: s.transpose(-1, -2)),
         "state read as [V, K] where it was written as [K, V]", case="P01", **READ),
    _row("state_reset", Family.state, "kda_core", Kind.extent, carried(torch.zeros_like),
         "state forgotten at a hand-over", case="P02", **READ),
    _row("state_heads_swapped", Family.state, "kda_core", Kind.extent, carried(lambda s: s.flip(1)),
         "state of another head read at a hand-over", **READ),
    _row("state_not_written", Family.state, "kda_state", Kind.extent, in_core(_not_written),
         "state left as it was before the step", case="P12", also=("kda_core",)),
    _row("state_decay_after_error", Family.state, "kda_core", Kind.extent, rule(_decay_after_error),
         "error computed from the state before its decay", case="P20", **TOKENS),
    _row("state_no_prediction", Family.state, "kda_core", Kind.extent, rule(_no_prediction),
         "value written without subtracting what the state predicts", **TOKENS),
    _row("state_output_before_update", Family.state, "kda_core", Kind.extent, rule(_output_before_update),
         "output read before the token's own update", exercise=TOKENS["exercise"]),
    _row("state_scaled", Family.state, "kda_state", Kind.scale, AtSite(("kda_state",), scaled),
         "state off by a factor where it is stored"),
    _row("state_rows_dropped", Family.state, "kda_state", Kind.extent,
         AtSite(("kda_state",), lambda x, t, _: x * ~t.channels(x.shape[2]).unsqueeze(-1).to(x.device)),
         "key rows of the state left out at the store"),
)  # fmt: skip
GATE = (
    _row("gate_bias_per_head", G, "decay_gate", Kind.extent, InParameter("self_attn.dt_bias", per_head),
         "dt_bias read once a head", case="P04", exercise="a dt_bias that differs between the channels of a head"),
    _row("gate_bias_scaled", G, "decay_gate", Kind.scale, InParameter("self_attn.dt_bias", scaled),
         "dt_bias off by a factor", exercise="a dt_bias that is not zero"),
    _row("gate_rate_scaled", G, "decay_gate", Kind.scale,
         InParameter("self_attn.A_log", lambda x, t: x + torch.tensor(t.factor, dtype=x.dtype).log()),
         "exp(A_log) off by a factor"),
    _row("gate_bounded", G, "decay_gate", Kind.extent, InBlock(_bounded),
         "bounded sigmoid gate in place of the softplus gate", case="P05"),
    _row("gate_clamped", G, "decay_gate", Kind.extent,
         AtSite(("decay_gate",), lambda x, t, _: t.blend(t.channels(x.shape[-1]), x.clamp_min(-0.02), x)),
         "log-decay clamped from below", case="P05", exercise="a log-decay under -0.02 in a hit channel"),
    _row("gate_of_previous_token", G, "decay_gate", Kind.extent, AtSite(("decay_gate",), previous),
         "decay of the token before", exercise="a prefill of more than four tokens"),
    _row("gate_pads_decay", G, "kda_state", Kind.extent, in_core(_pads_decay),
         "filling tokens decay the state of a short row", case="P08", also=("kda_core",), run=(Run.carried,),
         exercise="rows that run together and differ in length by more than three tokens"),
)  # fmt: skip
CHUNKS = (
    _row("chunk_state_transposed", Family.chunk, "kda_core", Kind.extent,
         AtSite(("kda_h",), _chunks(lambda h: h.transpose(-1, -2))),
         "state read transposed at a chunk boundary", case="P01", **CHUNK),
    _row("chunk_state_forgotten", Family.chunk, "kda_core", Kind.extent, AtSite(("kda_h",), _chunks(torch.zeros_like)),
         "a chunk starts from a zero state", case="P02", **CHUNK),
    _row("chunk_inverse_first_order", Family.chunk, "kda_core", Kind.extent,
         AtSite(("kda_ainv",), _chunk_rows(_first_order)), "I - A for the inverse of I + A", **CHUNK),
    _row("chunk_inverse_left_out", Family.chunk, "kda_core", Kind.extent,
         AtSite(("kda_ainv",), _chunk_rows(lambda x: torch.eye(x.shape[-1], dtype=x.dtype).expand_as(x))),
         "no correction inside the chunk", **CHUNK),
    _row("chunk_inverse_scaled", Family.chunk, "kda_core", Kind.scale, AtSite(("kda_ainv",), _off_diagonal),
         "inverse off by a factor below its diagonal", **CHUNK),
    _row("chunk_own_token_unseen", Family.chunk, "kda_core", Kind.extent,
         AtSite(("kda_aqk",), _chunk_rows(lambda x: x.tril(-1))), "a query does not see its own token", **CHUNK),
    _row("chunk_token_not_kept", Family.chunk, "kda_core", Kind.extent,
         AtSite(("kda_kg",), _chunk_rows(torch.zeros_like)), "a token is left out of the state at the chunk's end",
         **CHUNK),
    _row("chunk_read_scaled", Family.chunk, "kda_core", Kind.scale, AtSite(("kda_qg",), scaled),
         "what earlier chunks give is off by a factor", **CHUNK),
    _row("chunk_one_anchor", Family.chunk, "kda_core", Kind.extent,
         AtSite(("kda_aqk",), _one_anchor, reads=("q_l2norm", "k_l2norm", "decay_gate")),
         "decays from one anchor leave the exponent range", case="P03",
         **{**CHUNK, "exercise": "summed log-decay under -88 inside one chunk; else only the order of sums differs"}),
)  # fmt: skip
TABLE = (*STATE, *GATE, *CHUNKS)
