"""Speed and memory of a run, by rules that make two runs comparable.

Rules
- The first token of a row comes out of prefill and belongs to it: prefill tok/s counts prompt tokens over the time to
  the first token, decode tok/s counts the tokens of the steps after it. End-to-end is a figure of its own.
- Tokens are counted, never steps, chunks or requests: a step yields one token for each row of its batch still going.
- A row goes on up to and including its end token. A step after the end of every row yields nothing; it is in no rate
  and is counted apart (`idle_steps`), so that two legs that stop differently still have the same decode rate.
- A step or prefill whose shape had not run before (compilation, autotuning, allocation) is listed apart and is in no
  steady rate, wherever it comes; it stays in the end-to-end time, where it was really waited for.
- A rate is the median over steps of tokens per second, `low` and `high` are the 5th and 95th percentile (linear between
  steps) and `cv` the sample standard deviation over the mean.
- The figures check themselves: the tokens of all steps sum to the tokens of the run, and no average is above its peak.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from harness.engines.protocol import Generation
from variants.errors import EngineError, NeartieError

PREFILL = -1  # the `step` of a batch's prefill, in `first_seen` too
LOW_PERCENTILE, HIGH_PERCENTILE = 5, 95


@dataclass(frozen=True, kw_only=True)
class Step:
    """One timed call. step: PREFILL, or the index among the batch's later steps.

    tokens: what the rate counts, prompt tokens in a prefill and new tokens in a later step. new_tokens: new ones in
    either. first_seen: its shape had not run before. cpu_s: processor seconds of this process, NaN where unknown.
    """

    batch: int
    step: int
    tokens: int
    new_tokens: int
    seconds: float
    first_seen: bool = False
    cpu_s: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Tokens per second over the steady steps; null and `steps` 0 where there were none."""

    median: float | None = None
    low: float | None = None
    high: float | None = None
    steps: int = 0
    cv: float | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a run's steps say. end_to_end_tok_s: all new tokens over all time, null unless every prefill was timed.

    prefill_tok_cpu_s, decode_tok_cpu_s: tokens per processor second, which other work of the machine hardly moves.
    seconds: of steady prefills, of steady later steps and of first calls, by the clock ("wall") and, where it is known,
    of the processor ("cpu").
    """

    prefill_tok_s: Rate
    decode_tok_s: Rate
    prefill_tok_cpu_s: Rate
    decode_tok_cpu_s: Rate
    end_to_end_tok_s: float | None
    first_seen: tuple[Step, ...]
    idle_steps: int
    seconds: dict[str, dict[str, float]]

    def record(self) -> dict[str, object]:
        """The ledger's fields; what has no fixed field is under `detail.timing`."""
        apart = [{"batch": step.batch, "step": step.step, "seconds": step.seconds} for step in self.first_seen]
        detail = {"end_to_end_tok_s": self.end_to_end_tok_s, "idle_steps": self.idle_steps, "first_seen": apart}
        detail["seconds"] = self.seconds
        detail |= {name: asdict(getattr(self, name)) for name in ("prefill_tok_cpu_s", "decode_tok_cpu_s")}
        rates = {"prefill_tok_s": asdict(self.prefill_tok_s), "decode_tok_s": asdict(self.decode_tok_s)}
        return {**rates, "detail": {"timing": detail}}


