"""The launches of a layer of experts in a fused step."""

import torch
from torch import Tensor

from variants.axes import RouterScale
from variants.bind_row import expert_rounding
from variants.binding import Binder
from variants.fused_layers import F32, Buffers, Launch, cdiv, normed, packed
from variants.ops import row_fused_triton, row_mix_triton, row_triton
from variants.ops.launch_triton import block


def mixture(b: Binder, buf: Buffers) -> list[Launch]:
    """Router and choice beside the shared expert's gate and up; the chosen experts'; their down into the stream."""
    c = b.config
    shared = c.num_shared_experts * c.moe_intermediate_size
    logits = buf.named("router", c.num_experts + 2 * shared)
    given = {
        "x": buf.named("x", c.hidden_size),
        "logits": logits,
        "act": buf.named("act", c.experts_per_token * c.moe_intermediate_size),
        "shared": buf.named("shared", c.hidden_size),
        "ids": buf.named("ids", c.experts_per_token, dtype=torch.int64),
        "weights": buf.named("weights", c.experts_per_token, dtype=F32),
    }
    return [_router(b, buf, given, shared), _up(b, buf, given, shared), _down(b, buf, given, shared)]


def _router(b: Binder, buf: Buffers, given: dict[str, Tensor], shared: int) -> Launch:
    c, name = b.config, "block_sparse_moe"
    weight = packed(b, f"{name}.gate", *(f"{name}.shared_experts.{x}_proj" for x in ("gate", "up") if shared))
    bias = b.parameter(f"{name}.gate.e_score_correction_bias", "router_scores")
    norm = normed(b, "post_attention_layernorm", "post_attn_norm")
    rows, arrived = row_triton.rows_of(c.hidden_size), buf.named("arrived", 1, dtype=torch.int32)
    constants = {
        **row_triton.split(c.hidden_size), "BN": rows, "E": c.num_experts, "BE": block(c.num_experts),
        "SLOTS": c.experts_per_token,
        "BEFORE": b.rule("router_weights").algorithm == f"scale_{RouterScale.before.name}",
        "RENORMALIZE": c.renormalize, "num_warps": row_triton.WARPS, **buf.overlap,
    }  # fmt: skip
    operands = (
        buf.stream, norm["norm"], weight, given["logits"], given["x"], bias, given["ids"], given["weights"], arrived,
        len(weight), norm["eps"], c.routed_scaling_factor,
    )  # fmt: skip
    return Launch(
        "router", row_fused_triton.router_kernel, buf.programs("router", cdiv(len(weight), rows)), operands, constants
    )


def _experts(b: Binder, leaves: tuple[str, ...], site: str) -> Tensor:
    prefix = f"model.layers.{b.layer}.block_sparse_moe"
    return b.weights.experts(prefix, leaves, b.config.num_experts, b.held(site), operand=b.rule(site).input)


def _up(b: Binder, buf: Buffers, given: dict[str, Tensor], shared: int) -> Launch:
    c = b.config
    d, inner, slots = c.hidden_size, c.moe_intermediate_size, c.experts_per_token
    down = packed(b, "block_sparse_moe.shared_experts.down_proj") if shared else given["shared"]
    parts, own, rows = row_triton.split(d), row_triton.split(max(shared, 1)), row_mix_triton.up_rows(d)
    below = row_triton.rows_of(max(shared, 1))
    constants = {
        "D": d, "K1": parts["K1"], "K2": parts["K2"], "I": inner, "BN": rows, "S": own["K"], "S1": own["K1"],
        "S2": own["K2"], "BD": below, "SLOTS": slots, "num_warps": row_triton.WARPS, **buf.overlap,
    }  # fmt: skip
    first, others = buf.programs("up", cdiv(d, below) if shared else 0, slots * cdiv(inner, rows))
    operands = (given["x"], _experts(b, ("w1", "w3"), "expert_gate_up"), given["act"],
                given["logits"][c.num_experts :], down, given["shared"], given["ids"], first)  # fmt: skip
    return Launch("experts_up", row_fused_triton.experts_up_kernel, (first + others,), operands, constants)


def _down(b: Binder, buf: Buffers, given: dict[str, Tensor], shared: int) -> Launch:
    c = b.config
    shape = row_mix_triton.down_shape(c.moe_intermediate_size, c.experts_per_token)
    constants = {
        "D": c.hidden_size, "I": c.moe_intermediate_size, "SLOTS": c.experts_per_token, **shape,
        "SHARED": bool(shared), **row_mix_triton.formats(expert_rounding(b), "expert_down", "expert_out"),
        "num_warps": row_mix_triton.DOWN_WARPS, **buf.overlap,
    }  # fmt: skip
    operands = (given["act"], _experts(b, ("w2",), "expert_down"), given["ids"], given["weights"], given["shared"],
                buf.stream)  # fmt: skip
    grid = buf.most_programs("down", cdiv(c.hidden_size, shape["BN"]))
    return Launch("experts_down", row_fused_triton.experts_down_kernel, grid, operands, constants)
