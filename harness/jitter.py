"""The jitter floor: how far a variant is from itself when its products change in their last bits.

Every product's result is moved by what a relative perturbation of its operands amounts to, before the recipe rounds it;
nothing else changes. A reference at no more than that distance has matched every rounding point that there is to match:
only bit-equal products come closer. A product that the library rounds itself is summed in float32 here and rounded at
the same point, since there is nothing left to move once it is rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from harness.calibration import of_recipe
from harness.forced_errors import groups
from harness.forced_values import Candidate, LastTokens, ModelCandidate, layer_places
from harness.golden_data import ENDED, Golden
from harness.progress import progress
from harness.rounding_noise import COARSE_BITS, stream, twin
from variants.dtypes import DType
from variants.errors import UsageError
from variants.model import Model
from variants.recipe import Recipe, Rule
from variants.rounding import RoundAt, Step
from variants.weights import Casts, Weights

PRODUCTS = ("gemm", "gemm_rows", "gemm_columns", "bmm", "bmm_rows")
RELATIVE = 1e-7
TOP = 20


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Between two sets of teacher-forced logprobs, in nats.

    median, rms: of |difference| over the top tokens of each position. token_median, token_rms: over the forced token.
    full_median (median over positions of the median over the vocabulary), full_rms: over all tokens, None where they
    are not known. argmax_changes: positions whose best token differs.
    """

    positions: int
    median: float
    rms: float
    token_median: float
    token_rms: float
    full_median: float | None
    full_rms: float | None
    argmax_changes: int


@dataclass(frozen=True, kw_only=True)
class JitterFloor:
    """A variant's distance to itself jittered, to the oracle, and to the golden where that has logprobs."""

    relative: float
    seed: int
    itself: Distance
    oracle: Distance
    golden: Distance | None

    @property
    def ratio(self) -> float | None:
        """Median distance to the golden over the floor; about 1 where every rounding point is matched.

        None without a golden's logprobs, or where more than half of the jittered logprobs are bit-equal.
        """
        if self.golden is None or self.itself.median == 0:
            return None
        return self.golden.median / self.itself.median

    @property
    def resolution(self) -> float | None:
        """Median distance to the oracle over the floor: what the ratio to a reference can rise to at all.

        At about 1 the jitter has grown to the whole of the recipe's rounding (a stream of few roundings, far apart):
        then a matched reference and float64 are equally far, and the floor cannot discriminate.
        """
        return None if self.itself.median == 0 else self.oracle.median / self.itself.median


class ProductJitter:
    """Moves every product's result by a uniform amount: `relative` of the rms of its last dimension, either way."""

    def __init__(self, *, relative: float, seed: int, device: str = "cpu") -> None:
        self.relative = relative
        self.random = torch.Generator(device=device).manual_seed(seed)

    def begin(self, step: Step) -> None:
        return None

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        if rule.algorithm not in PRODUCTS:
            return rounding

        def jitter(x: Tensor) -> Tensor:
            wide = x.double()
            draw = torch.rand(x.shape, generator=self.random, dtype=torch.float64, device=x.device) * 2 - 1
            moved = (wide + self.relative * draw * wide.pow(2).mean(-1, keepdim=True).sqrt()).to(x.dtype)
            return moved if rounding is None else rounding(moved)

        return jitter


def jittered(recipe: Recipe) -> Recipe:
    """The recipe with products of a narrow dtype summed in float32 and rounded afterwards: the same rounding points."""

    def wide(rule: Rule) -> Rule:
        narrow = rule.algorithm in PRODUCTS and rule.accum.precision <= COARSE_BITS
        return replace(rule, accum=DType.f32) if narrow else rule

    return replace(
        recipe,
        rules={k: wide(r) for k, r in recipe.rules.items()},
        exceptions={k: wide(r) for k, r in recipe.exceptions.items()},
    )


def jitter_floor(
    recipe: Recipe, casts: Casts, golden: Golden, *, relative: float = RELATIVE, seed: int = 0
) -> JitterFloor:
    """Run a variant, the same jittered, and its oracle along a golden's tokens.

    Raises UsageError for a relative jitter that is not above 0.
    """
    if not relative > 0:
        raise UsageError(f"jitter: got relative={relative}, expected above 0 (1e-7 is float32's last place)")
    parties: dict[str, Candidate] = {
        "own": of_recipe(recipe, casts),
        "jittered": jittered_candidate(recipe, casts, relative=relative, seed=seed),
        "oracle": of_recipe(twin(recipe).with_execution(batch=len(golden.prompts)), casts),
    }
    sums = {"jittered": _Sum(), "oracle": _Sum(), "golden": _Sum()}
    with progress("jitter floor", len(golden.prompts)) as done:
        for rows in groups(golden.prompts, len(parties)):
            found = {name: forced_logprobs(party, casts, golden, rows) for name, party in parties.items()}
            for i, row in enumerate(rows):
                live = golden.tokens[0][row] != ENDED
                tokens, ids = golden.tokens[0][row][live], _top(golden, row, found["oracle"][i])[live]
                own = found["own"][i][live]
                for name in ("jittered", "oracle"):
                    sums[name].add(own, found[name][i][live], ids, tokens)
                if golden.top_logprobs is not None:
                    sums["golden"].add_known(own, golden.top_logprobs[row][live], ids, tokens)
                done()
    return JitterFloor(
        relative=relative,
        seed=seed,
        itself=sums["jittered"].distance(),
        oracle=sums["oracle"].distance(),
        golden=sums["golden"].distance() if golden.top_logprobs is not None else None,
    )


