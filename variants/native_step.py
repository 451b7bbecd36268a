"""One decode step of one sequence by our CPU kernels as one call, the same bits as the plain path's call by call.

Built for a model, a state and a slot: every address is fixed, and the token, its position and the choice of the next
lie where the kernels find them, so any number of steps runs without Python.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from variants.bind_native import delta_numbers, gate_parameters, scales_before, taps
from variants.binding import Binder
from variants.errors import UsageError
from variants.fused_step import TAKEN, carried_by
from variants.mlp_layers import expert_weights
from variants.model_config import LayerKind
from variants.ops.native import narrow
from variants.ops.native_library import Code, Op, op, run
from variants.state import State

if TYPE_CHECKING:
    from variants.model import Model


@dataclass
class Listing:
    """Operations as they are put down, the buffers between them and all that their addresses point at."""

    slot: Tensor
    one: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.int64))
    ops: list[Op] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    made: dict[str, Tensor] = field(default_factory=dict)

    def add(self, code: Code, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float] = ()) -> None:
        self.held += tensors
        self.ops.append(op(code, tensors, sizes, numbers))

    def named(self, name: str, *shape: int) -> Tensor:
        """A float32 buffer that layers of one kind share; larger where a later one needs it."""
        found = self.made.get(name)
        if found is None or found.numel() < prod(shape):
            found = self.made[name] = torch.zeros(prod(shape))
        return found[: prod(shape)]

    def product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        self.add(Code.linear, (x, weight, out), (1, *weight.shape, narrow(weight)))
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        self.add(Code.rms_norm, (x, weight, out), (1, weight.numel()), (eps,))
        return out

    def residual(self, x: Tensor, block: Tensor) -> None:
        self.add(Code.add, (x, block, x), (x.numel(),))


@dataclass
class NativeStep:
    """The operations of a step. `step` runs one on a given token; `run` goes on greedily."""

    ops: "ctypes.Array[Op]"
    listing: Listing
    token: Tensor
    position: Tensor
    logits: Tensor
    remembered: Tensor
    count: Tensor
    carried: tuple[Tensor, ...]
    max_len: int

    @classmethod
    def of(cls, model: "Model", state: State, slot: int) -> "NativeStep":
        """Bind every operation to the weights and to the slot's part of the state."""
        c, whole = model.config, lambda n: torch.zeros(n, dtype=torch.int64)
        token, position, remembered, count = whole(1), whole(1), whole(TAKEN), whole(1)
        put = Listing(torch.tensor([slot]))
        x, logits = put.named("x", c.hidden_size), put.named("logits", c.vocab_size)
        where = Binder(c, model.recipe, model.weights, model.probe, -1, "decode")
        table = where.weights.get("model.embed_tokens.weight", where.lies("lm_head", "model.embed_tokens.weight"))
        put.add(Code.embed, (token, table, x), (c.hidden_size, narrow(table)))
        for layer, kind in enumerate(c.layer_kinds):
            b = where.on(layer)
            name = f"model.layers.{layer}"
            normed = put.norm(
                x, _norm(b, f"{name}.input_layernorm", "input_norm"), c.rms_norm_eps, put.named("n", x.numel())
            )
            put.residual(
                x, _kda(put, b, normed, state) if kind is LayerKind.kda else _mla(put, b, normed, state, position, slot)
            )
            normed = put.norm(x, _norm(b, f"{name}.post_attention_layernorm", "post_attn_norm"), c.rms_norm_eps, normed)
            put.residual(x, _mixture(put, b, normed) if c.moe_layers[layer] else _swiglu(put, b, "mlp", "mlp", normed))
        head = where.on(c.num_layers)
        normed = put.norm(x, _norm(head, "model.norm", "final_norm"), c.rms_norm_eps, put.named("n", x.numel()))
        put.product(normed, head.weight("lm_head", "lm_head.weight"), logits)
        put.add(Code.finish, (logits, token, position, remembered, count), (c.vocab_size, TAKEN))
        return cls((Op * len(put.ops))(*put.ops), put, token, position, logits, remembered, count, carried_by(state),
                   state.max_len)  # fmt: skip

    def step(self, token: Tensor, position: int) -> Tensor:
        """Logits [1, V] after one token [1] at a position; the state has moved on by it."""
        self.begin(token, position)
        self.run(1)
        return self.logits.clone().unsqueeze(0)

    @torch.inference_mode()
    def begin(self, token: Tensor, position: int) -> None:
        vocab, number = len(self.logits), int(token)
        if not 0 <= number < vocab:
            raise UsageError(f"token id {number} is outside 0..{vocab - 1}; another tokenizer made it")
        self.token.fill_(number)
        self.position.fill_(position)

    def run(self, steps: int) -> None:
        end = int(self.position) + steps
        if end > self.max_len:
            raise UsageError(f"a sequence of {end} tokens does not fit max_len={self.max_len}")
        run(self.ops, steps)

    def taken(self, steps: int) -> list[int]:
        assert steps <= TAKEN, "so many are remembered"
        count = int(self.count)
        return [int(self.remembered[i % TAKEN]) for i in range(count - steps, count)]


def _norm(b: Binder, name: str, site: str) -> Tensor:
    return b.weights.get(f"{name}.weight", b.rule(site).accum)


def _projected(put: Listing, b: Binder, x: Tensor, site: str, leaf: str, out: Tensor | None = None) -> Tensor:
    weight = b.weight(site, f"model.layers.{b.layer}.{leaf}.weight")
    return put.product(x, weight, put.named(site, len(weight)) if out is None else out)


