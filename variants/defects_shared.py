"""Planted defects of norms, undeclared rounding, indexing, slots and non-finite values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from variants.defects_delta import in_core, narrow_decay
from variants.defects_kinds import (
    AtSite,
    Defect,
    Family,
    InBlock,
    InParameter,
    InSlots,
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
from variants.defects_mixers import at_tokens
from variants.dtypes import round_to
from variants.layers import KdaBlock, MlaBlock
from variants.model import Layer
from variants.ops.norm import gated_rms_norm
from variants.state import Batch, State

Store = dict[int, Tensor]


def _eps(where: Callable[[Layer], Any]) -> InBlock:
    def planted(layer: Layer, t: Target) -> None:
        where(layer).eps *= t.factor

    return InBlock(planted)


def _neighbour(weight: Tensor, t: Target) -> Tensor:
    return t.blend(t.channels(weight.shape[0]), weight.roll(1), weight)


def _one_plus(weight: Tensor, t: Target) -> Tensor:
    return t.blend(t.channels(weight.shape[0]), weight + 1, weight)


def _gate_first(layer: Layer, t: Target) -> None:
    """norm(o * gate) in place of norm(o) * gate, at the hit positions."""
    block = layer.attention
    assert isinstance(block, KdaBlock)
    seen: dict[str, Tensor] = {}
    watch(block, "round_core", seen)
    watch(block, "gate_sigmoid", seen)

    def wrong(y: Tensor) -> Tensor:
        gate = seen["gate_sigmoid"]
        o = seen["round_core"].to(y.device, y.dtype) * gate
        return t.blend(t.tokens(y), gated_rms_norm(o, block.o_norm_weight, torch.ones_like(gate), eps=block.eps), y)

    before(block, "round_o", wrong)


def _silu_gate(layer: Layer, t: Target) -> None:
    def around(sigmoid: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: t.blend(t.channels(x.shape[-1]), x * sigmoid(x), sigmoid(x))

    wrap(layer.attention, "gate_sigmoid", around)


def _before_residual(layer: Layer, t: Target) -> None:
    """The norm after attention sees the stream before the add, at the hit positions."""
    seen: dict[str, Tensor] = {}

    def remember(add: Callable[..., Any]) -> Callable[..., Any]:
        def call(h: Tensor, block: Tensor) -> Any:
            seen["h"] = h
            return add(h, block)

        return call

    wrap(layer, "attn_residual", remember)
    wrap(
        layer, "post_norm", lambda norm: lambda *xs: norm(*(t.blend(t.tokens(x), seen["h"].to(x.dtype), x) for x in xs))
    )


def _centred(layer: Layer, t: Target) -> None:
    def centred(x: Tensor) -> Tensor:
        return t.blend(t.tokens(x), x - x.mean(-1, keepdim=True), x)

    wrap(layer, "input_norm", lambda norm: lambda *xs: norm(*(centred(x) for x in xs)))


def _rounded(x: Tensor, t: Target, _: Visit | None = None) -> Tensor:
    return round_to(x, t.dtype)


def _rolled(weight: Tensor, t: Target) -> Tensor:
    """Each hit row of a parameter is its neighbour's."""
    hit = t.channels(weight.shape[0]).view(-1, *[1] * (weight.ndim - 1))
    return t.blend(hit, weight.roll(1, 0), weight)


def _other_head(weight: Tensor, t: Target) -> Tensor:
    """The hit channels of every head are those of the next head: rows [H * N, K]."""
    rows = weight.view(t.config.kda_num_heads, -1, *weight.shape[1:])
    hit = t.channels(rows.shape[1]).view(-1, *[1] * (weight.ndim - 1))
    return t.blend(hit, rows.roll(1, 0), rows).reshape(weight.shape)


def _halves_swapped(weight: Tensor, t: Target) -> Tensor:
    """Value rows read where the key rows of kv_b_proj are, in the hit rows of each head."""
    c = t.config
    rows = weight.view(c.num_heads, c.qk_nope_head_dim + c.v_head_dim, -1)
    hit = t.channels(rows.shape[1]).unsqueeze(-1)
    return t.blend(hit, rows.roll(c.qk_nope_head_dim, 1), rows).reshape(weight.shape)


def _left_over(stores: Callable[[State], Store]) -> InSlots:
    """What an earlier request left stays in a slot that is taken: seeded values of the size that a state has."""

    def change(state: State, slots: list[int], t: Target) -> None:
        for layer in t.layers:
            store = stores(state)[layer].clone()
            random = torch.Generator().manual_seed(layer)
            left = 0.05 * torch.randn(store.shape[1:], generator=random, dtype=torch.float64)
            hit = t.channels(left.shape[1]).view(-1, *[1] * (left.ndim - 2))
            for slot in slots:
                store[slot] = torch.where(hit, left, 0.0).to(store.dtype)
            stores(state)[layer] = store

    return InSlots(change)


