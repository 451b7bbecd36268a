"""The envelope: how far rounding alone takes a recipe from the oracle, place by place, and where a candidate stands.

K members are float64 runs with independent noise of +-half an ulp wherever the recipe rounds (Monte-Carlo arithmetic,
`harness.rounding_noise`); all are teacher-forced through the decode path beside the oracle, which is the same float64
run without noise. A candidate is anything whose values can be read at the same places. Its excess is the mean over
positions of ln(its rms error / the members' rms error): 0 is what rounding explains. Whether that is more than a
correct run shows is asked of its shifts, prompt by prompt (`harness.benign_null`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.forced_errors import Battery, ErrorTable, Party, errors_against
from harness.forced_values import Candidate, LastTokens, ModelCandidate, layer_places
from harness.rounding_noise import member, stream, twin
from variants.errors import UsageError
from variants.model import Model
from variants.recipe import Place, Recipe
from variants.rounding import NoProbe, Probe
from variants.weights import Casts, Weights

MEMBERS, CANDIDATE = "(members)", "candidate"
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

    def part(self, keep: np.ndarray) -> "Envelope":
        """The positions at which bool [P] is true."""
        errors, deviations = self.errors[..., keep], self.deviations[:, keep]
        return replace(self, table=self.table.part(keep), errors=errors, deviations=deviations)

    @property
    def rms(self) -> np.ndarray:
        """The envelope itself: rms error over the members, [S, P]."""
        return np.sqrt(np.mean(self.errors**2, axis=0))

    def excess(self, errors: np.ndarray) -> np.ndarray:
        """Mean over positions of ln(error / envelope) at each place, for errors [..., S, P] -> [..., S]."""
        return self._excess(errors, self.rms)

    @property
    def tokens(self) -> int:
        """Positions of the shortest continuation."""
        return int(np.unique(self.table.positions[:, 0], return_counts=True)[1].min())

    def by_prompt(self, x: np.ndarray, tokens: int | None = None) -> np.ndarray:
        """Mean over each prompt's (first `tokens`) positions, [..., P] -> [..., N]; NaN is no position.

        A prompt of which nothing is known is left out.
        """
        prompts, t = self.table.positions.T
        near = (t < (tokens or np.inf)) & ~np.isnan(x).reshape(-1, x.shape[-1]).any(0)
        kept = [(prompts == n) & near for n in np.unique(prompts[near])]
        return np.stack([x[..., mine].mean(-1) for mine in kept], -1)

    def levels(self, errors: np.ndarray, tokens: int | None = None) -> np.ndarray:
        """Mean ln(error) of each prompt at each place, [..., S, P] -> [..., N, S].

        One member in which routing changed lifts the rms over the members, and with it every excess of the others;
        the mean of logarithms is not moved so.
        """
        logs = np.log(np.maximum(errors, F64_FLOOR * self.table.scale))
        return np.moveaxis(self.by_prompt(logs, tokens), -1, -2)

    def shifts(self, errors: np.ndarray, tokens: int | None = None) -> np.ndarray:
        """A run's levels minus the members' mean level, errors [S, P] -> [N, S]: 0 where it is one of them."""
        return self.levels(errors, tokens) - self.levels(self.errors, tokens).mean(0)

    def logprob_shifts(self, deviations: np.ndarray, tokens: int | None = None) -> np.ndarray:
        """As `shifts`, of ln(rms over the watched tokens) of a run's deviations [P, W] in nats: [N, 1].

        NaN is a token that is not known; members are held to the same tokens.
        """
        own = self._logprob_levels(deviations)
        theirs = self._logprob_levels(np.where(np.isnan(deviations), np.nan, self.deviations))
        return (self.by_prompt(own, tokens) - self.by_prompt(theirs, tokens).mean(0))[:, None]

    def _logprob_levels(self, deviations: np.ndarray) -> np.ndarray:
        """ln(rms over the known watched tokens), NaN where there is none: [..., P, W] -> [..., P]."""
        known = (~np.isnan(deviations)).sum(-1)
        mean = np.nansum(deviations**2, -1) / np.where(known, known, np.nan)
        return np.log(np.maximum(np.sqrt(mean), F64_FLOOR * self.table.scale[self.head]))

    def leave_one_out(self) -> np.ndarray:
        """Each member's shifts from the mean of the others: [K, N, S]. Raises UsageError with fewer than three."""
        if self.members < 3:
            raise UsageError(f"leave-one-out needs at least 3 members, got {self.members}; ask for more")
        levels = self.levels(self.errors)
        return (levels - levels.mean(0)) * (self.members / (self.members - 1))

    def leave_one_out_logprobs(self, deviations: np.ndarray) -> np.ndarray:
        """Each member's logprob shifts from the mean of the others, at the tokens that are known: [K, N, 1]."""
        theirs = self.by_prompt(self._logprob_levels(np.where(np.isnan(deviations), np.nan, self.deviations)))
        return ((theirs - theirs.mean(0)) * (self.members / (self.members - 1)))[..., None]

    def known_tokens(self, deviations: np.ndarray) -> int:
        """Positions with a known token, of the prompt that has the fewest but some."""
        known = ~np.isnan(deviations).all(-1)
        return int(np.unique(self.table.positions[known, 0], return_counts=True)[1].min())

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
    up, noise = member(recipe, casts, battery.prompts[0], seed=seed)
    parties = {name: Party(candidate) for name, candidate in (candidates or {}).items()}
    parties[MEMBERS] = Party(ModelCandidate(model_maker(up, casts, noise)), copies=members)
    oracle = ModelCandidate(model_maker(twin(recipe), casts))
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
    """A model around a probe that keeps values, with noise beneath it."""

    def build(seen: LastTokens) -> Model:
        seen.inner = noise or NoProbe()
        return Model(casts.checkpoint.config, recipe, Weights(casts, recipe.semantics), probe=seen)

    return build
