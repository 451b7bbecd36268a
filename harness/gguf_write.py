"""A checkpoint as a GGUF file of llama.cpp's architecture `kimi-linear`, written through the `gguf` package.

What differs from the checkpoint: `ssm_a` is -exp(A_log); `kv_b` is split into k_b, transposed per head, and v_b, so
that the latent is what is cached; experts are stacked; a convolution is [1, channels, 1, taps]. No tokenizer here adds
a BOS. Source: `src/models/kimi-linear.cpp` of llama.cpp (MIT), read for names, shapes and metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.gguf_vocabulary import Vocabulary, add_vocabulary
from harness.progress import tracked
from variants.checkpoint import Checkpoint
from variants.errors import DeviceError, UsageError
from variants.model_config import LayerKind, ModelConfig

ARCHITECTURE = "kimi-linear"
INSTALL = "install it with: pip install 'neartie[llama]'"


class WeightFormat(Enum):
    """Format of the matrices; norms, convolutions, the router and the decay's parameters are always float32.

    llama.cpp on a CPU rounds the other operand of a product to the matrix's format too.
    """

    f32 = "float32"
    bf16 = "bfloat16"
    f16 = "float16"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file; `value()` makes it, in the shape that numpy sees (GGUF counts dimensions backwards)."""

    name: str
    shape: tuple[int, ...]
    matrix: bool
    value: Callable[[], Tensor]


def write_gguf(
    checkpoint: Checkpoint,
    path: str | Path,
    *,
    weights: WeightFormat = WeightFormat.f32,
    vocabulary: Vocabulary = Vocabulary.ids,
    eos_reachable: bool = False,
) -> None:
    """Write `checkpoint` to the file `path`, one tensor in memory at a time beside the checkpoint itself.

    Conversion to `weights` is ties_to_even. Raises UsageError for a geometry that the architecture does not have, for a
    file that exists, and for a vocabulary that cannot be; DeviceError where the `gguf` package is not installed.
    """
    path = Path(path)
    check_geometry(checkpoint.config)
    if path.exists():
        raise UsageError(f"{path}: exists already; name another file or remove it")
    gguf = gguf_package()
    writer = gguf.GGUFWriter(str(path), ARCHITECTURE)
    _add_geometry(writer, gguf, checkpoint.config)
    writer.add_string("neartie.model_sha256", checkpoint.sha256)
    add_vocabulary(writer, checkpoint, vocabulary, eos_reachable=eos_reachable)
    tensors = list(gguf_tensors(checkpoint))
    for t in tensors:
        kind, itemsize = _storage(gguf, t, weights)
        count = int(np.prod(t.shape))
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), count * itemsize, raw_dtype=kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for t in tracked("gguf: tensors", tensors, len(tensors)):
            writer.write_tensor_data(_bytes(t, weights))
    finally:
        writer.close()


def gguf_package() -> Any:
    """The `gguf` package; raises DeviceError where it is not installed."""
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise DeviceError(f"the gguf package is not installed; {INSTALL}") from error
    return gguf


def check_geometry(config: ModelConfig) -> None:
    """Raises UsageError for what llama.cpp's `kimi-linear` does not compute."""
    dense = config.moe_layers.count(False)
    reasons = {
        f"kda_v_head_dim {config.kda_v_head_dim} differs from kda_head_dim {config.kda_head_dim}": (
            config.kda_v_head_dim != config.kda_head_dim
        ),
        f"KDA has {config.kda_num_heads} heads and attention {config.num_heads}": (
            config.kda_num_heads != config.num_heads
        ),
        "dense layers are not the first ones": config.moe_layers
        != tuple(layer >= dense for layer in range(config.num_layers)),
        "the router does not renormalise": not config.renormalize,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"gguf: {reason}, which llama.cpp's {ARCHITECTURE} does not compute; use another engine")


