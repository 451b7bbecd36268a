"""The places where a golden's next token hangs on little: the first two candidates are a small gap apart.

The gaps are the float64 oracle's, or, where the model is not at hand, those that the reference engine recorded. The
latter hold that engine's own rounding (a gap of exactly zero is a tie of rounded logits) and end with its list.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.gaps import top2_gaps
from harness.golden_data import ENDED, Golden
from harness.noise_scale import Noise
from harness.oracle import Oracle
from variants.errors import InputError

TokenText = Callable[[int], str | None]


@dataclass(frozen=True, kw_only=True)
class NearTie:
    """One place. first, second: the source's two best tokens. gap_nats: between them.

    lead_nats: the golden token's logprob minus the best other one, negative where the source prefers another; None
    where the golden token is not on a recorded list. rank: of the golden token, 1 = the source's choice, or None so.
    golden_gap_nats: the gap that the reference engine recorded, None where it recorded none.
    """

    prompt: int
    position: int
    golden_id: int
    first_id: int
    second_id: int
    gap_nats: float
    lead_nats: float | None
    rank: int | None
    golden_gap_nats: float | None
    golden_text: str | None = None
    first_text: str | None = None
    second_text: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Gaps:
    """Every place of a golden. source: "oracle" or "recorded". Arrays [N, T], NaN (rank 0) where there is nothing.

    best: int [N, T, 2], the source's two best tokens. golden_gaps: None without recorded logprobs.
    """

    golden: Golden
    source: str
    gaps: np.ndarray
    leads: np.ndarray
    ranks: np.ndarray
    best: np.ndarray
    golden_gaps: np.ndarray | None

    @property
    def judge(self) -> str:
        return "oracle" if self.source == "oracle" else "reference engine"

    @property
    def places(self) -> int:
        return int(np.count_nonzero(~np.isnan(self.gaps)))

    @property
    def not_first(self) -> int:
        """Places whose golden token is known not to be the source's choice."""
        return int(np.count_nonzero(self.ranks > 1))

    def under(self, nats: float) -> int:
        """Places whose gap is under a number of nats."""
        return int(np.count_nonzero(self.gaps < nats))

    def turned(self, noise: Noise) -> float:
        """How many golden tokens this noise is expected to turn when every place is judged on the golden's prefix."""
        return float(np.nansum(noise.flips(self.leads)))

    def nearest(self, count: int | None = None, *, text: TokenText | None = None) -> list[NearTie]:
        """The places of the smallest gaps, smallest first, equal ones in the golden's order; all without `count`."""
        order = np.argsort(self.gaps, axis=None, kind="stable")[: self.places][:count]
        return [
            self._place((int(n), int(t)), text) for n, t in zip(*np.unravel_index(order, self.gaps.shape), strict=True)
        ]

    def _place(self, place: tuple[int, int], text: TokenText | None) -> NearTie:
        ids = int(self.golden.tokens[0][place]), *(int(i) for i in self.best[place])
        said = [text(i) if text else None for i in ids]
        return NearTie(
            prompt=place[0],
            position=place[1],
            golden_id=ids[0],
            first_id=ids[1],
            second_id=ids[2],
            gap_nats=float(self.gaps[place]),
            lead_nats=_known(self.leads[place]),
            rank=int(self.ranks[place]) or None,
            golden_gap_nats=None if self.golden_gaps is None else _known(self.golden_gaps[place]),
            golden_text=said[0],
            first_text=said[1],
            second_text=said[2],
        )


def oracle_gaps(golden: Golden, oracle: Oracle) -> Gaps:
    """The gaps of float64 on a golden's run 0."""
    if not np.array_equal(oracle.forced.tokens, golden.tokens[0]) or oracle.forced.prompts != golden.prompts:
        raise InputError(f"golden {golden.name}: the oracle was asked about other prompts or tokens")
    return Gaps(
        golden=golden,
        source="oracle",
        gaps=oracle.gaps,
        leads=oracle.leads,
        ranks=oracle.ranks,
        best=oracle.top_ids[..., :2],
        golden_gaps=top2_gaps(golden),
    )


def recorded_gaps(golden: Golden) -> Gaps:
    """The gaps that a golden recorded itself; raises InputError where it holds fewer than two logprobs a place."""
    gaps = top2_gaps(golden)
    if gaps is None or golden.top_ids is None or golden.top_logprobs is None:
        raise InputError(f"golden {golden.name} recorded no logprobs; leave --recorded out and name its model")
    tokens = golden.tokens[0]
    there = tokens != ENDED
    own = (golden.top_ids == tokens[..., None]) & there[..., None]
    values = golden.top_logprobs.astype(np.float64)
    listed = own.any(-1)
    lead = np.where(own, values, -np.inf).max(-1) - np.where(own, -np.inf, values).max(-1)
    return Gaps(
        golden=golden,
        source="recorded",
        gaps=gaps,
        leads=np.where(listed, lead, np.nan),
        ranks=np.where(listed, own.argmax(-1) + 1, 0),
        best=golden.top_ids[..., :2],
        golden_gaps=gaps,
    )


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
