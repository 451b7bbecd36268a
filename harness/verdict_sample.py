"""Which places of a large battery the envelope walks: a sample that is fixed beforehand, and every divergence.

What is said of a run as a whole is read off the sample alone, since prompts that diverge are no fair choice of prompts;
each divergence has its sigma from the members at its own place. A small battery is walked whole.
"""

from collections.abc import Sequence

import numpy as np

from harness.envelope import Envelope
from harness.forced_errors import Battery

PROMPTS, TOKENS = 24, 16  # as many prompts as the calibration has


def sampled_lengths(battery: Battery) -> list[int]:
    """How many tokens of each prompt belong to the sample: all of a small battery, else some prompts spread evenly."""
    whole = [len(c) for c in battery.continuations]
    if sum(whole) <= PROMPTS * TOKENS:
        return whole
    count = min(PROMPTS, len(whole))
    rows = {round(i * (len(whole) - 1) / max(1, count - 1)) for i in range(count)}
    return [min(TOKENS, n) if i in rows else 0 for i, n in enumerate(whole)]


def last_places(diverges: np.ndarray) -> list[int]:
    """How many tokens of each prompt lie up to its last divergence, from bool [N, T]."""
    return [int(np.flatnonzero(row).max(initial=-1)) + 1 for row in diverges]


def sampled(own: Envelope, lengths: Sequence[int]) -> Envelope:
    """The part of an envelope that belongs to the sample."""
    prompts, t = own.table.positions.T
    return own.part(t < np.asarray(lengths)[prompts])
