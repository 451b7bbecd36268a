"""What a planted defect is: its family, how strong it is, where it sits, and the four ways in which one is planted.

Planted defects test the instruments. No axis, rule or configuration leads here; a variant that a user can name never
holds one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from variants.dtypes import DType
from variants.model import Layer
from variants.model_config import LayerKind, ModelConfig
from variants.rounding import Step
from variants.state import State


class Family(Enum):
    """What goes wrong; the value is what a report prints."""

    state = "recurrent state"
    conv = "short convolution"
    gate = "decay gate"
    l2norm = "L2 norm of q and k"
    beta = "beta"
    chunk = "chunk boundary and inverse"
    mla = "MLA scale, mask and cache"
    router = "router and bias"
    scaling = "a scale off"
    norm = "norm: eps, weight, order"
    rounding = "undeclared rounding"
    indexing = "index by head or channel"
    slots = "stale or leaking slot"
    nonfinite = "NaN and infinity"


class Extent(Enum):
    """How much of what a fault could hit is hit."""

    all = "all"
    eighth = "one in eight"
    one = "one position"


class Severity(Enum):
    heavy = 0
    medium = 1
    light = 2


class Kind(Enum):
    """What makes a defect of this kind heavy, medium or light."""

    scale = (0.1, 0.01, 0.001)
    eps = (100.0, 10.0, 2.0)
    extent = (Extent.all, Extent.eighth, Extent.one)
    rounding = (DType.e4m3, DType.bf16, DType.f16)

    def amount(self, severity: Severity) -> "Amount":
        return self.value[severity.value]


Amount = float | Extent | DType


class Needs(Enum):
    """The kind of layer that a defect can sit in."""

    any = "any layer"
    kda = "a KDA layer"
    mla = "an MLA layer"
    moe = "a layer with experts"

    def layers(self, config: ModelConfig) -> tuple[int, ...]:
        holds = {
            Needs.any: lambda n: True,
            Needs.kda: lambda n: config.layer_kinds[n] is LayerKind.kda,
            Needs.mla: lambda n: config.layer_kinds[n] is LayerKind.mla,
            Needs.moe: lambda n: config.moe_layers[n],
        }[self]
        return tuple(n for n in range(config.num_layers) if holds(n))


class Run(Enum):
    """What a run must have for a defect to be in the code that it executes."""

    chunk = "kda.prefill=chunk"
    carried = "execution.mode=incremental"


class Clock:
    """Where a run stands: the step, and how often each slot's sequence has been carried on since it began."""

    def __init__(self) -> None:
        self.step = Step("prefill", (), (), ())
        self._carried: dict[int, int] = {}

    def begin(self, step: Step) -> None:
        self.step = step
        for slot, start in zip(step.slots, step.starts, strict=True):
            self._carried[slot] = self._carried.get(slot, 0) + 1 if start else 0

    def carried(self) -> Tensor:
        """Hand-overs so far of each row's sequence, 0 in its first step: int64 [B]."""
        return torch.tensor([self._carried[s] for s in self.step.slots])

    def positions(self) -> Tensor:
        """Position of each token of the step: int64 [B, T]."""
        return torch.tensor(self.step.starts).unsqueeze(1) + torch.arange(max(self.step.lengths))


@dataclass(frozen=True)
class Target:
    """A defect's strength and place in one planting; `clock` follows the run that it is planted in."""

    amount: Amount
    layers: tuple[int, ...]
    config: ModelConfig
    clock: Clock = field(default_factory=Clock, compare=False)

    @property
    def factor(self) -> float:
        """1 + the relative fault of a scale, or the factor on an eps."""
        assert isinstance(self.amount, float)
        return self.amount if self.amount > 1 else 1 + self.amount

    @property
    def dtype(self) -> DType:
        assert isinstance(self.amount, DType)
        return self.amount

    def picked(self, index: Tensor) -> Tensor:
        """Which of these indices (positions, channels, hand-overs) are hit: bool of the shape of `index`."""
        assert isinstance(self.amount, Extent)
        if self.amount is Extent.all:
            return torch.ones_like(index, dtype=torch.bool)
        return index % 8 == 2 if self.amount is Extent.eighth else index == 3

    def channels(self, count: int) -> Tensor:
        return self.picked(torch.arange(count))

    def tokens(self, x: Tensor) -> Tensor:
        """Mask of the hit positions for x [B, T, ...] or [B * T, ...], with its number of dimensions."""
        hit = self.picked(self.clock.positions())
        hit = hit if x.shape[:2] == hit.shape else hit.flatten()
        return hit.view(*hit.shape, *[1] * (x.ndim - hit.ndim))

    def rows(self, x: Tensor) -> Tensor:
        """Mask of the rows whose hand-over is hit, for x [B, ...], with its number of dimensions."""
        return self.picked(self.clock.carried()).view(-1, *[1] * (x.ndim - 1))

    def blend(self, mask: Tensor, wrong: Tensor, right: Tensor) -> Tensor:
        return torch.where(mask.to(right.device), wrong, right)


@dataclass
class Visit:
    """One call of a faulty place: which, how often it was called in this step before, and earlier values it reads."""

    site: str
    call: int
    seen: dict[str, Tensor]


@dataclass(frozen=True)
class AtSite:
    """Changes the value of a site before the recipe rounds it; `reads` are earlier sites that the change looks at."""

    sites: tuple[str, ...]
    change: Callable[[Tensor, Target, Visit], Tensor]
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class InParameter:
    """Changes a parameter (float64, as the recipe declares it); `leaf` is a pattern under `model.layers.N.`."""

    leaf: str
    change: Callable[[Tensor, Target], Tensor]


@dataclass(frozen=True)
class InBlock:
    """Changes what a built layer holds: a constant, or one of its functions."""

    change: Callable[[Layer, Target], None]


@dataclass(frozen=True)
class InSlots:
    """Changes what a slot holds after it was made ready for a new sequence."""

    change: Callable[[State, list[int], Target], None]


Mechanism = AtSite | InParameter | InBlock | InSlots


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A fault that can be planted.

    site: where local replay must find it; also: further places where it may be found first, when an operation gives
    two values or another core is run. case: the practice case that it stands for. exercise: what an input must have for
    the fault to show; a run without that is bit-identical to a correct one.
    """

    name: str
    family: Family
    site: str
    text: str
    kind: Kind
    needs: Needs
    mechanism: Mechanism
    also: tuple[str, ...] = ()
    case: str = ""
    run: tuple[Run, ...] = ()
    exercise: str = ""

    @property
    def sites(self) -> tuple[str, ...]:
        return (self.site, *self.also)


def wrap(owner: Any, name: str, outer: Callable[[Any], Any]) -> None:
    """Exchange a function that a built layer holds for one around it."""
    setattr(owner, name, outer(getattr(owner, name)))


def before(owner: Any, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Let a function of one tensor see `change(x)`; the dtype that it sees stays."""
    wrap(owner, name, lambda f: lambda x: f(change(x).to(x.dtype)))


def watch(owner: Any, name: str, seen: dict[str, Tensor]) -> None:
    """Remember the last value that a function of the layer returned, as seen[name]."""

    def outer(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            seen[name] = f(*args, **options)
            return seen[name]

        return call

    wrap(owner, name, outer)
