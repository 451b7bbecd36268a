"""How far correct implementations stand from envelope members: measured once on benign variants, stored with a hash.

Members add noise where a recipe rounds; a real implementation rounds. What is left between the two (roundings that are
not uniform, sums in another order, a token sent to other experts) is read off variants that were composed for this
alone: for each variant, prompt and place its shift, which is its mean ln(error) over the first tokens minus the
members'. `harness.benign_null` makes of these what a correct run shows on a battery of any size. Whole hundredths are
kept, so that the order of float64 sums does not change the hash.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness import strict_json
from harness.benign_null import Outside, outside
from harness.envelope import CANDIDATE, Envelope, envelope
from harness.forced_errors import Battery
from harness.forced_values import ModelCandidate
from variants.axes import Variant
from variants.errors import InputError, UsageError
from variants.model import Model
from variants.recipe import Recipe, resolve
from variants.weights import Casts, Weights

SCHEMA = 2
SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "calibration"
LOGPROBS = "logprobs"
UNIT = 100  # shifts are stored in hundredths
# An envelope alarms under this p: half of the 1 % that is promised, for the null distribution is an estimate too.
ENVELOPE_P = 0.005


@dataclass(frozen=True, kw_only=True)
class Benign:
    """One variant's shifts in hundredths: for each of the calibration's `lengths`, each prompt, each place."""

    variant: str
    family: str
    recipe_hash: str
    shifts: tuple[tuple[tuple[int, ...], ...], ...]


Measured = tuple[Benign, tuple[str, ...]]  # a variant's shifts, and the places they are of


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, on what. places: "site@layer" in order, then "logprobs". hash: of all else, canonical JSON.

    lengths: over how many first tokens of a continuation shifts were taken.
    """

    model_sha256: str
    golden: str
    golden_hash: str
    lengths: tuple[int, ...]
    members: int
    seed: int
    torch: str
    places: tuple[str, ...]
    benign: tuple[Benign, ...]

    @property
    def hash(self) -> str:
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        plain, nulls = strict_json.encode(self)
        if nulls or not isinstance(plain, dict):
            raise InputError(f"calibration: not finite at {', '.join(nulls)}")
        return {"schema": SCHEMA, **plain}

    def covers(self, recipe: Recipe) -> bool:
        return family(recipe) in {b.family for b in self.benign}

    def correct(self, recipe: Recipe, tokens: int) -> np.ndarray:
        """Shifts [V, N, S] of the benign variants of a recipe's family, the recipe itself left out.

        Over the longest of the stored lengths that is no more than `tokens`: a mean over fewer spreads more, so p is
        at most too large. Raises UsageError for a family with fewer than three.
        """
        kind = family(recipe)
        used = [b for b in self.benign if b.family == kind and b.recipe_hash != recipe.hash]
        if len(used) < 3:
            raise UsageError(
                f"calibration has {len(used)} benign variants of {kind}, expected 3 or more; make it again"
            )
        length = max(n for n in self.lengths if n <= tokens)
        return np.array([b.shifts[self.lengths.index(length)] for b in used]) / UNIT

    def judge(self, recipe: Recipe, own: Envelope, errors: np.ndarray) -> Outside:
        """How far a run with errors [S, P] lies outside what correct runs of its family show on the same battery.

        Raises UsageError for an envelope of fewer members than the calibration's: their mean would be less well known.
        """
        return outside(own.shifts(errors), self._correct(recipe, own)[..., :-1])

    def judge_logprobs(self, recipe: Recipe, own: Envelope, deviations: np.ndarray) -> Outside:
        """As `judge`, of logprobs' deviations [P, W] alone, NaN for a token that is not known."""
        shifts, tokens = own.logprob_shifts(deviations), own.known_tokens(deviations)
        return outside(shifts, self._correct(recipe, own, tokens)[..., -1:])

    def check_members(self, members: int) -> None:
        """Raises UsageError for fewer members than it was made with."""
        if members < self.members:
            raise UsageError(
                f"the calibration was made with {self.members} members, got {members}; ask for as many, members="
                f"{self.members}"
            )

    def _correct(self, recipe: Recipe, own: Envelope, tokens: int | None = None) -> np.ndarray:
        self.check_members(own.members)
        return self.correct(recipe, own.tokens if tokens is None else tokens)


def alone(own: Envelope, errors: np.ndarray) -> Outside:
    """As `Calibration.judge` where there is no calibration: each member against the others stands for a correct run."""
    return outside(own.shifts(errors), own.leave_one_out())


def alone_logprobs(own: Envelope, deviations: np.ndarray) -> Outside:
    """As `Calibration.judge_logprobs` where there is no calibration."""
    return outside(own.logprob_shifts(deviations), own.leave_one_out_logprobs(deviations))


