"""Kimi-Linear written out from its definition in NumPy and float64, one token after another, sharing no arithmetic.

The oracle, local replay and every variant run the functions of `variants/`: a fault there is in all of them at once
and no comparison between them can show it. This module is the second opinion: short rather than fast, without recipes,
states or batches, and it imports from `variants` only the sizes. Sources: the Kimi Linear technical report (delta
attention, NoPE latent attention) and the release's config; parameters have the release's names.
"""

from collections.abc import Callable, Sequence

import numpy as np

from variants.model_config import LayerKind, ModelConfig

Array = np.ndarray
Values = dict[tuple[str, int], Array]
Parameter = Callable[[str], Array]


def forward(config: ModelConfig, parameter: Parameter, ids: Sequence[int]) -> Values:
    """Every named value of one sequence: (site, layer) -> float64 [T, ...], the last logits [T, vocab] at `lm_head`.

    parameter(name) is a float64 array in the layout of the checkpoint. Layers are numbered as in `variants.sites`:
    -1 is the embedding, the number of layers the head.
    """
    out: Values = {}
    x = parameter("model.embed_tokens.weight")[np.asarray(ids)]
    out["embed", -1] = x
    for layer, kind in enumerate(config.layer_kinds):
        own = _Layer(config, parameter, layer, out)
        y = own.keep("input_norm", rms_norm(x, own.weight("input_layernorm"), config.rms_norm_eps))
        mixed = own.delta_attention(y) if kind is LayerKind.kda else own.latent_attention(y)
        x = own.keep("attn_residual", x + own.keep("o_proj", mixed))
        y = own.keep("post_attn_norm", rms_norm(x, own.weight("post_attention_layernorm"), config.rms_norm_eps))
        block = own.experts(y) if config.moe_layers[layer] else own.gated_mlp(y, "mlp", "mlp")
        x = own.keep("mlp_residual", x + block)
    top = config.num_layers
    out["final_norm", top] = rms_norm(x, parameter("model.norm.weight"), config.rms_norm_eps)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    out["lm_head", top] = out["final_norm", top] @ parameter(head).T
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x over the root of its mean square plus eps, times the weight."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    """Logistic function without overflow on either side."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


