"""Which places make one variant choose another token than a second one: the smallest exchange that flips it.

Everything is teacher-forced on a golden's prefix, one row alone. The recipe of A takes over places of B's until its
token is B's; delta debugging makes that set 1-minimal, first over sites with all their layers, then over layers.
Near a tie a token hangs on every place a little: then many sets do, and what is found is one of them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.config import DeviceChoice
from harness.ddmin import ddmin, is_one_minimal
from harness.lockstep import Tokens, walk
from harness.mixing import by_site, differing_places, is_setting, mixed
from harness.numerics import policy
from harness.probes import chain
from harness.progress import progress
from variants import decode
from variants.axes import Execution
from variants.model import Model
from variants.recipe import Place, Recipe, Rule
from variants.rounding import Probe, RoundAt, Step
from variants.weights import Casts, Weights

FEW = 64  # places that are each tried alone without being asked for


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A prompt and the golden's tokens that are forced after it; the token in question is the next one."""

    prompt: Sequence[int]
    forced: Sequence[int]


class Count:
    """Counts forwards of a model; changes no bit."""

    def __init__(self) -> None:
        self.forwards = 0

    def begin(self, step: Step) -> None:
        self.forwards += 1

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        return rounding


@dataclass
class Runner:
    """Runs recipes over one checkpoint to one spot; `count` holds the forwards spent so far."""

    casts: Casts
    device: DeviceChoice = field(default_factory=DeviceChoice)
    count: Count = field(default_factory=Count)

    def model(self, recipe: Recipe, *, probe: Probe | None = None) -> Model:
        """A model whose forwards are counted."""
        probes = self.count if probe is None else chain([probe, self.count])
        return Model(self.casts.checkpoint.config, recipe, Weights(self.casts, recipe.semantics), probe=probes)

    def logits(self, recipe: Recipe, spot: Spot, *, probe: Probe | None = None) -> Tensor:
        """Logits [V] of the spot: through the decode path, or in one pass where the recipe recomputes."""
        with policy(self.device, tf32=recipe.tf32, reduced_sums=recipe.reduced_sums):
            return forced_along(rows_to(self.model(recipe, probe=probe), spot), spot)[0]


def rows_to(model: Model, spot: Spot) -> decode.Sequences:
    """What `forced_along` runs: one row, which in a recompute run holds the forced tokens already."""
    if model.recipe.execution.mode is Execution.recompute:
        return decode.Sequences(model, [[*spot.prompt, *spot.forced]], 1)
    return decode.Sequences(model, [list(spot.prompt)], len(spot.forced) + 1)


def forced_along(rows: decode.Sequences, spot: Spot) -> Tensor:
    """Logits [1, V] after the spot's tokens, bit for bit those of a walk along all of them."""
    logits = rows.start()
    if rows.model.recipe.execution.mode is not Execution.recompute:
        for token in spot.forced:
            logits = rows.after(torch.tensor([token], device=rows.model.device))
    return logits


def token_of(logits: Tensor) -> int:
    """The greedy token of logits [V], the lowest id on a tie."""
    return int(decode.greedy(logits.unsqueeze(0)))


def first_token(
    runner: Runner, a: Recipe, b: Recipe, prompts: Sequence[Tokens], tokens: Sequence[Tokens]
) -> tuple[int, int] | None:
    """The first (prompt, position) at which A and B choose different tokens, each prompt alone along its own tokens.

    None where they agree everywhere.
    """
    with policy(runner.device, tf32=a.tf32, reduced_sums=a.reduced_sums), progress("prompts", len(prompts)) as done:
        for p, (prompt, forced) in enumerate(zip(prompts, tokens, strict=True)):
            for position in walk([runner.model(a), runner.model(b)], [prompt], [forced]):
                choice_a, choice_b = (token_of(x[0]) for x in position.logits)
                if choice_a != choice_b:
                    return p, position.t
            done()
    return None


@dataclass(frozen=True, kw_only=True)
class Flip:
    """What exchanging places does to the token at one spot.

    token_a, token_b: the choices of A and B. margin_*: logit of token_a minus that of token_b, in nats: of A, of B and
    of A with the minimal set exchanged. candidates: places that differ and that a value passes. minimal: the set, empty
    where both choose the same token, None where not even all places together give B's token. one_minimal: checked by
    running the set and every set with one place fewer. complete: whether all candidates together give B's own logits
    bit for bit. alone: the places each of which flips the token by itself, None where not tried. sets, forwards: spent.
    """

    token_a: int
    token_b: int
    margin_a: float
    margin_b: float
    candidates: tuple[Place, ...]
    minimal: tuple[Place, ...] | None
    margin_swapped: float | None
    one_minimal: bool
    complete: bool
    alone: tuple[Place, ...] | None
    sets: int
    forwards: int


