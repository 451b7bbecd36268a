"""The attention blocks, norms and residual adds of a layer, written once; the arithmetic of each line was bound before.

x is [B, T, D] throughout. A block is built for one layer and one phase and called with the batch and the state.
"""

import torch
from torch import Tensor

from variants.batch import Batch
from variants.binding import Binder
from variants.dtypes import store_as
from variants.ops import kda, mla
from variants.ops.conv import CONV, next_state
from variants.ops.norm import GATED, SIGMOID, SILU, norm_of
from variants.recipe import Rule
from variants.rounding import adds_at_once, both_bf16, pinned
from variants.sites import CHUNK_SITES
from variants.state import State, append, carried_keys, put


class Norm:
    """RMSNorm after a residual add: sees the sum before its store, after it, or one for variance and one for value."""

    def __init__(self, b: Binder, site: str, name: str, eps: float) -> None:
        rule = b.rule(site)
        self.accum, self.eps = rule.accum, eps
        self.weight = b.weights.get(name, rule.accum)
        self.round = b.at(site, None)
        bind = b.kernel("rms_norm", site)
        self.normalize = self._normalize if bind is None else bind(b, site, self.weight, eps)
        self.between = self.round if rule.algorithm.endswith("_twice") else None
        self.norm = norm_of(rule.algorithm)
        self.source = rule.algorithm.removesuffix("_twice").rpartition("norm_")[2].removeprefix("fused_")
        store = rule.storage
        if self.between is not None and store is not None:
            self.between = lambda y: store_as(y, store)

    def __call__(self, stored: Tensor, unrounded: Tensor) -> Tensor:
        return self.round(self.normalize(stored, unrounded))

    def _normalize(self, stored: Tensor, unrounded: Tensor) -> Tensor:
        variance_of = stored if self.source == "stored" else unrounded
        value = pinned(stored, self.accum) if self.source == "mixed" else None
        return self.norm(pinned(variance_of, self.accum), self.weight, self.eps, value=value, between=self.between)


