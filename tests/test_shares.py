"""Shares of a difference: exact on games whose answer is known, honest about sampling, and only over what can run."""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from experiments.cli import main
from harness.axis_sets import Allowed, differing_axes, mixed_variant
from harness.compose import groups, named_variant
from harness.golden import Golden
from harness.localize import Runner
from harness.matched import matched
from harness.shares import shares
from variants import decode
from variants.axes import ExecutionAxes, Gemm, KdaCore, Stream, Variant
from variants.errors import UsageError
from variants.model import Model
from variants.recipe import resolve

Axes = frozenset[str]
Captured = pytest.CaptureFixture[str]
WEIGHTS = {"a": 3.0, "b": -1.0, "c": 0.0, "d": 5.5, "e": 2.0, "f": -4.0}


def additive(axes: Axes) -> float:
    return 7.0 + sum(WEIGHTS[x] for x in axes)


@pytest.mark.parametrize("orders", [720, 5])
def test_an_additive_game_is_shared_exactly(orders: int) -> None:
    """Each change adds its own weight whatever else is there: shares are the weights, in all orders or in five."""
    found = shares(tuple(WEIGHTS), additive, orders=orders)
    assert {s.axis: s.share for s in found.shares} == WEIGHTS
    assert {s.error for s in found.shares} == {0.0}
    assert (found.before, found.after, found.exact) == (7.0, 12.5, orders == 720)


def gloves(axes: Axes) -> float:
    """One left glove (l), two right ones (r, s): a pair is worth 1."""
    return float("l" in axes and bool(axes & {"r", "s"}))


def test_the_glove_game_has_its_known_shares() -> None:
    """2/3 to the one that is scarce, 1/6 to each of the two that stand in for each other."""
    found = {s.axis: s.share for s in shares(("l", "r", "s"), gloves).shares}
    assert found == pytest.approx({"l": 2 / 3, "r": 1 / 6, "s": 1 / 6}, abs=1e-15)


def interacting(axes: Axes) -> float:
    return additive(axes) + 3.0 * ({"a", "b"} <= axes) - 2.0 * ({"c", "d", "e"} <= axes)


def test_a_sample_is_as_near_as_its_error_says() -> None:
    """Of 60 seeded samples, two standard errors cover the exact share about as often as they promise."""
    exact = {s.axis: s.share for s in shares(tuple(WEIGHTS), interacting, orders=720).shares}
    assert exact["a"] == pytest.approx(4.5)
    assert exact["d"] == pytest.approx(5.5 - 2 / 3)
    covered = [
        abs(s.share - exact[s.axis]) <= 2 * s.error
        for seed in range(60)
        for s in shares(tuple(WEIGHTS), interacting, orders=40, seed=seed).shares
        if s.error > 0
    ]
    assert len(covered) > 250
    assert 0.9 < np.mean(covered) < 0.99


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shares_sum_to_the_difference(seed: int) -> None:
    """In a sample too, and the same seed draws the same orders."""
    found = shares(tuple(WEIGHTS), interacting, orders=9, seed=seed)
    assert math.fsum(s.share for s in found.shares) == pytest.approx(found.after - found.before, abs=1e-12)
    assert found == shares(tuple(WEIGHTS), interacting, orders=9, seed=seed)


def test_each_set_is_scored_once() -> None:
    """64 sets for six axes and all their orders."""
    asked: list[Axes] = []

    def value(axes: Axes) -> float:
        asked.append(axes)
        return additive(axes)

    found = shares(tuple(WEIGHTS), value, orders=720)
    assert len(asked) == len(set(asked)) == found.evaluated == 64


def test_only_orders_that_can_run_count() -> None:
    """b needs a: of six orders the three with a first count, and no score of a set that cannot run is asked for."""

    def value(axes: Axes) -> float:
        assert "b" not in axes or "a" in axes
        return float(len(axes) + ({"b", "c"} <= axes))

    found = shares(("a", "b", "c"), value, allowed=lambda axes: "b" not in axes or "a" in axes)
    gains = {"a": [1, 1, 1], "b": [1, 1, 2], "c": [2, 1, 1]}  # a b c, a c b, c a b
    expected = {name: float(np.mean(values)) for name, values in gains.items()}
    expected |= {"b": (1 + 2 + 2) / 3, "c": (2 + 1 + 1) / 3}
    assert {s.axis: s.share for s in found.shares} == pytest.approx(expected)
    assert (found.orders, found.acceptance) == (3, 0.5)


@pytest.mark.parametrize("axes", ["abc", "abcdefgh"])
def test_changes_that_cannot_be_made_one_at_a_time_are_refused(axes: str) -> None:
    """Every first step is refused: a usage error, not an empty mean."""
    with pytest.raises(UsageError, match="one at a time"):
        shares(tuple(axes), lambda axes: 0.0, allowed=lambda s: len(s) == len(axes))