class Exchange:
    """A and B at one spot, and A with any set of places from B."""

    def __init__(self, runner: Runner, a: Recipe, b: Recipe, spot: Spot) -> None:
        self.runner, self.a, self.b, self.spot = runner, a, b, spot
        self._before = runner.count.forwards
        passed = Passed()
        self.logits_a = runner.logits(a, spot, probe=passed)
        self.logits_b = runner.logits(b, spot, probe=passed)
        self.token_a, self.token_b = token_of(self.logits_a), token_of(self.logits_b)
        found = differing_places(a, b, runner.casts.checkpoint.config)
        self.candidates = tuple(p for p in found if is_setting(p) or p in passed.places)
        self.logits: dict[frozenset[Place], Tensor] = {}

    @property
    def sets(self) -> int:
        return len(self.logits)

    @property
    def forwards(self) -> int:
        """Spent on this exchange, the runs of A and B included."""
        return self.runner.count.forwards - self._before

    def swapped(self, places: Collection[Place]) -> Tensor:
        """Logits [V] of A with these places as B has them; every set is run once."""
        chosen = frozenset(places)
        if chosen not in self.logits:
            self.logits[chosen] = self.runner.logits(mixed(self.a, self.b, chosen), self.spot)
        return self.logits[chosen]

    def flips(self, places: Collection[Place]) -> bool:
        return token_of(self.swapped(places)) == self.token_b

    def margin(self, logits: Tensor) -> float:
        return float(logits[self.token_a].double() - logits[self.token_b].double())


class Passed:
    """Notes the places that a value passes, in all steps and in the last one; changes no bit."""

    def __init__(self) -> None:
        self.places: set[Place] = set()
        self.last: set[Place] = set()

    def begin(self, step: Step) -> None:
        self.last = set()

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        def note(x: Tensor) -> Tensor:
            self.places.add((site, layer))
            self.last.add((site, layer))
            return x if rounding is None else rounding(x)

        return note


def minimal_flip(runner: Runner, a: Recipe, b: Recipe, spot: Spot, *, alone: bool = False) -> Flip:
    """The smallest exchange found that turns A's token at a spot into B's.

    alone: try every place by itself too, which delta debugging may pass by; up to FEW places are always tried.
    """
    exchange = Exchange(runner, a, b, spot)
    whole = exchange.swapped(exchange.candidates)
    minimal, singles = _search(exchange, alone=alone)
    return Flip(
        token_a=exchange.token_a,
        token_b=exchange.token_b,
        margin_a=exchange.margin(exchange.logits_a),
        margin_b=exchange.margin(exchange.logits_b),
        candidates=exchange.candidates,
        minimal=minimal,
        margin_swapped=exchange.margin(exchange.swapped(minimal)) if minimal else None,
        one_minimal=bool(minimal) and is_one_minimal(minimal or (), exchange.flips),
        complete=torch.equal(whole.double(), exchange.logits_b.double()),
        alone=singles,
        sets=exchange.sets,
        forwards=exchange.forwards,
    )


def _search(exchange: Exchange, *, alone: bool) -> tuple[tuple[Place, ...] | None, tuple[Place, ...] | None]:
    """The minimal set, and the places that flip the token by themselves."""
    if exchange.token_a == exchange.token_b:
        return (), None
    if not exchange.flips(exchange.candidates):
        return None, None
    groups = by_site(exchange.candidates)
    sites = ddmin(list(groups), lambda chosen: exchange.flips(_places(groups, chosen)))
    minimal = ddmin([p for site in sites for p in groups[site]], exchange.flips)
    if not alone and len(exchange.candidates) > FEW:
        return minimal, None
    singles = []
    with progress("each place alone", len(exchange.candidates)) as done:
        for place in exchange.candidates:
            singles += [place] if exchange.flips([place]) else []
            done()
    return (tuple(singles[:1]) or minimal), tuple(singles)


def _places(groups: dict[str, list[Place]], sites: frozenset[str]) -> frozenset[Place]:
    return frozenset(place for site in sites for place in groups[site])
