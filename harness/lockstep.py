"""Several models on the same tokens, one step of each after the other: values meet without being stored.

Teacher-forced means here: the prompt is prefilled, then each forced token goes through the decode path (or, for a
recompute variant, the prefix is run again). The models of one walk may differ in recipe, probe and parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from variants.decode import Sequences, padded
from variants.model import Model

Tokens = Sequence[int]


@dataclass(frozen=True)
class Position:
    """One step of a walk. t: index of the continuation token that the logits are for. rows: which rows have it."""

    t: int
    logits: tuple[Tensor, ...]
    rows: tuple[int, ...]


class Stepper(Protocol):
    """Something that goes over forced tokens one step at a time: a model's rows, or another engine's."""

    def start(self) -> Tensor:
        """Prefill; logits [B, V] for the first continuation token."""
        ...

    def after(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after one more token a row, tokens int64 [B]."""
        ...


def walk(models: Sequence[Model], prompts: Sequence[Tokens], continuations: Sequence[Tokens]) -> Iterator[Position]:
    """Yield, for each continuation position, every model's logits [B, V] under the same forced prefix.

    All rows run together in one batch; rows whose continuation has ended still run and are left out of `rows`. Probes
    see each model's step just before the next model's, so a later model's probe can read an earlier one's taps.
    """
    tokens = max(len(c) for c in continuations)
    yield from walk_steppers([Sequences(m, prompts, tokens) for m in models], continuations)


def walk_steppers(runs: Sequence[Stepper], continuations: Sequence[Tokens]) -> Iterator[Position]:
    """As `walk`, for anything that steps."""
    forced, lengths = padded(continuations)
    logits = tuple(r.start() for r in runs)
    for t in range(forced.shape[1]):
        yield Position(t, logits, tuple(i for i, n in enumerate(lengths) if n > t))
        if t + 1 < forced.shape[1]:
            logits = tuple(r.after(forced[:, t].to(x.device)) for r, x in zip(runs, logits, strict=True))


def batches(
    prompts: Sequence[Tokens], continuations: Sequence[Tokens], size: int
) -> Iterator[tuple[range, list, list]]:
    """Rows in groups of `size`, in order."""
    for start in range(0, len(prompts), size):
        rows = range(start, min(start + size, len(prompts)))
        yield rows, [prompts[i] for i in rows], [continuations[i] for i in rows]