def _add_geometry(writer: Any, gguf: Any, c: ModelConfig) -> None:
    attends = [kind is LayerKind.mla for kind in c.layer_kinds]
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv([int(a) for a in attends])  # 0 marks a recurrent layer; attention runs over one latent
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_ssm_conv_kernel(c.conv_size)
    writer.add_kda_head_dim(c.kda_head_dim)
    writer.add_kv_lora_rank(c.kv_lora_rank)
    writer.add_rope_dimension_count(c.qk_rope_head_dim)
    writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    writer.add_value_length(c.kv_lora_rank)
    writer.add_key_length_mla(c.qk_head_dim)
    writer.add_value_length_mla(c.v_head_dim)
    writer.add_leading_dense_block_count(c.moe_layers.count(False))
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.experts_per_token)
    writer.add_expert_shared_count(c.num_shared_experts)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_weights_norm(c.renormalize)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


_BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_conv1d.weight": "ssm_conv1d_q.weight",
    "self_attn.k_conv1d.weight": "ssm_conv1d_k.weight",
    "self_attn.v_conv1d.weight": "ssm_conv1d_v.weight",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.f_a_proj.weight": "ssm_f_a.weight",
    "self_attn.f_b_proj.weight": "ssm_f_b.weight",
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.g_a_proj.weight": "ssm_g_a.weight",
    "self_attn.g_b_proj.weight": "ssm_g_b.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "block_sparse_moe.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "block_sparse_moe.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_ALWAYS_F32 = ("ffn_gate_inp.weight",)


def gguf_tensors(checkpoint: Checkpoint) -> Iterator[GgufTensor]:
    """Every tensor of the file, in the order of the checkpoint's names."""
    config, tensors = checkpoint.config, checkpoint.tensors
    for name, tensor in tensors.items():
        if name in _TOP:
            yield _plain(_TOP[name], tensor)
            continue
        _, _, layer, part = name.split(".", 3)
        block = f"blk.{layer}"
        if part == "self_attn.kv_b_proj.weight":
            yield from _split_kv_b(block, tensor, config)
        elif ".experts." in part:
            if part.startswith("block_sparse_moe.experts.0."):
                yield _stacked(block, name, tensors, config)
        else:
            yield _plain(f"{block}.{_BLOCK[part]}", tensor)


def _plain(name: str, x: Tensor) -> GgufTensor:
    if name.endswith(".ssm_a"):
        heads = x.numel()
        return GgufTensor(name, (1, 1, heads, 1), False, lambda: -x.double().exp().reshape(1, 1, heads, 1))
    if ".ssm_conv1d_" in name:
        shape = (1, x.shape[0], 1, x.shape[-1])
        return GgufTensor(name, shape, False, lambda: x.reshape(shape))
    matrix = x.dim() == 2 and not name.endswith(_ALWAYS_F32)
    return GgufTensor(name, tuple(x.shape), matrix, lambda: x)


def _split_kv_b(block: str, x: Tensor, c: ModelConfig) -> Iterator[GgufTensor]:
    """k_b [H, latent, nope], transposed since it is applied to the query, and v_b [H, v, latent]."""
    heads = x.view(c.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
    key, value = heads.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
    transposed = (c.num_heads, c.kv_lora_rank, c.qk_nope_head_dim)
    yield GgufTensor(f"{block}.attn_k_b.weight", transposed, True, lambda: key.transpose(1, 2))
    yield GgufTensor(f"{block}.attn_v_b.weight", tuple(value.shape), True, lambda: value)


def _stacked(block: str, first: str, tensors: dict[str, Tensor], c: ModelConfig) -> GgufTensor:
    prefix, _, kind = first.removesuffix(".weight").rpartition(".0.")
    parts = [tensors[f"{prefix}.{expert}.{kind}.weight"] for expert in range(c.num_experts)]
    return GgufTensor(
        f"{block}.{_EXPERTS[kind]}.weight", (c.num_experts, *parts[0].shape), True, lambda: torch.stack(parts)
    )


def _storage(gguf: Any, tensor: GgufTensor, weights: WeightFormat) -> tuple[Any, int]:
    kind = weights.name.upper() if tensor.matrix else "F32"
    return gguf.GGMLQuantizationType[kind], 4 if kind == "F32" else 2


def _bytes(tensor: GgufTensor, weights: WeightFormat) -> np.ndarray:
    dtype = getattr(torch, weights.value) if tensor.matrix else torch.float32
    value = tensor.value().detach().to("cpu", dtype).contiguous()
    assert value.shape == tensor.shape, tensor.name
    return value.view(-1).view(torch.uint8).numpy()
