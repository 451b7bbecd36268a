"""The transformers library's in-memory names, which `save_pretrained(save_original_format=False)` writes, both ways.

The library joins what the release stores apart: the three convolutions of a layer, an expert's gate with its up
projection, and the experts of a layer. Source: `transformers.conversion_mapping`, "kimi_linear", version 5.24.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from variants import side_by_side
from variants.checkpoint import Checkpoint, load_checkpoint
from variants.checkpoint_config import load_config
from variants.checkpoint_file import find_weights, stream_tensors
from variants.checkpoint_names import HEAD, expected_tensors
from variants.errors import InputError
from variants.model_config import LayerKind, ModelConfig

_IN_FORGET_GATE = ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight")
_CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")


def library_tensors(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a release checkpoint under the library's names, joined as it joins them: views of tensors that lie
    side by side, copies of others.
    """
    left = dict(tensors)
    joined: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        attention, moe = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.block_sparse_moe"
        mlp = f"model.layers.{layer}.mlp"
        if config.layer_kinds[layer] is LayerKind.kda:
            convs = [left.pop(f"{attention}.{c}.weight") for c in _CONVS]
            joined[f"{attention}.conv1d.weight"] = side_by_side.joined(convs)
        if config.moe_layers[layer]:
            experts = [f"{moe}.experts.{e}" for e in range(config.num_experts)]
            pairs = [side_by_side.joined([left.pop(f"{e}.w1.weight"), left.pop(f"{e}.w3.weight")]) for e in experts]
            joined[f"{mlp}.experts.gate_up_proj"] = side_by_side.stacked(pairs)
            joined[f"{mlp}.experts.down_proj"] = side_by_side.stacked([left.pop(f"{e}.w2.weight") for e in experts])
    return {_library_name(name): tensor for name, tensor in left.items()} | joined


def release_tensors(stored: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The release's tensors of a checkpoint in the library's names; names that are the release's already are kept.

    Raises InputError for a joined tensor that does not divide as the config says.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(".self_attn.conv1d.weight"):
            sizes = [
                config.kda_num_heads * w for w in (config.kda_head_dim, config.kda_head_dim, config.kda_v_head_dim)
            ]
            _check(name, tensor, (sum(sizes), 1, config.conv_size))
            parts = zip(_CONVS, tensor.split(sizes), strict=True)
            tensors |= {name.replace(".conv1d.", f".{conv}."): part for conv, part in parts}
        elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors |= _experts(name, tensor, config)
        else:
            tensors[_release_name(name, config)] = tensor
    return tensors


def load_any_checkpoint(path: str | Path) -> Checkpoint:
    """A checkpoint in the release's names, in those that `save_pretrained` writes, or in the library's in-memory ones.

    Raises InputError for whatever `load_checkpoint` refuses.
    """
    path = Path(path)
    files = find_weights(path)
    if not any(_is_library(stored.name) for file in files for stored in file.tensors):
        return load_checkpoint(path)
    config = load_config(path)
    stored: dict[str, Tensor] = {}
    digest = hashlib.sha256()
    for file in files:
        read = stream_tensors(file, place=lambda entry: torch.empty(entry.shape, dtype=entry.dtype), digest=digest)
        stored |= {entry.name: tensor for entry, tensor in read}
    tensors = release_tensors(stored, config)
    expected = expected_tensors(config)
    if config.tie_word_embeddings and HEAD not in tensors:
        tensors[HEAD] = tensors["model.embed_tokens.weight"]
    if strange := sorted(tensors.keys() ^ expected.keys()):
        raise InputError(f"{path}: tensor {strange[0]} is missing or unexpected; config.json says which there are")
    for name, shape in expected.items():
        _check(name, tensors[name], shape)
    tokenizer = path / "tokenizer.json"
    return Checkpoint(
        path=path,
        config=config,
        tensors={name: tensors[name] for name in expected},
        sha256=digest.hexdigest(),
        notes=("tensors were in the transformers library's in-memory form",),
        tokenizer_sha256=hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else None,
    )


def _is_library(name: str) -> bool:
    return name.endswith((".self_attn.conv1d.weight", ".experts.gate_up_proj")) or ".forget_gate." in name


def _library_name(name: str) -> str:
    prefix, _, last = name.rpartition(".self_attn.")
    if last in _IN_FORGET_GATE:
        return f"{prefix}.self_attn.forget_gate.{last}"
    return name.replace(".block_sparse_moe.", ".mlp.")


def _release_name(name: str, config: ModelConfig) -> str:
    name = name.replace(".self_attn.forget_gate.", ".self_attn.")
    parts = name.split(".")
    if parts[:2] == ["model", "layers"] and config.moe_layers[int(parts[2])]:
        return name.replace(".mlp.", ".block_sparse_moe.")
    return name


def _experts(name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    prefix = name.rpartition(".")[0].replace(".mlp.", ".block_sparse_moe.")
    width, hidden = config.moe_intermediate_size, config.hidden_size
    if name.endswith("down_proj"):
        _check(name, tensor, (config.num_experts, hidden, width))
        return {f"{prefix}.{e}.w2.weight": one for e, one in enumerate(tensor)}
    _check(name, tensor, (config.num_experts, 2 * width, hidden))
    halves = [(e, one.split(width)) for e, one in enumerate(tensor)]
    gates = {f"{prefix}.{e}.w1.weight": gate for e, (gate, _) in halves}
    return gates | {f"{prefix}.{e}.w3.weight": up for e, (_, up) in halves}


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise InputError(f"tensor {name} has shape {list(tensor.shape)}, config.json expects {list(shape)}")
