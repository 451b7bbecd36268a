"""What a run's outputs alone say beside the envelope of its recipe, and where that is worth a closer look."""

from collections.abc import Sequence

import numpy as np

from harness.calibration import ENVELOPE_P, Calibration, alone
from harness.divergence import Cause, Divergence
from harness.envelope import CANDIDATE, F64_FLOOR, Envelope
from harness.verdict import GROSS, Finding
from variants.recipe import Recipe

CLOSER = 3  # prompts that are replayed again, whole, where their outputs are suspicious
CLEARED_EXCESS = 0.7  # ln; correct runs stay within 0.25 of their envelope at every layer
CLEARED_SIGMA = 20.0


def beyond(calibration: Calibration | None, declared: Recipe, own: Envelope) -> list[Finding]:
    """An error beyond the envelope at a layer's output: too unlikely, corrected for the number of layers, or gross.

    From few members or few places no p is small, however large the error is.
    """
    errors = own.table.parties[CANDIDATE].rms[0]
    known = calibration is not None and calibration.covers(declared)
    found = calibration.judge(declared, own, errors) if calibration and known else alone(own, errors)
    excess = own.excess(errors)
    if found.p.min() >= ENVELOPE_P and excess.max() < GROSS:
        return []
    jump = int(np.argmax(np.diff(excess, prepend=0.0)))  # where the error rises most, not where it is first seen
    site, layer = own.places[jump]
    size = f"error e^{excess[jump]:+.2f} of the envelope of its recipe, smallest p {found.p.min():.1e}"
    reason = f"layer {layer} output: {size}"
    return [Finding(instrument="envelope", reason=reason, layer=layer if site == "mlp_residual" else None)]


def suspects(own: Envelope, outside: Sequence[Finding], found: Sequence[Divergence]) -> dict[int, int]:
    """Up to CLOSER prompts, with the last position to look at, where outputs alone are suspicious."""
    places = [(d.prompt, d.position) for d in found if d.cause is Cause.defect]
    errors = own.table.parties[CANDIDATE].rms[0]
    if outside or float(own.excess(errors).max()) >= CLEARED_EXCESS:
        worst = int(np.argmax((errors / np.maximum(own.rms, F64_FLOOR * own.table.scale)).max(0)))
        places.insert(0, tuple(own.table.positions[worst].tolist()))
    last: dict[int, int] = {}
    for prompt, position in places:
        last[prompt] = max(position, last.get(prompt, 0))
    return dict(list(last.items())[:CLOSER])


def moderate(own: Envelope, found: Sequence[Divergence]) -> bool:
    """Whether what the outputs suggest is small enough for a clean replay to clear it.

    Members are few and their tails heavy. But the replay runs the same functions of ours as the candidate, so a fault
    that both share leaves it clean: an error far beyond the envelope is a defect all the same.
    """
    excess = own.excess(own.table.parties[CANDIDATE].rms[0])
    unlikely = [d.candidate.z(d.margin) for d in found if d.cause is Cause.defect]
    return float(excess.max()) < CLEARED_EXCESS and max(unlikely, default=0.0) < CLEARED_SIGMA
