"""What only a runner does: pieces, shared prefixes, preemption, each faulty in turn where nothing else looks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor

from harness.as_run import as_run
from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.runner_tasks import Task, tasks
from harness.through_runner import INSTRUMENT, ThroughRunner, through_runner
from variants import runner
from variants.axes import Execution, ExecutionAxes, Preempt
from variants.decode import padded
from variants.prefix import PrefixCache
from variants.recipe import Recipe, resolve
from variants.scheduler import Live, Scheduler
from variants.state import SLOTTED, Saved, State

BATTERY = Battery(prompts=tiny.ragged([5, 11, 8]), continuations=[tiny.prompt(4, seed=i) for i in range(3)])
PLAIN = ExecutionAxes(mode=Execution.paged, block_size=4, batch=3)
PREFIX = replace(PLAIN, prefill_piece=8, prefix_cache=2)
SHORT = replace(PLAIN, pages=9)
AWAY = replace(SHORT, preempt=Preempt.offload)
Monkey = pytest.MonkeyPatch
COPY, SAVE, PREEMPT = State.copy_slot, State.save, Scheduler._preempt


def recipe(execution: ExecutionAxes) -> Recipe:
    return resolve(tiny.plain(tiny.Stream.f32, tiny.Gemm.f32, execution=execution), tiny.ODD)


def asked(execution: ExecutionAxes) -> ThroughRunner:
    return through_runner(tiny.casts(), recipe(execution), BATTERY)


BOTH = replace(AWAY, prefill_piece=4, prefix_cache=1)
SETTINGS = {
    "plain": PLAIN, "prefixes": PREFIX, "one prefix": replace(PREFIX, prefix_cache=1, batch=1),
    "pieces are pages": replace(PREFIX, prefill_piece=4), "recompute": SHORT, "offload": AWAY, "both": BOTH,
    "a budget": replace(BOTH, token_budget=6), "one token a page": replace(SHORT, block_size=1, pages=40),
    "long pieces": replace(PREFIX, prefill_piece=256, block_size=32),
    "a token a piece": replace(SHORT, prefill_piece=1, pages=40),
    "pieces of many pages": replace(SHORT, prefill_piece=3, block_size=1, pages=40),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_sound_runner_computes_the_definition(name: str) -> None:
    """And what the settings allow has happened: prefixes were found where some are kept, a sequence gave way where the
    number of pages is named."""
    run = SETTINGS[name]
    found = asked(run)
    assert found.findings() == []
    assert found.compared > 400
    assert (found.hits > 0) == (run.prefix_cache > 0)
    assert (found.preemptions > 0) == (run.pages > 0)
    assert found.record()["preemptions"] == found.preemptions


def _ends_twice(rows: list[tuple[int, ...]], device: str) -> tuple[Tensor, list[int]]:
    return padded([(*row[:-1], row[-2]) if len(row) == 8 else row for row in rows], device)


def _conv_alone(self: State, source: int, target: int) -> None:
    kept = {n: x[target].clone() for n, x in self.recurrent.items()}
    COPY(self, source, target)
    for n, x in kept.items():
        self.recurrent[n][target] = x


def _narrow(self: State, source: int, target: int) -> None:
    COPY(self, source, target)
    for x in self.recurrent.values():
        x[target] = x[target].to(torch.bfloat16).to(x.dtype)


def _saved_without_conv(self: State, slot: int, **how: str | None) -> Saved:
    saved = SAVE(self, slot, **how)
    return replace(saved, tensors={key: x * (key[0] != "conv") for key, x in saved.tensors.items()})


def _only_its_own_piece(self: PrefixCache, ids: tuple[int, ...]) -> list[tuple[int, bytes]]:
    ends = range(self.piece, len(ids) + 1, self.piece)
    return [(n, repr(list(ids[n - self.piece : n])).encode()) for n in ends]


def _last_but_one(self: Live) -> int:
    return self.made[max(self.computed - len(self.request.ids) - 1, 0)]


def _forgets_one(self: Scheduler, live: Live) -> None:
    PREEMPT(self, live)
    live.made[-1:] = live.made[:1]


def _keeps_its_count(self: Scheduler, live: Live) -> None:
    computed = live.computed
    PREEMPT(self, live)
    live.computed = computed


FAULTS: dict[str, tuple[ExecutionAxes, object, str, Callable, str]] = {
    "a piece ends with a token twice": (PREFIX, runner, "padded", _ends_twice, "embed"),
    "the state is in no snapshot": (PREFIX, State, "copy_slot", _conv_alone, "kda_core"),
    "a snapshot is rounded": (PREFIX, State, "copy_slot", _narrow, "kda_core"),
    "a piece is known by itself alone": (PREFIX, PrefixCache, "_keys", _only_its_own_piece, "kda_core"),
    "a token is fed twice": (PLAIN, Live, "next_token", _last_but_one, "embed"),
    "what went away lacks a store": (AWAY, State, "save", _saved_without_conv, "short_conv"),
    "what runs again goes on": (SHORT, Scheduler, "_preempt", _keeps_its_count, "embed"),
    "what runs again has another token": (SHORT, Scheduler, "_preempt", _forgets_one, "embed"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_runner_is_named(name: str, monkeypatch: Monkey) -> None:
    """Each is the same watched and unwatched, and in every run of the runner; the first place that departs is told."""
    run, owner, method, fault, site = FAULTS[name]
    monkeypatch.setattr(owner, method, fault)
    (finding,) = asked(run).findings()
    assert (finding.instrument, finding.site) == (INSTRUMENT, site)
    assert "depart from the model's definition" in finding.reason


def test_what_is_not_paged_or_too_large_is_left_out(monkeypatch: Monkey) -> None:
    assert "not paged" in (asked(tiny.INCREMENTAL).left_out or "")
    monkeypatch.setattr("harness.shared_code.LARGEST_BYTES", 100)
    found = asked(PLAIN)
    assert found.compared == 0
    assert "parameters" in (found.left_out or "")


def test_tasks_are_no_longer_than_the_model_allows() -> None:
    """A task that does not fit is not asked; pieces longer than 64 tokens are cut to 64 or to a page."""

    def lengths(run: ExecutionAxes, longest: int = 512) -> list[int]:
        return [task.longest for task in tasks(run, BATTERY, longest)]

    assert lengths(PLAIN) == []
    assert lengths(PREFIX) == [2 * 8 + 9 + 2]
    assert lengths(PREFIX, 26) == []
    long: list[Task] = tasks(replace(PREFIX, prefill_piece=256, block_size=32), BATTERY, 512)
    assert [t.execution.prefill_piece for t in long] == [64]
    assert [t.execution.pages for t in tasks(SHORT, BATTERY, 512)] == [5]
    assert tasks(replace(SHORT, batch=1), BATTERY, 512) == []


def _swapped(self: State, source: int, target: int) -> None:
    COPY(self, source, target)
    for name in SLOTTED:
        for x in getattr(self, name).values():
            if x.dtype is torch.float32:
                x[target] = x[target] + 1e-6 * x[target].abs()


def test_a_fault_in_float32_alone_is_seen_by_bits(monkeypatch: Monkey) -> None:
    """The definition is asked in float64, where such a fault is not; the twin holds what a slot carries bit for bit."""
    variant = tiny.plain(tiny.Stream.f32, tiny.Gemm.f32, execution=PREFIX)
    engine = LocalEngine(tiny.casts(), variant, name="tiny")
    assert as_run(engine, BATTERY).findings() == []
    monkeypatch.setattr(State, "copy_slot", _swapped)
    assert asked(PREFIX).findings() == []
    (finding,) = as_run(engine, BATTERY).findings()
    assert (finding.instrument, finding.site, finding.layer) == ("between_forwards", "conv_state", 0)


def test_a_runner_that_chooses_another_token_is_found(monkeypatch: Monkey) -> None:
    """Forced tokens hide it: the same prompts also run freely, and each token is held against its own logits."""

    def second(logits: Tensor) -> Tensor:
        best = logits.topk(2, -1).indices[:, 1]
        return torch.stack([best, torch.ones_like(best)], 1)

    variant = tiny.plain(tiny.Stream.f32, tiny.Gemm.f32, execution=PLAIN)
    monkeypatch.setattr("variants.runner.told", second)
    (finding,) = as_run(LocalEngine(tiny.casts(), variant, name="tiny"), BATTERY).findings()
    assert "is chosen where the lowest id of the largest logit is" in finding.reason


def _leaks(self: PrefixCache) -> bool:
    if self.kept:
        _, prefix = self.kept.popitem(last=False)
        self.slots.give_back([prefix.slot])
    return False


def test_a_runner_that_breaks_is_found_and_not_an_error_of_the_user(monkeypatch: Monkey) -> None:
    """Pages that nobody gives back fail the audit, in both instruments: a defect with the line where it shows."""
    monkeypatch.setattr(PrefixCache, "evict", _leaks)
    run = replace(PREFIX, prefix_cache=1)
    variant = tiny.plain(tiny.Stream.f32, tiny.Gemm.f32, execution=run)
    for found in (asked(run), as_run(LocalEngine(tiny.casts(), variant, name="tiny"), BATTERY)):
        (finding,) = found.findings()
        assert "a runner breaks on requests that it took, in scheduler.py line" in finding.reason
        assert "a page has owners that do not hold it" in finding.reason
