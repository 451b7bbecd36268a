"""An engine that answers from files: tokens that another engine recorded, scored as if it ran here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.golden import load_golden
from harness.golden_data import ENDED, Golden, Recorded, as_ids
from harness.golden_folder import CANDIDATE
from harness.pregate import prompt_mismatch
from harness.row_ends import without_padding
from harness.token_run import TokenRun, is_token_file, read_run
from variants.errors import EngineError, InputError

IN_ORDER = "no prompts were recorded with the tokens: rows are taken in the golden's order"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Source:
    """What was recorded; made: provenance of the engine that recorded, {} where nothing says."""

    version: str
    run: TokenRun
    sampling: dict[str, object]
    made: dict[str, Any]


class ReplayEngine:
    """Recorded greedy tokens of one candidate.

    ends: ids that end a row, where the golden tells; what pads a row after one is then no token.

    The candidate is the one that came with the golden (`our_ids.npy` of a folder of token files), or a file of tokens
    (`harness.token_run`). Of a NAME.json without one it is run 0 of the golden itself, or the named `run`; run 0 brings
    its top logprobs along. Tokens cannot show non-finite logits: `finite` is True unless a recorded logprob is not
    finite. Times are NaN and no step is reported: nothing ran.
    """

    def __init__(self, path: str | Path, *, run: int | None = None) -> None:
        """Raises InputError when there is no candidate at `path`, or no such run."""
        if not Path(path).exists() and (Path(path).suffix or Path(path).name != str(path)):
            raise InputError(f"engine.folder={path}: no such file or folder")
        source = _of_file(Path(path), run) if is_token_file(Path(path)) else _of_golden(path, run)
        self._source, self._run = source, source.run
        self.ends: frozenset[int] = frozenset()
        prompts = source.run.prompts or ()
        self._rows = {prompt: row for row, prompt in reversed(list(enumerate(prompts)))}

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...] | None:
        """The prompt ids that the tokens were recorded on, for the pre-gate; None where they were not recorded."""
        return self._run.prompts

    def answered(self, prompts: Prompts) -> Prompts | None:
        """The recorded prompt that answers each of these, for the pre-gate: its own row, else that in its place."""
        recorded = self._run.prompts
        if recorded is None or len(recorded) < len(prompts):
            return recorded
        return [recorded[self._rows.get(tuple(prompt), n)] for n, prompt in enumerate(prompts)]

    def recorded_for(self, golden: Golden) -> Recorded | None:
        """The gaps that came with the tokens, laid beside `golden`; None where none did or they are of other places."""
        gaps = self._run.gap_nats
        if gaps is None or gaps.shape[0] < golden.tokens.shape[1] or gaps.shape[1] < golden.tokens.shape[2]:
            return None
        _, n, t = golden.tokens.shape
        tokens, gaps = self._run.tokens[:n, :t], gaps[:n, :t]
        return Recorded(tokens=tokens, gap_nats=gaps, outside=np.isposinf(gaps))

    @property
    def info(self) -> EngineInfo:
        """The recording engine's provenance; of a candidate that came with a golden the files say nothing."""
        made, top = self._source.made, self._run.top_ids
        return EngineInfo(
            name="replay",
            version=self._source.version,
            device=f"recorded on {made['device']}" if "device" in made else "unknown",  # nothing runs there now
            dtype=str(made.get("dtype", "unknown")),
            model_sha256=made.get("model_sha256"),
            tokenizer_sha256=made.get("tokenizer_sha256"),
            tokenizer_class=made.get("tokenizer_class"),
            can_score=top is not None,
            top_logprobs=0 if top is None else top.shape[-1],
            echoes_ids=self.prompts is not None,
            sampling=dict(self._source.sampling),
            limits=("nothing runs: it answers for what was recorded alone",),
        )

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        """The recorded tokens of these prompts, cut at `max_tokens`.

        Raises InputError for a prompt that was not recorded, for more tokens than were recorded or for another EOS rule
        than the recorded one: nothing ran here that could have failed.
        """
        rows = [self._row(n, prompt) for n, prompt in enumerate(prompts)]
        kept = self._run.rows(len(prompts))
        notes = self._notes(kept.shape, len(prompts), max_tokens)
        recorded = kept.shape[1]
        if recorded < max_tokens and kept.shape == (max_tokens, len(prompts)):
            raise InputError(f"{self._run.name}: tokens are {list(kept.shape)}, transposed: expected [prompts, tokens]")
        if not 1 <= max_tokens <= recorded:
            raise InputError(
                f"input mismatch: {self._run.name} holds {recorded} tokens a prompt, the golden {max_tokens}; record "
                f"as many, or compare the first alone with max_tokens={recorded}"
            )
        if stop_at_eos:
            kept, padded = without_padding(kept, self.ends)
            said = ", ".join(map(str, padded[:4])) + (", ..." if len(padded) > 4 else "")
            notes += (f"rows {said}: what fills them after the golden's end of sequence is padding",) * bool(padded)
        self._check_eos(kept[rows], stop_at_eos)
        tokens = kept[rows, :max_tokens].copy()
        gaps = np.full(tokens.shape, np.nan)
        finite = np.ones(tokens.shape, dtype=bool)
        ids, values = self._run.top_ids, self._run.top_logprobs
        if values is not None and ids is not None:
            ids, values = ids[rows, :max_tokens], values[rows, :max_tokens].astype(np.float64)
            finite = np.isfinite(values[..., 0]) | (tokens == ENDED)
            if values.shape[-1] > 1:
                gaps = np.where(tokens == ENDED, np.nan, values[..., 0] - values[..., 1])
        return Generation(
            tokens=tokens,
            finite=finite,
            gaps=gaps,
            prefill_s=np.full(len(rows), np.nan),
            prefill_tokens=np.array([len(prompt) for prompt in prompts]),
            decode_s=(),
            top_ids=ids,
            top_logprobs=values,
            notes=notes,
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
            ids, values = _ordered(self._run, row, length)
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

    def _notes(self, recorded: tuple[int, ...], prompts: int, tokens: int) -> tuple[str, ...]:
        found = () if self.prompts is not None else (IN_ORDER,)
        if self.prompts is None and recorded[0] > prompts:
            found += (f"{recorded[0]} rows were recorded, the first {prompts} are compared",)
        if recorded[1] > tokens:
            found += (f"{recorded[1]} tokens a row were recorded, the first {tokens} are compared",)
        return found

    def _row(self, n: int, prompt: Sequence[int]) -> int:
        if self.prompts is None:
            return n
        key = tuple(int(i) for i in prompt)
        if n < len(self.prompts) and self.prompts[n] == key:
            return n  # a battery may hold one prompt twice
        if (row := self._rows.get(key)) is not None:
            return row
        same_place = self.prompts[n] if n < len(self.prompts) else ()
        why = prompt_mismatch(key, same_place) if key and same_place else "not recorded"
        raise InputError(f"input mismatch: prompt {n} is not among the {len(self.prompts)} recorded ({why})")

    def _check_eos(self, tokens: np.ndarray, stop_at_eos: bool) -> None:
        rule = self._source.sampling.get("eos", "unknown")
        if stop_at_eos and rule == "ignored":
            raise InputError(
                "input mismatch: tokens were recorded past EOS, the golden's rows end there; choose a golden that "
                "ignores EOS"
            )
        ended = (tokens == ENDED).any(-1)
        if not stop_at_eos and ended.any():
            n = int(np.argmax(ended))
            raise InputError(
                f"input mismatch at prompt {n}: its recorded row ends after {int((tokens[n] != ENDED).sum())} tokens "
                f"({int(ended.sum())} rows end early) where the golden goes on past EOS; let the engine ignore EOS"
            )

    def _check_can_score(self, top_k: int) -> None:
        if self._run.top_ids is None or self._run.top_logprobs is None:
            raise EngineError("replay: these files hold no logprobs; score with an engine that runs")
        if not 1 <= top_k <= self._run.top_ids.shape[-1]:
            raise EngineError(f"replay: top {top_k} asked for, top {self._run.top_ids.shape[-1]} recorded")

    def _check_on_record(self, n: int, row: int, forced: Sequence[int]) -> None:
        given = np.asarray(forced)
        kept = self._run.tokens[row, : len(given)]
        if len(kept) < len(given) or (kept == ENDED).any() or not np.array_equal(kept[:-1], given[:-1]):
            raise EngineError(f"replay: continuation {n} leaves the recorded tokens; only they have logprobs")

    def _finite(self) -> np.ndarray:
        assert self._run.top_logprobs is not None
        return np.isfinite(self._run.top_logprobs[..., 0])


def _of_file(path: Path, run: int | None) -> _Source:
    if run is not None:
        raise InputError(f"{path}: a file of tokens is one run; got engine.run={run}, leave it out")
    found = read_run(path)
    return _Source(version=found.digest[:12], run=found, sampling={}, made={})


def _of_golden(path: str | Path, run: int | None) -> _Source:
    golden = load_golden(path)
    if run is None and golden.recorded is None:
        # A folder without a candidate would otherwise be scored against itself, unasked.
        if golden.path is not None and golden.path.is_dir():
            notes = golden.provenance.get("import_notes", [])
            absent = f"holds no {CANDIDATE}, the candidate's tokens; add it, or name a run of the golden (engine.run=0)"
            raise InputError(f"{path}: {next((n for n in notes if n.startswith(CANDIDATE)), absent)}")
        run = 0
    if run is not None and not 0 <= run < golden.tokens.shape[0]:
        raise InputError(f"{path}: got run {run}, expected 0 to {golden.tokens.shape[0] - 1}")
    top = run == 0 and golden.top_ids is not None
    recorded = golden.recorded if run is None else None
    kept = TokenRun(
        name=str(path),
        digest=golden.hash,
        tokens=golden.tokens[run] if recorded is None else recorded.tokens,
        prompts=golden.prompts,
        gap_nats=None if recorded is None or np.isnan(recorded.gap_nats).all() else recorded.gap_nats,
        top_ids=golden.top_ids if top else None,
        top_logprobs=golden.top_logprobs if top else None,
    )
    made = {} if run is None else dict(golden.provenance)
    return _Source(version=golden.hash[:12], run=kept, sampling=dict(golden.sampling), made=made)


def _ordered(run: TokenRun, row: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """ids and logprobs [length, k] of a row in decreasing order, ties to the lower id."""
    assert run.top_ids is not None
    assert run.top_logprobs is not None
    ids, values = run.top_ids[row, :length], run.top_logprobs[row, :length].astype(np.float64)
    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(ids, order, axis=-1), np.take_along_axis(values, order, axis=-1)
