"""Greedy decoding and teacher forcing as free functions over a model and a state."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from variants.axes import Execution
from variants.model import Model
from variants.state import State

Tokens = Sequence[int]


def greedy(logits: Tensor) -> Tensor:
    """The token of the largest logit, the lowest id on exact ties: [B, V] -> int64 [B].

    A row that holds a NaN has no largest value: its result means nothing, and `is_finite` says so.
    """
    return (logits == logits.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)


def is_finite(logits: Tensor) -> Tensor:
    """Whether a row has no NaN and no infinity: [B, V] -> bool [B]."""
    return torch.isfinite(logits).all(-1)


def gaps(logits: Tensor) -> Tensor:
    """Top-1 minus top-2 in nats, from the logits as they were stored: [B, V] -> float64 [B]."""
    top = logits.double().topk(2, -1).values
    return top[:, 0] - top[:, 1]


def padded(rows: Sequence[Tokens], device: str = "cpu") -> tuple[Tensor, list[int]]:
    """Rows of different lengths as one [B, T] filled up at the right with id 0, and their lengths."""
    lengths = [len(r) for r in rows]
    width = max(lengths)
    return torch.tensor([[*r, *[0] * (width - len(r))] for r in rows], device=device), lengths


def prefill(model: Model, state: State, slots: Sequence[int], prompts: Sequence[Tokens]) -> Tensor:
    """Run prompts into fresh or continued slots, in pieces when the recipe says so; logits of each last token [B, V].

    Rows shorter than the longest finish in an earlier piece; later pieces run only the rows that still have tokens.
    """
    piece = model.recipe.execution.prefill_piece or max(len(p) for p in prompts)
    out: list[Tensor | None] = [None] * len(prompts)
    for start in range(0, max(len(p) for p in prompts), piece):
        rows = [i for i, p in enumerate(prompts) if len(p) > start]
        tokens, lengths = padded([prompts[i][start : start + piece] for i in rows], model.device)
        logits = model.forward(tokens, state, slots=[slots[i] for i in rows], lengths=lengths, phase="prefill")
        for row, i in enumerate(rows):
            out[i] = logits[row]
    return torch.stack([x for x in out if x is not None])


def decode_one_token(model: Model, state: State, slots: Sequence[int], tokens: Tensor) -> Tensor:
    """One step: the logits [B, V] after tokens [B], one a row, were appended to the slots' sequences."""
    return model.forward(tokens.unsqueeze(1), state, slots=slots, lengths=[1] * len(slots), phase="decode")


@dataclass
class Run:
    """What `steps` hands out after each token: logits [B, V], and what that step took.

    seconds: by the clock. cpu_s: of all of this process's threads, NaN where another device computes.
    """

    logits: Tensor
    seconds: float
    cpu_s: float


@dataclass
class Sequences:
    """Rows that decode together, and the two ways to go one token further."""

    model: Model
    prompts: Sequence[Tokens]
    max_tokens: int
    state: State = field(init=False)
    taken: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        longest = max(len(p) for p in self.prompts) + self.max_tokens
        self.state = self.model.new_state(slots=len(self.prompts), max_len=longest)
        self.taken = [[] for _ in self.prompts]

    @property
    def slots(self) -> list[int]:
        return list(range(len(self.prompts)))

    def start(self) -> Tensor:
        self.state.reset(self.slots)
        return prefill(self.model, self.state, self.slots, self.prompts)

    def after(self, tokens: Tensor) -> Tensor:
        """Logits after one more token a row; in recompute the whole prefix runs again from empty slots."""
        for row, token in zip(self.taken, tokens.tolist(), strict=True):
            row.append(token)
        if self.model.recipe.execution.mode is not Execution.recompute:
            return decode_one_token(self.model, self.state, self.slots, tokens)
        self.state.reset(self.slots)
        return prefill(
            self.model, self.state, self.slots, [[*p, *t] for p, t in zip(self.prompts, self.taken, strict=True)]
        )


Choose = Callable[[int, Tensor], Tensor | None]


def steps(model: Model, prompts: Sequence[Tokens], max_tokens: int, choose: Choose) -> list[Run]:
    """Decode up to `max_tokens` tokens for prompts that run together.

    choose(t, logits [B, V]) gives the token [B] that is appended after step t, the greedy one or a forced one, or None
    to end early; it is also called after the last step, whose answer is not run. Returns one `Run` a step, the first
    one being the prefill's.
    """
    rows = Sequences(model, prompts, max_tokens)
    began = _now()
    logits = rows.start()
    runs = [Run(logits, *_until_done(logits, began))]
    for t in range(max_tokens):
        tokens = choose(t, logits)
        if tokens is None or t == max_tokens - 1:
            break
        began = _now()
        logits = rows.after(tokens)
        runs.append(Run(logits, *_until_done(logits, began)))
    return runs


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _until_done(logits: Tensor, began: tuple[float, float]) -> tuple[float, float]:
    """Seconds and processor seconds since `began`, once the device has really finished."""
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    now = _now()
    return now[0] - began[0], math.nan if logits.is_cuda else now[1] - began[1]


def single_pass(model: Model, prompts: Sequence[Tokens], continuations: Sequence[Tokens]) -> list[Tensor]:
    """Logits [T, V] of each continuation token from one prefill over prompt and continuation: not the decode path."""
    rows = [[*p, *c[:-1]] for p, c in zip(prompts, continuations, strict=True)]
    state = model.new_state(slots=len(rows), max_len=max(len(r) for r in rows))
    tokens, lengths = padded(rows, model.device)
    logits = model.forward(tokens, state, slots=range(len(rows)), lengths=lengths, phase="prefill", every=True)
    return [x[len(p) - 1 : n] for x, p, n in zip(logits, prompts, lengths, strict=True)]
