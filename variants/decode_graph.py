"""Decode steps of a batch as CUDA graphs over one state, one graph for each number of rows that steps are filled up to.

A step's tokens, slots, positions and page tables lie at fixed addresses on the device; the host writes them there, the
graph runs the same functions as `Model.forward` over them, and chooses the greedy tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from variants.batch import NOBODY, StaticBatch
from variants.graph import captured
from variants.model import Model
from variants.request import told
from variants.state import State

TOKEN, SLOT, POSITION = range(3)


class Inputs:
    """What a step reads, on the host and on the device: a token, a slot and a position a row, and each row's pages.

    numbers int32 [3, rows]; table int32 [rows, n] with as many pages as the longest sequence has. Beyond a row's own
    pages lies what an earlier step left there, and no position of the row reaches it.
    """

    def __init__(self, rows: int, pages: int, device: str) -> None:
        pinned = torch.device(device).type == "cuda"
        self.numbers, self.table = (
            torch.zeros(n, dtype=torch.int32, device=device) for n in ((3, rows), (rows, pages))
        )
        self._numbers = torch.zeros(3, rows, dtype=torch.int32, pin_memory=pinned)
        self._table = torch.zeros(rows, pages, dtype=torch.int32, pin_memory=pinned)
        self._known: list[list[int]] = [[]] * rows

    def put(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        """The rows of a step; all others are nobody's. The step before must have ended on the device."""
        rest = self._numbers.shape[1] - len(tokens)
        rows = [[*tokens, *[0] * rest], [*slots, *[NOBODY] * rest], [*positions, *[-1] * rest]]
        self._numbers.copy_(torch.tensor(rows, dtype=torch.int32))
        self.numbers.copy_(self._numbers, non_blocking=True)

    def put_pages(self, tables: Sequence[Sequence[int]]) -> None:
        """The pages of each row; copied where one has changed."""
        changed = [row for row, table in enumerate(tables) if self._known[row] != table]
        for row in changed:
            self._known[row] = list(tables[row])
            self._table[row, : len(tables[row])] = torch.tensor(tables[row], dtype=torch.int32)
        if changed:
            self.table.copy_(self._table, non_blocking=True)


@dataclass
class Step:
    """A decode step of so many rows: `run` leaves logits [rows, V] and what the host is told of them."""

    run: Callable[[], None] = field(init=False)
    logits: Tensor = field(init=False)
    told: Tensor = field(init=False)


class DecodeGraphs:
    """The steps of one model over one paged state, each captured when it is first needed."""

    def __init__(self, model: Model, state: State) -> None:
        self.model, self.state = model, state
        run = model.recipe.execution
        self.filled = run.filled
        self.steps: dict[int, Step] = {}
        with torch.inference_mode():
            self.inputs = Inputs(run.batch, -(-state.max_len // state.page_size), model.device)
            self._ends = torch.arange(run.batch + 1, dtype=torch.int32, device=model.device)
            self._chunks = torch.stack([self._ends, torch.zeros_like(self._ends)], 1).contiguous()

    @torch.inference_mode()
    def prepare(self, count: int) -> Step:
        """The step for so many sequences. It is captured over rows that are nobody's, so nothing carried moves."""
        rows = self.filled(count)
        if rows not in self.steps:
            self.inputs.put([], [], [])
            step = Step()
            step.run = captured(lambda: self._launch(rows, step), (), self.model.device)
            self.steps[rows] = step
        return self.steps[rows]

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One token more in each slot: logits [rows, V] and `told` of them; the slots' sequences have moved on."""
        step, lengths = self.prepare(len(slots)), [1] * len(slots)
        self.inputs.put(tokens, slots, self.state.starts(slots, lengths))
        self.inputs.put_pages([self.state.tables[s] for s in slots])
        step.run()
        self.state.advance(slots, lengths)
        return step.logits.clone(), step.told

    def _launch(self, rows: int, step: Step) -> None:
        from variants.ops.launch_triton import Ragged

        numbers, state = self.inputs.numbers[:, :rows], self.state
        ragged = Ragged((1,) * rows, self._ends[: rows + 1], numbers[SLOT], self._chunks[:rows], self._ends[:rows])
        batch = StaticBatch.of(ragged, numbers[POSITION].unsqueeze(1), self.inputs.table[:rows],
                               page_size=state.page_size, null_page=state.pages)  # fmt: skip
        phase = self.model.phases["decode"]
        step.logits = phase.logits(*phase(numbers[TOKEN].unsqueeze(1), batch, state))[:, 0]
        step.told = told(step.logits)
