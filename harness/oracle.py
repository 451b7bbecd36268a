"""The oracle: the same model with everything in float64, teacher-forced, as arbiter between engines.

It says for each golden token how far ahead of the next candidate it is, or how far behind the best. What is measured
against it is only as good as its semantics: the checkpoint's own, where a golden is to be judged, or those that a
variant declares (eps of kv_a_layernorm, parameters rounded to bf16), where rounding is to be told from a defect.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from harness.compose import named_variant
from harness.engines.logits import log_softmax, ranked
from harness.golden_data import ENDED, Golden
from harness.oracle_cache import read_arrays, write_arrays
from harness.streamed import streamed_logits
from variants.axes import KdaAxes, KdaCore, MlaAxes, MlaCore, Variant
from variants.checkpoint import Checkpoint
from variants.dtypes import DType
from variants.errors import EngineError, InputError
from variants.model_config import ModelConfig
from variants.recipe import Recipe, Semantics, resolve
from variants.weights import Casts

SCHEMA = 1
FULL_BYTES = 64 * 2**20
KEPT = 256
Place = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Forced:
    """Prompts and the tokens [N, T] that are forced after them, -1 past a row's end."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: np.ndarray

    @classmethod
    def of(cls, golden: Golden) -> "Forced":
        """A golden's prompts and its run 0."""
        return cls(prompts=golden.prompts, tokens=golden.tokens[0])

    @property
    def continuations(self) -> list[list[int]]:
        return [[int(t) for t in row if t != ENDED] for row in self.tokens]

    @property
    def hash(self) -> str:
        """SHA-256 of the ids alone, whatever golden they came from."""
        ids = json.dumps([list(self.prompts), self.tokens.tolist()], separators=(",", ":"))
        return hashlib.sha256(ids.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Oracle:
    """What float64 says of forced tokens [N, T]; past a row's end values are NaN, ids -1 and ranks 0.

    token_logprobs, leads: float64 [N, T] in nats, the forced token's logprob, and that minus the best other token's:
    positive exactly where the token is the oracle's own choice, and then the gap. ranks: int32, 1 = that choice.
    top_ids, top_logprobs: [N, T, k] in decreasing order, equal ones by increasing id. log_normalizers: [N, T], a logit
    is its logprob plus that. logprobs: [N, T, V], or None for a battery too large to keep them.
    """

    forced: Forced
    model_sha256: str
    semantics: dict[str, object]
    token_logprobs: np.ndarray
    leads: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    log_normalizers: np.ndarray
    logprobs: np.ndarray | None
    again: Callable[[int], np.ndarray] = field(repr=False)

    @property
    def gaps(self) -> np.ndarray:
        """Top-1 minus top-2, float64 [N, T] in nats."""
        return self.top_logprobs[..., 0] - self.top_logprobs[..., 1]

    def logprob(self, place: Place, token: int) -> float:
        """Natural log of the probability of any token at (prompt, position); a row is run again for one not kept."""
        n, t = place
        if not (0 <= n < len(self.ranks) and 0 <= t < self.ranks.shape[1]) or self.ranks[place] == 0:
            raise InputError(f"the oracle was not asked about prompt {n}, position {t}; no token was forced there")
        if self.logprobs is not None:
            return float(self._of(self.logprobs[place], token))
        found = np.flatnonzero(self.top_ids[place] == token)
        if found.size:
            return float(self.top_logprobs[n, t, found[0]])
        if token == self.forced.tokens[place]:
            return float(self.token_logprobs[place])
        return float(self._of(self.again(n)[t], token))

    def margin(self, place: Place, token_a: int, token_b: int) -> float:
        """logprob(token_a) - logprob(token_b) at a place, in nats."""
        return self.logprob(place, token_a) - self.logprob(place, token_b)

    @staticmethod
    def _of(row: np.ndarray, token: int) -> float:
        if not 0 <= token < row.size:
            raise InputError(f"token {token} is outside the model's vocabulary of {row.size}")
        return row[token]


def oracle_recipe(config: ModelConfig, semantics: Semantics | None = None) -> Recipe:
    """The arithmetic of conf/variant/oracle.yaml with both cores on the model's device, on the host the same bits."""
    return replace(resolve(_variant(), config).at_precision(DType.f64), semantics=semantics or Semantics())


@cache
def _variant() -> Variant:
    return replace(
        named_variant("oracle"),
        kda=KdaAxes(prefill=KdaCore.recurrent, decode=KdaCore.recurrent),
        mla=MlaAxes(prefill=MlaCore.dense_f32, decode=MlaCore.dense_f32),
    )


def consult(
    checkpoint: Checkpoint,
    forced: Forced,
    *,
    semantics: Semantics | None = None,
    device: str = "cpu",
    cache: Path | None = None,
) -> Oracle:
    """The oracle on forced tokens, from the cache where it has answered this before.

    semantics: None for the checkpoint's own. cache: a folder. Every logprob is kept where all of them take at most
    64 MiB, else the 256 best of each place. Raises InputError where no token is forced or one is not in the vocabulary,
    EngineError where a logit is not finite.
    """
    _check(forced, checkpoint.config)
    recipe = oracle_recipe(checkpoint.config, semantics)
    path = cache / f"{_key(checkpoint, forced, recipe)}.oracle" if cache else None
    arrays = read_arrays(path) if path else None
    if arrays is None:
        arrays = _answers(checkpoint, forced, recipe, device)
        if path:
            write_arrays(path, arrays)
    return Oracle(
        forced=forced,
        model_sha256=checkpoint.sha256,
        semantics=recipe.semantics.as_dict(),
        again=_OneRow(checkpoint, forced, recipe, device),
        **{"logprobs": None, **arrays},  # pyright: ignore[reportArgumentType]
    )


def _key(checkpoint: Checkpoint, forced: Forced, recipe: Recipe) -> str:
    """Everything that an answer depends on: the weights, the config beside them, the ids, the recipe, the layout."""
    parts = (SCHEMA, checkpoint.sha256, repr(checkpoint.config), forced.hash, recipe.hash, FULL_BYTES, KEPT)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _check(forced: Forced, config: ModelConfig) -> None:
    there = forced.tokens[forced.tokens != ENDED]
    if not there.size:
        raise InputError("the oracle was given no token to judge")
    largest = max(int(there.max()), *(max(p) for p in forced.prompts))
    if largest >= config.vocab_size:
        raise InputError(f"token {largest} is outside the model's vocabulary of {config.vocab_size}: another tokenizer")


def _answers(checkpoint: Checkpoint, forced: Forced, recipe: Recipe, device: str) -> dict[str, np.ndarray]:
    table = _Table(forced, checkpoint.config.vocab_size)
    casts = Casts(checkpoint, device=device)
    for row, first, logits in streamed_logits(casts, recipe, forced.prompts, forced.continuations):
        for t, values in enumerate(logits.cpu().numpy(), start=first):
            table.put((row, t), values)
    return table.arrays


class _Table:
    """The arrays of an `Oracle`, filled place by place."""

    def __init__(self, forced: Forced, vocab: int) -> None:
        self.forced = forced
        shape, self.kept = forced.tokens.shape, min(KEPT, vocab)
        names = ("token_logprobs", "leads", "log_normalizers")
        self.arrays: dict[str, np.ndarray] = {name: np.full(shape, np.nan) for name in names}
        self.arrays["ranks"] = np.zeros(shape, np.int32)
        self.arrays["top_ids"] = np.full((*shape, self.kept), -1, np.int32)
        self.arrays["top_logprobs"] = np.full((*shape, self.kept), np.nan)
        if np.prod(shape) * vocab * 8 <= FULL_BYTES:
            self.arrays["logprobs"] = np.full((*shape, vocab), np.nan)

    def put(self, place: Place, logits: np.ndarray) -> None:
        if not np.isfinite(logits).all():
            raise EngineError(f"the float64 oracle's logits are not finite at prompt {place[0]}, position {place[1]}")
        logprobs, token = log_softmax(logits), int(self.forced.tokens[place])
        ids, values = ranked(logprobs, self.kept)
        own, best_other = logprobs[token], values[1] if ids[0] == token else values[0]
        before = (logprobs > own) | ((logprobs == own) & (np.arange(logprobs.size) < token))
        entries = {
            "token_logprobs": own,
            "leads": own - best_other,
            "log_normalizers": logits[ids[0]] - values[0],
            "ranks": before.sum() + 1,
            "top_ids": ids,
            "top_logprobs": values,
            "logprobs": logprobs,
        }
        for name, array in self.arrays.items():
            array[place] = entries[name]


class _OneRow:
    """Logprobs [T, V] of one row, run again; the last row asked for is kept."""

    def __init__(self, checkpoint: Checkpoint, forced: Forced, recipe: Recipe, device: str) -> None:
        self.checkpoint, self.forced, self.recipe, self.device = checkpoint, forced, recipe, device
        self._last: tuple[int, np.ndarray] | None = None

    def __call__(self, row: int) -> np.ndarray:
        if self._last is None or self._last[0] != row:
            self._last = (row, self._run(row))
        return self._last[1]

    def _run(self, row: int) -> np.ndarray:
        casts = Casts(self.checkpoint, device=self.device)
        prompts, continuations = [self.forced.prompts[row]], [self.forced.continuations[row]]
        pieces = [x.cpu().numpy() for _, _, x in streamed_logits(casts, self.recipe, prompts, continuations)]
        return np.stack([log_softmax(values) for values in np.concatenate(pieces)])
