"""A golden in memory: prompts, K greedy runs, top-k logprobs, how they were made, and what they are worth as a bar."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from harness.sampling import greedy_problems
from variants.errors import InputError

ENDED = -1


class Bar(Enum):
    """What a golden can demand of a candidate; measured from its K runs, never asserted.

    UNMEASURED: K = 1, the reference was never compared with itself. STRICT: all K runs are identical in all places.
    DISTRIBUTIONAL: they differ; a candidate must stay within the set of runs (see `harness.score`).
    """

    UNMEASURED = "unmeasured"
    STRICT = "strict"
    DISTRIBUTIONAL = "distributional"


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """A candidate's free-running tokens that came with a golden.

    tokens: int32 [N, T]. gap_nats: float64 [N, T], the reference teacher-forced on these tokens, its argmax logprob
    minus this token's: 0.0 = the token is the reference's argmax on that prefix (this does not make it a tie), +inf =
    outside the list the reference returned (at least unknown), NaN = not recorded. outside: bool [N, T].
    """

    tokens: np.ndarray
    gap_nats: np.ndarray
    outside: np.ndarray

    def __post_init__(self) -> None:
        assert self.gap_nats.shape == self.outside.shape == self.tokens.shape
        for name in ("tokens", "gap_nats", "outside"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Golden:
    """Prompts and K greedy runs of a reference engine; arrays are read-only.

    tokens: int32 [K, N, T], -1 after an early end. top_ids: int32 [N, T, k] and top_logprobs: float32 or float64
    [N, T, k] of run 0 in decreasing order, or None. provenance: engine, versions, device, model_sha256,
    tokenizer_sha256, ... as recorded. sampling: effective settings (`harness.sampling`), {} = not recorded.
    Raises InputError when empty or inconsistent.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    tokens: np.ndarray
    texts: tuple[str, ...] | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, object] = field(default_factory=dict)
    path: Path | None = None
    recorded: Recorded | None = None

    def __post_init__(self) -> None:
        prompts = tuple(tuple(int(i) for i in row) for row in self.prompts)
        object.__setattr__(self, "prompts", prompts)
        object.__setattr__(self, "tokens", _frozen(as_ids(self.tokens, f"golden {self.name}: tokens")))
        _check_prompts(self)
        _check_tokens(self)
        _check_top(self)
        if self.recorded is not None and self.recorded.tokens.shape != self.tokens.shape[1:]:
            got, expected = self.recorded.tokens.shape, self.tokens.shape[1:]
            raise InputError(f"golden {self.name}: recorded candidate has shape {got}, the golden {expected}")

    @cached_property
    def hash(self) -> str:
        """SHA-256 of prompts, tokens of all runs and top-k values; independent of file, compression and float width."""
        digest = hashlib.sha256(b"neartie golden 1\n")
        for part in [*_prompt_bytes(self.prompts), *_array_bytes(self.tokens, "<i4")]:
            digest.update(part)
        if self.top_ids is not None and self.top_logprobs is not None:
            # + 0.0 folds -0.0, where() folds the payloads of NaN.
            values = self.top_logprobs.astype("<f8") + 0.0
            for part in [*_array_bytes(self.top_ids, "<i4"), *_array_bytes(np.where(values == values, values, np.nan))]:
                digest.update(part)
        return digest.hexdigest()

    @cached_property
    def battery_hash(self) -> str:
        """SHA-256 of the prompts alone: two goldens of one battery share it."""
        digest = hashlib.sha256(b"neartie battery 1\n")
        for part in _prompt_bytes(self.prompts):
            digest.update(part)
        return digest.hexdigest()

    @cached_property
    def bar(self) -> Bar:
        """The bar that the K runs measure."""
        if self.tokens.shape[0] == 1:
            return Bar.UNMEASURED
        return Bar.STRICT if (self.tokens == self.tokens[:1]).all() else Bar.DISTRIBUTIONAL

    @property
    def plain_greedy(self) -> bool:
        """True when the effective sampling settings are argmax and nothing else."""
        return not greedy_problems(self.sampling)


