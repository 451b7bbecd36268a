"""One run of the power experiment: a correct variant or a planted defect, watched by every instrument at once.

The candidate runs at its own formats and again with every format raised to float32 and to float64 (the same code
path), each under local replay; the raised runs also are the ladder's rungs. What cells share is made once.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from harness.calibration import ENVELOPE_P, of_recipe, shipped_calibration
from harness.engines.local import LocalEngine
from harness.envelope import Envelope, envelope
from harness.expected import ExpectedScore, expected_score
from harness.forced_values import Values, layer_places
from harness.golden import load_golden
from harness.inspect import RUNGS, make_oracle, model_stepper
from harness.ladder import LAYER_OUTPUT, Ladder, ladder, other_order
from harness.local_replay import LocalReplay, local_replay
from harness.lockstep import Stepper, batches, walk_steppers
from harness.oracle import oracle_recipe
from harness.power_cells import GATE, Cell, Slice, variant_of
from harness.power_rules import Judgement, Observed
from harness.power_watch import Again, Digest, Seen, Shown, climbed, first_difference, replayed
from harness.probes import Tap, chain
from harness.rounding_noise import twin
from harness.significance import Interval
from variants import decode
from variants.axes import Variant
from variants.defects import DEFECTS, Planted, build, plant
from variants.defects import Spread as Where
from variants.defects_kinds import Severity
from variants.dtypes import DType
from variants.model import Model
from variants.recipe import Place, Recipe, Semantics, resolve
from variants.rounding import NoProbe, Probe
from variants.weights import Casts

MEMBERS = 8
EXPECTED_MEMBERS = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one cell left. acts_at: the first place whose value differs from the clean run's in one bit, at the highest
    precision that shows one; None for a run that is bit-identical to it, or that has none beside it. effect: rms of
    what a defect does to the logits in float64, over rms of what rounding does to them; None for a correct run."""

    observed: Observed
    acts_at: Place | None
    effect: float | None
    seconds: float


Make = Callable[[Recipe, Probe], Model]


def replayed_as(recipe: Recipe) -> dict[str, Recipe]:
    """The runs that local replay looks into: at the recipe's own formats, and with all of them raised, rung by rung."""
    return {"replay": recipe, **{f"replay_{p.name}": recipe.at_precision(p) for p in RUNGS}}


@dataclass(frozen=True)
class _Run:
    """One precision: its local replay, its steps, logits [P, V], values of each step's last tokens, and digests."""

    replay: LocalReplay
    shown: Sequence[Shown]
    logits: Tensor
    values: list[Values]
    digests: Sequence[Digest]