def family(recipe: Recipe) -> str:
    """The coarsest format that a recipe rounds to, by name."""
    rules = (*recipe.rules.values(), *recipe.exceptions.values())
    return min((f for r in rules for f in (r.output, r.accum) if f is not None), key=lambda d: d.precision).name


def measured(label: str, variant: Variant, casts: Casts, battery: Battery, *, members: int, seed: int) -> Measured:
    """One variant against its own envelope."""
    recipe = resolve(variant, casts.checkpoint.config)
    found = envelope(
        recipe, casts, battery, members=members, seed=seed, candidates={CANDIDATE: of_recipe(recipe, casts)}
    )
    places = (*(f"{site}@{layer}" for site, layer in found.places), LOGPROBS)
    return _benign(label, recipe, found, _lengths(battery)), places


def calibrate(
    found: Iterable[Measured], *, model_sha256: str, battery: Battery, members: int, seed: int, named: Mapping[str, str]
) -> Calibration:
    """What was measured of every variant as one calibration; `named`: golden and golden_hash, for the record."""
    import torch

    benign, places = zip(*found, strict=True)
    return Calibration(
        model_sha256=model_sha256,
        lengths=_lengths(battery),
        members=members,
        seed=seed,
        torch=torch.__version__,
        places=places[0],
        benign=benign,
        **named,
    )


def _lengths(battery: Battery) -> tuple[int, ...]:
    return tuple(sorted({1, min(len(c) for c in battery.continuations)}))


def of_recipe(recipe: Recipe, casts: Casts) -> ModelCandidate:
    """A recipe as a candidate, run as its execution says."""
    weights = Weights(casts, recipe.semantics)
    build = lambda probe: Model(casts.checkpoint.config, recipe, weights, probe=probe)  # noqa: E731
    return ModelCandidate(build, recipe.execution.batch)


def _benign(label: str, recipe: Recipe, found: Envelope, lengths: Sequence[int]) -> Benign:
    mine = found.table.parties[CANDIDATE]
    errors, deviations = mine.rms[0], mine.deviations[0]
    both = [np.hstack([found.shifts(errors, n), found.logprob_shifts(deviations, n)]) for n in lengths]
    shifts = [np.rint(UNIT * x).astype(int).tolist() for x in both]
    return Benign(
        variant=label,
        family=family(recipe),
        recipe_hash=recipe.hash,
        shifts=tuple(tuple(map(tuple, rows)) for rows in shifts),
    )


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Strict JSON, the hash with it; a line for each variant."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {**calibration.as_dict(), "hash": calibration.hash}
    plain = lambda value: json.dumps(value, separators=(",", ":"), allow_nan=False)  # noqa: E731
    variants = ",\n".join(plain(row) for row in fields.pop("benign"))
    text = ",\n".join([*(f"{plain(k)}:{plain(v)}" for k, v in fields.items()), f'"benign":[\n{variants}\n]'])
    path.write_text("{\n" + text + "\n}\n", encoding="utf-8")


def load_calibration(path: Path) -> Calibration:
    """Read a stored calibration. Raises InputError where there is none, or it is not what its hash says."""
    if not path.is_file():
        raise InputError(f"no calibration at {path}; make it with `neartie calibrate`")
    try:
        row = strict_json.loads(path.read_bytes())
        said, schema = row.pop("hash"), row.pop("schema")
        benign = tuple(_read_benign(b) for b in _rows(row.pop("benign")))
        places, lengths = (tuple(_rows(row.pop(name))) for name in ("places", "lengths"))
        found = Calibration(benign=benign, places=places, lengths=lengths, **row)  # pyright: ignore
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a calibration of schema {SCHEMA} ({error}); make it again") from error
    if schema != SCHEMA or said != found.hash:
        raise InputError(f"{path}: its hash does not fit what it holds; it was edited or is of another schema")
    return found


def find_calibration(model_sha256: str) -> Calibration | None:
    """The stored calibration of a checkpoint, None where it has none. Raises InputError for a file that is damaged."""
    stored = (load_calibration(path) for path in sorted(SHIPPED.glob("*.json")))
    return next((c for c in stored if c.model_sha256 == model_sha256), None)


def shipped_calibration(model_sha256: str) -> Calibration:
    """The stored calibration of a checkpoint. Raises InputError where this checkpoint has none."""
    found = find_calibration(model_sha256)
    if found is not None:
        return found
    raise InputError(f"no calibration of checkpoint {model_sha256[:12]}; make it with `neartie calibrate model=DIR`")


def _rows(value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise TypeError(f"got {type(value).__name__}, expected a list")
    return value


def _read_benign(row: Mapping[str, Any]) -> Benign:
    shifts = tuple(tuple(map(tuple, _rows(rows))) for rows in _rows(row["shifts"]))
    return Benign(**{**row, "shifts": shifts})