def as_ids(array: np.ndarray, what: str) -> np.ndarray:
    """`array` as contiguous int32; raises InputError unless it holds integers from -1 (ended) to 2^31 - 1.

    In an unsigned array of rows -1 is its type's largest value, where that value stands at the rows' ends alone.
    """
    array = np.asarray(array)
    if array.dtype.kind not in "iu":
        raise InputError(f"{what}: got dtype {array.dtype}, expected integers: token ids, saved as int32")
    array = _signed(array)
    if array.size and (array.min() < ENDED or array.max() > np.iinfo(np.int32).max):
        raise InputError(f"{what}: ids run from {array.min()} to {array.max()}, expected -1 (ended) or a token id")
    return np.ascontiguousarray(array, dtype=np.int32)


def _signed(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind != "u" or array.ndim < 2 or not array.size:
        return array
    ended = array == np.iinfo(array.dtype).max
    if not ended.any() or (ended[..., :-1] & ~ended[..., 1:]).any():
        return array
    return np.where(ended, ENDED, array.astype(np.int64))


def check_ends(tokens: np.ndarray, what: str) -> None:
    """Raises InputError where a row of tokens [..., T] goes on after its end (-1)."""
    resumed = (tokens[..., :-1] == ENDED) & (tokens[..., 1:] != ENDED)
    if resumed.any():
        *row, step = (int(i) for i in np.argwhere(resumed)[0])
        raise InputError(f"{what}: row {row} has a token at {step + 1} after its end (-1) at {step}")


def _frozen(array: np.ndarray) -> np.ndarray:
    # A copy: a hash that was computed once must stay true.
    copy = np.array(array, order="C")
    copy.setflags(write=False)
    return copy


def _check_prompts(golden: Golden) -> None:
    if not golden.prompts:
        raise InputError(f"golden {golden.name}: holds no prompt, so nothing can be compared")
    for n, row in enumerate(golden.prompts):
        if not row or min(row) < 0:
            raise InputError(f"golden {golden.name}: prompt {n} is empty or holds a negative id; expected token ids")
    if golden.texts is not None and len(golden.texts) != len(golden.prompts):
        raise InputError(f"golden {golden.name}: {len(golden.texts)} texts for {len(golden.prompts)} prompts")


def _check_tokens(golden: Golden) -> None:
    shape = golden.tokens.shape
    if len(shape) != 3 or shape[1] != len(golden.prompts):
        raise InputError(f"golden {golden.name}: tokens have shape {shape}, expected [K, {len(golden.prompts)}, T]")
    if 0 in shape:
        raise InputError(f"golden {golden.name}: K, N, T = {shape}: nothing to compare; capture at least one run")
    check_ends(golden.tokens, f"golden {golden.name}: tokens [run, prompt]")
    if (golden.tokens[0] == ENDED).all():
        raise InputError(f"golden {golden.name}: run 0 holds no token, so nothing can be compared")


def _check_top(golden: Golden) -> None:
    ids, values = golden.top_ids, golden.top_logprobs
    if ids is None and values is None:
        return
    if ids is None or values is None or ids.shape != values.shape or ids.ndim != 3:
        raise InputError(f"golden {golden.name}: top_ids and top_logprobs must come together in one shape [N, T, k]")
    if ids.shape[:2] != golden.tokens.shape[1:] or ids.shape[2] < 1:
        raise InputError(f"golden {golden.name}: top-k shape {ids.shape} for tokens {golden.tokens.shape}")
    if values.dtype not in (np.float32, np.float64):
        raise InputError(f"golden {golden.name}: top_logprobs are {values.dtype}, expected float32 or float64")
    object.__setattr__(golden, "top_ids", _frozen(as_ids(ids, f"golden {golden.name}: top_ids")))
    object.__setattr__(golden, "top_logprobs", _frozen(values))


def _prompt_bytes(prompts: Iterable[tuple[int, ...]]) -> Iterable[bytes]:
    for row in prompts:
        yield from _array_bytes(np.asarray(row), "<i4")


def _array_bytes(array: np.ndarray, dtype: str = "<f8") -> Iterable[bytes]:
    # Shape first, so that no two splits of the same numbers share their bytes.
    yield f"{array.shape}\n".encode()
    yield np.ascontiguousarray(array, dtype=dtype).tobytes()