def _lands(stores: Callable[[State], Store], source: Callable[[int], int | None]) -> InBlock:
    """Another row's carried value lands in a row's slot at the hit hand-overs; source(row) names whose, if any."""

    def planted(layer: Layer, t: Target) -> None:
        def around(block: KdaBlock) -> Callable[..., Tensor]:
            def call(x: Tensor, batch: Batch, state: State) -> Tensor:
                store = stores(state)
                value = store[block.layer].clone()
                for row, hit in enumerate(t.picked(t.clock.carried()).tolist()):
                    other = source(row)
                    if hit and other is not None and other < len(batch.slots):
                        value[batch.slots[row]] = store[block.layer][batch.slots[other]]
                store[block.layer] = value
                return block(x, batch, state)

            return call

        wrap(layer, "attention", around)

    return InBlock(planted)


def _latent_lands(layer: Layer, t: Target) -> None:
    """The last latent of the second row is written to the first row's slot too, at the hit hand-overs."""

    def around(block: MlaBlock) -> Callable[..., Tensor]:
        def call(x: Tensor, batch: Batch, state: State) -> Tensor:
            if len(batch.slots) > 1 and min(batch.starts[:2]) > 0 and bool(t.picked(t.clock.carried())[0]):
                store, (a, b) = state.latent[block.layer], batch.slots[:2]
                store[state.cell(a, batch.starts[0] - 1)] = store[state.cell(b, batch.starts[1] - 1)]
            return block(x, batch, state)

        return call

    wrap(layer, "attention", around)


def _poison(value: float) -> Callable[[Tensor], Tensor]:
    """One bad element at the end of each hit token's value."""
    return lambda x: torch.cat([x[..., :-1], torch.full_like(x[..., -1:], value)], -1)


def _bad_state(x: Tensor, t: Target, _: Visit) -> Tensor:
    return t.blend(t.rows(x), _poison(float("nan"))(x), x)


def _row(needs: Needs, family: Family, site: str, name: str, *rest: Any, **more: Any) -> Defect:
    kind, mechanism, text = rest
    assert isinstance(mechanism, Mechanism)
    return Defect(name=name, family=family, site=site, kind=kind, mechanism=mechanism, text=text, needs=needs, **more)


