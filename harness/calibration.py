"""How far correct implementations stand from envelope members: measured once on benign variants, stored with a hash.

Members add noise where a recipe rounds; a real implementation rounds. What is left between the two (roundings that are
not uniform, sums in another order) is read off variants that were composed for this alone. For each variant and place
its shift is kept: its mean ln(error) minus the members'. Of the spread of these shifts, what the members' own noise
explains is taken off; the rest is the variance that a judgement adds to the members'. Four digits are kept, so that
the order of float64 sums does not change the hash.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness import strict_json
from harness.envelope import Envelope, envelope
from harness.forced_errors import Battery
from harness.forced_values import ModelCandidate
from harness.significance import Spread
from variants.axes import Variant
from variants.errors import InputError, UsageError
from variants.model import Model
from variants.recipe import Recipe, resolve
from variants.weights import Casts, Weights

SCHEMA = 1
SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "calibration"
LOGPROBS = "logprobs"


@dataclass(frozen=True, kw_only=True)
class Benign:
    """One variant's shift at every place and, last, in the logprobs; `noise`: variance that members explain of each."""

    variant: str
    family: str
    recipe_hash: str
    shift: tuple[float, ...]
    noise: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, on what. places: "site@layer" in order, then "logprobs". hash: of all else, canonical JSON."""

    model_sha256: str
    golden: str
    golden_hash: str
    positions: int
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

    def model(self, recipe: Recipe) -> Spread:
        """Mean and variance, at every place and last for logprobs, of a correct implementation's shift.

        From the benign variants of the recipe's family, the recipe itself left out. Raises UsageError for a family
        with fewer than three.
        """
        kind = family(recipe)
        used = [b for b in self.benign if b.family == kind and b.recipe_hash != recipe.hash]
        if len(used) < 3:
            raise UsageError(
                f"calibration has {len(used)} benign variants of {kind}, expected 3 or more; make it again"
            )
        seen = Spread.of(np.array([b.shift for b in used]))
        noise = np.array([b.noise for b in used]).mean(0)
        return Spread(mean=seen.mean, variance=np.maximum(seen.variance - noise, 0.0), df=seen.df, count=seen.count)


def family(recipe: Recipe) -> str:
    """The coarsest format that a recipe rounds to, by name."""
    rules = (*recipe.rules.values(), *recipe.exceptions.values())
    return min((f for r in rules for f in (r.output, r.accum) if f is not None), key=lambda d: d.precision).name


def calibrate(
    casts: Casts,
    variants: Mapping[str, Variant],
    battery: Battery,
    *,
    members: int,
    seed: int,
    named: Mapping[str, str],
) -> Calibration:
    """Measure every variant against its own envelope; `named`: golden and golden_hash, for the record."""
    import torch

    benign, places = [], ()
    for label, variant in variants.items():
        recipe = resolve(variant, casts.checkpoint.config)
        found = envelope(
            recipe, casts, battery, members=members, seed=seed, candidates={label: of_recipe(recipe, casts)}
        )
        benign.append(_benign(label, recipe, found))
        places = tuple(f"{site}@{layer}" for site, layer in found.places)
    return Calibration(
        model_sha256=casts.checkpoint.sha256,
        positions=sum(len(c) for c in battery.continuations),
        members=members,
        seed=seed,
        torch=torch.__version__,
        places=(*places, LOGPROBS),
        benign=tuple(benign),
        **named,
    )


def of_recipe(recipe: Recipe, casts: Casts) -> ModelCandidate:
    """A recipe as a candidate, run as its execution says."""
    weights = Weights(casts, recipe.semantics)
    build = lambda probe: Model(casts.checkpoint.config, recipe, weights, probe=probe)  # noqa: E731
    return ModelCandidate(build, recipe.execution.batch)


def _benign(label: str, recipe: Recipe, found: Envelope) -> Benign:
    mine = found.table.parties[label]
    level, members = found.logprob_levels(mine.deviations[0])
    shift = [*found.shift(mine.rms[0]), level - float(members.mean)]
    noise = [*found.member_levels.of_next, float(members.of_next)]
    return Benign(
        variant=label,
        family=family(recipe),
        recipe_hash=recipe.hash,
        shift=tuple(round(float(x), 4) for x in shift),
        noise=tuple(float(f"{x:.4g}") for x in noise),
    )


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Strict JSON, the hash with it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**calibration.as_dict(), "hash": calibration.hash}, indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def load_calibration(path: Path) -> Calibration:
    """Read a stored calibration. Raises InputError where there is none, or it is not what its hash says."""
    if not path.is_file():
        raise InputError(f"no calibration at {path}; make it with `neartie calibrate`")
    try:
        row = strict_json.loads(path.read_bytes())
        said, schema = row.pop("hash"), row.pop("schema")
        benign = tuple(_read_benign(b) for b in _rows(row.pop("benign")))
        found = Calibration(benign=benign, places=tuple(map(str, _rows(row.pop("places")))), **row)  # pyright: ignore
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a calibration of schema {SCHEMA} ({error}); make it again") from error
    if schema != SCHEMA or said != found.hash:
        raise InputError(f"{path}: its hash does not fit what it holds; it was edited or is of another schema")
    return found


def shipped_calibration(model_sha256: str) -> Calibration:
    """The stored calibration of a checkpoint. Raises InputError where this checkpoint has none."""
    for path in sorted(SHIPPED.glob("*.json")):
        found = load_calibration(path)
        if found.model_sha256 == model_sha256:
            return found
    raise InputError(f"no calibration of checkpoint {model_sha256[:12]}; make it with `neartie calibrate model=DIR`")


def _rows(value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise TypeError(f"got {type(value).__name__}, expected a list")
    return value


def _read_benign(row: Mapping[str, Any]) -> Benign:
    return Benign(**{**row, "shift": tuple(row["shift"]), "noise": tuple(row["noise"])})
