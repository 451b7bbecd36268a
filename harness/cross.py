"""Engines against each other: each one's run is the reference that every other one is held against, by tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.engines.protocol import Generation
from harness.gaps import top2_gaps
from harness.golden_data import ENDED, Golden
from harness.score import score
from harness.verdict_tokens import judge_tokens


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A candidate against a reference. max_margin_nats: the reference's largest, over its own token's rivals."""

    reference: str
    candidate: str
    matched: int
    total: int
    verdict: str
    reason: str
    max_margin_nats: float | None
    noise_nats: float | None

    def __str__(self) -> str:
        if self.matched == self.total:
            return f"{self.matched} {self.verdict}"
        margin = "-" if self.max_margin_nats is None else f"{self.max_margin_nats:.2g}"
        return f"{self.matched} {self.verdict} {margin}"


def cross(golden: Golden, runs: Mapping[str, Golden]) -> list[Cell]:
    """Every run against every other, the golden first among the references; runs are goldens of its prompts."""
    references = {f"golden ({golden.provenance.get('engine', 'unknown')})": golden, **runs}
    return [
        _cell(name, reference, other, run)
        for name, reference in references.items()
        for other, run in runs.items()
        if name != other
    ]


def _cell(name: str, reference: Golden, other: str, run: Golden) -> Cell:
    made = as_generation(run)
    agreement = score(reference, made)
    verdict = judge_tokens(reference, made, agreement, noise=None)
    margin, noise = verdict.figures["max_margin_nats"], verdict.figures["noise_nats"]
    return Cell(
        reference=name,
        candidate=other,
        matched=agreement.matched,
        total=agreement.total,
        verdict=verdict.run_class.value,
        reason=verdict.reason,
        max_margin_nats=margin if isinstance(margin, float) else None,
        noise_nats=noise if isinstance(noise, float) and verdict.figures["noise_places"] else None,
    )


def as_generation(run: Golden) -> Generation:
    """Run 0 of a golden as what an engine said; a golden holds no token out of logits that were not finite."""
    tokens = run.tokens[0]
    gaps = top2_gaps(run)
    return Generation(
        tokens=tokens,
        finite=np.ones(tokens.shape, bool),
        gaps=np.full(tokens.shape, np.nan) if gaps is None else np.where(tokens == ENDED, np.nan, gaps),
        prefill_s=np.full(len(tokens), np.nan),
        prefill_tokens=np.array([len(p) for p in run.prompts]),
        decode_s=(),
        top_ids=run.top_ids,
        top_logprobs=run.top_logprobs,
    )
