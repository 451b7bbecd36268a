"""A battery through the paged runner: the gate's tokens, scores and times, and what was watched."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_paged_state import incremental, made, variant
from tiny import build, prompt, ragged
from torch import Tensor

from experiments.explain import _recipe_text
from harness.engines.local import LocalEngine
from harness.local_replay import local_replay
from harness.localize import Spot
from harness.lockstep import walk
from harness.measure import summarize
from harness.observe import observe
from harness.op_capture import capture_op
from harness.op_file import read_capture, write_capture
from harness.op_replay import replay_op
from harness.probes import Against, Place, Tap
from variants.axes import Variant
from variants.decode import Sequences
from variants.dtypes import DType
from variants.model import Model
from variants.recipe import resolve
from variants.weights import Weights

LENGTHS = (17, 1, 20, 8)


def few() -> Variant:
    """So few pages that sequences give way."""
    return variant(prefill_piece=16, pages=9, block_size=4, batch=3)


def engine(v: Variant) -> LocalEngine:
    return LocalEngine(made(), v, name="tiny")


def test_the_gates_tokens_and_gaps_are_those_of_the_incremental_run() -> None:
    """Generated and teacher-forced, bit for bit, though sequences join, leave and give way."""
    v, prompts = few(), ragged(LENGTHS)
    paged, plain = engine(v), engine(incremental(v))
    a, b = paged.generate(prompts, 6), plain.generate(prompts, 6)
    assert np.array_equal(a.tokens, b.tokens)
    assert np.array_equal(a.gaps, b.gaps)
    forced = [[5, 6, 7], [8], [9, 10, 11, 12], [3, 4]]
    x, y = (e.score(prompts, forced, top_k=5, full_logits=True) for e in (paged, plain))
    assert x.logits is not None
    assert y.logits is not None
    assert np.array_equal(x.logits, y.logits, equal_nan=True)
    assert np.array_equal(x.top_ids, y.top_ids)
    assert x.forced == "decode"


def test_the_gate_says_what_was_planned_and_what_gave_way() -> None:
    """Notes hold the memory of both groups, preemptions, and where bits may follow the batch, where they may."""
    notes = engine(few()).generate(ragged(LENGTHS), 6).notes
    assert [n.split(":")[1].strip() for n in notes[:2]] == ["kda", "mla"]
    assert " 0 preemptions" not in notes[2]
    assert len(notes) == 3
    told = engine(replace(few(), batch_invariant=False)).generate(ragged(LENGTHS), 2).notes[-1]
    assert "gemm" in told


def test_an_end_token_ends_its_row() -> None:
    """What follows the end token is -1 and counts nowhere; rows that end early free their slots for others."""
    v = few()
    whole = engine(v).generate(ragged(LENGTHS), 6)
    eos = int(whole.tokens[0, 2])
    casts = made()
    casts.checkpoint = replace(casts.checkpoint, config=replace(casts.checkpoint.config, eos_token_id=eos))
    try:
        a, b = (engine(x).generate(ragged(LENGTHS), 6, stop_at_eos=True) for x in (v, incremental(v)))
    finally:
        casts.checkpoint = replace(casts.checkpoint, config=replace(casts.checkpoint.config, eos_token_id=2))
    assert np.array_equal(a.tokens, b.tokens)
    assert (a.tokens == -1).any()
    summarize(a)


def test_times_count_each_token_once() -> None:
    """Decode steps hold all tokens but the first of each prompt, one that runs again none; prefill is by prompt."""
    got = engine(few()).generate(ragged(LENGTHS), 6)
    assert got.decode_tokens[0].sum() == len(LENGTHS) * 5
    assert (got.decode_tokens[0] == 0).any()
    assert got.prefill_tokens.tolist() >= list(LENGTHS)
    timing = summarize(got)
    assert timing.prefill_tok_s.steps == len(LENGTHS)
    assert timing.idle_steps == int((got.decode_tokens[0] == 0).sum())
    assert timing.end_to_end_tok_s is not None
    shared = engine(variant(prefill_piece=16, block_size=4, batch=1, prefix_cache=1)).generate([prompt(20)] * 2, 2)
    assert shared.prefill_tokens.tolist() == [20, 4]


@pytest.mark.parametrize("invariant", [True, False])
def test_what_ran_is_watched_through_the_runner(invariant: bool) -> None:
    """Nothing contradicts the recipe; the passes name the rows and tokens of each product; other rows, other arm."""
    v = replace(variant(prefill_piece=16, batch=3), batch_invariant=invariant)
    seen = observe(resolve(v, made().checkpoint.config), made(), prompt(20))
    assert seen.contradictions == ()
    assert seen.as_dict()["passes"] == "prefill 1 x 16, prefill 1 x 4, decode 3 x 1"
    two = replace(v, execution=replace(v.execution, batch=2))
    assert observe(resolve(two, made().checkpoint.config), made(), prompt(20)).hash != seen.hash
    assert "passes" not in observe(resolve(incremental(v), made().checkpoint.config), made(), prompt(20)).as_dict()


def test_explain_names_where_bits_follow_the_batch() -> None:
    """A line of the recipe's text for each algorithm has its sites; batch-invariant it says nowhere."""
    config = made().checkpoint.config
    free, kept = (_recipe_text("x", resolve(replace(variant(), batch_invariant=b), config)) for b in (False, True))
    assert "\nbatch_dependent gemm: q_proj k_proj" in free
    assert "\nbatch_dependent: nowhere\n" in kept


