"""A slot that is taken again: what an earlier prompt left there is seen, in every store and execution."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import tiny
import torch
from instruments import engine as shipped_engine
from instruments import shipped
from torch import Tensor

from harness.compose import groups, named_variant
from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.gate import part_of, run_gate
from harness.golden import load_golden
from harness.reused_slot import ANSWER, INSTRUMENT, Reused, reused_slot, two_lengths
from harness.verdict import RunClass
from harness.verdict_run import Question, judge_run
from variants.axes import Execution, ExecutionAxes, Impl, KvCache, Variant
from variants.batch import Batch
from variants.model import Model, Pair
from variants.scheduler import Live, Scheduler
from variants.state import State

BATTERY = Battery(prompts=tiny.ragged([5, 11, 8]), continuations=[tiny.prompt(2)] * 3)
PAGED = ExecutionAxes(mode=Execution.paged, block_size=4)
CLEAN = sorted(n for n in groups()["variant"] if named_variant(n).impl.all_are(Impl.torch))
KINDS = {"recompute": tiny.RECOMPUTE, "incremental": tiny.INCREMENTAL, "paged": PAGED,
         "two rows": replace(tiny.INCREMENTAL, batch=2), "paged together": replace(PAGED, batch=3)}  # fmt: skip

Monkey = pytest.MonkeyPatch
RESET, CLEAR, GROW, RUN = State.reset, State.clear_pages, Scheduler._grow, Model._run


def asked(execution: ExecutionAxes, *, expanded: bool = False, battery: Battery = BATTERY) -> Reused:
    variant = tiny.plain(tiny.Stream.f32, tiny.Gemm.f32, execution=execution)
    if expanded:
        variant = replace(variant, mla=replace(variant.mla, cache=KvCache.expanded))
    return reused_slot(LocalEngine(tiny.casts(), variant, name="tiny"), battery)


def place(found: Reused) -> tuple[str | None, int | None]:
    (finding,) = found.findings()
    assert finding.instrument == INSTRUMENT
    return finding.site, finding.layer


def leaving(store: str, *, layers: Sequence[int] | None = None) -> Callable[[State, Sequence[int]], None]:
    """A reset that forgets a store, or some of its layers."""

    def reset(state: State, slots: Sequence[int]) -> None:
        stores = getattr(state, store)
        kept = {n: x.clone() for n, x in stores.items() if layers is None or n in layers}
        RESET(state, slots)
        stores |= kept

    return reset


@pytest.mark.parametrize("name", CLEAN)
def test_a_sound_variant_leaves_nothing_behind(name: str) -> None:
    """Nothing is found in any named variant that runs on a CPU, and nothing is left out."""
    found = reused_slot(LocalEngine(tiny.casts(), named_variant(name), name=name), BATTERY)
    assert (found.findings(), found.left_out) == ([], None)


PIECES = {"incremental": {}, "two rows": {}, "paged": {"prefix_cache": 2, "pages": 6},
          "paged together": {"prefix_cache": 2, "pages": 6, "fixed_rows": True}}  # fmt: skip


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("kind", PIECES)
def test_a_sound_execution_leaves_nothing_behind(kind: str, expanded: bool) -> None:
    """Rows together, pages, pieces and kept prefixes neither, with latents or expanded keys."""
    for execution in (KINDS[kind], replace(KINDS[kind], prefill_piece=4, **PIECES[kind])):
        found = asked(execution, expanded=expanded)
        assert (found.findings(), found.left_out) == ([], None)


FORGOTTEN = [("conv", "conv_state", 0), ("recurrent", "kda_state", 0), ("latent", "kv_cache", 1),
             ("keys", "mla_k", 1), ("values", "mla_v", 1)]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "store", "site", "layer"),
    [(kind, *row) for kind in ("incremental", "two rows") for row in FORGOTTEN]
    + [("recompute", *row) for row in FORGOTTEN[:3]],
)
def test_a_reset_that_forgets_a_store_is_named(
    kind: str, store: str, site: str, layer: int, monkeypatch: Monkey
) -> None:
    """Each store, whatever the execution that runs into the used slot."""
    monkeypatch.setattr(State, "reset", leaving(store))
    found = asked(KINDS[kind], expanded=store in ("keys", "values"))
    assert place(found) == (site, layer)
    assert "is not empty" in found.findings()[0].reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("store", "site"), [("conv", "conv_state"), ("recurrent", "kda_state")])
def test_the_first_layer_that_is_not_clean_is_named(kind: str, store: str, site: str, monkeypatch: Monkey) -> None:
    """A reset that forgets the last layer alone; a slot of a runner is taken again too."""
    monkeypatch.setattr(State, "reset", leaving(store, layers=[2]))
    assert place(asked(KINDS[kind])) == (site, 2)


@pytest.mark.parametrize("kind", PIECES)
def test_a_length_that_stays_is_told(kind: str, monkeypatch: Monkey) -> None:
    """A slot that still counts the tokens before it; that it then overflows is no crash."""

    def reset(state: State, slots: Sequence[int]) -> None:
        kept = list(state.length)
        RESET(state, slots)
        state.length = kept

    monkeypatch.setattr(State, "reset", reset)
    (finding,) = asked(KINDS[kind]).findings()
    assert "where fresh ones stand at" in finding.reason


def test_rows_that_run_together_are_all_reset(monkeypatch: Monkey) -> None:
    """A reset of the first slot's KDA state alone is right for one row and wrong for two."""
    right = State._set
    monkeypatch.setattr(State, "_set", lambda state, store, n, slots, x: right(state, store, n, slots[:1], x))
    assert place(asked(KINDS["two rows"])) == ("conv_state", 0)
    assert not asked(KINDS["incremental"]).findings()


