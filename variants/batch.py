"""The rows of one step: which slots, positions and pages they are, made once and read by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from variants.ops.launch_triton import Ragged

Index = slice | Tensor
NOBODY = -1  # the slot of a row that fills a batch up


@dataclass(frozen=True)
class Batch:
    """Rows that run together: slots, first positions, real lengths and, where lengths differ, which tokens are real.

    index: into a state tensor's slots. positions [B, T]. real: bool [B, T] or None when every row fills the batch.
    slots: NOBODY for a row that only fills the batch up, of length 0. tables: each row's pages where they are not its
    slot alone; page_size: tokens of a page; null_page: one that is zero and is never written.
    """

    index: Index
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    positions: Tensor
    real: Tensor | None
    page_size: int
    tables: tuple[Sequence[int], ...] | None = None
    null_page: int = 0

    @property
    def end(self) -> int:
        """Keys that the longest row has after this step."""
        return max(s + n for s, n in zip(self.starts, self.lengths, strict=True))

    @property
    def alone(self) -> bool:
        """Whether one token is all there is, rows that fill the batch up counted too."""
        return self.positions.numel() == 1

    def to(self, device: str) -> "Batch":
        """The same rows for layers that lie on another device."""
        index = self.index if isinstance(self.index, slice) else self.index.to(device)
        real = None if self.real is None else self.real.to(device)
        return replace(self, index=index, positions=self.positions.to(device), real=real)

    @cached_property
    def block_table(self) -> Tensor:
        """int64 [B, n]: the pages of each row as far as the longest row reaches, the null page after a row's own."""
        if self.tables is None:
            return torch.tensor(self.slots, device=self.positions.device).unsqueeze(1)
        width = -(-self.end // self.page_size)
        rows = [[*table[:width], *[self.null_page] * (width - len(table))] for table in self.tables]
        return torch.tensor(rows, device=self.positions.device)

    @cached_property
    def ragged(self) -> "Ragged":
        """The rows that have tokens, as the Triton kernels read them; steps alike in lengths and slots share one."""
        rows = [(n, s) for n, s in zip(self.lengths, self.slots, strict=True) if n]
        return _ragged(tuple(n for n, _ in rows), tuple(s for _, s in rows), self.positions.device)

    def written(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """What of value [B, T, ...] is written, [tokens, ...], and the cell of each."""
        tokens, cells = self.writes
        value = value.flatten(0, 1)
        return value if tokens is None else value[tokens], cells

    @cached_property
    def writes(self) -> tuple[Tensor | None, Tensor]:
        """Which of the batch's B * T tokens are real (None: all), and the cell, page times size and offset, of each."""
        columns = (self.positions // self.page_size).clamp_max(self.block_table.shape[1] - 1)
        cells = self.block_table.gather(1, columns) * self.page_size + self.positions % self.page_size
        if self.real is None:
            return None, cells.flatten()
        tokens = self.real.flatten().nonzero().squeeze(1)
        return tokens, cells.flatten()[tokens]

    @cached_property
    def owned(self) -> tuple[Tensor | None, Tensor]:
        """Rows that have a slot (None: all), and their slots."""
        rows = [i for i, s in enumerate(self.slots) if s != NOBODY]
        device = self.positions.device
        live = torch.tensor([self.slots[i] for i in rows], device=device)
        return None if len(rows) == len(self.slots) else torch.tensor(rows, device=device), live


@dataclass(frozen=True, kw_only=True)
class StaticBatch(Batch):
    """Decode rows told by tensors alone, so that a step over them can be captured: no host number is in it.

    positions int32 [B, 1], -1 for a row that fills the batch up. rows: one token each and the slots. table int32
    [B, n]: pages, whatever they are beyond a row's own. Made anew for each launch, since what it makes of its tensors
    belongs to that launch.
    """

    rows: "Ragged"
    table: Tensor

    @classmethod
    def of(cls, rows: "Ragged", positions: Tensor, table: Tensor, *, page_size: int, null_page: int) -> "StaticBatch":
        return cls(
            index=rows.slots, slots=(), starts=(), lengths=rows.lengths, positions=positions, real=None,
            page_size=page_size, tables=(), null_page=null_page, rows=rows, table=table,
        )  # fmt: skip

    @property
    def ragged(self) -> "Ragged":
        return self.rows

    @property
    def block_table(self) -> Tensor:
        return self.table

    def written(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """A row that fills the batch up writes zeros where zeros are: into the first cell of the null page."""
        nobody = self.positions.flatten() < 0
        return value.flatten(0, 1).masked_fill(nobody.view(-1, *[1] * (value.ndim - 2)), 0), self._cells

    @cached_property
    def _cells(self) -> Tensor:
        positions = self.positions.long()
        pages = self.block_table.gather(1, (positions // self.page_size).clamp_min(0)).long()
        cells = pages * self.page_size + positions % self.page_size
        return torch.where(positions < 0, self.null_page * self.page_size, cells).flatten()


@lru_cache(maxsize=64)
def _ragged(lengths: tuple[int, ...], slots: tuple[int, ...], device: torch.device) -> "Ragged":
    from variants.ops.launch_triton import ragged

    with torch.inference_mode():
        return ragged(lengths, slots, device=device)
