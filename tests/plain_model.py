"""Kimi-Linear once more, in float64 and in plain loops: one sequence, no state, no batch, no choice of arithmetic.

Written from the model's description alone. Nothing of `variants` is used but the sizes of the config.
"""

import torch
from torch import Tensor

from variants.model_config import LayerKind, ModelConfig

Parameters = dict[str, Tensor]


def logits(
    tensors: Parameters, c: ModelConfig, tokens: list[int], *, kv_eps: float | None = None, l2_eps: float = 1e-6
) -> Tensor:
    """[T, vocab]: what follows each token."""
    p = {name: tensor.double() for name, tensor in tensors.items()}
    h = torch.stack([p["model.embed_tokens.weight"][t] for t in tokens])
    for i in range(c.num_layers):
        layer = {n.removeprefix(f"model.layers.{i}."): x for n, x in p.items() if n.startswith(f"model.layers.{i}.")}
        x = norm(h, layer["input_layernorm.weight"], c.rms_norm_eps)
        if c.layer_kinds[i] is LayerKind.kda:
            h = h + kda(layer, c, x, l2_eps)
        else:
            h = h + mla(layer, c, x, kv_eps or c.rms_norm_eps)
        x = norm(h, layer["post_attention_layernorm.weight"], c.rms_norm_eps)
        h = h + (moe(layer, c, x) if c.moe_layers[i] else mlp(layer, "mlp", x))
    return norm(h, p["model.norm.weight"], c.rms_norm_eps) @ p["lm_head.weight"].T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.stack([row / (row.square().sum() / len(row) + eps).sqrt() * weight for row in x])


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, C], weight [C, 1, W], the newest tap last."""
    width = weight.shape[-1]
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for j in range(width):
            if t - j >= 0:
                out[t] += weight[:, 0, width - 1 - j] * x[t - j]
    return silu(out)


def kda(p: Parameters, c: ModelConfig, x: Tensor, l2_eps: float) -> Tensor:
    w = {name.removeprefix("self_attn."): tensor for name, tensor in p.items()}
    q, k, v = (short_conv(x @ w[f"{n}_proj.weight"].T, w[f"{n}_conv1d.weight"]) for n in "qkv")
    z = x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    gate = torch.sigmoid(x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T)
    heads = []
    for h in range(c.kda_num_heads):
        keys = slice(h * c.kda_head_dim, (h + 1) * c.kda_head_dim)
        values = slice(h * c.kda_v_head_dim, (h + 1) * c.kda_v_head_dim)
        decay = torch.exp(-w["A_log"].flatten()[h].exp() * torch.log1p(z[:, keys].exp()))
        out = delta_rule(q[:, keys], k[:, keys], v[:, values], decay, beta[:, h], l2_eps)
        heads.append(norm(out, w["o_norm.weight"], c.rms_norm_eps) * gate[:, values])
    return torch.cat(heads, 1) @ w["o_proj.weight"].T


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, l2_eps: float) -> Tensor:
    """One head: q, k, decay [T, K], v [T, V], beta [T] -> [T, V]."""
    state, out = torch.zeros(q.shape[1], v.shape[1], dtype=torch.float64), []
    for t in range(len(q)):
        key = k[t] / (k[t].square().sum() + l2_eps).sqrt()
        query = q[t] / (q[t].square().sum() + l2_eps).sqrt() / q.shape[1] ** 0.5
        state = decay[t].unsqueeze(1) * state
        state = state + torch.outer(key, beta[t] * (v[t] - key @ state))
        out.append(query @ state)
    return torch.stack(out)


def mla(p: Parameters, c: ModelConfig, x: Tensor, kv_eps: float) -> Tensor:
    w = {name.removeprefix("self_attn."): tensor for name, tensor in p.items()}
    q = (x @ w["q_proj.weight"].T).view(len(x), c.num_heads, -1)
    low, k_pe = (x @ w["kv_a_proj_with_mqa.weight"].T).split([c.kv_lora_rank, c.qk_rope_head_dim], 1)
    kv = (norm(low, w["kv_a_layernorm.weight"], kv_eps) @ w["kv_b_proj.weight"].T).view(len(x), c.num_heads, -1)
    out = torch.zeros(len(x), c.num_heads, c.v_head_dim, dtype=torch.float64)
    for t in range(len(x)):
        for h in range(c.num_heads):
            keys = torch.cat([kv[: t + 1, h, : c.qk_nope_head_dim], k_pe[: t + 1]], 1)
            scores = keys @ q[t, h] / (c.qk_nope_head_dim + c.qk_rope_head_dim) ** 0.5
            out[t, h] = torch.softmax(scores, 0) @ kv[: t + 1, h, c.qk_nope_head_dim :]
    return out.flatten(1) @ w["o_proj.weight"].T


def mlp(p: Parameters, name: str, x: Tensor) -> Tensor:
    gate, up, down = (p[f"{name}.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def moe(p: Parameters, c: ModelConfig, x: Tensor) -> Tensor:
    w = {name.removeprefix("block_sparse_moe."): tensor for name, tensor in p.items()}
    rows = []
    for row in x:
        score = torch.sigmoid(w["gate.weight"] @ row)
        choice = (score + w["gate.e_score_correction_bias"]).tolist()
        chosen = sorted(range(c.num_experts), key=lambda e: (-choice[e], e))[: c.experts_per_token]
        total = sum(score[e] for e in chosen) if c.renormalize else 1.0
        out = torch.zeros_like(row)
        for e in chosen:
            w1, w2, w3 = (w[f"experts.{e}.w{n}.weight"] for n in (1, 2, 3))
            out = out + c.routed_scaling_factor * score[e] / total * (w2 @ (silu(w1 @ row) * (w3 @ row)))
        rows.append(out)
    routed = torch.stack(rows)
    return routed + mlp(w, "shared_experts", x) if c.num_shared_experts else routed
