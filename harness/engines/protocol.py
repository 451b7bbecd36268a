"""What every engine offers to the gate: greedy tokens and teacher-forced logprobs.

An engine is anything that can be asked for tokens: a local variant, a library in this process, a server, a folder of
files. An engine that cannot do one of these says so in `EngineInfo` and raises `EngineError` when asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine is and which instruments it allows.

    ids_in: takes token ids as prompts. ids_out: returns the ids of what it said. echoes_ids: returns the prompt ids
    that it ran. top_logprobs: how many logprobs it gives with each token, None for all of the vocabulary. can_score:
    `score` works. full_logits: it gives whole rows of logits. precisions: dtypes that the same code can run in. taps:
    values inside can be read. batch: rows or requests that run together. max_length: prompt and answer in tokens.
    sampling: effective settings, as far as they are known. limits: what it cannot do, a line each.
    """

    name: str
    version: str
    device: str
    dtype: str
    model_sha256: str | None = None
    tokenizer_sha256: str | None = None
    tokenizer_class: str | None = None
    can_score: bool = True
    full_logits: bool = False
    precisions: tuple[str, ...] = ()
    taps: bool = False
    ids_in: bool = True
    ids_out: bool = True
    echoes_ids: bool = False
    top_logprobs: int | None = 0
    batch: int = 1
    max_length: int | None = None
    sampling: dict[str, object] = field(default_factory=dict)
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One greedy run.

    tokens: int32 [N, T], -1 after the end of a sequence. finite: bool [N, T], False where the logits that chose the
    token held a NaN or an infinity (such a token never counts as agreement). gaps: float64 [N, T], top-1 minus top-2
    in nats, NaN where unknown. prefill_s: [N] seconds to the first token of each prompt (or of its batch).
    decode_s: one array a batch, seconds of each later step. prefill_tokens: [N]. batch: rows that ran together.
    first_seen: steps (batch index, step) whose shape had not run before, kept out of the steady figures.
    decode_tokens: where rows join and leave between steps, the new tokens of each step of the one array in decode_s;
    prefill_s is then each prompt's own, and prefill_tokens what was really run for it.
    prefill_cpu_s, decode_cpu_s: processor seconds of this process in the shapes of prefill_s and decode_s, NaN or
    nothing where another process or device computes.

    What a remote engine says beside its tokens: finish: why each row ended ("length", "stop" or the engine's own word),
    () where it does not say. prompt_ids: the ids that it ran, None where it does not say. top_ids int32 and
    top_logprobs float64 [N, T, k]: ranked, ids -1 and values NaN where unknown. sampling: settings that it reports to
    have used. notes: what a reader must be told.
    """

    tokens: np.ndarray
    finite: np.ndarray
    gaps: np.ndarray
    prefill_s: np.ndarray
    prefill_tokens: np.ndarray
    decode_s: tuple[np.ndarray, ...]
    decode_tokens: tuple[np.ndarray, ...] = ()
    prefill_cpu_s: np.ndarray | None = None
    decode_cpu_s: tuple[np.ndarray, ...] = ()
    batch: int = 1
    first_seen: tuple[tuple[int, int], ...] = ()
    finish: tuple[str | None, ...] = ()
    prompt_ids: Prompts | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    sampling: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Teacher-forced logprobs: each position is conditioned on the prompt and the forced tokens before it.

    token_logprobs: float64 [N, T], of the forced token (NaN where the engine did not return it, and past a row's end).
    top_ids, top_logprobs: [N, T, k] in decreasing order of logprob, ties to the lower id.
    logits: float [N, T, V] where the engine gives them all, else None. finite: bool [N, T].
    forced: "decode" when every token went through the decode path, "single_pass" for one pass over prompt and tokens.
    """

    token_logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    finite: np.ndarray
    forced: str
    logits: np.ndarray | None = None

    @property
    def not_finite(self) -> str | None:
        """Where the first logits that were not finite lie, in words; None where all were."""
        if self.finite.all():
            return None
        prompt, step = np.argwhere(~self.finite)[0]
        return f"non-finite logits when teacher-forced, first at prompt {prompt}, step {step}"


@runtime_checkable
class Engine(Protocol):
    """The calls that the harness makes; token ids in, token ids out."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        """Greedy tokens, lowest id on ties, for each prompt; raises EngineError when the engine fails."""
        ...

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20) -> Scored:
        """Teacher-forced logprobs of `continuations`, one row a prompt."""
        ...


@runtime_checkable
class Probing(Protocol):
    """An engine that must be asked to know what it offers."""

    def probe(self, prompt: Sequence[int]) -> None:
        """Ask for as little as tells; `info` says more afterwards."""
        ...
