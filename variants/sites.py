"""The places of the forward pass where a value is produced, in the order in which a layer produces them.

A *value site* is tapped, rounded, perturbed and replayed under its name. A name that ends in `_in` is the operand of
the products that follow it: there a wider value is rounded to the dtype that the product reads.
"""

from variants.model_config import LayerKind, ModelConfig

EMBED = "embed"
KDA_SITES = (
    "input_norm", "attn_in", "q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj",
    "f_b_in", "f_b_proj", "g_b_in", "g_b_proj", "conv_state", "conv_sum", "short_conv",
    "q_l2norm", "k_l2norm", "kda_v", "decay_gate", "beta",
    "kda_v_beta", "kda_k_beta", "kda_ainv", "kda_u", "kda_w", "kda_kg", "kda_h", "kda_v_new", "kda_q_scaled", "kda_qg",
    "kda_aqk", "kda_core", "kda_state", "o_norm", "o_proj_in", "o_proj", "attn_residual",
)  # fmt: skip
MLA_SITES = (
    "input_norm", "attn_in", "mla_q_proj", "kv_a_proj", "kv_a_norm", "kv_cache", "kv_b_in", "kv_b_proj",
    "mla_q", "mla_k", "mla_v", "q_latent", "mla_scores", "mla_probs", "o_latent", "mla_core",
    "o_proj_in", "o_proj", "attn_residual",
)  # fmt: skip
DENSE_SITES = ("post_attn_norm", "mlp_in", "mlp_gate", "mlp_up", "mlp_silu", "mlp_act", "mlp_down_in", "mlp_down",
               "mlp_residual")  # fmt: skip
MOE_SITES = (
    "post_attn_norm", "mlp_in", "router_in", "router", "router_scores", "router_ids", "router_weights",
    "expert_gate_up", "expert_silu", "expert_act", "expert_down_in", "expert_down", "expert_out", "routed",
    "shared_gate", "shared_up", "shared_silu", "shared_act", "shared_down_in", "shared_down", "combine", "mlp_residual",
)  # fmt: skip
HEAD_SITES = ("final_norm", "lm_head_in", "lm_head")

# Sites inside the chunked form of the delta rule; no other core has them.
CHUNK_SITES = ("kda_v_beta", "kda_k_beta", "kda_ainv", "kda_u", "kda_w", "kda_kg", "kda_h", "kda_v_new",
               "kda_q_scaled", "kda_qg", "kda_aqk")  # fmt: skip
# Sites whose arithmetic differs between prefill and decode: their rule is looked up as "site.phase".
PHASED = ("kda_core", "mla_core", "mla_scores", "mla_probs", "q_l2norm", "k_l2norm")
# Integer sites: expert choice is forced or compared, never rounded.
INTEGER = ("router_ids",)

# Shapes other than [B, T, ...]: one row a token [B * T, ...]; rows of one expert [n, ...]; one row a key [B, L, ...];
# one value a sequence.
BY_TOKEN = ("router_in", "router", "router_scores", "router_ids", "router_weights", "expert_out", "routed")
BY_EXPERT = ("expert_gate_up", "expert_silu", "expert_act", "expert_down_in", "expert_down")
BY_KEY = ("kv_b_in", "kv_b_proj", "mla_k", "mla_v")
BY_ROW = ("kda_state", "conv_state", "lm_head", "lm_head_in", "final_norm")
# Values inside attention: the tiled cores hold unnormalised ones, the dense core normalised.
INSIDE_ATTENTION = ("mla_scores", "mla_probs")

ALL_SITES = (EMBED, *dict.fromkeys(KDA_SITES + MLA_SITES + DENSE_SITES + MOE_SITES), *HEAD_SITES)


def layer_sites(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The value sites of one layer in order."""
    attention = KDA_SITES if config.layer_kinds[layer] is LayerKind.kda else MLA_SITES
    return attention + (MOE_SITES if config.moe_layers[layer] else DENSE_SITES)


def places(config: ModelConfig) -> list[tuple[str, int]]:
    """Every (site, layer) of a model in order; the embedding has layer -1 and the head the number of layers."""
    body = [(site, layer) for layer in range(config.num_layers) for site in layer_sites(config, layer)]
    return [(EMBED, -1), *body, *((site, config.num_layers) for site in HEAD_SITES)]


def rule_key(site: str, phase: str) -> str:
    """The name under which a recipe holds the rule of a site in a phase ("prefill" or "decode")."""
    return f"{site}.{phase}" if site in PHASED else site
