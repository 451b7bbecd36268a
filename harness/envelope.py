"""The envelope: how far rounding alone takes a recipe from the oracle, place by place, and where a candidate stands.

K members are float64 runs with independent noise of +-half an ulp wherever the recipe rounds (Monte-Carlo arithmetic,
`harness.rounding_noise`); all are teacher-forced through the decode path beside the oracle, which is the same float64
run without noise. A candidate is anything whose values can be read at the same places. Its excess is the mean over
positions of ln(its rms error / the members' rms error): 0 is what rounding explains.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.forced_errors import Battery, ErrorTable, Party, errors_against
from harness.forced_values import Candidate, LastTokens, ModelCandidate, layer_places
from harness.rounding_noise import RoundingNoise, noise_plan, stream, twin
from harness.significance import Spread, next_run_p
from variants.errors import UsageError
from variants.model import Model
from variants.recipe import Place, Recipe
from variants.rounding import NoProbe, Probe
from variants.weights import Casts, Weights

MEMBERS = "(members)"
# Of a value's rms: under this an error is the order of float64 sums, which nobody is to be blamed for.
F64_FLOOR = 2.0**-44


@dataclass(frozen=True, kw_only=True, eq=False)
class Envelope:
    """K members' errors beside those of the candidates that walked with them.

    errors: float64 [K, S, P], rms error of each member at each place and position. deviations: [K, P, W], a member's
    logprob of a watched token minus the oracle's, in nats. table: positions, places' scales, watched tokens and
    candidates (`harness.forced_errors`).
    """

    recipe_hash: str
    seed: int
    places: tuple[Place, ...]
    table: ErrorTable
    errors: np.ndarray
    deviations: np.ndarray

    @property
    def members(self) -> int:
        return self.errors.shape[0]

    @property
    def head(self) -> int:
        """Which of `places` is the logits."""
        return next(i for i, (site, _) in enumerate(self.places) if site == "lm_head")

    @property
    def rms(self) -> np.ndarray:
        """The envelope itself: rms error over the members, [S, P]."""
        return np.sqrt(np.mean(self.errors**2, axis=0))

    def excess(self, errors: np.ndarray) -> np.ndarray:
        """Mean over positions of ln(error / envelope) at each place, for errors [..., S, P] -> [..., S]."""
        return self._excess(errors, self.rms)

    def leave_one_out(self) -> np.ndarray:
        """Each member's excess over the envelope of the others: [K, S]. Raises UsageError with fewer than two."""
        if self.members < 2:
            raise UsageError(f"leave-one-out needs at least 2 members, got {self.members}; ask for more")
        squares = self.errors**2
        others = np.sqrt((squares.sum(0) - squares).clip(0) / (self.members - 1))
        return self._excess(self.errors, others)

    def levels(self, errors: np.ndarray) -> np.ndarray:
        """Mean over positions of ln(error) at each place, [..., S, P] -> [..., S]: what runs are compared by.

        One member in which routing changed lifts the rms over the members, and with it every excess of the others;
        the mean of logarithms is not moved so.
        """
        return np.log(np.maximum(errors, F64_FLOOR * self.table.scale)).mean(-1)

    def shift(self, errors: np.ndarray) -> np.ndarray:
        """A candidate's level minus the members' mean level: [..., S, P] -> [..., S], 0 where it is one of them."""
        return self.levels(errors) - self.member_levels.mean

    @property
    def member_levels(self) -> Spread:
        return Spread.of(self.levels(self.errors))

    def p_values(self, errors: np.ndarray, model: Spread | None = None) -> np.ndarray:
        """For each place, how surprising so high a level of errors [S, P] is for a run of this recipe; not corrected.

        model: how far correct implementations are from members (`harness.calibration`), on top of the members' spread.
        """
        return next_run_p(self.levels(errors), self.member_levels, *([] if model is None else [model]))

    def logprob_errors(self, deviations: np.ndarray) -> np.ndarray:
        """rms over the watched tokens of deviations [..., P, W] in nats, NaN for one that is unknown: [..., P].

        Raises UsageError for a position of which nothing is known.
        """
        known = ~np.isnan(deviations)
        if not known.any(-1).all():
            raise UsageError("logprobs: a position has none of the watched tokens; ask the engine for more of its top")
        return np.sqrt(np.nansum(deviations**2, -1) / known.sum(-1))

    def logprob_levels(self, deviations: np.ndarray) -> tuple[float, Spread]:
        """A candidate's mean ln(rms deviation) over positions [P, W], and the members' over the same tokens."""
        unknown = np.isnan(deviations)
        members = self.logprob_errors(np.where(unknown, np.nan, self.deviations))
        floor = F64_FLOOR * self.table.scale[self.head]
        own = np.log(np.maximum(self.logprob_errors(deviations), floor)).mean(-1)
        return float(own), Spread.of(np.log(np.maximum(members, floor)).mean(-1))

    def _excess(self, errors: np.ndarray, envelope: np.ndarray) -> np.ndarray:
        floor = F64_FLOOR * self.table.scale
        return np.log(np.maximum(errors, floor) / np.maximum(envelope, floor)).mean(-1)

    def sigma(self, prompt: int, t: int, a: int, b: int) -> float:
        """Standard deviation in nats of logit a minus logit b at one position under the recipe's rounding.

        About the oracle's own difference, over the members. Raises UsageError for a token that was not watched.
        """
        p = self.table.index(prompt, t)
        one, other = (self.deviations[:, p, self.table.column(p, token)] for token in (a, b))
        return float(np.sqrt(np.mean((one - other) ** 2)))


def envelope(
    recipe: Recipe,
    casts: Casts,
    battery: Battery,
    *,
    members: int = 8,
    seed: int = 0,
    candidates: Mapping[str, Candidate] | None = None,
    sites: Sequence[Place] = (),
) -> Envelope:
    """Walk oracle, members and candidates along forced tokens together.

    recipe: whose roundings, semantics included (the oracle has the same). sites: places beyond the layers' outputs and
    the logits. Raises UsageError for a site that has not one value a token or for no member, EngineError for a
    candidate that is not finite.
    """
    if members < 1:
        raise UsageError(f"envelope: got {members} members, expected at least 1")
    noise = RoundingNoise(noise_plan(recipe, casts, battery.prompts[0]), seed=seed, device=casts.device)
    up = twin(recipe)
    parties = {name: Party(candidate) for name, candidate in (candidates or {}).items()}
    parties[MEMBERS] = Party(ModelCandidate(model_maker(up, casts, noise)), copies=members)
    oracle = ModelCandidate(model_maker(up, casts))
    places = (*layer_places(casts.checkpoint.config), *sites)
    table = errors_against(oracle, parties, battery, places, begin=lambda g: noise.restart(stream(seed, g)))
    drawn = table.parties.pop(MEMBERS)
    return Envelope(
        recipe_hash=recipe.hash,
        seed=seed,
        places=places,
        table=table,
        errors=drawn.rms,
        deviations=drawn.deviations,
    )


def model_maker(recipe: Recipe, casts: Casts, noise: Probe | None = None) -> Callable[[LastTokens], Model]:
    """A float64 model around a probe that keeps values, with noise beneath it."""

    def build(seen: LastTokens) -> Model:
        seen.inner = noise or NoProbe()
        return Model(casts.checkpoint.config, recipe, Weights(casts, recipe.semantics), probe=seen)

    return build
