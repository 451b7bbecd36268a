"""What a sequence carries from step to step, addressed by slot: incremental, batched and (later) paged are one path."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from variants.dtypes import DType, widest
from variants.errors import UsageError
from variants.model_config import LayerKind, ModelConfig
from variants.recipe import Recipe, Rule

Index = slice | Tensor


@dataclass(frozen=True)
class Batch:
    """Rows that run together: slots, first positions, real lengths and, where lengths differ, which tokens are real.

    index: into a state tensor's slots. positions [B, T]. real: bool [B, T] or None when every row fills the batch.
    """

    index: Index
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    positions: Tensor
    real: Tensor | None

    @property
    def end(self) -> int:
        """Keys that the longest row has after this step."""
        return max(s + n for s, n in zip(self.starts, self.lengths, strict=True))


def _contiguous(slots: Sequence[int]) -> bool:
    return list(slots) == list(range(slots[0], slots[0] + len(slots)))


class State:
    """Slots of carried values for one model under one recipe.

    KDA layers: `conv` [slots, W - 1, 3 streams' channels] of raw inputs, `recurrent` [slots, H, K, V]. MLA layers:
    `latent` [slots, max_len, R + P], and `keys`, `values` [slots, max_len, H, .] where the recipe expands once.
    A slot is zeroed when it is taken (`reset`), never by the length of what arrives.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, *, slots: int, max_len: int, device: str = "cpu") -> None:
        if slots < 1 or max_len < 1:
            raise UsageError(f"state needs at least one slot and one position, got slots={slots}, max_len={max_len}")
        self.max_len = max_len
        self.length = [0] * slots
        self.conv: dict[int, Tensor] = {}
        self.recurrent: dict[int, Tensor] = {}
        self.latent: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for layer, kind in enumerate(config.layer_kinds):
            if kind is LayerKind.kda:
                self._add_kda(config, recipe, layer, slots, device)
            else:
                self._add_mla(config, recipe, layer, slots, device)

    def _add_kda(self, c: ModelConfig, recipe: Recipe, layer: int, slots: int, device: str) -> None:
        channels = c.kda_num_heads * (2 * c.kda_head_dim + c.kda_v_head_dim)
        made = [_made(recipe.rule(site, layer)) for site in ("q_proj", "k_proj", "v_proj")]
        conv = recipe.rule("conv_state", layer).storage or widest(*made)
        self.conv[layer] = torch.zeros(slots, c.conv_size - 1, channels, dtype=conv.torch, device=device)
        cores = [recipe.rule("kda_core", layer, phase).accum for phase in ("prefill", "decode")]
        carried = recipe.rule("kda_state", layer).storage or widest(*cores)  # kept: as the cores compute it
        shape = (slots, c.kda_num_heads, c.kda_head_dim, c.kda_v_head_dim)
        self.recurrent[layer] = torch.zeros(shape, dtype=carried.torch, device=device)

    def _add_mla(self, c: ModelConfig, recipe: Recipe, layer: int, slots: int, device: str) -> None:
        made = [_made(recipe.rule(site, layer)) for site in ("kv_a_norm", "kv_a_proj")]
        dtype = recipe.rule("kv_cache", layer).storage or widest(*made)
        width = c.kv_lora_rank + c.qk_rope_head_dim
        self.latent[layer] = torch.zeros(slots, self.max_len, width, dtype=dtype.torch, device=device)
        if recipe.expanded_cache:
            expanded = recipe.rule("kv_b_proj", layer)
            k, v = (recipe.rule(site, layer).storage or _made(expanded) for site in ("mla_k", "mla_v"))
            keys = (slots, self.max_len, c.num_heads, c.qk_head_dim)
            self.keys[layer] = torch.zeros(keys, dtype=k.torch, device=device)
            self.values[layer] = torch.zeros(*keys[:3], c.v_head_dim, dtype=v.torch, device=device)

    def batch(self, slots: Sequence[int], lengths: Sequence[int], width: int, device: str = "cpu") -> Batch:
        """The rows of one step: `lengths` real tokens each in rows of `width`; refuses a slot that would overflow."""
        assert len(set(slots)) == len(slots), "a slot stands in one row only"
        assert all(0 <= s < len(self.length) for s in slots), "a row without a slot must not run: it would write to one"
        assert all(1 <= n <= width for n in lengths), "each row has at least one real token and fits the batch"
        starts = tuple(self.length[s] for s in slots)
        longest = max(s + n for s, n in zip(starts, lengths, strict=True))
        if longest > self.max_len:
            raise UsageError(f"a sequence of {longest} tokens does not fit max_len={self.max_len}")
        index = slice(slots[0], slots[0] + len(slots)) if _contiguous(slots) else torch.tensor(slots, device=device)
        span = torch.arange(width, device=device)
        positions = torch.tensor(starts, device=device).unsqueeze(1) + span
        ragged = any(n != width for n in lengths)
        real = span < torch.tensor(lengths, device=device).unsqueeze(1) if ragged else None
        return Batch(index, tuple(slots), starts, tuple(lengths), positions, real)

    def advance(self, batch: Batch) -> None:
        for slot, n in zip(batch.slots, batch.lengths, strict=True):
            self.length[slot] += n

    @torch.inference_mode()
    def reset(self, slots: Sequence[int]) -> None:
        """Make slots ready for new sequences: all that they hold is zeroed, for a masked key still counts 0 times its
        value, and 0 times what is not finite is NaN. What a probe took of a carried value is left as it was."""
        for cache in (*self.latent.values(), *self.keys.values(), *self.values.values()):
            for slot in slots:
                cache[slot, : self.length[slot]] = 0
        for store in (self.conv, self.recurrent):
            for layer, carried in store.items():
                store[layer] = carried.index_fill(0, torch.tensor(list(slots), device=carried.device), 0)
        for slot in slots:
            self.length[slot] = 0


def put(store: dict[int, Tensor], layer: int, batch: Batch, value: Tensor) -> None:
    """Exchange the carried value of the batch's slots; nothing is written into a tensor that somebody may have kept."""
    value = value.to(store[layer].dtype)
    if isinstance(batch.index, slice) and value.shape[0] == store[layer].shape[0]:
        store[layer] = value
    else:
        store[layer] = store[layer].index_copy(0, torch.tensor(batch.slots, device=value.device), value)


def append(store: Tensor, batch: Batch, value: Tensor) -> None:
    """Write value [B, T, ...] at each row's positions; tokens that are not real are not written."""
    if batch.real is None and len(batch.slots) == 1:
        start, n = batch.starts[0], batch.lengths[0]
        store[batch.slots[0], start : start + n] = value[0]
        return
    slots = torch.tensor(batch.slots, device=store.device).unsqueeze(1).expand_as(batch.positions)
    keep = batch.real if batch.real is not None else torch.ones_like(batch.positions, dtype=torch.bool)
    store[slots[keep], batch.positions[keep]] = value[keep].to(store.dtype)


def _made(rule: Rule) -> DType:
    """The dtype of what a site gives: its storage, or as it was computed."""
    return rule.storage or rule.accum
