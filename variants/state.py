"""What a sequence carries from step to step, addressed by slot: incremental, batched and paged are one path.

A slot owns a row of every KDA store and a table of pages of every MLA store. Outside paged execution a page is as long
as a sequence may be and slot s owns page s alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from variants.batch import NOBODY, Batch
from variants.dtypes import DType, widest
from variants.errors import UsageError
from variants.model_config import LayerKind, ModelConfig
from variants.placement import Placement
from variants.recipe import Recipe, Rule

SLOTTED, PAGED = ("conv", "recurrent"), ("latent", "keys", "values")


def _contiguous(slots: Sequence[int]) -> bool:
    return list(slots) == list(range(slots[0], slots[0] + len(slots)))


class State:
    """Slots of carried values for one model under one recipe.

    KDA layers: `conv` [slots, W - 1, 3 streams' channels] of raw inputs, `recurrent` [slots, H, K, V]. MLA layers:
    `latent` [pages, page_size, R + P], and `keys`, `values` [pages, page_size, H, .] where the recipe expands once.
    A slot is zeroed when it is taken (`reset`), never by the length of what arrives.

    block_size: None gives each slot one page of max_len tokens. Else pages hold so many tokens, every store has one
    more row that belongs to nobody, and `tables` says which pages a slot owns, first to last; with `pages` None each
    slot owns as many as max_len needs, else none yet and `pages` are to be handed out.
    """

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        *,
        slots: int,
        max_len: int,
        device: str = "cpu",
        block_size: int | None = None,
        pages: int | None = None,
        placement: Placement | None = None,
    ) -> None:
        if slots < 1 or max_len < 1:
            raise UsageError(f"state needs at least one slot and one position, got slots={slots}, max_len={max_len}")
        self.max_len, self.device = max_len, device
        self.paged, self.page_size = block_size is not None, block_size or max_len
        each = -(-max_len // self.page_size)
        self.pages = slots * each if pages is None else pages
        owned = each if pages is None else 0
        self.tables = [list(range(s * owned, (s + 1) * owned)) for s in range(slots)]
        self.length = [0] * slots
        self.conv: dict[int, Tensor] = {}
        self.recurrent: dict[int, Tensor] = {}
        self.latent: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for layer, kind in enumerate(config.layer_kinds):
            home = device if placement is None else placement.at(layer)
            if kind is LayerKind.kda:
                self._add_kda(config, recipe, layer, slots + self.paged, home)
            else:
                self._add_mla(config, recipe, layer, self.pages + self.paged, home)

    def _add_kda(self, c: ModelConfig, recipe: Recipe, layer: int, slots: int, device: str) -> None:
        channels = c.kda_num_heads * (2 * c.kda_head_dim + c.kda_v_head_dim)
        made = [_made(recipe.rule(site, layer)) for site in ("q_proj", "k_proj", "v_proj")]
        conv = recipe.rule("conv_state", layer).storage or widest(*made)
        self.conv[layer] = torch.zeros(slots, c.conv_size - 1, channels, dtype=conv.torch, device=device)
        cores = [recipe.rule("kda_core", layer, phase).accum for phase in ("prefill", "decode")]
        carried = recipe.rule("kda_state", layer).storage or widest(*cores)  # kept: as the cores compute it
        shape = (slots, c.kda_num_heads, c.kda_head_dim, c.kda_v_head_dim)
        self.recurrent[layer] = torch.zeros(shape, dtype=carried.torch, device=device)

    def _add_mla(self, c: ModelConfig, recipe: Recipe, layer: int, pages: int, device: str) -> None:
        made = [_made(recipe.rule(site, layer)) for site in ("kv_a_norm", "kv_a_proj")]
        dtype = recipe.rule("kv_cache", layer).storage or widest(*made)
        width = c.kv_lora_rank + c.qk_rope_head_dim
        self.latent[layer] = torch.zeros(pages, self.page_size, width, dtype=dtype.torch, device=device)
        if recipe.expanded_cache:
            expanded = recipe.rule("kv_b_proj", layer)
            k, v = (recipe.rule(site, layer).storage or _made(expanded) for site in ("mla_k", "mla_v"))
            keys = (pages, self.page_size, c.num_heads, c.qk_head_dim)
            self.keys[layer] = torch.zeros(keys, dtype=k.torch, device=device)
            self.values[layer] = torch.zeros(*keys[:3], c.v_head_dim, dtype=v.torch, device=device)

    def batch(self, slots: Sequence[int], lengths: Sequence[int], width: int, device: str = "cpu") -> Batch:
        """The rows of one step: `lengths` real tokens each in rows of `width`; refuses a slot that would overflow."""
        starts = self.starts(slots, lengths, width)
        near = not self.paged and _contiguous(slots)
        index = slice(slots[0], slots[0] + len(slots)) if near else torch.tensor(slots, device=device)
        span = torch.arange(width, device=device)
        positions = torch.tensor(starts, device=device).unsqueeze(1) + span
        ragged = any(n != width for n in lengths)
        real = span < torch.tensor(lengths, device=device).unsqueeze(1) if ragged else None
        return Batch(
            index,
            tuple(slots),
            starts,
            tuple(lengths),
            positions,
            real,
            page_size=self.page_size,
            tables=tuple([] if s == NOBODY else self.tables[s] for s in slots) if self.paged else None,
            null_page=self.pages,
        )

    def starts(self, slots: Sequence[int], lengths: Sequence[int], width: int = 1) -> tuple[int, ...]:
        """Where the new tokens of each row begin; refuses a slot that would overflow."""
        live = [s for s in slots if self.paged is False or s != NOBODY]
        assert len(set(live)) == len(live), "a slot stands in one row only"
        assert all(0 <= s < len(self.length) for s in live), "a row without a slot must not run: it would write to one"
        starts = tuple(0 if s == NOBODY else self.length[s] for s in slots)
        for slot, start, n in zip(slots, starts, lengths, strict=True):
            assert n == 0 if slot == NOBODY else 1 <= n <= width, "each row has at least one real token and fits"
            if start + n > self.max_len:
                raise UsageError(f"a sequence of {start + n} tokens does not fit max_len={self.max_len}")
            held = len(self.tables[slot]) * self.page_size if self.paged and slot != NOBODY else start + n
            assert start + n <= held, "a row's pages hold what it has and what it adds"
        return starts

    def advance(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, n in zip(slots, lengths, strict=True):
            if slot != NOBODY:
                self.length[slot] += n

    def take_one(self, slot: int) -> int:
        """One token more in a slot: the position at which it stands."""
        position = self.length[slot]
        if position + 1 > self.max_len:
            raise UsageError(f"a sequence of {position + 1} tokens does not fit max_len={self.max_len}")
        self.length[slot] += 1
        return position

    @torch.inference_mode()
    def reset(self, slots: Sequence[int]) -> None:
        """Make slots ready for new sequences: all that they hold is zeroed, for a masked key still counts 0 times its
        value, and 0 times what is not finite is NaN. What a probe took of a carried value is left as it was."""
        for slot in slots:
            self.clear_pages(self.tables[slot][: -(-self.length[slot] // self.page_size)])
            self.length[slot] = 0
        for store in (self.conv, self.recurrent):
            for layer in store:
                self._set(store, layer, slots, 0)

    @torch.inference_mode()
    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages, before or after they belong to somebody."""
        for cache in (*self.latent.values(), *self.keys.values(), *self.values.values()):
            cache[list(pages)] = 0

    def _set(self, store: dict[int, Tensor], layer: int, slots: Sequence[int], value: Tensor | float) -> None:
        index = torch.tensor(list(slots), device=store[layer].device)
        if not self.paged:  # a probe may have kept the store's own tensor
            store[layer] = store[layer].clone()
        store[layer][index] = value

    def rows(self, store: Tensor, slots: Sequence[int], end: int) -> Tensor:
        """What the pages of slots hold at positions 0..end - 1: a store of pages -> [rows, end, ...]."""
        pages = torch.tensor([self.tables[s][: -(-end // self.page_size)] for s in slots], dtype=torch.int64)
        return store[pages.to(store.device)].flatten(1, 2)[:, :end]

    @torch.inference_mode()
    def save(self, slot: int, *, device: str | None = None) -> "Saved":
        """A copy of all that a slot holds, on the host or on `device`; its pages are kept whole."""
        pages = self.tables[slot][: -(-self.length[slot] // self.page_size)]
        kept = {(n, i): x[slot].to(device or "cpu", copy=True) for n, i, x in self._stores(SLOTTED)}
        kept |= {(n, i): x[pages].to(device or "cpu", copy=True) for n, i, x in self._stores(PAGED)}
        return Saved(self.length[slot], len(pages), kept)

    @torch.inference_mode()
    def load(self, slot: int, saved: "Saved") -> None:
        """Put what was saved into a slot, which must own enough pages, bit for bit."""
        pages = self.tables[slot][: saved.pages]
        assert len(pages) == saved.pages, "a slot owns the pages that it is to hold"
        for name, layer, store in self._stores(SLOTTED):
            self._set(getattr(self, name), layer, [slot], saved.tensors[(name, layer)].to(store.device))
        for name, layer, store in self._stores(PAGED):
            store[pages] = saved.tensors[(name, layer)].to(store.device)
        self.length[slot] = saved.length

    @torch.inference_mode()
    def copy_slot(self, source: int, target: int) -> None:
        """Snapshot or restore: the KDA state of one slot into another, and its length; pages are the caller's."""
        for name, layer, store in self._stores(SLOTTED):
            self._set(getattr(self, name), layer, [target], store[source].clone())
        self.length[target] = self.length[source]

    def cell(self, slot: int, position: int) -> tuple[int, int]:
        """Page and offset at which a position of a slot lies in every MLA store."""
        return self.tables[slot][position // self.page_size], position % self.page_size

    def _stores(self, names: Sequence[str]) -> list[tuple[str, int, Tensor]]:
        return [(name, layer, x) for name in names for layer, x in getattr(self, name).items()]

    def groups(self) -> dict[str, tuple[int, int, int]]:
        """The two groups of what is carried: layers, units (slots or pages) and bytes of one unit over all layers."""
        out = {}
        for group, names, units in (("kda", SLOTTED, len(self.length)), ("mla", PAGED, self.pages)):
            stores = self._stores(names)
            each = sum(x[0].numel() * x.element_size() for _, _, x in stores)
            out[group] = (len({layer for _, layer, _ in stores}), units, each)
        return out


@dataclass(frozen=True)
class Saved:
    """All that one slot held: its length, how many pages, and tensors by (store, layer)."""

    length: int
    pages: int
    tensors: Mapping[tuple[str, int], Tensor]


def put(store: dict[int, Tensor], layer: int, batch: Batch, value: Tensor) -> None:
    """Exchange the carried value of the batch's slots; nothing is written into a tensor that somebody may have kept.

    A paged store is written in place: what is read of it is a copy. A row without a slot is written nowhere.
    """
    value = value.to(store[layer].dtype)
    if batch.tables is not None:
        rows, slots = batch.owned
        store[layer][slots] = value if rows is None else value[rows]
    elif isinstance(batch.index, slice) and value.shape[0] == store[layer].shape[0]:
        store[layer] = value
    else:
        store[layer] = store[layer].index_copy(0, torch.tensor(batch.slots, device=value.device), value)


def append(store: Tensor, batch: Batch, value: Tensor) -> None:
    """Write value [B, T, ...] at each row's positions; tokens that are not real are not written."""
    if batch.tables is None and batch.real is None and len(batch.slots) == 1:
        start, n = batch.starts[0], batch.lengths[0]
        store[batch.slots[0], start : start + n] = value[0]
        return
    value, cells = batch.written(value)
    store.flatten(0, 1)[cells] = value.to(store.dtype)


def carried_keys(store: Tensor, batch: Batch) -> Tensor:
    """What the batch's rows carry after this step, [B, L, ...] to the longest: a view, or gathered page by page."""
    if batch.tables is None:
        return store[batch.index, : batch.end]
    return store[batch.block_table].flatten(1, 2)[:, : batch.end]


def _made(rule: Rule) -> DType:
    """The dtype of what a site gives: its storage, or as it was computed."""
    return rule.storage or rule.accum