def summarize(generation: Generation) -> Timing:
    """The rates of one greedy run by the rules of this module.

    A prefill of NaN seconds and an empty `decode_s` were not timed: their rates are null. Raises EngineError when the
    engine's times do not fit its tokens.
    """
    tokens, together = generation.tokens, bool(generation.decode_tokens)
    batch = 1 if together else generation.batch
    groups = [slice(start, start + batch) for start in range(0, len(tokens), batch)]
    if generation.decode_s and not together and len(generation.decode_s) != len(groups):
        raise EngineError(
            f"engine timed {len(generation.decode_s)} batches, expected {len(groups)} for {len(tokens)} rows by {batch}"
        )
    first_seen = set(generation.first_seen)
    steps: list[Step] = []
    for index, rows in enumerate(groups):
        seconds = float(np.max(generation.prefill_s[rows]))  # each row holds the time of its batch, or its own
        if not np.isnan(seconds):
            new = int(np.count_nonzero(tokens[rows, :1] >= 0))
            prompt = int(generation.prefill_tokens[rows].sum())
            apart = (index, PREFILL) in first_seen
            cpu_s = math.nan if generation.prefill_cpu_s is None else float(np.max(generation.prefill_cpu_s[rows]))
            given = {"seconds": seconds, "first_seen": apart, "cpu_s": cpu_s}
            steps.append(Step(batch=index, step=PREFILL, tokens=prompt, new_tokens=new, **given))
        if generation.decode_s and not together:
            counts = _yielded(tokens[rows], len(generation.decode_s[index]))
            cpu_s = generation.decode_cpu_s[index] if generation.decode_cpu_s else None
            steps += _decode_steps(index, counts, generation.decode_s[index], first_seen, cpu_s)
    if together:
        steps += _decode_steps(0, generation.decode_tokens[0], generation.decode_s[0], first_seen)
    decoded = int(np.count_nonzero(tokens[:, 1:] >= 0)) if generation.decode_s else 0
    return timing_of(steps, decoded=decoded, prefilled=len(groups))


def _yielded(tokens: np.ndarray, steps: int) -> np.ndarray:
    """Tokens of each step of one batch [rows, T]: step s yields column s + 1, and nothing past the last column."""
    yielded = np.zeros(steps, dtype=int)
    counts = np.count_nonzero(tokens[:, 1:] >= 0, axis=0)[:steps]
    yielded[: len(counts)] = counts
    return yielded


def _decode_steps(
    batch: int,
    counts: np.ndarray,
    seconds: np.ndarray,
    first_seen: set[tuple[int, int]],
    cpu_s: np.ndarray | None = None,
) -> list[Step]:
    cpu_s = np.full(len(seconds), math.nan) if cpu_s is None else cpu_s
    steps = []
    for s, (n, t, c) in enumerate(zip(counts, seconds, cpu_s, strict=True)):
        given = {"seconds": float(t), "first_seen": (batch, s) in first_seen, "cpu_s": float(c)}
        steps.append(Step(batch=batch, step=s, tokens=int(n), new_tokens=int(n), **given))
    return steps


def timing_of(steps: Sequence[Step], *, decoded: int, prefilled: int) -> Timing:
    """Rates of timed steps. decoded: tokens after the first ones, and prefilled: prefills, each counted another way.

    Raises EngineError for a time that is not positive, and NeartieError when the figures contradict each other.
    """
    for step in steps:
        if not (np.isfinite(step.seconds) and step.seconds > 0):
            raise EngineError(f"batch {step.batch} step {step.step} took {step.seconds} s, expected a positive time")
    prefill = [step for step in steps if step.step == PREFILL]
    decode = [step for step in steps if step.step != PREFILL]
    check_sum([step.tokens for step in decode], decoded)
    total_s = sum(step.seconds for step in steps)
    whole = len(prefill) == prefilled and bool(steps)
    by_processor = _by_processor(steps)
    return Timing(
        prefill_tok_s=_rate(prefill),
        decode_tok_s=_rate(decode),
        prefill_tok_cpu_s=_rate(_by_processor(prefill)),
        decode_tok_cpu_s=_rate(_by_processor(decode)),
        end_to_end_tok_s=sum(step.new_tokens for step in steps) / total_s if whole else None,
        first_seen=tuple(step for step in steps if step.first_seen),
        idle_steps=sum(step.tokens == 0 for step in decode),
        seconds={"wall": _spent(steps), **({"cpu": _spent(by_processor)} if by_processor else {})},
    )


def _spent(steps: Sequence[Step]) -> dict[str, float]:
    spent = {"prefill": 0.0, "decode": 0.0, "first calls": 0.0}
    for step in steps:
        spent["first calls" if step.first_seen else "prefill" if step.step == PREFILL else "decode"] += step.seconds
    return spent


def _by_processor(steps: Sequence[Step]) -> list[Step]:
    """The steps as if the clock had stood still while nothing of this process ran."""
    return [replace(step, seconds=step.cpu_s) for step in steps if step.cpu_s > 0]


