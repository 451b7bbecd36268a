"""Rates and memory by the stated rules, on stub clocks, with the exact figures of the practice cases."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.engines.protocol import Generation
from harness.ledger_schema import RATE, shaped
from harness.measure import PREFILL, Rate, StepTimer, Timing, check_peak, check_sum, summarize
from harness.memory import peak_memory, peak_resident_bytes
from harness.strict_json import encode
from variants.errors import EngineError, NeartieError

MIB = 2**20
ROOT = Path(__file__).resolve().parents[1]


class Clock:
    """Nanoseconds that stand still until the clock is told how long something took."""

    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms * 1_000_000


def timed(*laps: tuple[Callable[[StepTimer], None], int]) -> Timing:
    """The timing of one batch of which each lap takes that many milliseconds."""
    clock = Clock()
    timer = StepTimer(clock_ns=clock)
    timer.start()
    for lap, milliseconds in laps:
        clock.now_ms += milliseconds
        lap(timer)
    return timer.timing()


def generation(tokens: np.ndarray, **given) -> Generation:
    rows, _ = tokens.shape
    filled = {
        "finite": np.ones(tokens.shape, bool),
        "gaps": np.full(tokens.shape, np.nan),
        "prefill_s": np.full(rows, 1.0),
        "prefill_tokens": np.full(rows, 10),
    }
    return Generation(tokens=tokens.astype(np.int32), **(filled | given))


def test_tokens_are_counted_not_chunks():
    """P46: 10 chunks of 4 tokens within 1 s are 40 tok/s."""
    chunk = (lambda timer: timer.step(tokens=4), 100)
    timing = timed((lambda timer: timer.prefill(prompt_tokens=1), 500), *[chunk] * 10)
    assert timing.decode_tok_s == Rate(median=40.0, low=40.0, high=40.0, steps=10, cv=0.0)


def test_the_self_checks_fail_loudly():
    """P46: a peak below the average, and buckets that do not sum to the tokens, are errors and not figures."""
    with pytest.raises(NeartieError, match="peak rate 113 tok/s is below the average 411"):
        check_peak(113, 411)
    check_peak(411, 411 * (1 + 1e-12))
    with pytest.raises(NeartieError, match="hold 10 tokens, the run has 40"):
        check_sum([1] * 10, 40)
    check_sum([4] * 10, 40)


def test_tokens_per_processor_second_are_a_figure_of_their_own():
    """Ten steps of 100 ms that took 10 ms of a processor are 10 tok/s by the clock and 100 per processor second.

    An engine that does not say what it took has no such figure.
    """
    timed = {"decode_s": (np.full(10, 0.1),), "decode_cpu_s": (np.full(10, 0.01),), "prefill_cpu_s": np.array([0.5])}
    timing = summarize(generation(np.zeros((1, 11)), **timed))
    medians = timing.decode_tok_s.median, timing.decode_tok_cpu_s.median, timing.prefill_tok_cpu_s.median
    assert medians == pytest.approx((10.0, 100.0, 20.0))
    assert summarize(generation(np.zeros((1, 11)), decode_s=(np.full(10, 0.1),))).decode_tok_cpu_s == Rate()


def test_an_engine_that_times_chunks_for_tokens_is_found_out():
    """P46: 3 times for 12 tokens after the first contradict each other, and summarize says so."""
    with pytest.raises(NeartieError, match="hold 3 tokens, the run has 12"):
        summarize(generation(np.zeros((1, 13)), decode_s=(np.full(3, 0.1),)))


@pytest.mark.parametrize("at", [0, 40])
def test_a_new_shape_is_kept_out_of_the_steady_rate_wherever_it_comes(at: int):
    """P47: 2 s for a new shape and 10 ms after is 100 steps/s, with the new shape at step 0 or 40 listed apart."""

    def step(index: int):
        return lambda timer: timer.step(shape="old" if index < at else "new")

    laps = [(step(index), 2000 if index in (0, at) else 10) for index in range(60)]
    timing = timed((lambda timer: timer.prefill(prompt_tokens=1), 10), *laps)
    steady = 60 - len({0, at})
    assert timing.decode_tok_s == Rate(median=100.0, low=100.0, high=100.0, steps=steady, cv=0.0)
    assert [(seen.step, seen.seconds) for seen in timing.first_seen] == sorted({(0, 2.0), (at, 2.0)})


@pytest.mark.parametrize("at", [0, 40])
def test_summarize_keeps_first_seen_steps_apart(at: int):
    """P47 by way of an engine's own times: the marked step is in no rate and is listed with its seconds."""
    seconds = np.full(60, 0.010)
    seconds[at] = 2.0
    timing = summarize(generation(np.zeros((1, 61)), decode_s=(seconds,), first_seen=((0, at),)))
    assert timing.decode_tok_s == Rate(median=100.0, low=100.0, high=100.0, steps=59, cv=0.0)
    assert [(seen.batch, seen.step, seen.seconds) for seen in timing.first_seen] == [(0, at, 2.0)]


