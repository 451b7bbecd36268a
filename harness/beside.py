"""What runs beside an engine seen from outside, whatever it says: oracle, members, expected score, other meanings.

Envelopes know the tokens that they watch. So several runs of one battery may be judged beside the same ones: what each
of them chose is a column, and each is given its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from harness.envelope import Envelope, envelope
from harness.expected import ExpectedScore, ends_at, expected_score
from harness.forced_errors import Battery
from harness.golden_data import Golden
from harness.parts import part
from harness.shared_code import SecondOpinion, sound_oracle
from harness.verdict_semantics import other_meanings
from variants.dtypes import DType
from variants.recipe import Recipe
from variants.weights import Casts


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """One precision of what an engine is declared to do: its recipe and its members beside the oracle."""

    casts: Casts
    battery: Battery
    recipe: Recipe
    own: Envelope

    @cached_property
    def meanings(self) -> Mapping[str, np.ndarray]:
        """The oracle's logprobs of the watched tokens under each known departure, [P, W], by what it is called."""
        return other_meanings(self.recipe, self.casts, self.battery, self.own)

    def columns(self, kept: np.ndarray) -> Level:
        """With some of the watched tokens alone."""
        found = replace(self, own=_columns(self.own, kept))
        if "meanings" in vars(self):
            vars(found)["meanings"] = {text: rows[:, kept] for text, rows in self.meanings.items()}
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Beside:
    """Of one battery and one declared recipe. reference: members of an engine like the golden's, `as_runs.own` where
    that is the same. finer: by the precision that the engine's code is raised to."""

    opinion: SecondOpinion
    expected: ExpectedScore
    as_runs: Level
    reference: Envelope
    finer: Mapping[str, Level] = field(default_factory=dict)

    def of(self, run: int, runs: int) -> Beside:
        """What stands beside one of several runs: the tokens that everybody watches, and its own choices."""
        width = self.as_runs.own.table.ids.shape[1]
        kept = np.array([*range(width - runs), width - runs + run])
        levels = {name: level.columns(kept) for name, level in self.finer.items()}
        return replace(self, as_runs=self.as_runs.columns(kept), reference=_columns(self.reference, kept), finer=levels)


def stand_beside(
    golden: Golden,
    casts: Casts,
    declared: Recipe,
    reference: Recipe,
    chosen: Sequence[np.ndarray],
    *,
    members: int,
    seed: int,
    precisions: Sequence[str] = (),
) -> Beside:
    """Walk everything that a verdict holds runs of `declared` against; chosen: the tokens [N, T] that each run took.

    Raises NeartieError where the oracle itself departs from the model's definition.
    """
    battery = Battery.of(golden).watching(*chosen)
    opinion = sound_oracle(casts, declared, battery)

    def walked(recipe: Recipe, salt: int) -> Envelope:
        with part("envelope"):
            return envelope(recipe, casts, battery, members=members, seed=seed + salt)

    def level(recipe: Recipe, salt: int) -> Level:
        return Level(casts=casts, battery=battery, recipe=recipe, own=walked(recipe, salt))

    own = level(declared, 0)
    same = reference.hash == declared.hash or all(np.array_equal(c, golden.tokens[0]) for c in chosen)
    stop = ends_at(golden, casts)
    return Beside(
        opinion=opinion,
        expected=expected_score(declared, casts, golden, members=members, seed=seed, stop_at=stop),
        as_runs=own,
        reference=own.own if same else walked(reference, 1),
        finer={name: level(declared.at_precision(DType[name]), 2) for name in precisions},
    )


def _columns(own: Envelope, kept: np.ndarray) -> Envelope:
    t = own.table
    parties = {n: replace(p, deviations=p.deviations[..., kept]) for n, p in t.parties.items()}
    table = replace(t, ids=t.ids[:, kept], oracle_logprobs=t.oracle_logprobs[:, kept], parties=parties)
    return replace(own, table=table, deviations=own.deviations[..., kept])
