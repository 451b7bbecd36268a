"""What a float32 product of this machine's library loses, measured: it follows library, processor, length and rows.

A library sums in blocks that it chooses by shape and instruction set, so the same product errs by 2.0 unit roundoffs on
one processor and by 3.4 on another. A table would make one of the two machines look wrong.
"""

from functools import cache

import torch

from variants.dtypes import DType
from variants.model_config import LayerKind, ModelConfig

MANY_ROWS = 4  # from so many rows on, libraries use the form of many rows
PRODUCTS = 512  # rows that are measured, in all
COLUMNS = 256


def terms_of(site: str, layer: int, config: ModelConfig) -> int:
    """How many terms each sum of the product at a site has. Raises KeyError for a site without a product."""
    kda = layer < config.num_layers and config.layer_kinds[layer] is LayerKind.kda
    core = config.kda_num_heads * config.kda_v_head_dim if kda else config.num_heads * config.v_head_dim
    hidden = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj", "mla_q_proj", "kv_a_proj", "mlp_gate",
              "mlp_up", "shared_gate", "shared_up", "router", "expert_gate_up", "lm_head")  # fmt: skip
    return {
        **dict.fromkeys(hidden, config.hidden_size),
        "f_b_proj": config.kda_v_head_dim,
        "g_b_proj": config.kda_v_head_dim,
        "o_proj": core,
        "kv_b_proj": config.kv_lora_rank,
        "q_latent": config.qk_nope_head_dim,
        "o_latent": config.kv_lora_rank,
        "mlp_down": config.intermediate_size,
        "shared_down": config.moe_intermediate_size * config.num_shared_experts,
        "expert_down": config.moe_intermediate_size,
    }[site]


@cache
def product_units(terms: int, *, many: bool, device: str = "cpu") -> float:
    """rms error of one float32 product of normal numbers, in units of u(float32) times the rms of its results.

    many: with `MANY_ROWS` rows or more, else row by row. Tenths, so that two runs on one machine agree.
    """
    random = torch.Generator(device=device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random, device=device)  # noqa: E731
    weight, rows = draw(COLUMNS, terms), draw(PRODUCTS, terms)
    parts = rows.split(2 * MANY_ROWS if many else 1)
    found = torch.cat([torch.nn.functional.linear(part, weight) for part in parts]).double()
    exact = torch.nn.functional.linear(rows.double(), weight.double())
    error = (found - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    return round(float(error) / DType.f32.unit_roundoff, 1)
