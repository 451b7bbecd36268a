"""Towards an engine: every rounding point once, alone and with those before it, from float32 to the whole of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from experiments.cli import main
from harness.calibration import of_recipe
from harness.compose import named_variant
from harness.golden import Golden
from harness.jitter import forced_logprobs
from harness.localize import Runner
from harness.toward import END, OPERANDS, POINTS, recipes, toward
from variants import decode
from variants.axes import Gemm, Store, Stream
from variants.dtypes import DType
from variants.errors import UsageError
from variants.model import PHASES, Model
from variants.recipe import Recipe, resolve
from variants.sites import ALL_SITES, places
from variants.weights import Casts, Weights

Captured = pytest.CaptureFixture[str]


def recipe(name: str) -> Recipe:
    return resolve(named_variant(name), tiny.ODD)


def changed_sites(a: Recipe, b: Recipe) -> set[str]:
    return {p[0] for p in places(tiny.ODD) for phase in PHASES if a.rule(*p, phase) != b.rule(*p, phase)}


def build(recipe: Recipe, made: Casts) -> Model:
    return Model(tiny.ODD, recipe, Weights(made, recipe.semantics))


def greedy(_: int, logits: torch.Tensor) -> torch.Tensor:
    return decode.greedy(logits)


def test_every_site_is_in_one_point_or_the_operand_of_a_product() -> None:
    """No rounding is left out and none is turned on twice."""
    named = [site for sites in POINTS.values() for site in sites]
    assert len(named) == len(set(named))
    assert set(named) | set(OPERANDS) == set(ALL_SITES)
    assert not set(named) & set(OPERANDS)


def test_the_way_leads_from_the_start_to_the_target() -> None:
    """First the start, then the target's own code path in float32, then each point that rounds; with all of them on,
    only operands that no longer change a value are left between the last step and the target."""
    start, target = recipe("f32"), recipe("bf16_engine")
    steps = list(recipes(start, target, tiny.ODD))
    assert steps[0][2] == start
    assert steps[1][2] == target.at_precision(DType.f32)
    assert steps[-1] == (END, True, target)
    names = [point for point, cumulative, _ in steps[2:-1] if cumulative]
    assert names == [p for p in POINTS if p in names]
    assert {"residual stream", "norms", "KDA core", "experts", "logits"} <= set(names)
    assert "inside chunks" not in names, "bf16_engine rounds nothing there"
    assert {p for p, cumulative, _ in steps if not cumulative} == set(names[1:]), "the first is alone as it is"
    last = next(r for p, c, r in reversed(steps) if p == names[-1] and c)
    assert changed_sites(last, target) <= set(OPERANDS)


def test_one_point_alone_changes_its_sites_and_no_other() -> None:
    """A row that says `alone` differs from the float32 code path at the sites of its point."""
    steps = list(recipes(recipe("f32"), recipe("bf16_engine"), tiny.ODD))
    base = steps[1][2]
    for point, cumulative, one in steps[2:-1]:
        changed = changed_sites(base, one)
        assert changed
        assert cumulative or changed <= set(POINTS[point])


def test_each_step_is_measured_and_the_last_is_the_target() -> None:
    """Against a golden that the target itself made: the distance ends at zero, with every token agreeing and the score
    inside what is expected of it; in float32 there is a distance."""
    made = tiny.casts()
    prompts = tuple(tuple(tiny.prompt(3 + n)) for n in range(2))
    target = resolve(tiny.plain(Stream.bf16, Gemm.bf16, logits=Store.bf16), tiny.ODD).with_execution(batch=2)
    chosen = torch.stack([decode.greedy(r.logits) for r in decode.steps(build(target, made), prompts, 3, greedy)], 1)
    golden = Golden(name="own", prompts=prompts, tokens=chosen.numpy().astype(np.int32)[None])
    own = forced_logprobs(of_recipe(target, made), made, golden, range(2))
    ids = np.argsort(-own, -1, kind="stable")[..., :5]
    golden = replace(golden, top_ids=ids.astype(np.int32), top_logprobs=np.take_along_axis(own, ids, -1))
    start = resolve(tiny.plain(Stream.f32, Gemm.f32), tiny.ODD)
    rows = list(toward(Runner(made), start, target, golden, members=2))
    assert rows[0].median_nats > 0
    assert (rows[-1].median_nats, rows[-1].forced, rows[-1].free, rows[-1].total) == (0, 6, 6, 6)
    assert all(r.expected is not None and r.inside is not None for r in rows)
    with pytest.raises(UsageError, match="has no logprobs"):
        list(toward(Runner(made), start, target, replace(golden, top_ids=None, top_logprobs=None)))


def test_a_target_without_a_rounding_of_its_own_is_refused() -> None:
    """There is no way to go."""
    with pytest.raises(UsageError, match="rounds nowhere more than float32"):
        list(recipes(recipe("f32"), recipe("f32"), tiny.ODD))


@pytest.mark.slow
def test_the_command_measures_every_step(capsys: Captured) -> None:
    """Under its two names: distance, tokens forced and free, and with members the interval beside the score."""
    words = ["limit=1", "max_tokens=2", "members=0", "device.threads=1"]
    assert main(["experiment=ladder_to_vllm", *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["point"] for r in rows[:2]] == ["float32", "the target's code path in float32"]
    assert rows[-1]["point"] == END
    assert all(r["median_nats"] > 0 and r["total"] == 2 and r["forced"] <= 2 for r in rows)
    assert len({r["median_nats"] for r in rows}) > 5, "points move the logprobs"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["engine=transformers"], "engine=transformers has none"),
        (["members=1", "limit=1", "max_tokens=1"], "members=1: expected 0, or 2 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(words: list[str], said: str, capsys: Captured) -> None:
    """One line, exit code 2."""
    assert main(["ladder-to-vllm", *words]) == 2
    assert said in capsys.readouterr().err
