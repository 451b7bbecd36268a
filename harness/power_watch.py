"""What one run of the power experiment shows of itself, and what local replay and the ladder say of it."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from harness.forced_values import LastTokens, Values
from harness.ladder import Ladder
from harness.local_replay import LocalReplay
from harness.op_error import LIMIT
from harness.power_rules import Judgement
from harness.probes import Tap
from variants.decode import Sequences


class Seen:
    """A run that is stepped, and what it showed: logits, each step's last values, a digest of every tapped bit."""

    def __init__(self, places: Sequence[tuple[str, int]], rows: int) -> None:
        self.last, self.rows = LastTokens(places), rows
        self.logits: list[Tensor] = []
        self.values: list[Values] = []
        self.digest = hashlib.blake2b(digest_size=16)

    def on(self, run: Sequences, tap: Tap) -> "Seen":
        self.run, self.tap = run, tap
        return self

    def start(self) -> Tensor:
        return self._take(self.run.start())

    def after(self, tokens: Tensor) -> Tensor:
        return self._take(self.run.after(tokens))

    def _take(self, logits: Tensor) -> Tensor:
        self.logits.append(logits.double())
        self.values.append(self.last.values(self.rows))
        for (site, layer), value in self.tap.values.items():
            self.digest.update(f"{site}@{layer}".encode())
            self.digest.update(value.contiguous().view(torch.uint8).numpy().data)
        return logits


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
