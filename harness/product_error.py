"""What a float32 product of this machine's library loses, measured: it follows library, processor, length and rows.

A library sums in blocks that it chooses by shape and instruction set, so the same product errs by 2.0 unit roundoffs on
one processor and by 3.4 on another. A table would make one of the two machines look wrong.
"""

from functools import cache

import torch

from variants.axes import Impl
from variants.dtypes import DType
from variants.model_config import LayerKind, ModelConfig
from variants.recipe import Rule

LEAST_SUMS = 2**16  # results that are measured, at least
MOST_COLUMNS = 4096  # of a weight, whose further ones are summed alike


def shape_of(site: str, layer: int, config: ModelConfig) -> tuple[int, int]:
    """The weight [N, K] of the product at a site, K the terms of a sum. Raises KeyError for a site without one."""
    c, D = config, config.hidden_size
    kda = layer < c.num_layers and c.layer_kinds[layer] is LayerKind.kda
    keys, values = c.kda_num_heads * c.kda_head_dim, c.kda_num_heads * c.kda_v_head_dim
    core = values if kda else c.num_heads * c.v_head_dim
    shared = c.moe_intermediate_size * c.num_shared_experts
    return {
        "q_proj": (keys, D), "k_proj": (keys, D), "v_proj": (values, D), "b_proj": (c.kda_num_heads, D),
        "f_a_proj": (c.kda_v_head_dim, D), "g_a_proj": (c.kda_v_head_dim, D),
        "f_b_proj": (keys, c.kda_v_head_dim), "g_b_proj": (values, c.kda_v_head_dim), "o_proj": (D, core),
        "mla_q_proj": (c.num_heads * c.qk_head_dim, D), "kv_a_proj": (c.kv_lora_rank + c.qk_rope_head_dim, D),
        "kv_b_proj": (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "q_latent": (c.kv_lora_rank, c.qk_nope_head_dim), "o_latent": (c.v_head_dim, c.kv_lora_rank),
        "mlp_gate": (c.intermediate_size, D), "mlp_up": (c.intermediate_size, D), "mlp_down": (D, c.intermediate_size),
        "shared_gate": (shared, D), "shared_up": (shared, D), "shared_down": (D, shared), "router": (c.num_experts, D),
        "expert_gate_up": (2 * c.moe_intermediate_size, D), "expert_down": (D, c.moe_intermediate_size),
        "lm_head": (c.vocab_size, D),
    }[site]  # fmt: skip


def product_units(shape: tuple[int, int], rows: int, *, device: str = "cpu", rule: Rule | None = None) -> float:
    """rms error of a float32 product of normal numbers, in units of u(float32) times the rms of its results.

    shape: the weight's [N, K]. rows: of the other operand; measured at the next power of two. rule: whose product it
    is, of impl native our own kernels', and how its weight lies; None for the library's on a weight that lies by rows.
    """
    columns, terms = shape
    native = rule is not None and rule.impl == Impl.native.name
    by_columns = rule is not None and rule.algorithm == "gemm_columns" and columns > terms
    rows = 1 if native else 1 << (max(rows, 1) - 1).bit_length()  # no other row changes what native loses
    return _measured((min(columns, MOST_COLUMNS), terms), rows, device, native, by_columns)


@cache
def _measured(shape: tuple[int, int], rows: int, device: str, native: bool, by_columns: bool) -> float:
    """Rounded to tenths, so that two runs on one machine agree."""
    linear = product = torch.nn.functional.linear
    if native:
        from variants.ops.native import linear as product
    random = torch.Generator(device=device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random, device=device)  # noqa: E731
    weight = draw(*shape)
    weight = weight.t().contiguous().t() if by_columns else weight
    x = [draw(rows, shape[1]) for _ in range(-(-LEAST_SUMS // (rows * shape[0])))]
    found = torch.stack([product(part, weight) for part in x]).double()
    exact = torch.stack([linear(part.double(), weight.double()) for part in x])
    error = (found - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    return round(float(error) / DType.f32.unit_roundoff, 1)
