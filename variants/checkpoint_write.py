"""Random weights of any geometry, and checkpoints written under the release's tensor and field names."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from variants.checkpoint import Checkpoint
from variants.checkpoint_file import DTYPES, INDEX_NAME, SINGLE_NAME
from variants.checkpoint_names import EMBEDDING, HEAD, expected_tensors, is_float32_parameter
from variants.errors import UsageError
from variants.model_config import LayerKind, ModelConfig
from variants.placement import Placement, one
from variants.side_by_side import allocated


def random_checkpoint(
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    placement: Placement | None = None,
) -> Checkpoint:
    """Draw every tensor of a model: A_log, dt_bias and the correction bias in float32, all others in `dtype`.

    Each tensor has a seed of its own, made of `seed` and its name, so it does not depend on the others; it does depend
    on the device's generator. `sha256` therefore names the procedure (geometry, seed, dtype, device, torch), not the
    bytes. placement: several devices of one kind, each tensor drawn where it lies.
    """
    placement = placement or one(str(device))
    device = torch.device(placement.devices[0])
    homes = {d: torch.Generator("cpu" if device.type == "meta" else d) for d in placement.devices}
    tied = {HEAD} if config.tie_word_embeddings else set()
    drawn = [name for name in expected_tensors(config) if name not in tied]
    dtypes = {name: torch.float32 if is_float32_parameter(name) else dtype for name in drawn}
    tensors = allocated(config, dtypes, placement)
    for name, tensor in tensors.items():
        generator = homes[placement.of(name)]
        generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little"))
        tensors[name] = _draw(name, tensor, config=config, generator=generator)
    tensors |= dict.fromkeys(tied, tensors[EMBEDDING])
    procedure = f"random {config!r} seed={seed} {dtype} {device.type} torch={torch.__version__}"
    return Checkpoint(
        path=Path(f"random-seed-{seed}"),
        config=config,
        tensors=tensors,
        sha256=hashlib.sha256(procedure.encode()).hexdigest(),
        notes=(f"random weights, seed {seed}, drawn on {device.type}: sha256 names the procedure, not the bytes",),
    )


def _draw(name: str, tensor: Tensor, *, config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Fill in place: unit-variance projections, branch outputs scaled by depth, decays as flash-linear-attention's."""
    if name.endswith(".A_log"):
        return tensor.uniform_(1, 16, generator=generator).log_()
    if name.endswith(".dt_bias"):
        step = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        return step.add_(torch.log(-torch.expm1(-step)))  # inverse softplus
    if name.endswith(".e_score_correction_bias"):
        return tensor.uniform_(6.8, 7.1, generator=generator)  # the narrow, high band that collapses in bfloat16
    if name.endswith("norm.weight"):
        return tensor.normal_(1, 0.1, generator=generator)
    std = tensor.shape[-1] ** -0.5
    if name.endswith((".o_proj.weight", ".down_proj.weight", ".w2.weight")):
        std *= (2 * config.num_layers) ** -0.5
    return tensor.normal_(0, std, generator=generator)


def write_checkpoint(checkpoint: Checkpoint, path: str | Path, *, max_shard_bytes: int | None = None) -> None:
    """Write config.json and the weights: one file, or shards of at most `max_shard_bytes`.

    A tensor larger than a shard fills one alone. Dtypes are kept, a tied head is left out. Only one tensor at a time is
    copied to the host. Raises UsageError where the directory holds weights already.
    """
    tensors = dict(checkpoint.tensors)
    if checkpoint.config.tie_word_embeddings and tensors.get(HEAD) is tensors[EMBEDDING]:
        del tensors[HEAD]
    write_folder(path, config_fields(checkpoint.config), tensors, max_shard_bytes=max_shard_bytes)


def write_folder(
    path: str | Path,
    fields: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    max_shard_bytes: int | None = None,
    written: Callable[[], object] = lambda: None,
) -> None:
    """Write config.json of these fields (and the embedding's dtype) and the weights, under whatever names they have.

    written: called after each tensor. Raises UsageError where the directory holds weights already.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.glob("*.safetensors*")):
        raise UsageError(f"{path}: holds weights already; write to an empty directory")
    dtype = str(tensors[EMBEDDING].dtype).removeprefix("torch.")
    _write_json(path / "config.json", {**fields, "dtype": dtype})
    if max_shard_bytes is None:
        _write_file(path / SINGLE_NAME, tensors, written)
        return
    shards = list(_split(tensors, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        shard = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(path / shard, {name: tensors[name] for name in names}, written)
        weight_map |= dict.fromkeys(names, shard)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(path / INDEX_NAME, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json under the release's names: what `load_config` reads back as the same geometry."""
    differs = config.kda_v_head_dim != config.kda_head_dim
    layers = {kind: [i for i, k in enumerate(config.layer_kinds, start=1) if k is kind] for kind in LayerKind}
    num_dense = config.moe_layers.count(False)
    dense_first = config.moe_layers == tuple(layer >= num_dense for layer in range(config.num_layers))
    mlp_types = ["sparse" if moe else "dense" for moe in config.moe_layers]
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "kv_lora_rank": config.kv_lora_rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "mla_use_nope": True,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.experts_per_token,
        "num_shared_experts": config.num_shared_experts,
        **({"first_k_dense_replace": num_dense} if dense_first else {"mlp_layer_types": mlp_types}),
        "moe_layer_freq": 1,
        "routed_scaling_factor": config.routed_scaling_factor,
        "moe_renormalize": config.renormalize,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "topk_group": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "kda_layers": layers[LayerKind.kda],
            "full_attn_layers": layers[LayerKind.mla],
            "num_heads": config.kda_num_heads,
            "head_dim": config.kda_head_dim,
            **({"head_v_dim": config.kda_v_head_dim} if differs else {}),
            "short_conv_kernel_size": config.conv_size,
        },
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "model_max_length": config.max_length,
    }


def _split(tensors: dict[str, Tensor], max_bytes: int) -> Iterable[list[str]]:
    names: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        if names and filled + tensor.nbytes > max_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += tensor.nbytes
    yield names


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_file(file: Path, tensors: dict[str, Tensor], written: Callable[[], object]) -> None:
    """Write one safetensors file; wider dtypes first, so that every tensor is aligned to its element size."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as target:
        target.write(len(raw).to_bytes(8, "little") + raw)
        for _, tensor in ordered:
            target.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            written()