class _Layer:
    """One layer over a whole sequence x [T, D]; what it names goes into `out`."""

    def __init__(self, config: ModelConfig, parameter: Parameter, layer: int, out: Values) -> None:
        self.c, self.parameter, self.layer, self.out = config, parameter, layer, out

    def weight(self, name: str) -> Array:
        return self.parameter(f"model.layers.{self.layer}.{name}.weight")

    def bare(self, name: str) -> Array:
        return self.parameter(f"model.layers.{self.layer}.{name}")

    def keep(self, site: str, value: Array) -> Array:
        self.out[site, self.layer] = value
        return value

    def linear(self, site: str, x: Array, name: str) -> Array:
        return self.keep(site, x @ self.weight(name).T)

    def delta_attention(self, x: Array) -> Array:
        """Kimi delta attention: convolved q, k, v; the state decays by channel and is corrected by its own error."""
        c, own = self.c, "self_attn"
        shape = {"q": (c.kda_num_heads, c.kda_head_dim), "k": (c.kda_num_heads, c.kda_head_dim)}
        shape["v"] = (c.kda_num_heads, c.kda_v_head_dim)
        mixed = [self._convolved(self.linear(f"{n}_proj", x, f"{own}.{n}_proj"), f"{own}.{n}_conv1d") for n in "qkv"]
        self.keep("short_conv", np.concatenate(mixed, -1))
        q, k, v = (y.reshape(len(x), *shape[n]) for n, y in zip("qkv", mixed, strict=True))
        q, k = (self.keep(f"{n}_l2norm", _unit(y)) for n, y in (("q", q), ("k", k)))
        low = self.linear("f_a_proj", x, f"{own}.f_a_proj")
        raw = self.linear("f_b_proj", low, f"{own}.f_b_proj") + self.bare(f"{own}.dt_bias").reshape(-1)
        rate = np.exp(self.bare(f"{own}.A_log").reshape(-1, 1))
        g = self.keep("decay_gate", -rate * np.logaddexp(0.0, raw).reshape(len(x), *shape["k"]))
        beta = self.keep("beta", sigmoid(self.linear("b_proj", x, f"{own}.b_proj")))
        o = self.keep("kda_core", delta_rule(q * c.kda_head_dim**-0.5, k, v, g, beta))
        opened = self.linear("g_b_proj", self.linear("g_a_proj", x, f"{own}.g_a_proj"), f"{own}.g_b_proj")
        o = rms_norm(o, self.weight(f"{own}.o_norm"), c.rms_norm_eps) * sigmoid(opened.reshape(o.shape))
        return self.keep("o_norm", o).reshape(len(x), -1) @ self.weight(f"{own}.o_proj").T

    def _convolved(self, x: Array, name: str) -> Array:
        """Causal depthwise convolution, oldest tap first, then SiLU: x [T, C], weight [C, 1, W]."""
        taps = self.weight(name)[:, 0]
        width = taps.shape[1]
        padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
        return silu(np.sum([padded[j : j + len(x)] * taps[:, j] for j in range(width)], axis=0))

    def latent_attention(self, x: Array) -> Array:
        """Attention over keys and values expanded from a normed latent; no positions, one k_pe for all heads."""
        c, own, length = self.c, "self_attn", len(x)
        q = self.linear("mla_q_proj", x, f"{own}.q_proj").reshape(length, c.num_heads, -1)
        low = self.linear("kv_a_proj", x, f"{own}.kv_a_proj_with_mqa")
        latent, k_pe = low[:, : c.kv_lora_rank], low[:, c.kv_lora_rank :]
        latent = self.keep("kv_a_norm", rms_norm(latent, self.weight(f"{own}.kv_a_layernorm"), c.rms_norm_eps))
        kv = (latent @ self.weight(f"{own}.kv_b_proj").T).reshape(length, c.num_heads, -1)
        k, v = kv[..., : c.qk_nope_head_dim], kv[..., c.qk_nope_head_dim :]
        k = np.concatenate([k, np.broadcast_to(k_pe[:, None], (length, c.num_heads, c.qk_rope_head_dim))], -1)
        scores = np.einsum("thd,shd->hts", q, k) * (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        o = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)
        return self.keep("mla_core", o).reshape(length, -1) @ self.weight(f"{own}.o_proj").T

    def gated_mlp(self, x: Array, site: str, name: str) -> Array:
        gate, up = self.linear(f"{site}_gate", x, f"{name}.gate_proj"), self.linear(f"{site}_up", x, f"{name}.up_proj")
        return self.linear(f"{site}_down", silu(gate) * up, f"{name}.down_proj")

    def experts(self, x: Array) -> Array:
        """Sigmoid scores; the bias chooses and does not weigh; the chosen and the shared expert are summed."""
        c, name = self.c, "block_sparse_moe"
        scores = sigmoid(self.linear("router", x, f"{name}.gate"))
        choice = scores + self.bare(f"{name}.gate.e_score_correction_bias")
        ids = np.argsort(-choice, axis=-1, kind="stable")[:, : c.experts_per_token]
        weights = np.take_along_axis(scores, ids, -1)
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20) if c.renormalize else weights
        weights = self.keep("router_weights", weights * c.routed_scaling_factor)
        self.keep("router_ids", ids)
        routed = np.zeros_like(x)
        for e in np.unique(ids):
            w1, w2, w3 = (self.weight(f"{name}.experts.{e}.{w}") for w in ("w1", "w2", "w3"))
            weight = np.where(ids == e, weights, 0.0).sum(-1, keepdims=True)
            routed += weight * ((silu(x @ w1.T) * (x @ w3.T)) @ w2.T)
        self.keep("routed", routed)
        if c.num_shared_experts:
            routed = routed + self.gated_mlp(x, "shared", f"{name}.shared_experts")
        return self.keep("combine", routed)


def _unit(x: Array) -> Array:
    """x over the root of its sum of squares plus 1e-6."""
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def delta_rule(q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
    """o [T, H, V] of q, k, g [T, H, K] (q scaled, g a log-decay), v [T, H, V], beta [T, H], from an empty state."""
    state = np.zeros((q.shape[1], q.shape[2], v.shape[2]))
    out = np.empty_like(v)
    for t in range(len(q)):
        state *= np.exp(g[t])[..., None]
        error = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        state += k[t][..., None] * error[:, None]
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
    return out
