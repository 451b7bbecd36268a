"""Precision ladder: the same code path with its unit roundoff lowered, rung by rung, against the float64 oracle.

The error of a correct implementation falls in proportion to the unit roundoff u; a defect leaves a floor, and the first
layer that has the floor is where it sits. Each rung is also held against a reference that is known to be correct at
the same precision on the same battery, so that what a battery amplifies (routing, cancellation) is not taken for a
defect. Parameters stay as the candidate loaded them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.lockstep import Stepper, Tokens, walk_steppers
from harness.probes import Tap
from variants.decode import Sequences
from variants.dtypes import DType
from variants.model import Model
from variants.rounding import Probe

LAYER_OUTPUT = "mlp_residual"
EXCESS = 1.5  # ln: a layer's error at a rung is this much above the reference's and stays above from there on
RESOLUTION = 16.0
FALL = 0.5  # share of the fall in ln(u) by which a correct error must fall from rung to rung


@dataclass(frozen=True)
class Rung:
    """One precision: mean over positions of ln(relative root mean square error) at each layer's output, and extremes.

    error, p95, worst: one value a layer. reference: `error` of the correct reference at this precision, if it ran.
    """

    precision: DType
    error: tuple[float, ...]
    p95: tuple[float, ...]
    worst: tuple[float, ...]
    reference: tuple[float, ...] | None = None

    def excess(self) -> tuple[float, ...]:
        """ln of the candidate's error over the reference's, layer by layer."""
        assert self.reference is not None
        return tuple(a - b for a, b in zip(self.error, self.reference, strict=True))


@dataclass(frozen=True)
class Ladder:
    """Rungs from the coarsest to the finest."""

    rungs: tuple[Rung, ...]

    def floor(self) -> tuple[int, DType] | None:
        """The first layer whose error has a floor, and the rung that shows it; None where every error falls with u."""
        found = [(layer, rung.precision) for rung in self.rungs for layer in _floors(rung)]
        return min(found, key=lambda f: f[0], default=None)


def _floors(rung: Rung) -> list[int]:
    """The first layer from which a rung's error stays in excess of its reference."""
    if rung.reference is None:
        return []
    high = [e > EXCESS for e in rung.excess()]
    return next(([i] for i in range(len(high)) if all(high[i:])), [])


class _Layers:
    """Relative errors at layer outputs against an oracle's taps of the same step: a probe for one rung."""

    def __init__(self, oracle: Tap, layers: int) -> None:
        self.tap = Tap(_is_layer_output)
        self.oracle = oracle
        self.found: list[list[Tensor]] = [[] for _ in range(layers)]

    def take(self) -> None:
        """Read both taps of the step that has just run; pads of ragged rows are left out."""
        for (_, layer), values in self.tap.values.items():
            exact = self.oracle.values[(LAYER_OUTPUT, layer)].double()
            error = (values.double() - exact).square().mean(-1).sqrt() / exact.square().mean(-1).sqrt()
            self.found[layer].append(_real(error, self.tap))

    def rung(self, precision: DType, reference: tuple[float, ...] | None) -> Rung:
        """An error under RESOLUTION units is that many: the oracle itself is no more exact."""
        each = [torch.cat(x).clamp_min(RESOLUTION * precision.unit_roundoff).log() for x in self.found]
        return Rung(
            precision=precision,
            error=tuple(float(x.mean()) for x in each),
            p95=tuple(float(x.quantile(0.95)) for x in each),
            worst=tuple(float(x.max()) for x in each),
            reference=reference,
        )


def _is_layer_output(site: str, layer: int) -> bool:
    return site == LAYER_OUTPUT


def _real(error: Tensor, tap: Tap) -> Tensor:
    assert tap.step is not None
    lengths = torch.tensor(tap.step.lengths, device=error.device).unsqueeze(1)
    return error[torch.arange(error.shape[1], device=error.device) < lengths]


Make = Callable[[Tap], Stepper]


def ladder(
    oracle: Callable[[Probe], Model],
    candidates: Mapping[DType, Make],
    references: Mapping[DType, Make],
    prompts: Sequence[Tokens],
    continuations: Sequence[Tokens],
) -> Ladder:
    """Run every rung and its reference beside the oracle over a forced battery, in one walk.

    oracle(probe): a float64 model. candidates, references: for each precision, coarsest first, what makes a run whose
    layer outputs the given `Tap` sees. A precision without a reference is reported and never called a floor.
    """
    exact = Tap(_is_layer_output)
    model = oracle(exact)
    layers = model.config.num_layers
    seen = {(p, kind): _Layers(exact, layers) for p in candidates for kind in ("candidate", "reference")}
    runs: list[Stepper] = [Sequences(model, prompts, max(len(c) for c in continuations))]
    runs += [make(seen[(p, "candidate")].tap) for p, make in candidates.items()]
    runs += [make(seen[(p, "reference")].tap) for p, make in references.items()]
    for _ in walk_steppers(runs, continuations):
        for one in seen.values():
            one.take()
    rungs = []
    for p in candidates:
        reference = seen[(p, "reference")].rung(p, None).error if p in references else None
        rungs.append(seen[(p, "candidate")].rung(p, reference))
    return Ladder(tuple(rungs))


def falls_with_u(coarse: Rung, fine: Rung) -> tuple[bool, ...]:
    """Per layer: whether the error fell by at least FALL of what the unit roundoffs promise, in ln."""
    promised = math.log(coarse.precision.unit_roundoff / fine.precision.unit_roundoff)
    return tuple(a - b >= FALL * promised for a, b in zip(coarse.error, fine.error, strict=True))
