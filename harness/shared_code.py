"""Whether the code that the oracle shares with every variant still computes the model's definition.

Local replay, ladder and envelope hold a variant against the oracle, and the oracle runs the same functions of
`variants/`: whoever edits one in place changes both. So the oracle itself is held against `harness.definition`, which
shares nothing with it, value by value on a few short prompts, alone and together, and on one long enough to enter every
further piece, tile and page of what is declared: local replay goes there too, but with the same code.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harness.definition import Values, forward
from harness.forced_errors import Battery
from harness.inspect import make_oracle
from harness.lockstep import walk_steppers
from harness.parts import part
from harness.probes import Passes, Place
from harness.reach import long_enough
from harness.stored import stored
from harness.verdict import Finding
from variants.decode import Sequences
from variants.dtypes import DType
from variants.errors import NeartieError
from variants.model_config import ModelConfig
from variants.recipe import Recipe, Semantics
from variants.rounding import Step
from variants.sites import places
from variants.weights import Casts

INSTRUMENT = "definition"
LARGEST_BYTES = 2**31  # of float64 parameters; beyond that the second opinion would take minutes and is left out
TOKENS, TOGETHER = 16, 3  # the two prompts also run as rows of one batch, over fewer tokens
# Relative to the rms of a position. Two float64 orders of these sums differ by 1e-13; a float32 slip by 1e-7.
TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class SecondOpinion:
    """compared: values, of which `largest` is the largest relative difference; departs: the first place beyond
    TOLERANCE in the order of the forward, None where there is none; left_out: why nothing was compared."""

    compared: int = 0
    largest: float = 0.0
    departs: tuple[Place, float] | None = None
    left_out: str | None = None

    def record(self) -> dict[str, object]:
        return {"compared": self.compared, "largest": self.largest, "left_out": self.left_out}

    def findings(self) -> list[Finding]:
        if self.departs is None:
            return []
        (site, layer), size = self.departs
        reason = (
            f"layer {layer} {site}: the code that the oracle shares with every variant departs from the model's "
            f"definition by {size:.2g} relative (look at the latest edit of variants/)"
        )
        return [Finding(instrument=INSTRUMENT, reason=reason, site=site, layer=layer)]


@part("definition")
def second_opinion(casts: Casts, declared: Recipe, battery: Battery) -> SecondOpinion:
    """The float64 model, run in the steps of `declared` with the checkpoint's own semantics, against the definition."""
    if (why := too_large(casts)) is not None:
        return SecondOpinion(left_out=why)
    make, config = make_oracle(casts, declared, semantics=Semantics()), casts.checkpoint.config
    longer = long_enough(declared, battery, config.max_length)
    rows = _rows(battery)
    alone = rows + ([] if longer is None else _rows(longer))
    few = min(TOGETHER, *(len(forced) for _, forced in rows))
    together = [(prompt, forced[:few]) for prompt, forced in rows]
    parameter = stored_parameter(casts)
    first: dict[Place, float] = {}
    compared, largest = 0, 0.0
    for group in (*([row] for row in alone), *([together] if len(together) > 1 else [])):
        told = [forward(config, parameter, [*prompt, *forced[:-1]]) for prompt, forced in group]
        tap = Passes(lambda site, layer, told=told: (site, layer) in told[0])
        stepper = Sequences(make(tap), [prompt for prompt, _ in group], max(len(forced) for _, forced in group))
        for place, size in _differences(tap, stepper, told, [forced for _, forced in group]):
            compared += 1
            largest = max(largest, size)
            if size > TOLERANCE:
                first[place] = max(size, first.get(place, 0.0))
    return SecondOpinion(compared=compared, largest=largest, departs=earliest(first, config))


@part("definition")
def sound_oracle(casts: Casts, declared: Recipe, battery: Battery) -> SecondOpinion:
    """As `second_opinion`, for a verdict on another engine: raises NeartieError where oracle or weights depart."""
    found = second_opinion(casts, declared, battery)
    for finding in (*stored(casts.checkpoint).findings(), *found.findings()):
        raise NeartieError(f"{finding.reason}; no other engine can be judged by this oracle")
    return found


def too_large(casts: Casts) -> str | None:
    """Why a model's parameters are too many for the definition, or None."""
    parameters = sum(t.numel() for t in casts.checkpoint.tensors.values())
    if 8 * parameters <= LARGEST_BYTES:
        return None
    return f"{parameters / 1e9:.1f} G parameters: too many for the definition in NumPy"


def stored_parameter(casts: Casts) -> Callable[[str], np.ndarray]:
    """A parameter as the definition reads it, float64 in the checkpoint's layout."""
    return lambda name: casts.checkpoint.tensors[name].cpu().double().numpy()


def _rows(battery: Battery) -> list[tuple[list[int], list[int]]]:
    """The shortest prompt with its first tokens, and the longest with its last: the farthest position that there is."""
    rows = [(list(p), list(c)) for p, c in zip(battery.prompts, battery.continuations, strict=True)]
    short, long = min(rows, key=lambda row: len(row[0])), max(rows, key=lambda row: len(row[0]))
    ahead = max(0, len(long[1]) - TOKENS)
    found = [(short[0], short[1][:TOKENS]), ([*long[0], *long[1][:ahead]], long[1][ahead:])]
    return found if len(rows) > 1 else found[1:]


def _differences(
    tap: Passes, stepper: Sequences, told: Sequence[Values], forced: Sequence[Sequence[int]]
) -> Iterator[tuple[Place, float]]:
    """The relative difference of each row's part of each value that the run passes; router ids differ by 1 if they do.

    A value is [rows, tokens, ...] or the same with rows and tokens as one, or has one token a row.
    """
    for _ in walk_steppers([stepper], forced):
        for step, calls in tap.passes:
            yield from pass_differences(step, calls, [told[slot] for slot in step.slots])
        tap.passes.clear()


def pass_differences(
    step: Step, calls: Mapping[Place, Sequence[torch.Tensor]], told: Sequence[Values | None]
) -> Iterator[tuple[Place, float]]:
    """As `_differences`, of one pass; told: the definition's values of each row, None for a row that fills up."""
    for place, values in calls.items():
        for i, (start, n) in enumerate(zip(step.starts, step.lengths, strict=True)):
            if (row_told := told[i]) is not None:
                whole = row_told[place]
                row = values[-1].reshape(len(told), -1, whole[0].size)[i]
                span = whole[start : start + n]
                yield (place, _difference(row[:n], span) if len(row) >= n else _difference(row, span[-1:]))


def _difference(mine: torch.Tensor, told: np.ndarray) -> float:
    flat = mine.to(dtype=DType.f64.torch, device="cpu").reshape(len(told), -1).numpy()
    told = told.reshape(len(told), -1)
    if told.dtype.kind == "i":
        return float((np.sort(flat.astype(told.dtype)) != np.sort(told)).any())
    scale = np.maximum(np.sqrt((told**2).mean(-1)), np.finfo(np.float64).tiny)
    size = np.abs(flat - told).max(-1) / scale
    return float(np.where(np.isnan(size), np.inf, size).max())


def earliest(found: dict[Place, float], config: ModelConfig) -> tuple[Place, float] | None:
    return next(((place, found[place]) for place in places(config) if place in found), None)
