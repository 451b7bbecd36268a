"""Precision ladder: the same code path with its unit roundoff lowered, rung by rung, against the float64 oracle.

The error of a correct implementation falls in proportion to the unit roundoff u; a defect leaves a floor, and the first
layer that has the floor is where it sits. Each rung is also held against a reference that is known to be correct at
the same precision on the same battery, so that what a battery amplifies (routing, cancellation) is not taken for a
defect. Parameters stay as the candidate loaded them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.lockstep import Stepper, Tokens, walk_steppers
from harness.parts import part
from harness.probes import Tap
from variants.decode import Sequences
from variants.dtypes import DType
from variants.model import Model
from variants.recipe import Recipe
from variants.rounding import Probe

LAYER_OUTPUT = "mlp_residual"
EXCESS = 0.7  # ln: from some layer on the error stays this much above the reference; correct code stays within 0.15
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
    high = [not e <= EXCESS for e in rung.excess()]  # an error that is not a number is no small one
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
        each = [torch.cat(x).clamp_min(1e-300).log() for x in self.found]
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


def other_order(recipe: Recipe) -> Recipe:
    """The same formats at every site with the sums of both cores in another order: correct, and never bit-equal.

    The delta rule goes in chunks of 16 (of 32, if the recipe has 16), attention in tiles of 16 keys (of 32): the
    reference that a rung is held against.
    """
    rules = dict(recipe.rules)
    for phase in ("prefill", "decode"):
        kda, mla = rules[f"kda_core.{phase}"], rules[f"mla_core.{phase}"]
        chunk = 32 if dict(kda.options).get("chunk_size") == 16 else 16
        tile = 32 if dict(mla.options).get("tile_k") == 16 else 16
        rules[f"kda_core.{phase}"] = replace(kda, algorithm="chunk", options=(("chunk_size", chunk),))
        rules[f"mla_core.{phase}"] = replace(mla, algorithm="flash", options=(("tile_q", 16), ("tile_k", tile)))
    return replace(recipe, rules=rules, exceptions={})


@part("ladder")
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