class Bench:
    """A checkpoint with all that the cells of an experiment share; `observe` runs one cell."""

    def __init__(self, casts: Casts) -> None:
        self.casts = casts
        self.config = casts.checkpoint.config
        self.calibration = shipped_calibration(casts.checkpoint.sha256)
        self.engine = LocalEngine(casts, Variant(), name="power")
        self.recipe = cache(lambda words: resolve(variant_of(words), self.config))
        self.battery = cache(Slice.battery)
        self.clean = cache(self._clean)
        self.expected = cache(self._expected)
        self.oracle = cache(lambda words: make_oracle(casts, self.recipe(words)))
        self.reference = cache(self._reference)
        self.exact = cache(lambda semantics: oracle_recipe(self.config, semantics))
        self.oracle_logits = cache(lambda part: self._forced(self.exact(Semantics()), part))
        self.other_logits = cache(lambda words, part: self._forced(other_order(self.recipe(words)), part))
        self.envelope = cache(self._envelope)

    def observe(self, cell: Cell, *, scored: bool = True) -> Outcome:
        """Run a cell and everything that judges it.

        scored: also let it decode gate freely and hold the score against what is expected of its words; done for cells
        on the first half of gate, so that each variant is scored once.
        """
        began = time.perf_counter()
        make, recipe = self._maker(cell), self.recipe(cell.words)
        runs = self._runs(make, cell.words, cell.battery)
        own = runs["replay"]
        instruments = {
            **{name: replayed(run.replay) for name, run in runs.items()},
            "ladder": climbed(self._ladder(cell, runs)),
            "envelope": self._enveloped(cell, own.values),
        }
        expected = self.expected(cell.words) if scored and cell.battery == GATE else None
        matched = None if expected is None else self._matched(make, recipe)
        observed = Observed(
            logits=own.logits,
            oracle=self.oracle_logits(cell.battery),
            other=self.other_logits(cell.words, cell.battery),
            instruments=instruments,
            matched=matched,
            expected=_interval(expected, matched),
            expected_p=float("nan") if expected is None or matched is None else expected.p_value(matched),
        )
        return Outcome(
            observed=observed,
            acts_at=self._acts_at(cell, runs),
            effect=self._effect(cell, runs),
            seconds=time.perf_counter() - began,
        )

    def _effect(self, cell: Cell, runs: Mapping[str, _Run]) -> float | None:
        if cell.benign:
            return None
        found, _ = self.envelope(cell.words, cell.battery, cell.seed)
        moved = runs["replay_f64"].logits - self.oracle_logits(cell.battery)
        size = float(moved.square().mean().sqrt() / np.sqrt(np.mean(found.rms[found.head] ** 2)))
        return size if np.isfinite(size) else float("inf")

    def _expected(self, words: str) -> ExpectedScore:
        """What a correct run of these words scores on gate."""
        return expected_score(self.recipe(words), self.casts, load_golden("gate"), members=EXPECTED_MEMBERS)

    def planted(self, cell: Cell) -> Planted | None:
        if cell.benign:
            return None
        severity, where = Severity[cell.severity], Where[cell.spread]
        return plant(DEFECTS[cell.defect], severity=severity, layers=where, config=self.config)

    def _maker(self, cell: Cell) -> Make:
        planted = self.planted(cell)
        if planted is None:
            return lambda recipe, probe: self.engine.build(recipe=recipe, probe=probe)
        return lambda recipe, probe: build(self.engine, recipe, planted, probe=probe)

    def _runs(self, make: Make, words: str, part: Slice) -> dict[str, _Run]:
        return {name: self._run(make, words, r, part) for name, r in replayed_as(self.recipe(words)).items()}

    def _run(self, make: Make, words: str, recipe: Recipe, part: Slice) -> _Run:
        """Local replay of a recipe, all rows of the battery together."""
        battery = self.battery(part)
        seen = Seen(layer_places(self.config), len(battery.prompts))

        def stepper(tap: Tap) -> Seen:
            return seen.on(model_stepper(make(recipe, chain([tap, seen.last])), battery), tap)

        replay = local_replay(stepper, self.oracle(words), recipe, battery.prompts, battery.continuations)
        return _Run(replay, seen.shown, seen.logits, seen.values, seen.digests)

    def _clean(self, words: str, part: Slice) -> dict[str, Sequence[Digest]]:
        """Digests of the unplanted runs of the same words."""
        plain: Make = lambda r, probe: self.engine.build(recipe=r, probe=probe)  # noqa: E731
        return {name: run.digests for name, run in self._runs(plain, words, part).items()}

    def _acts_at(self, cell: Cell, runs: Mapping[str, _Run]) -> Place | None:
        if cell.benign:
            return None
        clean = self.clean(cell.words, cell.battery)
        found = [first_difference(runs[name].digests, clean[name]) for name in reversed([*runs])]
        return next((place for place in found if place is not None), None)

    def _ladder(self, cell: Cell, runs: Mapping[str, _Run]) -> Ladder:
        """The ladder over what the raised runs showed, beside the oracle and the same formats in another order."""
        battery = self.battery(cell.battery)

        def again(shown: Sequence[Shown]) -> Callable[[Tap], Stepper]:
            return lambda tap: Again(shown, tap)

        return ladder(
            self.oracle(cell.words),
            {p: again(runs[f"replay_{p.name}"].shown) for p in RUNGS},
            {p: again(self.reference(cell.words, cell.battery, p)) for p in RUNGS},
            battery.prompts,
            battery.continuations,
        )

    def _reference(self, words: str, part: Slice, precision: DType) -> Sequence[Shown]:
        """What a correct run shows at a rung of the ladder: the recipe's formats there, its sums in another order."""
        battery, tap = self.battery(part), Tap(lambda site, layer: site == LAYER_OUTPUT)
        model = self.engine.build(recipe=other_order(self.recipe(words).at_precision(precision)), probe=tap)
        seen = Seen((), len(battery.prompts)).on(model_stepper(model, battery), tap)
        for _ in walk_steppers([seen], battery.continuations):
            pass
        return seen.shown

    def _forced(self, recipe: Recipe, part: Slice) -> Tensor:
        """Teacher-forced logits [P, V] of a correct recipe, float64, positions in the order of (prompt, t)."""
        battery = self.battery(part)
        head = layer_places(self.config)[-1]
        steps = of_recipe(recipe, self.casts).values(battery.prompts, battery.continuations, [head])
        return torch.stack([v[head] for v in steps], 1).flatten(0, 1)

    def _envelope(self, words: str, part: Slice, seed: int) -> tuple[Envelope, list[Values]]:
        """The envelope of a recipe on a battery, and the oracle's values beside it."""
        recipe, battery = self.recipe(words), self.battery(part)
        oracle = of_recipe(twin(recipe), self.casts)
        places = layer_places(self.config)
        exact = list(oracle.values(battery.prompts, battery.continuations, places))
        return envelope(recipe, self.casts, battery, members=MEMBERS, seed=seed), exact

    def _enveloped(self, cell: Cell, values: list[Values]) -> Judgement:
        found, exact = self.envelope(cell.words, cell.battery, cell.seed)
        errors = np.stack([_rms(values, exact, place) for place in found.places])
        if not np.isfinite(errors).all():
            return Judgement(float("inf"), True)
        judged = self.calibration.judge(self.recipe(cell.words), found, errors)
        over = np.flatnonzero(judged.p < ENVELOPE_P)
        return Judgement(float(judged.z.max()), bool(over.size), None, found.places[over[0]][1] if over.size else None)

    def _matched(self, make: Make, recipe: Recipe) -> int:
        """Tokens of gate's run 0 that a free greedy run matches; a token of logits that are not finite is none."""
        golden = load_golden("gate")
        model = make(recipe, NoProbe())
        tokens, hits = golden.tokens[0].astype(np.int64).tolist(), []
        for _, prompts, right in batches(golden.prompts, tokens, recipe.execution.batch):
            wanted = torch.tensor(right)

            def choose(t: int, logits: Tensor, wanted: Tensor = wanted) -> Tensor:
                chosen = decode.greedy(logits)
                hits.append(int(((chosen == wanted[:, t]) & decode.is_finite(logits)).sum()))
                return chosen

            decode.steps(model, prompts, wanted.shape[1], choose)
        return sum(hits)


def _rms(values: list[Values], exact: list[Values], place: tuple[str, int]) -> np.ndarray:
    """rms error at one place, positions in the order of (prompt, t): [P]."""
    steps = [(v[place] - e[place]).pow(2).mean(-1).sqrt() for v, e in zip(values, exact, strict=True)]
    return torch.stack(steps, 1).flatten().numpy()


def _interval(expected: ExpectedScore | None, matched: int | None) -> Interval | None:
    return None if expected is None or matched is None else expected.interval
