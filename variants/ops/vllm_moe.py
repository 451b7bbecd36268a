"""vLLM's router and experts: one CUDA operation chooses and weighs, a Triton kernel multiplies.

The references are `variants.ops.moe`. N tokens, E experts, k chosen, D hidden, I expert width.
"""

import torch
from torch import Tensor

from variants.ops import vllm_load

SIGMOID = 1  # the kernel's number for the score that is a sigmoid of the logit


def route(logits: Tensor, bias: Tensor, *, k: int, factor: float, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Chosen experts and their weights: logits bf16 [N, E], bias bf16 [E] -> ids int32 [N, k], weights f32 [N, k].

    Chosen by sigmoid plus bias, ties to the lowest id; weights are sigmoids times `factor`, divided by the sum of the
    chosen sigmoids plus 1e-20 where `renormalize` is set.
    """
    weights, ids = vllm_load.module("_custom_ops").grouped_topk(logits, 1, 1, k, renormalize, factor, bias, SIGMOID)
    return ids, weights


def experts(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The routed sum bf16 [N, D]: x bf16 [N, D]; w13 [E, 2 I, D], gate rows first; w2 [E, D, I].

    Rounded after each product, after SiLU, after gate times up, after the weight, and once after the sum over slots.
    """
    fused = vllm_load.module("model_executor.layers.fused_moe.fused_moe")
    return fused.fused_experts(x.contiguous(), w13, w2, weights, ids.to(torch.int32))