class Residual:
    """The residual add: returns the sum as stored and as it was before the store, which is the stored one again where
    the norm that follows reads no other."""

    def __init__(self, b: Binder, site: str, following: Rule) -> None:
        rule = b.rule(site)
        self.accum, self.round = rule.accum, b.maybe(site, rule.accum)
        self.at_once = adds_at_once(rule, b.probe) and following.algorithm.removesuffix("_twice").endswith("_stored")

    def __call__(self, h: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        if self.at_once and both_bf16(h, block):
            stored = h + block
            return stored, stored
        total = pinned(h, self.accum) + pinned(block, self.accum)
        return (total if self.round is None else self.round(total)), total


class KdaBlock:
    """Projections, short convolution, decay gate, delta rule, gated norm, output projection."""

    def __init__(self, b: Binder) -> None:
        c = b.config
        self.heads, self.k_dim, self.v_dim = c.kda_num_heads, c.kda_head_dim, c.kda_v_head_dim
        self.scale, self.eps, self.width, self.layer = c.kda_scale, c.rms_norm_eps, c.conv_size, b.layer
        self.operand = b.at("attn_in")
        self.project = b.linears(q_proj="self_attn.q_proj", k_proj="self_attn.k_proj", v_proj="self_attn.v_proj",
                                 f_a_proj="self_attn.f_a_proj", g_a_proj="self_attn.g_a_proj",
                                 b_proj="self_attn.b_proj")  # fmt: skip
        self.f_b_in, self.f_b = b.at("f_b_in"), b.linear("f_b_proj", "self_attn.f_b_proj")
        self.g_b_in, self.g_b = b.at("g_b_in"), b.linear("g_b_proj", "self_attn.g_b_proj")
        self._bind_conv(b)
        self._bind_gates(b)
        self._bind_core(b)
        self.o_norm_weight = b.parameter("self_attn.o_norm.weight", "o_norm")
        self.norm = GATED[b.rule("o_norm").algorithm]
        self.norm_accum, self.round_o = b.rule("o_norm").accum, b.at("o_norm")
        bind = b.kernel("gated_rms_norm", "o_norm")
        self.gated_norm = self._gated_norm if bind is None else bind(b, self.o_norm_weight, self.eps)
        self.o_in, self.o_proj = b.at("o_proj_in"), b.linear("o_proj", "self_attn.o_proj")

    def _bind_conv(self, b: Binder) -> None:
        rule = b.rule("conv_sum")
        self.conv, self.conv_accum = CONV[rule.algorithm], rule.accum
        names = tuple(f"model.layers.{b.layer}.self_attn.{x}_conv1d.weight" for x in "qkv")
        self.conv_weight = b.weights.cat(names, self.conv_accum).squeeze(1)
        self.round_state, self.round_sum = b.at("conv_state"), b.at("conv_sum", self.conv_accum)
        self.silu = SILU[b.rule("short_conv").algorithm]
        self.silu_accum, self.round_conv = b.rule("short_conv").accum, b.at("short_conv")
        bind = b.kernel("short_conv", "short_conv")
        self.convolve = self._convolve if bind is None else bind(b, self.conv_weight)

    def _bind_gates(self, b: Binder) -> None:
        self.gate_accum, self.beta_accum = b.rule("decay_gate").accum, b.rule("beta").accum
        self.beta_sigmoid, self.gate_sigmoid = SIGMOID[b.rule("beta").algorithm], SIGMOID[b.rule("o_norm").algorithm]
        self.gate = kda.GATES[b.rule("decay_gate").algorithm]
        self.a_log = b.parameter("self_attn.A_log", "decay_gate").reshape(-1, 1)
        self.rate = kda.decay_rate(self.a_log)
        self.dt_bias = b.parameter("self_attn.dt_bias", "decay_gate").reshape(self.heads, self.k_dim)
        self.round_g, self.round_beta = b.at("decay_gate", self.gate_accum), b.at("beta", self.beta_accum)

    def _bind_core(self, b: Binder) -> None:
        rule = b.rule("kda_core")
        self.core, self.accum = kda.CORES[rule.algorithm], rule.accum
        self.options = dict(rule.options)
        if "chunk_size" in self.options:
            self.options["at"] = b.hooks(*CHUNK_SITES)  # pyright: ignore[reportArgumentType]
        self.island = rule.algorithm in kda.ISLANDS
        self.l2norm, self.norm_dtype = kda.L2NORM[b.rule("q_l2norm").algorithm], b.rule("q_l2norm").accum
        self.l2_eps = b.recipe.semantics.l2_eps or kda.L2_EPS
        self.round_q, self.round_k, self.round_v = b.at("q_l2norm"), b.at("k_l2norm"), b.at("kda_v")
        self.round_core, self.round_carry = b.at("kda_core", self.accum), b.at("kda_state")
        bind = b.kernel("delta_rule", "kda_core")
        self.delta_rule = self._delta_rule if bind is None else bind(b, (self.a_log, self.dt_bias))
        self.raw = {s for s in ("q_l2norm", "decay_gate", "beta") if b.rule(s).inside}  # what the kernel takes raw

    def __call__(self, x: Tensor, batch: Batch, state: State) -> Tensor:
        q, k, v, f, gate, beta = self.project(self.operand(x))
        qk, v = self._short_conv(torch.cat([q, k, v], -1), batch, state)
        g = self._decay(self.f_b(self.f_b_in(f)))
        if "beta" not in self.raw:
            beta = self.round_beta(self.beta_sigmoid(pinned(beta, self.beta_accum)))
        q, k = self._normalized(qk)
        o = self.delta_rule(q, k, self.round_v(v), g, beta, batch, state)
        gate = self.g_b(self.g_b_in(gate)).unflatten(-1, (self.heads, self.v_dim))
        return self.o_proj(self.o_in(self.round_o(self.gated_norm(o, gate)).flatten(-2)))

    def _gated_norm(self, o: Tensor, gate: Tensor) -> Tensor:
        gate = self.gate_sigmoid(pinned(gate, self.norm_accum))
        return self.norm(pinned(o, self.norm_accum), self.o_norm_weight, gate, eps=self.eps)

    def _short_conv(self, raw: Tensor, batch: Batch, state: State) -> tuple[Tensor, Tensor]:
        """q and k as [B, T, 2 H, K] and v [B, T, H, V], after convolution and SiLU."""
        mixed = self.convolve(raw, batch, state)
        qk, v = mixed.split([2 * self.heads * self.k_dim, self.heads * self.v_dim], -1)
        return qk.unflatten(-1, (2 * self.heads, -1)), v.unflatten(-1, (self.heads, -1))

    def _convolve(self, raw: Tensor, batch: Batch, state: State) -> Tensor:
        carried = state.conv[self.layer][batch.index]
        window = torch.cat([carried.to(raw.dtype), raw], 1)
        put(state.conv, self.layer, batch, self.round_state(next_state(window, list(batch.lengths), self.width - 1)))
        mixed = self.round_sum(self.conv(pinned(window, self.conv_accum), self.conv_weight))
        return self.round_conv(self.silu(pinned(mixed, self.silu_accum)))

    def _decay(self, f: Tensor) -> Tensor:
        if "decay_gate" in self.raw:
            return f.unflatten(-1, (self.heads, self.k_dim))
        f = pinned(f, self.gate_accum).unflatten(-1, (self.heads, self.k_dim))
        return self.round_g(self.gate(f, self.rate, self.dt_bias))

    def _normalized(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        if "q_l2norm" in self.raw:
            q, k = qk.chunk(2, 2)
            return q, k
        q, k = self.l2norm(pinned(qk, self.norm_dtype), eps=self.l2_eps).chunk(2, 2)
        return self.round_q(q), self.round_k(k)

    def _delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch, state: State
    ) -> Tensor:
        if batch.real is not None:  # a token that is not real neither writes nor decays, even where it is not finite
            pad = ~batch.real[..., None]
            k, v, g = (y.masked_fill(pad.unsqueeze(-1), 0) for y in (k, v, g))
            beta = beta.masked_fill(pad, 0)
        carried = state.recurrent[self.layer][batch.index]
        home = q.device
        q, k, v, g, beta, carried = (self._to_core(y) for y in (q, k, v, g, beta, carried))
        o, carried = self.core(q * self.scale, k, v, g, beta, carried, **self.options)
        o = self.round_core(o).to(home)
        put(state.recurrent, self.layer, batch, self.round_carry(carried).to(home))
        return o

    def _to_core(self, x: Tensor) -> Tensor:
        return pinned(x.cpu() if self.island else x, self.accum)


class MlaBlock:
    """Latent attention without positions: the latent is carried, expanded or absorbed as the recipe says."""

    def __init__(self, b: Binder) -> None:
        c = b.config
        self.config, self.layer, self.scale = c, b.layer, c.mla_scale
        self.operand = b.at("attn_in")
        self.project = b.linears(mla_q_proj="self_attn.q_proj", kv_a_proj="self_attn.kv_a_proj_with_mqa")
        self.norm_rule = b.rule("kv_a_norm")
        self.norm = norm_of(self.norm_rule.algorithm)
        bind = b.kernel("rms_norm", "kv_a_norm")
        self.norm_weight = b.parameter("self_attn.kv_a_layernorm.weight", "kv_a_norm")
        self.eps = b.recipe.semantics.kv_eps or c.rms_norm_eps
        self.round_norm, self.round_cache = b.at("kv_a_norm"), b.at("kv_cache")
        self.normalize = self._normalize if bind is None else bind(b, "kv_a_norm", self.norm_weight, self.eps)
        store = self.norm_rule.storage
        twice = self.norm_rule.algorithm.endswith("_twice") and store is not None
        self.between = (lambda y: store_as(y, store)) if twice and store else None
        self.kv_b_in, self.kv_b = b.at("kv_b_in"), b.linear("kv_b_proj", "self_attn.kv_b_proj")
        self.round_q, self.round_k, self.round_v = b.at("mla_q"), b.at("mla_k"), b.at("mla_v")
        self._bind_core(b)
        self.o_in, self.o_proj = b.at("o_proj_in"), b.linear("o_proj", "self_attn.o_proj")

    def _bind_core(self, b: Binder) -> None:
        rule = b.rule("mla_core")
        latent = rule.algorithm in mla.LATENT_CORES
        self.accum = b.rule("o_latent").accum if latent else rule.accum
        self.options = dict(rule.options)
        self.island = rule.algorithm in mla.ISLANDS
        self.attend = self._absorbed if latent else self._expanded
        self.core = (mla.LATENT_CORES if latent else mla.CORES)[rule.algorithm]
        self.hooks = b.hooks("mla_scores", "mla_probs")
        bind = b.kernel("absorbed", "o_latent") if latent else b.kernel("flash", "mla_core")
        bound = None if bind is None else bind(b)
        self.flash, self.over_latent = bound or self._flash, bound or self._over_latent
        self.round_core = b.at("mla_core", rule.accum)
        self.round_q_latent, self.round_o_latent = b.at("q_latent"), b.at("o_latent")
        self.latent_accum = b.rule("q_latent").accum
        absorb, expand = b.kernel("absorb", "q_latent"), b.kernel("expand", "mla_core") if latent else None
        self.absorb = mla.PER_HEAD[b.rule("q_latent").algorithm] if absorb is None else absorb(b)
        self.expand_out = mla.PER_HEAD[b.rule("o_latent").algorithm] if expand is None else expand(b)
        weight = b.parameter("self_attn.kv_b_proj.weight", "q_latent")
        c = b.config
        self.w_k, self.w_v = weight.view(c.num_heads, -1, c.kv_lora_rank).split([c.qk_nope_head_dim, c.v_head_dim], 1)

    def __call__(self, x: Tensor, batch: Batch, state: State) -> Tensor:
        q, kv = self.project(self.operand(x))
        q = q.unflatten(-1, (self.config.num_heads, self.config.qk_head_dim))
        latent, k_pe = kv.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], -1)
        latent = self.round_norm(self.normalize(latent, latent))
        fresh = self.round_cache(torch.cat([latent, k_pe], -1))  # in the wider dtype of the two
        append(state.latent[self.layer], batch, fresh)
        o = self.attend(q, fresh, batch, state)
        return self.o_proj(self.o_in(o.flatten(-2)))

    def _normalize(self, latent: Tensor, _: Tensor) -> Tensor:
        x = pinned(latent, self.norm_rule.accum)
        return self.norm(x, self.norm_weight, self.eps, between=self.between)

    def _expanded(self, q: Tensor, fresh: Tensor, batch: Batch, state: State) -> Tensor:
        k, v = (
            self._carried_kv(fresh, batch, state)
            if self.layer in state.keys
            else self._expand(carried_keys(state.latent[self.layer], batch))
        )
        return self.round_core(self.flash(self.round_q(q), k, v, batch)).to(q.device)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q, k, v = (self._to_core(y) for y in (q, k, v))
        positions = batch.positions.to(q.device)
        return self.core(q, k, v, positions, scale=self.scale, at=self.hooks, **self.options)

    def _expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of latent [B, L, R + P]: the product with kv_b_proj, k_pe shared by all heads."""
        c = self.config
        low, k_pe = latent.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b(self.kv_b_in(low)).unflatten(-1, (c.num_heads, -1))
        k, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_pe = k_pe.unsqueeze(2).expand(*k.shape[:3], -1).to(k.dtype)
        return self.round_k(torch.cat([k, k_pe], -1)), self.round_v(v)

    def _carried_kv(self, fresh: Tensor, batch: Batch, state: State) -> tuple[Tensor, Tensor]:
        k, v = self._expand(fresh)
        append(state.keys[self.layer], batch, k)
        append(state.values[self.layer], batch, v)
        return carried_keys(state.keys[self.layer], batch), carried_keys(state.values[self.layer], batch)

    def _absorbed(self, q: Tensor, fresh: Tensor, batch: Batch, state: State) -> Tensor:
        c, accum = self.config, self.latent_accum
        q = self.round_q(q)
        nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        q_latent = self.round_q_latent(self.absorb(pinned(nope, accum), self.w_k))
        o = self.over_latent(q_latent, q_pe, batch, state)
        o = self.expand_out(pinned(self.round_o_latent(o), accum), self.w_v.transpose(1, 2))
        return self.round_core(o)

    def _over_latent(self, q_latent: Tensor, q_pe: Tensor, batch: Batch, state: State) -> Tensor:
        latent = pinned(carried_keys(state.latent[self.layer], batch), self.accum)
        return self.core(pinned(q_latent, self.accum), pinned(q_pe, self.accum), latent, batch.positions,
                         scale=self.scale, rank=self.config.kv_lora_rank, at=self.hooks, **self.options)  # fmt: skip

    def _to_core(self, x: Tensor) -> Tensor:
        return pinned(x.cpu() if self.island else x, self.accum)