def test_taps_and_replay_work_over_pages() -> None:
    """Each operation of a paged run again in float64: nothing is in excess, and the passes meet one by one."""
    recipe = resolve(variant("recurrent", "absorbed", prefill_piece=16, batch=2), made().checkpoint.config)
    exact, prompts = recipe.at_precision(DType.f64), ragged((20, 7))
    weights = Weights(made(), recipe.semantics)
    result = local_replay(
        lambda tap: Sequences(Model(made().checkpoint.config, recipe, weights, probe=tap), prompts, 3),
        lambda probe: Model(made().checkpoint.config, exact, weights, probe=probe),
        recipe,
        prompts,
        [[5, 6, 7], [8, 9, 10]],
    )
    assert ("kv_cache", 1, "decode") in result.errors
    assert ("kda_state", 2, "prefill") in result.errors
    assert not result.excess()


def test_pages_and_slots_differ_nowhere() -> None:
    """A paged and an incremental run of one arithmetic side by side: no value at any place differs in a bit."""
    v, met, tap = variant("chunk", "flash"), [], Tap()

    def compare(place: Place, mine: Tensor, theirs: Tensor) -> bool:
        met.append((place, torch.equal(mine, theirs)))
        return True

    models = [build(v, made(), probe=tap), build(incremental(v), made(), probe=Against(lambda: tap.calls, compare))]
    for _ in walk(models, [prompt(20)], [[5, 6, 7]]):
        pass
    assert all(same for _, same in met)
    assert {("mla_core", 1), ("kda_state", 2), ("lm_head", 3)} <= {place for place, _ in met}


@pytest.mark.parametrize("place", [("mla_core", 1), ("kda_core", 2), ("kv_b_proj", 1)])
def test_an_operation_of_a_paged_run_is_captured_and_runs_alone(place: tuple[str, int], tmp_path: Path) -> None:
    """Written, read and run again without pages: the output has the bits of the run."""
    recipe = resolve(variant(prefill_piece=16), made().checkpoint.config)
    weights = Weights(made(), recipe.semantics)
    spot = Spot(prompt=prompt(20), forced=(5, 6))
    taken = capture_op(lambda probe: Model(made().checkpoint.config, recipe, weights, probe=probe), spot, place)
    again = read_capture(write_capture(taken, tmp_path / "op"))
    assert again.recipe == recipe
    assert replay_op(again).bit_equal
