"""An engine that answers from files: tokens that another engine recorded, scored as if it ran here."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.gaps import top2_gaps
from harness.golden import load_golden
from harness.golden_data import ENDED, Golden, as_ids
from harness.golden_folder import CANDIDATE
from harness.pregate import prompt_mismatch
from variants.errors import EngineError, InputError


class ReplayEngine:
    """Recorded greedy tokens of one candidate.

    The candidate is the one that came with the golden (`our_ids.npy` of a folder of token files). Of a NAME.json
    without one it is run 0 of the golden itself, or the named `run`; run 0 brings its top logprobs along. Files of
    tokens cannot show non-finite logits: `finite` is True unless a recorded logprob is not finite. Times are NaN and no
    step is reported: nothing ran.
    """

    def __init__(self, path: str | Path, *, run: int | None = None) -> None:
        """Raises InputError when there is no candidate at `path`, or no such run."""
        golden = load_golden(path)
        if run is None and golden.recorded is None:
            # A folder without a candidate would otherwise be scored against itself, unasked.
            if golden.path is not None and golden.path.is_dir():
                raise InputError(f"{path}: holds no {CANDIDATE}, the candidate's tokens; add it, or name a run")
            run = 0
        if run is not None and not 0 <= run < golden.tokens.shape[0]:
            raise InputError(f"{path}: got run {run}, expected 0 to {golden.tokens.shape[0] - 1}")
        self._source = golden
        self._run = run
        self._tokens = _candidate(golden) if run is None else golden.tokens[run]
        self._top = run == 0 and golden.top_ids is not None
        self._rows = {prompt: row for row, prompt in reversed(list(enumerate(golden.prompts)))}

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The prompt ids that the tokens were recorded on, for the pre-gate."""
        return self._source.prompts

    @property
    def info(self) -> EngineInfo:
        """The recording engine's provenance; of a candidate that came with a golden the files say nothing."""
        made = {} if self._run is None else self._source.provenance
        return EngineInfo(
            name="replay",
            version=self._source.hash[:12],
            device=str(made.get("device", "unknown")),
            dtype=str(made.get("dtype", "unknown")),
            model_sha256=made.get("model_sha256"),
            tokenizer_sha256=made.get("tokenizer_sha256"),
            can_score=self._top,
            sampling=dict(self._source.sampling),
        )

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        """The recorded tokens of these prompts, cut at `max_tokens`.

        Raises InputError for a prompt that was not recorded, EngineError for more tokens than were recorded or for
        another EOS rule than the recorded one.
        """
        rows = [self._row(n, prompt) for n, prompt in enumerate(prompts)]
        recorded = self._tokens.shape[1]
        if not 1 <= max_tokens <= recorded:
            raise EngineError(
                f"replay: {max_tokens} tokens asked for, {recorded} were recorded; ask for 1 to {recorded}"
            )
        self._check_eos(rows, stop_at_eos)
        tokens = self._tokens[rows, :max_tokens].copy()
        gaps = np.full(tokens.shape, np.nan)
        finite = np.ones(tokens.shape, dtype=bool)
        if self._top:
            gaps = _top2(self._source)[rows, :max_tokens]
            finite = self._finite()[rows, :max_tokens] | (tokens == ENDED)
        return Generation(
            tokens=tokens,
            finite=finite,
            gaps=gaps,
            prefill_s=np.full(len(rows), np.nan),
            prefill_tokens=np.array([len(prompt) for prompt in prompts]),
            decode_s=(),
        )

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20) -> Scored:
        """Recorded logprobs along the recorded tokens; the last token of a continuation may be any.

        Raises EngineError where none were recorded, where more than the recorded k are asked for, or where a
        continuation leaves the recorded tokens before its last: what follows was never computed.
        """
        self._check_can_score(top_k)
        longest = max((len(c) for c in continuations), default=0)
        shape = (len(prompts), longest)
        token_logprobs = np.full(shape, np.nan)
        top_ids = np.full((*shape, top_k), ENDED, dtype=np.int32)
        top_logprobs = np.full((*shape, top_k), np.nan)
        finite = np.ones(shape, dtype=bool)
        for n, (prompt, forced) in enumerate(zip(prompts, continuations, strict=True)):
            row, length = self._row(n, prompt), len(forced)
            self._check_on_record(n, row, forced)
            ids, values = _ordered(self._source, row, length)
            hit = ids == as_ids(np.asarray(forced, dtype=np.int64), f"continuation {n}")[:, None]
            found = np.where(hit.any(axis=1), values[np.arange(length), hit.argmax(axis=1)], np.nan)
            token_logprobs[n, :length] = found
            top_ids[n, :length], top_logprobs[n, :length] = ids[:, :top_k], values[:, :top_k]
            finite[n, :length] = self._finite()[row, :length]
        return Scored(
            token_logprobs=token_logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            finite=finite,
            forced="decode",
        )

    def _row(self, n: int, prompt: Sequence[int]) -> int:
        key = tuple(int(i) for i in prompt)
        if n < len(self.prompts) and self.prompts[n] == key:
            return n  # a battery may hold one prompt twice
        if (row := self._rows.get(key)) is not None:
            return row
        same_place = self.prompts[n] if n < len(self.prompts) else ()
        why = prompt_mismatch(key, same_place) if key and same_place else "not recorded"
        raise InputError(f"input mismatch: prompt {n} is not among the {len(self.prompts)} recorded ({why})")

    def _check_eos(self, rows: list[int], stop_at_eos: bool) -> None:
        rule = self._source.sampling.get("eos", "unknown")
        if stop_at_eos and rule == "ignored":
            raise EngineError("replay: tokens were recorded past EOS and cannot stop there; score with EOS ignored")
        if not stop_at_eos and (self._tokens[rows] == ENDED).any():
            raise EngineError("replay: recorded rows end early and cannot go on past EOS; score with EOS as the stop")

    def _check_can_score(self, top_k: int) -> None:
        if not self._top or self._source.top_ids is None:
            raise EngineError("replay: these files hold no logprobs; score with an engine that runs")
        if not 1 <= top_k <= self._source.top_ids.shape[-1]:
            raise EngineError(f"replay: top {top_k} asked for, top {self._source.top_ids.shape[-1]} recorded")

    def _check_on_record(self, n: int, row: int, forced: Sequence[int]) -> None:
        given = np.asarray(forced)
        kept = self._tokens[row, : len(given)]
        if len(kept) < len(given) or (kept == ENDED).any() or not np.array_equal(kept[:-1], given[:-1]):
            raise EngineError(f"replay: continuation {n} leaves the recorded tokens; only they have logprobs")

    def _finite(self) -> np.ndarray:
        assert self._source.top_logprobs is not None
        return np.isfinite(self._source.top_logprobs[..., 0])


def _candidate(golden: Golden) -> np.ndarray:
    assert golden.recorded is not None
    return golden.recorded.tokens


def _top2(golden: Golden) -> np.ndarray:
    gaps = top2_gaps(golden)
    return np.full(golden.tokens.shape[1:], np.nan) if gaps is None else gaps


def _ordered(golden: Golden, row: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """ids and logprobs [length, k] of a row in decreasing order, ties to the lower id."""
    assert golden.top_ids is not None
    assert golden.top_logprobs is not None
    ids, values = golden.top_ids[row, :length], golden.top_logprobs[row, :length].astype(np.float64)
    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(ids, order, axis=-1), np.take_along_axis(values, order, axis=-1)