def _kda(put: Listing, b: Binder, x: Tensor, state: State) -> Tensor:
    """Projections, convolution, the delta rule with its gates and norms, gated norm, output projection."""
    c, heads, key, value = b.config, b.config.kda_num_heads, b.config.kda_head_dim, b.config.kda_v_head_dim
    channels = heads * (2 * key + value)
    raw, mixed, o = put.named("raw", channels), put.named("mixed", channels), put.named("o", heads * value)
    for name, part in zip("qkv", raw.split([heads * key, heads * key, heads * value]), strict=True):
        _projected(put, b, x, f"{name}_proj", f"self_attn.{name}_proj", part)
    f = _projected(put, b, _projected(put, b, x, "f_a_proj", "self_attn.f_a_proj"), "f_b_proj", "self_attn.f_b_proj")
    gate = _projected(put, b, _projected(put, b, x, "g_a_proj", "self_attn.g_a_proj"), "g_b_proj", "self_attn.g_b_proj")
    beta = _projected(put, b, x, "b_proj", "self_attn.b_proj")
    convs = tuple(f"model.layers.{b.layer}.self_attn.{name}_conv1d.weight" for name in "qkv")
    weight = taps(b.weights.cat(convs, b.rule("conv_sum").accum).squeeze(1))
    rows = (put.one, put.slot)
    put.add(Code.short_conv, (raw, weight, state.conv[b.layer], *rows, mixed), (1, 1, channels, len(weight)))
    a_log, dt_bias = (b.parameter(f"self_attn.{n}", "decay_gate").reshape(heads, -1) for n in ("A_log", "dt_bias"))
    q, k, v = mixed.split([heads * key, heads * key, heads * value])
    operands = (q, k, v, f, beta, *gate_parameters((a_log, dt_bias)), state.recurrent[b.layer], *rows, o)
    sizes = (1, 1, heads, key, value, 0, len(q), len(k), len(v))
    put.add(Code.delta_rule, operands, sizes, delta_numbers(b))
    norm, normed = b.parameter("self_attn.o_norm.weight", "o_norm"), put.named("o_normed", heads * value)
    put.add(Code.gated_rms_norm, (o, norm, gate, normed), (heads, value), (c.rms_norm_eps,))
    return _projected(put, b, normed, "o_proj", "self_attn.o_proj")


def _mla(put: Listing, b: Binder, x: Tensor, state: State, position: Tensor, slot: int) -> Tensor:
    """Projections, the latent's norm, its keys and values, all into their cells; attention; output projection."""
    c, page = b.config, (state.latent, state.keys, state.values)
    q = _projected(put, b, x, "mla_q_proj", "self_attn.q_proj")
    kv = _projected(put, b, x, "kv_a_proj", "self_attn.kv_a_proj_with_mqa")
    latent = kv[: c.kv_lora_rank]
    put.norm(
        latent,
        b.parameter("self_attn.kv_a_layernorm.weight", "kv_a_norm"),
        b.recipe.semantics.kv_eps or c.rms_norm_eps,
        latent,
    )
    expanded = _projected(put, b, latent, "kv_b_proj", "self_attn.kv_b_proj")
    stores = tuple(store[b.layer][slot] for store in page)
    sizes = (c.kv_lora_rank, c.qk_rope_head_dim, c.num_heads, c.qk_nope_head_dim, c.v_head_dim)
    put.add(Code.append, (position, kv, expanded, *stores), sizes)
    o = put.named("mla_o", c.num_heads * c.v_head_dim)
    sizes = (1, 1, c.num_heads, c.qk_head_dim, c.v_head_dim, state.max_len)
    put.add(Code.attention, (q, *stores[1:], position, o), sizes, (c.mla_scale,))
    return _projected(put, b, o, "o_proj", "self_attn.o_proj")


def _swiglu(put: Listing, b: Binder, sites: str, leaf: str, x: Tensor) -> Tensor:
    gate, up = (_projected(put, b, x, f"{sites}_{n}", f"{leaf}.{n}_proj") for n in ("gate", "up"))
    act = put.named(f"{sites}_act", len(gate))
    put.add(Code.silu_and_mul, (gate, up, act), (len(gate),))
    return _projected(put, b, act, f"{sites}_down", f"{leaf}.down_proj")


def _mixture(put: Listing, b: Binder, x: Tensor) -> Tensor:
    """Router, chosen experts, shared expert."""
    c, name = b.config, "block_sparse_moe"
    logits = _projected(put, b, x, "router", f"{name}.gate")
    ids, weights = torch.zeros(c.experts_per_token, dtype=torch.int64), put.named("expert_weights", c.experts_per_token)
    bias = b.parameter(f"{name}.gate.e_score_correction_bias", "router_scores")
    sizes = (1, c.num_experts, c.experts_per_token, int(c.renormalize), int(scales_before(b)))
    put.add(Code.route, (logits, bias, ids, weights), sizes, (c.routed_scaling_factor,))
    w13, w2 = expert_weights(b, f"model.layers.{b.layer}.{name}")
    inner, routed = w2.shape[-1], put.named("routed", len(x))
    scratch = put.named("experts", 3 * inner + len(x))
    sizes = (1, len(x), inner, c.experts_per_token, narrow(w13))
    put.add(Code.experts, (x, ids, weights, w13, w2, routed, scratch), sizes)
    if c.num_shared_experts:
        put.residual(routed, _swiglu(put, b, "shared", f"{name}.shared_experts", x))
    return routed
