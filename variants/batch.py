"""The rows of one step: which slots, positions and pages they are, made once and read by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

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