def test_shapes_are_remembered_by_the_engine_not_the_run():
    """A second timer that is given the engine's seen shapes finds none of them new; a prefill is not a step."""
    seen: set = set()
    found = []
    for _ in range(2):
        clock = Clock()
        timer = StepTimer(clock_ns=clock, seen=seen)
        timer.start()
        for lap in (timer.prefill, timer.step):
            clock.now_ms += 10
            lap(**({"prompt_tokens": 3} if lap == timer.prefill else {}), shape=(1, 3))
        found.append(timer.first_seen)
    assert found == [((0, PREFILL), (0, 0)), ()]


def test_the_prompt_is_not_in_decode_and_a_row_ends_at_its_end_token():
    """P48: prefill 1000 tok/s, 99 tokens in 0.99 s = 100 tok/s, and 100 tokens in 1.99 s end to end.

    The budget was 128: steps after the end token yield nothing and change neither rate.
    """
    tokens = np.full((1, 128), -1)
    tokens[0, :100] = 7
    for steps in (99, 127):
        given = {"prefill_s": np.array([1.0]), "prefill_tokens": np.array([1000]), "decode_s": (np.full(steps, 0.010),)}
        timing = summarize(generation(tokens, **given))
        assert timing.prefill_tok_s == Rate(median=1000.0, low=1000.0, high=1000.0, steps=1)
        assert (timing.decode_tok_s.median, timing.decode_tok_s.steps) == (100.0, 99)
        assert timing.idle_steps == steps - 99
        assert timing.end_to_end_tok_s == pytest.approx(100 / (1 + steps * 0.010), rel=1e-12)


def test_the_same_run_through_the_timer_has_the_same_figures():
    """P48 through a stub engine loop: the timer's arrays, put into a Generation, summarize to the timer's own rates."""
    clock = Clock()
    timer = StepTimer(clock_ns=clock)
    for _ in range(2):
        timer.start()
        clock.now_ms += 1000
        timer.prefill(prompt_tokens=1000)
        for _ in range(99):
            clock.now_ms += 10
            timer.step()
    given = {"prefill_s": np.array(timer.prefill_s), "prefill_tokens": np.full(2, 1000), "decode_s": timer.decode_s}
    run = generation(np.zeros((2, 100)), **given)
    assert summarize(run) == timer.timing()
    assert timer.timing().end_to_end_tok_s == pytest.approx(100 / 1.99, rel=1e-12)


