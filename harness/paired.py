"""Two ways to decode, timed against each other token by token in one process.

A machine that is shared or changes its clock slows both sides of a pair alike, so the ratio of a pair holds where two
runs one after the other do not. Both sides are given the same tokens, and the one that goes first changes at each step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Protocol

import numpy as np
import torch

from harness.engines.transformers_engine import TransformersEngine
from harness.engines.transformers_load import quiet
from harness.measure import HIGH_PERCENTILE, LOW_PERCENTILE, Rate
from variants import decode
from variants.model import Model

WARM_UP = 8  # first steps of a run, in no figure


class Side(Protocol):
    """One sequence that grows by a token at a time; both calls give the greedy choice after what was run."""

    def start(self, prompt: Sequence[int]) -> int: ...

    def step(self, token: int) -> int: ...


class VariantSide:
    """A local variant: one model, fresh state for each prompt."""

    def __init__(self, model: Model, *, steps: int) -> None:
        self.model, self.steps = model, steps

    def start(self, prompt: Sequence[int]) -> int:
        self.rows = decode.Sequences(self.model, [prompt], self.steps + 1)
        return int(decode.greedy(self.rows.start()))

    def step(self, token: int) -> int:
        return int(decode.greedy(self.rows.after(torch.tensor([token], device=self.model.device))))


class LibrarySide:
    """The transformers library with its own cache."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        with quiet(), torch.inference_mode():  # what it says of kernels that are not installed, it says once
            once = engine.sequence()
            once.advance([0])
            once.advance([0])

    def start(self, prompt: Sequence[int]) -> int:
        self.sequence = self.engine.sequence()
        return self._advance(list(prompt))

    def step(self, token: int) -> int:
        return self._advance([token])

    def _advance(self, ids: list[int]) -> int:
        return int(decode.greedy(torch.from_numpy(self.sequence.advance(ids)).unsqueeze(0)))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, 5th and 95th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        low, median, high = (float(np.percentile(values, at)) for at in (LOW_PERCENTILE, 50, HIGH_PERCENTILE))
        return cls(median=median, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """One run: wall and processor seconds of each step, [steps, 2] with ours first, and tokens that both sides chose.

    cpu_s: None where the other side is another process. compared: how many tokens could have agreed.
    """

    wall_s: np.ndarray
    cpu_s: np.ndarray | None
    agreed: int
    compared: int

    def clocks(self) -> list[tuple[str, np.ndarray]]:
        return [("wall", self.wall_s), *([] if self.cpu_s is None else [("cpu", self.cpu_s)])]

    def record(self) -> dict[str, object]:
        """JSON-plain; ratio: theirs over ours of the same step, above 1 where ours is the faster."""
        out: dict[str, object] = {"steps": len(self.wall_s), "agreed": self.agreed, "compared": self.compared}
        for name, seconds in self.clocks():
            ours, theirs = (asdict(Spread.of(1e3 * seconds[:, side])) for side in (0, 1))
            ratio = asdict(Spread.of(seconds[:, 1] / seconds[:, 0]))
            out[name] = {"ours_ms": ours, "theirs_ms": theirs, "ratio": ratio}
        return out


@torch.inference_mode()
def timed(
    ours: Side, theirs: Side, prompt: Sequence[int], *, steps: int, clock: Callable[[], tuple[int, int]] | None = None
) -> Pairs:
    """Decode `steps` tokens after a prompt on both sides, each pair forced to the token that ours chose.

    clock: (wall, processor) nanoseconds; the processor's are of all threads of this process. A side's own greedy choice
    is in its time, and what it waits for on a device too.
    """
    clock = clock or _now
    token, agreed = ours.start(prompt), 0
    theirs.start(prompt)
    taken = np.empty((steps + WARM_UP, 2, 2), np.int64)
    for index, order in zip(range(steps + WARM_UP), cycle(((0, 1), (1, 0))), strict=False):
        chosen = [0, 0]
        for side in order:
            before = clock()
            chosen[side] = (ours, theirs)[side].step(token)
            taken[index, side] = np.subtract(clock(), before)
        agreed += index >= WARM_UP and chosen[0] == chosen[1]
        token = chosen[0]
    wall, cpu = np.moveaxis(taken[WARM_UP:] / 1e9, -1, 0)
    return Pairs(wall_s=wall, cpu_s=cpu, agreed=int(agreed), compared=steps)


def _now() -> tuple[int, int]:
    return time.perf_counter_ns(), time.process_time_ns()


def rate_of(runs: Sequence[Pairs], *, side: int = 0) -> Rate:
    """Tokens per second by the wall clock over the steps of all runs, as `harness.measure` takes them."""
    rates = 1 / np.concatenate([run.wall_s[:, side] for run in runs])
    spread = Spread.of(rates)
    cv = float(rates.std(ddof=1) / rates.mean()) if len(rates) > 1 else None
    return Rate(median=spread.median, low=spread.low, high=spread.high, steps=len(rates), cv=cv)