TOKENS = {"exercise": "a prompt of more than four tokens"}
PAIR = {"run": (Run.carried,), "exercise": "two rows that run together and are carried over at least three steps"}
N, F, E = Needs, Family, Kind.extent
V, U, IDX, L, X = F.norm, F.rounding, F.indexing, F.slots, F.nonfinite
NORM = (
    _row(N.any, V, "input_norm", "norm_eps_input", Kind.eps, _eps(lambda n: n.input_norm), "eps before attention"),
    _row(N.any, V, "post_attn_norm", "norm_eps_post", Kind.eps, _eps(lambda n: n.post_norm), "eps after attention"),
    _row(N.kda, V, "o_norm", "norm_eps_output", Kind.eps, _eps(lambda n: n.attention), "eps of the gated norm"),
    _row(N.mla, V, "kv_a_norm", "norm_eps_latent", Kind.eps, _eps(lambda n: n.attention), "eps of the latent's norm"),
    _row(N.any, V, "input_norm", "norm_weight_one_plus", E, InParameter("input_layernorm.weight", _one_plus),
         "weight taken as an offset from one"),
    _row(N.any, V, "post_attn_norm", "norm_weight_neighbour", E,
         InParameter("post_attention_layernorm.weight", _neighbour), "weight of the channel before"),
    _row(N.kda, V, "o_norm", "norm_after_gate", E, InBlock(_gate_first), "gate applied before the norm", **TOKENS),
    _row(N.kda, V, "o_norm", "norm_silu_gate", E, InBlock(_silu_gate), "gate through SiLU, not a sigmoid"),
    _row(N.any, V, "post_attn_norm", "norm_before_residual", E, InBlock(_before_residual),
         "norm over the stream before the residual add", case="P22", **TOKENS),
    _row(N.any, V, "input_norm", "norm_centred", E, InBlock(_centred), "mean subtracted first", **TOKENS),
)  # fmt: skip
_ROUNDED = (
    ("A_log", N.kda, "decay_gate", InParameter("self_attn.A_log", _rounded), "P15"),
    ("dt_bias", N.kda, "decay_gate", InParameter("self_attn.dt_bias", _rounded), "P15"),
    ("correction_bias", N.moe, "router_ids", InParameter("block_sparse_moe.gate.e_score_correction_bias", _rounded),
     "P15"),
    ("decay", N.kda, "kda_core", in_core(narrow_decay), "P07"),
    *((site, need, site, AtSite((site,), _rounded), case) for site, need, case in (
        ("kda_state", N.kda, ""), ("decay_gate", N.kda, "P07"), ("beta", N.kda, ""), ("k_l2norm", N.kda, ""),
        ("kda_core", N.kda, ""), ("mla_core", N.mla, ""), ("router_scores", N.moe, "P18"),
        ("router_weights", N.moe, ""), ("combine", N.moe, ""), ("attn_residual", N.any, "P22"))),
)  # fmt: skip
SAME = {"exercise": "values that the named format does not hold; a site that the recipe rounds there hides it"}
ROUNDING = tuple(
    _row(needs, U, site, f"rounded_{name}", Kind.rounding, mechanism, f"{name} rounded without being declared",
         case=case, also=("kda_state",) if name == "decay" else (), **SAME)
    for name, needs, site, mechanism, case in _ROUNDED
)  # fmt: skip
INDEXING = (
    _row(N.kda, IDX, "kda_core", "index_kda_heads", E, at_tokens(lambda x: x.flip(2), "kda_core"),
         "heads of the delta rule's output swapped", **TOKENS),
    _row(N.mla, IDX, "mla_core", "index_mla_heads", E, at_tokens(lambda x: x.flip(2), "mla_core"),
         "heads of attention's output swapped", **TOKENS),
    _row(N.kda, IDX, "kda_v", "index_value_channel", E, at_tokens(lambda x: x.roll(1, -1), "kda_v"),
         "values read one channel off", **TOKENS),
    _row(N.kda, IDX, "g_b_proj", "index_gate_head", E, InParameter("self_attn.g_b_proj.weight", _other_head),
         "output gate of another head"),
    _row(N.kda, IDX, "decay_gate", "index_bias_head", E, InParameter("self_attn.dt_bias", _other_head),
         "dt_bias of another head", case="P04"),
    _row(N.moe, IDX, "router", "index_router_row", E, InParameter("block_sparse_moe.gate.weight", _rolled),
         "router weight of the expert before"),
    _row(N.moe, IDX, "expert_down", "index_expert_row", E, InParameter("block_sparse_moe.experts.*.w2.weight", _rolled),
         "rows of the experts' down projection one off"),
    _row(N.mla, IDX, "kv_b_proj", "index_keys_values", E, InParameter("self_attn.kv_b_proj.weight", _halves_swapped),
         "value rows read for key rows", also=("q_latent", "mla_core")),
    _row(N.any, IDX, "o_proj", "index_output_row", E, InParameter("self_attn.o_proj.weight", _rolled),
         "rows of the output projection one off"),
)  # fmt: skip
STATE_STORE, CONV_STORE = (lambda s: s.recurrent), (lambda s: s.conv)
SLOTS = (
    _row(N.kda, L, "kda_core", "slot_state_stale", E, _left_over(STATE_STORE), "recurrent state of an earlier request",
         case="P09", also=("kda_state",)),
    _row(N.kda, L, "conv_sum", "slot_conv_stale", E, _left_over(CONV_STORE), "convolution inputs of an earlier request",
         case="P09", also=("conv_state",)),
    _row(N.kda, L, "kda_core", "slot_state_leaks", E, _lands(STATE_STORE, lambda row: 1 if row == 0 else None),
         "the second row's state lands in the first row's slot", case="P12", also=("kda_state",), **PAIR),
    _row(N.kda, L, "conv_sum", "slot_conv_leaks", E, _lands(CONV_STORE, lambda row: 1 if row == 0 else None),
         "the second row's inputs land in the first row's slot", case="P12", also=("conv_state",), **PAIR),
    _row(N.kda, L, "kda_core", "slot_snapshot_of_neighbour", E,
         _lands(STATE_STORE, lambda row: row - 1 if row else None),
         "each row goes on from the snapshot of the row before", case="P11", also=("kda_state",), **PAIR),
    _row(N.mla, L, "kv_b_in", "slot_latent_leaks", E, InBlock(_latent_lands),
         "the second row's latent lands in the first row's slot", case="P12", also=("o_latent", "mla_core"), **PAIR),
)  # fmt: skip
NONFINITE = (
    _row(N.kda, X, "kda_state", "nan_in_state", E, AtSite(("kda_state",), _bad_state), "NaN stored in the state",
         also=("kda_core",), run=(Run.carried,), exercise="a sequence carried over at least three steps"),
    _row(N.mla, X, "mla_core", "nan_in_attention", E, at_tokens(_poison(float("nan")), "mla_core"),
         "NaN from a row that attends to nothing", case="P21", **TOKENS),
    _row(N.moe, X, "expert_out", "infinity_in_expert", E, at_tokens(_poison(float("inf")), "expert_out"),
         "an expert's output overflows", case="P19", **TOKENS),
    _row(N.kda, X, "decay_gate", "nan_in_gate", E, at_tokens(_poison(float("nan")), "decay_gate"),
         "NaN in a decay", case="P03", **TOKENS),
    _row(N.kda, X, "kda_core", "nan_made_zero", E, at_tokens(torch.zeros_like, "kda_core"),
         "output of a token replaced by zeros, as after sanitising a NaN", case="P19", **TOKENS),
)  # fmt: skip
TABLE = (*NORM, *ROUNDING, *INDEXING, *SLOTS, *NONFINITE)
