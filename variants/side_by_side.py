"""Tensors that one launch reads together, lying side by side in memory, so that joining them copies nothing."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from variants.checkpoint_names import expected_tensors
from variants.model_config import ModelConfig
from variants.placement import Placement

# leaves of a layer that belong together, in the order in which they lie
_ATTENTION = (
    ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_conv1d", "k_conv1d", "v_conv1d"),
)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts stacked along their first dimension: a view where they lie side by side, in order, else a copy."""
    if len(parts) == 1:
        return parts[0]
    if not beside(parts):
        return torch.cat(list(parts))
    first = parts[0]
    return first.as_strided((sum(len(p) for p in parts), *first.shape[1:]), first.stride())


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Parts of one shape as one tensor with a new first dimension: a view where they lie side by side, else a copy."""
    if not beside(parts):
        return torch.stack(list(parts))
    first = parts[0]
    return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))


def beside(parts: Sequence[Tensor]) -> bool:
    """Whether contiguous parts of one dtype follow each other in one storage without a gap."""
    first = parts[0]
    storage, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for p in parts:
        same = p.dtype is first.dtype and p.shape[1:] == first.shape[1:] and p.is_contiguous()
        if not same or p.untyped_storage().data_ptr() != storage or p.storage_offset() != at:
            return False
        at += p.numel()
    return True


def groups(config: ModelConfig, stored: Iterable[str]) -> list[tuple[str, ...]]:
    """The tensors of a model that are stored, by their release names, those that are read together in one group."""
    left = dict.fromkeys(stored)
    found: list[tuple[str, ...]] = []
    for names in _together(config):
        if names and all(n in left for n in names):
            found.append(names)
            for n in names:
                del left[n]
    return found + [(n,) for n in left]


def _together(config: ModelConfig) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for layer in range(config.num_layers):
        at, moe = f"model.layers.{layer}", f"model.layers.{layer}.block_sparse_moe"
        found += [tuple(f"{at}.self_attn.{x}.weight" for x in leaves) for leaves in _ATTENTION]
        found.append(tuple(f"{at}.mlp.{x}_proj.weight" for x in ("gate", "up")))
        shared = tuple(f"{moe}.shared_experts.{x}_proj.weight" for x in ("gate", "up") if config.num_shared_experts)
        found.append((f"{moe}.gate.weight", *shared))
        found.append(tuple(f"{moe}.experts.{e}.{x}.weight" for e in range(config.num_experts) for x in ("w1", "w3")))
        found.append(tuple(f"{moe}.experts.{e}.w2.weight" for e in range(config.num_experts)))
    return found


def allocated(config: ModelConfig, dtypes: Mapping[str, torch.dtype], placement: Placement) -> dict[str, Tensor]:
    """Uninitialised tensors of the names and dtypes given, where they are placed; a group of one dtype side by side."""
    shapes, out = expected_tensors(config), {}
    for group in groups(config, dtypes):
        alike = len({dtypes[n] for n in group}) == 1
        for names in [group] if alike else [(n,) for n in group]:
            rows = [shapes[n][0] for n in names]
            place = {"dtype": dtypes[names[0]], "device": placement.of(names[0])}
            whole = torch.empty(sum(rows), *shapes[names[0]][1:], **place)
            out |= dict(zip(names, whole.split(rows), strict=True))
    return {name: out[name] for name in dtypes}
