"""Distances between the first two candidates of a position: in nats, in units in the last place, and as exact ties."""

import math

import numpy as np

from harness.golden_data import Golden
from variants.errors import UsageError

# The torch-free scalar twin of variants.dtypes; a test holds the two equal.
# Significand bits (with the hidden one), least exponent of a normal number, greatest finite value.
_FORMATS: dict[str, tuple[int, int, float]] = {
    "bfloat16": (8, -126, (2.0 - 2.0**-7) * 2.0**127),
    "float16": (11, -14, 65504.0),
    "float32": (24, -126, (2.0 - 2.0**-23) * 2.0**127),
    "float64": (53, -1022, math.ldexp(2.0 - 2.0**-52, 1023)),
}

# A random-init fixture has 40 % or more of its gaps under an eighth of a nat, a small trained model 4 %.
MAX_UNDER_NOISE = 0.25


def ulp(value: float, dtype: str) -> float:
    """Distance from |value| to the next larger magnitude of `dtype` ("bfloat16", "float16", "float32", "float64").

    Below the least normal number it is the spacing of the subnormals. NaN where the value is not finite in `dtype`.
    Raises UsageError for another dtype.
    """
    if dtype not in _FORMATS:
        raise UsageError(f"ulp: got dtype {dtype!r}, expected one of {', '.join(_FORMATS)}")
    bits, least, largest = _FORMATS[dtype]
    if not abs(value) <= largest:
        return math.nan
    exponent = max(math.frexp(value)[1] - 1, least) if value else least
    return math.ldexp(1.0, exponent - bits + 1)


def gap_ulp(first: float, second: float, dtype: str) -> float:
    """|first - second| in units in the last place of `dtype` at the larger magnitude of the two."""
    return abs(first - second) / ulp(max(abs(first), abs(second)), dtype)


def top2_gaps(golden: Golden) -> np.ndarray | None:
    """Top-1 minus top-2 logprob of run 0: float64 [N, T] in nats, NaN past a row's end; None without logprobs."""
    if golden.top_logprobs is None or golden.top_logprobs.shape[-1] < 2:
        return None
    top = golden.top_logprobs[..., :2].astype(np.float64)
    return np.where(golden.tokens[0] >= 0, top[..., 0] - top[..., 1], np.nan)


def exact_ties(golden: Golden) -> int | None:
    """Number of positions of run 0 whose first two logprobs are equal; None where the golden holds no logprobs."""
    gaps = top2_gaps(golden)
    return None if gaps is None else int(np.count_nonzero(gaps == 0.0))


def fixture_discrimination(golden: Golden, noise_nats: float) -> float | None:
    """Share of known positions whose top-2 gap is under the noise (nats); None where no gap is known."""
    if not (math.isfinite(noise_nats) and noise_nats >= 0.0):
        raise UsageError(f"noise: got {noise_nats} nats, expected a finite number, 0 or more")
    gaps = top2_gaps(golden)
    if gaps is None or np.isnan(gaps).all():
        return None
    return float(np.mean(gaps[~np.isnan(gaps)] < noise_nats))


def cannot_discriminate(golden: Golden, noise_nats: float, *, max_share: float = MAX_UNDER_NOISE) -> str | None:
    """The reason why token agreement on this golden can show nothing at this noise, or None where it can."""
    share = fixture_discrimination(golden, noise_nats)
    if share is None or share <= max_share:
        return None
    return (
        f"fixture cannot discriminate: {share:.0%} of top-2 gaps are under the noise of {noise_nats:g} nats "
        f"(at most {max_share:.0%} is allowed); use a trained checkpoint or compare logits"
    )