def _rate(steps: Sequence[Step]) -> Rate:
    steady = [step for step in steps if step.tokens and not step.first_seen]
    if not steady:
        return Rate()
    rates = np.array([step.tokens / step.seconds for step in steady])
    average = sum(step.tokens for step in steady) / sum(step.seconds for step in steady)
    check_peak(float(rates.max()), average)
    low, median, high = (float(np.percentile(rates, at)) for at in (LOW_PERCENTILE, 50, HIGH_PERCENTILE))
    cv = float(rates.std(ddof=1) / rates.mean()) if len(rates) > 1 else None
    return Rate(median=median, low=low, high=high, steps=len(rates), cv=cv)


def check_sum(buckets: Sequence[int], total: int) -> None:
    """Raise NeartieError unless the tokens of the buckets sum to the tokens of the run."""
    if sum(buckets) != total:
        raise NeartieError(
            f"timed steps hold {sum(buckets)} tokens, the run has {total}; are chunks counted as tokens?"
        )


def check_peak(peak: float, average: float) -> None:
    """Raise NeartieError when an average rate is above the peak (by more than the rounding of a sum)."""
    if peak < average * (1 - 1e-9):
        raise NeartieError(f"peak rate {peak:g} tok/s is below the average {average:g}; do both count tokens?")


class StepTimer:
    """A stopwatch for an engine's loop: each call ends the lap that began with the one before it.

    timer.start() before a batch, timer.prefill(...) when its first tokens are there, timer.step(...) after each later
    step or streamed chunk. `synchronize` waits for the device before the clock is read. `seen` outlives the timer where
    an engine keeps its compiled shapes from one run to the next; a shape of None is never a first one.
    """

    def __init__(
        self,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        synchronize: Callable[[], object] | None = None,
        seen: set[Hashable] | None = None,
    ) -> None:
        self.steps: list[Step] = []
        self._clock_ns, self._synchronize = clock_ns, synchronize
        self._seen: set[Hashable] = set() if seen is None else seen
        self._mark_ns: int | None = None
        self._batch, self._step = -1, PREFILL

    def start(self) -> None:
        """Begin a batch: the time to its first tokens runs from here."""
        self._now_ns()
        self._batch, self._step = self._batch + 1, PREFILL

    def prefill(self, *, prompt_tokens: int, rows: int = 1, shape: Hashable = None) -> None:
        """The first token of each of `rows` rows is there."""
        assert self._step == PREFILL, "one prefill a batch; call start() first"
        self._lap(prompt_tokens, rows, ("prefill", shape) if shape is not None else None)

    def step(self, *, tokens: int = 1, shape: Hashable = None) -> None:
        """A later step, or a streamed chunk, has brought `tokens` tokens, all rows together."""
        assert self._step != PREFILL, "prefill comes before the first step"
        self._lap(tokens, tokens, ("step", shape) if shape is not None else None)

    def timing(self) -> Timing:
        """The rates of all batches so far; raises as `timing_of` does."""
        decoded = sum(step.new_tokens for step in self.steps if step.step != PREFILL)
        return timing_of(self.steps, decoded=decoded, prefilled=self._batch + 1)

    @property
    def first_seen(self) -> tuple[tuple[int, int], ...]:
        """As `Generation.first_seen`: (batch, step), with step -1 for a prefill."""
        return tuple((step.batch, step.step) for step in self.steps if step.first_seen)

    @property
    def prefill_s(self) -> tuple[float, ...]:
        """Seconds to the first tokens, one figure a batch."""
        return tuple(step.seconds for step in self.steps if step.step == PREFILL)

    @property
    def decode_s(self) -> tuple[np.ndarray, ...]:
        """As `Generation.decode_s`: seconds of each later step, one array a batch."""
        return tuple(
            np.array([step.seconds for step in self.steps if step.batch == batch and step.step != PREFILL])
            for batch in range(self._batch + 1)
        )

    def _lap(self, tokens: int, new_tokens: int, shape: Hashable) -> None:
        before_ns = self._mark_ns
        assert before_ns is not None, "start() comes first"
        first = shape is not None and shape not in self._seen
        self._seen |= {shape} if first else set()
        lap = {"seconds": (self._now_ns() - before_ns) / 1e9, "first_seen": first}
        self.steps.append(Step(batch=self._batch, step=self._step, tokens=tokens, new_tokens=new_tokens, **lap))
        self._step += 1

    def _now_ns(self) -> int:
        if self._synchronize is not None:
            self._synchronize()
        self._mark_ns = self._clock_ns()
        return self._mark_ns
