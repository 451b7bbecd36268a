"""`round_at`: the one function through which every value passes that a recipe may round.

A model binds it once for each (site, layer, phase). A *probe* decides what a bound place does beyond rounding: nothing,
tap the value, add the envelope's noise, substitute a recorded value, plant a fault. Where there is nothing to do the
bound place is None and is not called, so the plain path pays nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from variants.dtypes import DType, dtype_of, round_to, store_as
from variants.recipe import Recipe, Rule
from variants.sites import INTEGER

RoundAt = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """What is running: the phase, the slots of the batch's rows, each row's first position and number of tokens."""

    phase: str
    slots: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]


class Probe(Protocol):
    """Something that watches or changes values at sites; bound once, told of every step."""

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        """What the place does: `rounding` itself, something around it, or None for nothing at all."""
        ...

    def begin(self, step: Step) -> None:
        """Called before the forward of each step."""
        ...


class NoProbe:
    """Rounds as the recipe says and does nothing else."""

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        return rounding

    def begin(self, step: Step) -> None:
        return None


def rounding_of(rule: Rule) -> RoundAt | None:
    """The rounding that a rule means (ties_to_even), or None where the value is kept as it was computed."""
    output, storage = rule.output, rule.storage
    if output is None or storage is None:
        return None
    if output is storage:
        return lambda x: x if dtype_of(x) is storage else store_as(x, storage)
    return lambda x: store_as(round_to(x, output), storage)


def round_at(
    recipe: Recipe, probe: Probe, place: tuple[str, int], *, phase: str, arrives: DType | None = None
) -> RoundAt | None:
    """Bind one place: the recipe's rounding as the probe has it.

    place: (site, layer). arrives: the format that the operation returns where that is known; a rounding to the same
    format and storage is then left out. Returns a function of one tensor, or None where nothing happens.
    """
    site, layer = place
    rule = recipe.rule(site, layer, phase)
    rounding = None if site in INTEGER else rounding_of(rule)
    if arrives is not None and rule.output is rule.storage is arrives:
        rounding = None
    return probe.bind(site, layer, rule, rounding)


def adds_at_once(rule: Rule, probe: Probe) -> bool:
    """Whether the sum of two bfloat16 values here is the library's own, which adds in float32 and rounds once; a probe
    sees the sum before it is rounded too."""
    return isinstance(probe, NoProbe) and rule.accum is DType.f32 and rule.output is rule.storage is DType.bf16


def both_bf16(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype is torch.bfloat16


def pinned(x: Tensor, dtype: DType) -> Tensor:
    """`x` in the format that an operation runs in; exact, since no operation runs in less than its operands hold."""
    return x if x.dtype == dtype.torch else x.to(dtype.torch)
