"""Which tensors a Kimi-Linear checkpoint holds: release names and shapes, derived from the geometry alone."""

import re

from variants.model_config import LayerKind, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Read by float32 arithmetic in the release; a lower stored dtype means that somebody rounded them.
FLOAT32_SUFFIXES = (".self_attn.A_log", ".self_attn.dt_bias", ".gate.e_score_correction_bias")
_DENSE_AS_MOE = re.compile(r"^(model\.layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)$")

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a model by its release name, in the order of the forward pass, with its stored shape.

    Linear weights are [out, in]. `lm_head.weight` is listed whether or not the head is tied.
    """
    tensors: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer, kind in enumerate(config.layer_kinds):
        parts = {
            "input_layernorm.weight": (config.hidden_size,),
            **(_kda(config) if kind is LayerKind.kda else _mla(config)),
            "post_attention_layernorm.weight": (config.hidden_size,),
            **(_moe(config) if config.moe_layers[layer] else _mlp("mlp", config.hidden_size, config.intermediate_size)),
        }
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return tensors | {"model.norm.weight": (config.hidden_size,), HEAD: (config.vocab_size, config.hidden_size)}


def is_float32_parameter(name: str) -> bool:
    """Whether the release stores this tensor in float32 among its bfloat16 weights."""
    return name.endswith(FLOAT32_SUFFIXES)


def canonical_name(stored: str) -> str:
    """The release name of a stored tensor.

    transformers' save_pretrained reverses its renaming `block_sparse_moe` -> `mlp` for the dense layers too, which
    never had the former name; an expert layer has no tensor that could be meant instead.
    """
    return _DENSE_AS_MOE.sub(r"\1.mlp.\2", stored)


def _kda(config: ModelConfig) -> dict[str, Shape]:
    D, H, K, V, W = (
        config.hidden_size,
        config.kda_num_heads,
        config.kda_head_dim,
        config.kda_v_head_dim,
        config.conv_size,
    )
    parts: dict[str, Shape] = {
        "q_proj.weight": (H * K, D),
        "k_proj.weight": (H * K, D),
        "v_proj.weight": (H * V, D),
        "q_conv1d.weight": (H * K, 1, W),
        "k_conv1d.weight": (H * K, 1, W),
        "v_conv1d.weight": (H * V, 1, W),
        "A_log": (1, 1, H, 1),
        "dt_bias": (H * K,),
        # Both low-rank gates are V wide in the middle, as in flash-linear-attention's layer.
        "f_a_proj.weight": (V, D),
        "f_b_proj.weight": (H * K, V),
        "b_proj.weight": (H, D),
        "g_a_proj.weight": (V, D),
        "g_b_proj.weight": (H * V, V),
        "o_norm.weight": (V,),
        "o_proj.weight": (D, H * V),
    }
    return {f"self_attn.{name}": shape for name, shape in parts.items()}


def _mla(config: ModelConfig) -> dict[str, Shape]:
    D, H, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
    return {
        "self_attn.q_proj.weight": (H * config.qk_head_dim, D),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + config.qk_rope_head_dim, D),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (H * (config.qk_nope_head_dim + config.v_head_dim), latent),
        "self_attn.o_proj.weight": (D, H * config.v_head_dim),
    }


def _mlp(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }


def _moe(config: ModelConfig) -> dict[str, Shape]:
    D, E, F = config.hidden_size, config.num_experts, config.moe_intermediate_size
    tensors: dict[str, Shape] = {"gate.weight": (E, D), "gate.e_score_correction_bias": (E,)}
    for expert in range(E):
        for name, shape in (("w1", (F, D)), ("w3", (F, D)), ("w2", (D, F))):  # gate, up, down
            tensors[f"experts.{expert}.{name}.weight"] = shape
    if config.num_shared_experts:
        tensors |= _mlp("shared_experts", D, F * config.num_shared_experts)
    return {f"block_sparse_moe.{name}": shape for name, shape in tensors.items()}