@pytest.mark.parametrize("expanded", [False, True])
def test_pages_that_are_handed_out_again_are_clean(expanded: bool, monkeypatch: Monkey) -> None:
    """A runner whose pages are not cleared; the first page of a prompt is enough, latents come before keys."""
    monkeypatch.setattr(State, "clear_pages", lambda state, pages: None)
    assert place(asked(PAGED, expanded=expanded)) == ("kv_cache", 1)


def test_a_page_that_comes_later_is_clean(monkeypatch: Monkey) -> None:
    """The page that a sequence grows into at its second piece, stale beyond the end, where no logit shows it."""

    def grow(self: Scheduler, live: Live, tokens: int, *, preempt: bool) -> bool:
        monkeypatch.setattr(State, "clear_pages", (lambda state, pages: None) if live.table else CLEAR)
        return GROW(self, live, tokens, preempt=preempt)

    monkeypatch.setattr(Scheduler, "_grow", grow)
    found = asked(replace(PAGED, prefill_piece=4))
    assert place(found) == ("kv_cache", 1)
    assert "after 4 tokens a used slot does not hold what a fresh one does" in found.findings()[0].reason


def _rolled(pair: Pair) -> Pair:
    return pair[0].roll(1, -1), pair[1].roll(1, -1)


def test_logits_are_compared_too(monkeypatch: Monkey) -> None:
    """What is carried may be right and the output of a used state not: told, without a place."""
    resets: dict[State, int] = {}

    def reset(state: State, slots: Sequence[int]) -> None:
        resets[state] = resets.get(state, 0) + 1
        RESET(state, slots)

    def run(self: Model, tokens: Tensor, batch: Batch, state: State, phase: str) -> tuple[Pair, Pair]:
        last, every = RUN(self, tokens, batch, state, phase)
        return (_rolled(last) if resets[state] > 1 else last), every

    monkeypatch.setattr(State, "reset", reset)
    monkeypatch.setattr(Model, "_run", run)
    found = asked(tiny.INCREMENTAL)
    assert place(found) == (None, None)
    assert "logits in a used slot are not those in a fresh one" in found.findings()[0].reason


def test_what_differs_from_run_to_run_is_no_finding(monkeypatch: Monkey) -> None:
    """Where fresh slots differ from fresh slots nothing can be said of used ones, and that is recorded."""
    calls: list[str] = []

    def run(self: Model, tokens: Tensor, batch: Batch, state: State, phase: str) -> tuple[Pair, Pair]:
        calls.append(phase)
        last, every = RUN(self, tokens, batch, state, phase)
        return (last[0].roll(len(calls), -1), last[1].roll(len(calls), -1)), every

    monkeypatch.setattr(Model, "_run", run)
    found = asked(tiny.INCREMENTAL)
    assert not found.findings()
    assert found.record()["left_out"] == "two runs in fresh slots differ already"


def test_a_value_that_is_not_a_number_stays_no_difference(monkeypatch: Monkey) -> None:
    """NaN in fresh slots and NaN in used ones are the same; left in a slot it is a finding."""
    monkeypatch.setattr("variants.layers.next_state", lambda window, lengths, keep: window[:, -keep:] * torch.nan)
    assert not asked(tiny.INCREMENTAL).findings()
    monkeypatch.setattr(State, "reset", leaving("conv"))
    assert place(asked(tiny.INCREMENTAL)) == ("conv_state", 0)


def test_the_two_prompts() -> None:
    """The battery's longest and shortest; equal ones are cut; over pages the long one enters a second, if it may."""
    plain = named_variant("f32")
    one = Battery(prompts=[tiny.prompt(9), tiny.prompt(9)], continuations=[[1], [1]])

    def lengths(variant: Variant, of: Battery, longest: int = 512) -> list[int]:
        recipe = LocalEngine(tiny.casts(), variant, name="").recipe
        return [len(x) for x in two_lengths(of, recipe, longest)]

    assert lengths(plain, BATTERY) == [11, 5]
    assert lengths(plain, one) == [9, 4]
    paged = named_variant("paged_batch")
    assert lengths(paged, one) == [73, 9]
    assert lengths(paged, one, 40) == [40 - ANSWER, 9]
    assert lengths(replace(paged, execution=replace(paged.execution, pages=1)), one) == [64 - ANSWER, 9]


@pytest.mark.parametrize("kept", [None, "conv"])
def test_the_verdict_says_so(kept: str | None, monkeypatch: Monkey) -> None:
    """A store that a reset forgets was ROUNDING by every other instrument; the record says what was run."""
    if kept:
        monkeypatch.setattr(State, "reset", leaving(kept))
    golden, run = part_of(load_golden("gate"), prompts=2, tokens=2), shipped_engine("f32")
    reference = shipped_engine("bf16_engine").recipe
    question = Question(golden=golden, engine=run, casts=shipped(), declared=run.recipe, reference=reference, members=3)
    v = judge_run(question, run_gate(golden, run))[0]
    assert {f.instrument for f in v.findings} == ({INSTRUMENT} if kept else set())
    assert (v.run_class is RunClass.defect, v.site, v.layer) == (
        (True, "conv_state", 0) if kept else (False, None, None)
    )
    assert v.figures[INSTRUMENT] == {"tokens": [10, 5], "left_out": None}
    assert INSTRUMENT in v.instruments
