"""The grid of prompts by tokens: what became of each place, by agreement, margin and verdict, in colour and letter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.gaps import top2_gaps
from harness.golden_data import ENDED, Golden
from harness.near_ties import TokenText
from harness.page.entries import Entry
from harness.verdict_tokens import ASSUMED_NOISE_NATS

# Kind of a place: its letter, what it means, and its colour; letters alone tell the kinds apart.
KINDS: dict[str, tuple[str, str, str]] = {
    "agree": ("", "the golden's token", "#BFD9EC"),
    "near": ("·", "the golden's token, at a gap under the noise", "#56B4E9"),
    "after": ("=", "the golden's token, after a divergence", "#E8EEF2"),
    "other": ("×", "another token, after a divergence", "#D9D9D9"),
    "tie": ("T", "diverges: an exact tie", "#CC79A7"),
    "rounding": ("R", "diverges: rounding explains it", "#F0E442"),
    "routing": ("A", "diverges: rounding amplified by routing", "#E69F00"),
    "defect": ("D", "diverges: defect or suspect", "#D55E00"),
    "unjudged": ("?", "diverges: no verdict on record", "#FFFFFF"),
    "none": ("–", "no token: the golden's row has ended", "#FFFFFF"),
}
CAUSES = {"tie": "tie", "rounding": "rounding", "rounding amplified by routing": "routing", None: "unjudged"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One place. kind: of KINDS. text: the whole of what is known of it, in a line."""

    kind: str
    text: str

    @property
    def letter(self) -> str:
        return KINDS[self.kind][0]


def grid(entry: Entry, golden: Golden, text: TokenText | None = None) -> list[list[Cell]] | None:
    """One cell a place [N][T], None for a run whose tokens are not on record. text: of a token id."""
    own = entry.tokens
    if own is None:
        return None
    gaps = top2_gaps(golden)
    causes = {(d["prompt"], d["position"]): d for d in entry.verdict.get("divergences") or ()}
    rows: list[list[Cell]] = []
    for n, (said, reference) in enumerate(zip(own, golden.tokens[0].tolist(), strict=True)):
        pairs = list(zip([*said, *[ENDED] * (len(reference) - len(said))], reference, strict=True))
        first = next((t for t, (mine, its) in enumerate(pairs) if mine != its), len(pairs))
        row = []
        for t, pair in enumerate(pairs):
            gap = None if gaps is None or np.isnan(gaps[n, t]) else float(gaps[n, t])
            cause = causes.get((n, t))
            near = gap is not None and gap < (entry.noise_nats or ASSUMED_NOISE_NATS)
            parts = (f"prompt {n}, token {t}: {_said(pair, text)}", _gap(gap), _cause(cause))
            row.append(Cell(kind=_kind(pair, t - first, cause, near), text="; ".join(p for p in parts if p)))
        rows.append(row)
    return rows


def counts(rows: Sequence[Sequence[Cell]]) -> dict[str, int]:
    """How many places are of each kind, in the order of KINDS, those that there are."""
    kinds = [cell.kind for row in rows for cell in row]
    return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}


def _kind(pair: tuple[int, int], after: int, cause: Mapping[str, Any] | None, near: bool) -> str:
    """after: positions past the row's first divergence, 0 at it, negative before."""
    mine, its = pair
    if mine == its == ENDED:
        return "none"
    if after == 0 or cause is not None:
        return CAUSES.get(cause and cause["class"], "defect")
    if after > 0:
        return "after" if mine == its else "other"
    return "near" if near else "agree"


def _said(pair: tuple[int, int], text: TokenText | None) -> str:
    mine, its = (_token(token, text) for token in pair)
    return mine if pair[0] == pair[1] else f"golden {its}, here {mine}"


def _token(token: int, text: TokenText | None) -> str:
    if token == ENDED:
        return "end"
    said = text(token) if text else None
    return str(token) if said is None else f"{token} {said!r}"


def _gap(gap: float | None) -> str:
    return "" if gap is None else f"golden's gap {gap:.3g} nat"


def _cause(cause: Mapping[str, Any] | None) -> str:
    return "" if cause is None else f"verdict: {cause['reason']}"
