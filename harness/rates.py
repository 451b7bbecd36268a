"""Prefill and decode of an engine that is asked from outside: sequences, tokens before a step, and how it ran them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from harness.device_timing import Timed
from variants.errors import EngineError

PROMPT = 32  # tokens of each prompt where sequences decode together
# of an engine that is somebody else's code, whose own checks are asserts
FAILURES = (EngineError, RuntimeError, ValueError, AttributeError, LookupError, AssertionError)
WARM_STEPS = 4  # of a run that is in no figure, so that no step compiles
REPEATS = 3  # of a prefill, after one that is in no figure
RunSteps = Callable[[list[list[int]], int], list[float]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is timed. contexts: tokens before a lone sequence's steps; batches: sequences together, each of `PROMPT`
    tokens; prefills: tokens of a lone prompt; steps: of a run. seed: of the prompts.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    prefills: tuple[int, ...]
    steps: int
    seed: int

    @property
    def longest(self) -> int:
        return max(*self.contexts, *self.prefills, PROMPT) + self.steps + WARM_STEPS + 1

    @property
    def decodes(self) -> list[tuple[int, int]]:
        """(sequences, tokens before) of every decode run, each once."""
        alone = [(1, n) for n in self.contexts]
        return list(dict.fromkeys([*alone, *((b, PROMPT) for b in self.batches)]))

    def prompts(self, count: int, tokens: int, vocab: int) -> list[list[int]]:
        random = torch.Generator().manual_seed(self.seed)
        return torch.randint(3, vocab, (count, tokens), generator=random).tolist()


@dataclass(frozen=True, kw_only=True)
class Row:
    """Milliseconds of a step of so many sequences, or of a prefill. path: how the engine ran it (`eager`, `graph`)."""

    path: str
    phase: str
    sequences: int
    tokens: int
    ms: Timed

    @property
    def tok_s(self) -> float:
        """Tokens of all sequences a second, by the median."""
        return 1e3 / self.ms.median * (self.sequences if self.phase == "decode" else self.tokens)

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"tok_s": self.tok_s}


@dataclass(kw_only=True)
class Rates:
    """Rows as they are found, and why a path could not be timed. about: the engine's own settings and versions.

    told: called with each row, so that a run that is killed has said what it found.
    """

    told: Callable[[Row], None] = lambda row: None
    rows: list[Row] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def add(self, path: str, phase: str, size: tuple[int, int], ms: Timed) -> None:
        self.rows.append(Row(path=path, phase=phase, sequences=size[0], tokens=size[1], ms=ms))
        self.told(self.rows[-1])

    def attempt(self, path: str, what: Callable[[], None]) -> None:
        """Run a path's measurements; what it cannot do is its line in `refused`, and its earlier rows stay."""
        try:
            what()
        except FAILURES as error:
            self.refused[path] = (str(error).strip() or type(error).__name__).splitlines()[0]

    def record(self) -> dict[str, Any]:
        return {"against": "floors", "rates": [r.record() for r in self.rows], "refused": self.refused} | self.about


def stepped(step: Callable[[], bool]) -> list[float]:
    """Milliseconds by the wall clock of each call until it says that nothing is left to do."""
    taken: list[float] = []
    more = True
    while more:
        began = time.perf_counter()
        more = step()
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


def parted(taken: Sequence[float], steps: int) -> tuple[float, Timed]:
    """Of a run of prefill and `steps` decode steps: milliseconds before the first token of all, and of a step."""
    return sum(taken[:-steps]), Timed.of(taken[-steps:])


def time_decodes(path: str, asked: Asked, vocab: int, run: RunSteps, rates: Rates) -> None:
    """Every decode that is asked for, each after a short one. run(prompts, tokens): milliseconds of each step until all
    have so many tokens."""
    for count, tokens in asked.decodes:
        for steps in (WARM_STEPS, asked.steps):
            taken = run(asked.prompts(count, tokens, vocab), steps + 1)
        rates.add(path, "decode", (count, tokens), parted(taken, asked.steps)[1])


def time_prefills(path: str, asked: Asked, vocab: int, run: RunSteps, rates: Rates) -> None:
    """Every prefill that is asked for; `run` as in `time_decodes`."""
    for tokens in asked.prefills:
        once = [sum(run(asked.prompts(1, tokens, vocab), 1)) for _ in range(REPEATS + 1)]
        rates.add(path, "prefill", (1, tokens), Timed.of(once[1:]))