def distance(a: np.ndarray, b: np.ndarray, golden: Golden) -> Distance:
    """Between logprobs [N, T, V] of two engines that were forced along the golden's tokens."""
    found = _Sum()
    for row, tokens in enumerate(golden.tokens[0]):
        live = tokens != ENDED
        found.add(a[row][live], b[row][live], _top(golden, row, b[row])[live], tokens[live])
    return found.distance()


def golden_distance(a: np.ndarray, golden: Golden) -> Distance:
    """Between logprobs [N, T, V] along a golden's tokens and the golden's own, at the tokens that it recorded."""
    assert golden.top_logprobs is not None
    found = _Sum()
    for row, tokens in enumerate(golden.tokens[0]):
        live = tokens != ENDED
        found.add_known(a[row][live], golden.top_logprobs[row][live], _top(golden, row, a[row])[live], tokens[live])
    return found.distance()


def forced_logprobs(candidate: Candidate, casts: Casts, golden: Golden, rows: Sequence[int]) -> np.ndarray:
    """Logprobs [rows, T, V] of a candidate along the golden's tokens; past a row's end they mean nothing."""
    head = layer_places(casts.checkpoint.config)[-1]
    forced = [[max(int(t), 0) for t in golden.tokens[0][row]] for row in rows]
    steps = candidate.values([golden.prompts[row] for row in rows], forced, (head,))
    return torch.stack([values[head].log_softmax(-1) for values in steps], 1).cpu().numpy()


def jittered_candidate(recipe: Recipe, casts: Casts, *, relative: float = RELATIVE, seed: int = 0) -> ModelCandidate:
    """The variant with its products moved; draws go on from one group of prompts to the next."""
    probe = ProductJitter(relative=relative, seed=stream(seed, 0), device=casts.device)
    moved = jittered(recipe)

    def build(seen: LastTokens) -> Model:
        seen.inner = probe
        return Model(casts.checkpoint.config, moved, Weights(casts, moved.semantics), probe=seen)

    return ModelCandidate(build, recipe.execution.batch)


def _top(golden: Golden, row: int, logprobs: np.ndarray) -> np.ndarray:
    """The tokens that are compared at each position [T, W]: the golden's own top, else the best by `logprobs`."""
    if golden.top_ids is not None:
        return golden.top_ids[row]
    return np.argsort(-logprobs, -1, kind="stable")[:, :TOP]


@dataclass
class _Sum:
    """|differences| as they come in: of top tokens, of forced tokens, and per position of the whole vocabulary."""

    top: list[np.ndarray] = field(default_factory=list)
    token: list[np.ndarray] = field(default_factory=list)
    medians: list[np.ndarray] = field(default_factory=list)
    squares: list[np.ndarray] = field(default_factory=list)
    changes: int = 0

    def add(self, a: np.ndarray, b: np.ndarray, ids: np.ndarray, tokens: np.ndarray) -> None:
        gaps = np.abs(a - b)
        self.top.append(np.take_along_axis(gaps, ids.astype(np.int64), -1).ravel())
        self.token.append(gaps[np.arange(len(tokens)), tokens])
        self.medians.append(np.median(gaps, -1))
        self.squares.append((gaps**2).mean(-1))
        self.changes += int((a.argmax(-1) != b.argmax(-1)).sum())

    def add_known(self, a: np.ndarray, known: np.ndarray, ids: np.ndarray, tokens: np.ndarray) -> None:
        """Against logprobs [P, W] of `ids` alone; the first of them is the other's best."""
        gaps = np.abs(np.take_along_axis(a, ids.astype(np.int64), -1) - known)
        self.top.append(gaps.ravel())
        self.token.append(gaps[ids == tokens[:, None]])
        self.changes += int((a.argmax(-1) != ids[:, 0]).sum())

    def distance(self) -> Distance:
        top, token = np.concatenate(self.top), np.concatenate(self.token)
        full = np.concatenate(self.medians) if self.medians else None
        return Distance(
            positions=len(token),
            median=float(np.median(top)),
            rms=_rms(top),
            token_median=float(np.median(token)),
            token_rms=_rms(token),
            full_median=None if full is None else float(np.median(full)),
            full_rms=None if full is None else float(np.sqrt(np.concatenate(self.squares).mean())),
            argmax_changes=self.changes,
        )


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))