def test_each_row_of_a_batch_counts_while_it_goes_on():
    """Three rows by two: a batch's step yields one token a live row, and its prefill the prompts of all its rows."""
    tokens = np.array([[1, 1, 1, 1], [1, 1, -1, -1], [1, 1, 1, -1]])
    given = {"prefill_s": np.array([0.5, 0.5, 0.25]), "decode_s": (np.full(3, 0.1), np.full(2, 0.1)), "batch": 2}
    timing = summarize(generation(tokens, **given))
    assert timing.prefill_tok_s.steps == 2
    assert timing.prefill_tok_s.median == 40.0
    assert timing.decode_tok_s.median == pytest.approx(10, rel=1e-12)
    assert timing.decode_tok_s.high == pytest.approx(18, rel=1e-12)  # 95th percentile of 10 10 10 10 20
    assert timing.end_to_end_tok_s == pytest.approx(9 / 1.25, rel=1e-12)


def test_what_was_not_timed_is_unknown_not_zero():
    """A folder of tokens has no rates: null and 0 steps, nothing end to end."""
    timing = summarize(generation(np.zeros((2, 4)), prefill_s=np.full(2, np.nan), decode_s=()))
    assert timing.prefill_tok_s == timing.decode_tok_s == Rate()
    assert timing.end_to_end_tok_s is None


def test_times_that_cannot_be_are_refused():
    """A time of nought, a negative or an infinite one, and times of another number of batches are engine errors."""
    for wrong in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(EngineError, match="expected a positive time"):
            summarize(generation(np.zeros((1, 2)), decode_s=(np.array([wrong]),)))
    with pytest.raises(EngineError, match="timed 1 batches, expected 2"):
        summarize(generation(np.zeros((2, 2)), decode_s=(np.ones(1),)))


def test_a_timing_is_what_the_ledger_takes():
    """The record of a timing has the ledger's fields and no others."""
    timing = timed((lambda timer: timer.prefill(prompt_tokens=5), 10), (lambda timer: timer.step(shape=1), 10))
    row = shaped(encode(timing.record())[0])  # pyright: ignore[reportArgumentType]
    assert set(RATE) == set(timing.record()["decode_tok_s"])  # pyright: ignore[reportArgumentType]
    assert row["detail"]["timing"]["first_seen"] == [{"batch": 0, "step": 0, "seconds": 0.01}]  # pyright: ignore


def test_the_clock_is_read_after_the_device_has_finished():
    """Each reading of the clock comes after a synchronisation."""
    calls: list[str] = []
    timer = StepTimer(
        clock_ns=lambda: len(calls) + bool(calls.append("clock")), synchronize=lambda: calls.append("sync")
    )
    timer.start()
    timer.prefill(prompt_tokens=1)
    assert calls == ["sync", "clock"] * 2


PEAKS = """
import numpy as np
from harness.memory import peak_memory
with peak_memory() as before:
    pass
with peak_memory() as during:
    block = np.ones(64 * 2**20, dtype=np.uint8)
    del block
with peak_memory() as after:
    pass
print(before.bytes, during.bytes, after.bytes, after.since)
"""


def test_peak_memory_is_that_of_the_block():
    """A block that touches 64 MiB peaks at least 60 above one that does not, and a later one is below it again.

    In a process of its own: a large one may hand out memory that it had before.
    """
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True, cwd=ROOT)
    *figures, since = done.stdout.split()
    before, during, after = map(int, figures)
    assert during - before > 60 * MIB
    if since == "run":
        assert during - after > 60 * MIB


def test_without_a_reset_the_figure_says_that_it_is_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Where the kernel keeps its peak from us the figure stands for the whole process, and the result says so."""
    monkeypatch.setattr("harness.memory.CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    monkeypatch.setattr("harness.memory.STATUS", tmp_path / "absent")
    with peak_memory() as peak:
        pass
    assert peak.since == "process"
    assert peak.bytes is not None
    assert 10 * MIB < peak.bytes == peak_resident_bytes()


@pytest.mark.gpu
def test_peak_memory_of_a_device_is_what_torch_allocated():
    """On CUDA the peak is the most that torch had allocated within the block."""
    with peak_memory("cuda") as peak:
        held = torch.cuda.memory_allocated()
        block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        del block
    assert peak.bytes == held + 64 * MIB
