"""What one run of the power experiment shows of itself, and what local replay and the ladder say of it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.forced_values import LastTokens, Values
from harness.ladder import LAYER_OUTPUT, Ladder
from harness.local_replay import LocalReplay
from harness.lockstep import Stepper
from harness.op_error import LIMIT
from harness.power_rules import Judgement
from harness.probes import Place, Tap
from variants.rounding import Step
from variants.sites import CHUNK_SITES, INSIDE_ATTENTION

Digest = tuple[Place, bytes]


@dataclass(frozen=True)
class Shown:
    """One step of a run: its logits, the last pass of it and that pass's layer outputs."""

    logits: Tensor
    step: Step | None
    layers: dict[Place, Tensor]


class Seen:
    """A run that is stepped, and what it showed: each step, its last tokens' values, a digest of every tapped value."""

    def __init__(self, places: Sequence[Place], rows: int) -> None:
        self.last, self.rows = LastTokens(places), rows
        self.shown: list[Shown] = []
        self.values: list[Values] = []
        self.digests: list[Digest] = []

    def on(self, run: Stepper, tap: Tap) -> "Seen":
        self.run, self.tap = run, tap
        return self

    def start(self) -> Tensor:
        return self._take(self.run.start())

    def after(self, tokens: Tensor) -> Tensor:
        return self._take(self.run.after(tokens))

    def _take(self, logits: Tensor) -> Tensor:
        layers = {place: value for place, value in self.tap.values.items() if place[0] == LAYER_OUTPUT}
        self.shown.append(Shown(logits, self.tap.step, layers))
        self.values.append(self.last.values(self.rows))
        self.digests += [(place, _bits(value)) for place, value in self.tap.values.items()]
        return logits

    @property
    def logits(self) -> Tensor:
        """Float64 [P, V], positions in the order of (prompt, t)."""
        return torch.stack([s.logits.double() for s in self.shown], 1).flatten(0, 1)


def _bits(value: Tensor) -> bytes:
    return hashlib.blake2b(value.contiguous().view(torch.uint8).numpy().data, digest_size=16).digest()


def first_difference(run: Sequence[Digest], clean: Sequence[Digest]) -> Place | None:
    """The first place, in the order in which values came, that two runs of the same code do not share bit for bit.

    What a kernel holds inside is left out, since its output stands for it.
    """
    pairs = ((a, b) for a, b in zip(run, clean, strict=True) if a[0][0] not in (*CHUNK_SITES, *INSIDE_ATTENTION))
    return next((place for (place, bits), (_, right) in pairs if bits != right), None)


class Again:
    """A run that was seen, stepped once more without running: what it showed goes into a tap as it did then."""

    def __init__(self, shown: Sequence[Shown], tap: Tap) -> None:
        self.left, self.tap = iter(shown), tap

    def start(self) -> Tensor:
        return self._next()

    def after(self, tokens: Tensor) -> Tensor:
        return self._next()

    def _next(self) -> Tensor:
        now = next(self.left)
        self.tap.step, self.tap.calls = now.step, {place: [value] for place, value in now.layers.items()}
        return now.logits


def replayed(replay: LocalReplay) -> Judgement:
    """Local replay's judgement: the largest error over its bound in units of LIMIT, and the first place in excess."""
    excess = replay.excess()
    finite = not any(e.non_finite for e in replay.errors.values())
    worst = max(e.worst for e in replay.errors.values()) / LIMIT if finite else float("inf")
    site, layer = excess[0][:2] if excess else (None, None)
    return Judgement(worst, bool(excess), site, layer)


def climbed(found: Ladder) -> Judgement:
    """The ladder's judgement: the largest excess of a rung at the last layer, and the first layer with a floor."""
    floor = found.floor()
    last = [rung.excess()[-1] for rung in found.rungs]
    score = max(last) if np.isfinite(last).all() else float("inf")
    return Judgement(score, floor is not None, None, floor[0] if floor else None)