@pytest.mark.parametrize(("axes", "orders", "said"), [("", 24, "same axes"), ("ab", 1, "orders=1")])
def test_nothing_to_share_and_too_few_orders_are_refused(axes: str, orders: int, said: str) -> None:
    """One line each."""
    with pytest.raises(UsageError, match=said):
        shares(tuple(axes), lambda axes: 0.0, orders=orders)


def test_pairs_of_named_variants_can_be_shared() -> None:
    """All axes together make the other variant, none this one, and at least one order of single changes can run; of
    all the pairs a drawn part."""
    named = {name: named_variant(name) for name in groups()["variant"]}
    pairs = list(itertools.permutations(named.items(), 2))
    for (x, a), (y, b) in random.Random(0).sample(pairs, 60):
        axes = differing_axes(a, b)
        assert mixed_variant(a, b, axes) == b, (x, y)
        assert mixed_variant(a, b, ()) == a
        allowed = Allowed(lambda s, a=a, b=b: mixed_variant(a, b, s))
        found = shares(axes, lambda s: float(len(s)), allowed=allowed, orders=2)
        assert [s.share for s in found.shares] == [1.0] * len(axes), (x, y)


def test_a_core_is_one_axis() -> None:
    """Its phases and sizes go together, so that a recompute variant is never asked to decode unlike it prefills."""
    a = Variant()
    b = replace(a, kda=replace(a.kda, prefill=KdaCore.chunk, decode=KdaCore.chunk, chunk_size=16))
    assert differing_axes(a, b) == ("kda.core",)
    assert differing_axes(a, a) == ()


def test_refusals_are_kept_with_their_reason() -> None:
    """norm.variance needs a stream that rounds; the set without it is refused, and asked about once."""
    a, b = named_variant("f32"), named_variant("bf16_stream")
    allowed = Allowed(lambda s: mixed_variant(a, b, s))
    assert not allowed(frozenset(["norm.variance"]))
    assert allowed(frozenset(["norm.variance", "stream"]))
    assert "does not round the sum" in allowed.refusals[frozenset(["norm.variance"])]


def golden(tokens: list[list[int]]) -> Golden:
    prompts = tuple(tuple(p) for p in tiny.ragged([5, 3, 7]))
    return Golden(name="tiny", prompts=prompts, tokens=np.array([tokens], np.int32))


@pytest.mark.parametrize(("batch", "forwards"), [(1, 12 + 10), (2, 8 + 6), (3, 4 + 4)])
def test_matched_counts_what_a_loop_counts(batch: int, forwards: int) -> None:
    """Forced and free, for prompts of different lengths and a row that ends early, in batches of any size."""
    made = tiny.casts()
    variant = tiny.plain(Stream.f32, Gemm.f32, batch_invariant=True)
    recipe = resolve(replace(variant, execution=replace(tiny.INCREMENTAL, batch=batch)), tiny.ODD)
    model = tiny.build(variant, made)
    prompts = tiny.ragged([5, 3, 7])
    free = [greedy(model, p, 4) for p in prompts]
    wanted = [[*free[0]], [free[1][0], (free[1][1] + 1) % 67, *free[1][2:]], [*free[2][:2], -1, -1]]
    forced = [sum(greedy(model, [*p, *row[:t]], 1)[0] == row[t] for t in range(4) if row[t] >= 0)
              for p, row in zip(prompts, wanted, strict=True)]  # fmt: skip
    runner = Runner(made)
    assert matched(runner, recipe, golden(wanted), free=True) == 4 + 3 + 2
    assert matched(runner, recipe, golden(wanted), free=False) == sum(forced)
    assert runner.count.forwards == forwards  # free, then forced: a batch runs as long as its longest row


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        (logits,) = decode.single_pass(model, [[*prompt, *out]], [[0]])
        out.append(int(logits[0].argmax()))
    return out


def test_command_shares_a_difference(tmp_path: Path, capsys: Captured) -> None:
    """Two axes of the shipped variants on a small battery: shares sum to the difference, and say what ran."""
    arms = ["variant=incremental_chunk", "variant.logits=bf16", "against=incremental_recurrent"]
    argv = ["bisect", *arms, "shares=true", "limit=2", "max_tokens=3", f"results={tmp_path}"]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {s["axis"] for s in document["shares"]["shares"]} == {"kda.core", "logits"}
    assert document["shares"]["exact"]
    assert document["shares"]["after"] - document["shares"]["before"] == sum(
        s["share"] for s in document["shares"]["shares"]
    )
    assert document["forwards"] == 4 * 2 * 3
    assert main(argv) == 0
    assert "every order that can run" in capsys.readouterr().out


def test_execution_axes_are_axes() -> None:
    """Mode and batch are named one by one."""
    a = tiny.plain(Stream.f32, Gemm.f32)
    b = replace(a, execution=ExecutionAxes(batch=4))
    assert differing_axes(a, b) == ("execution.mode", "execution.batch")
