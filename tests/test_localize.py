"""Bisect: minimal sets, the recipe between two recipes, planted differences found at their place, forwards counted."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from experiments.cli import main
from harness import localize
from harness.ddmin import ddmin, is_one_minimal
from harness.first_difference import first_difference
from harness.ledger import Ledger
from harness.localize import Exchange, Runner, Spot, first_token, forced_along, minimal_flip, rows_to, token_of
from harness.lockstep import walk
from harness.mixing import NOWHERE, by_site, differing_places, mixed
from variants.axes import (
    Execution,
    ExecutionAxes,
    Gemm,
    KvNormEps,
    NormAxes,
    Param,
    ParamAxes,
    SiteOverride,
    Store,
    Stream,
    Variant,
)
from variants.errors import UsageError
from variants.model import Model
from variants.recipe import Recipe, resolve
from variants.sites import places
from variants.weights import Casts, Weights

# A larger vocabulary than the other tests': best tokens lie closer, so a few dozen tokens hold one that turns.
CONFIG = replace(tiny.ODD, vocab_size=2003)
F32 = tiny.plain(Stream.f32, Gemm.f32)
SPOT = Spot(prompt=tiny.prompt(9, seed=0, vocab=2003), forced=tiny.prompt(40, seed=100, vocab=2003)[:25])
SHORT = replace(SPOT, forced=SPOT.forced[:3])
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made() -> Casts:
    return tiny.casts(CONFIG)


def recipe(variant: Variant) -> Recipe:
    return resolve(variant, CONFIG)


def rounded(**layers: tuple[int, ...]) -> Recipe:
    """F32 with the values of some sites rounded to bf16 at some layers: a difference that is planted."""
    return recipe(replace(F32, override={s: SiteOverride(output=Store.bf16, layers=n) for s, n in layers.items()}))


@pytest.mark.parametrize("needed", [{5}, {0, 19}, {3, 4, 5, 6}, {1, 8, 13}, set(range(20))], ids=str)
def test_ddmin_finds_what_a_monotone_property_needs(needed: set[int]) -> None:
    """Exactly the needed items of 20, in their order, in fewer tries than the 2^20 subsets or a try of every pair."""
    tried: list[frozenset[int]] = []

    def holds(items: frozenset[int]) -> bool:
        tried.append(items)
        return needed <= items

    assert ddmin(range(20), holds) == tuple(sorted(needed))
    assert len(set(tried)) < 20 * 19 // 2


@pytest.mark.parametrize("seed", range(30))
def test_ddmin_is_one_minimal_whatever_the_property(seed: int) -> None:
    """Of properties drawn by a coin for each set, true of all, false of none: it holds, with one fewer it does not."""

    def holds(items: frozenset[int]) -> bool:
        coin = random.Random(hash((seed, *sorted(items)))).random() < 0.3
        return len(items) == 9 or (coin and len(items) > 0)

    found = ddmin(range(9), holds)
    assert holds(frozenset(found))
    assert not any(holds(frozenset(found) - {x}) for x in found)
    assert is_one_minimal(found, holds)


def test_one_minimality_is_refused_to_a_set_with_a_spare_item() -> None:
    """A set that holds without one of its items, and one that does not hold, are not 1-minimal."""
    assert not is_one_minimal([1, 2, 3], lambda items: {1, 2} <= items)
    assert not is_one_minimal([1], lambda items: 2 in items)
    assert is_one_minimal([1, 2], lambda items: {1, 2} <= items)


OTHER = replace(
    tiny.plain(Stream.bf16, Gemm.bf16, execution=ExecutionAxes(mode=Execution.recompute)),
    norm=NormAxes(kv_eps=KvNormEps.eps_1e6),
    params=ParamAxes(a_log=Param.bf16, weights=Param.bf16),
    fused_projections=True,
)


def test_all_places_together_are_the_other_recipe() -> None:
    """Every rule, the semantics, the execution and the settings; none of them leaves the recipe as it is."""
    a, b = recipe(F32), recipe(OTHER)
    found = differing_places(a, b, CONFIG)
    whole = mixed(a, b, found)
    for place in places(CONFIG):
        for phase in ("prefill", "decode"):
            assert whole.rule(*place, phase) == b.rule(*place, phase)
    assert replace(whole, rules={}, exceptions={}) == replace(b, rules={}, exceptions={})
    assert mixed(a, b, []) == a
    assert {name for name, layer in found if layer == NOWHERE} == {
        "kv_norm_eps", "bf16_A_log", "bf16_weight", "execution.mode", "fused_projections", "embed",
    }  # fmt: skip


def test_each_place_changes_what_it_names_and_nothing_else() -> None:
    """One place exchanged leaves every other place to be exchanged still, and itself not."""
    a, b = recipe(F32), recipe(OTHER)
    found = differing_places(a, b, CONFIG)
    for place in found:
        assert set(differing_places(mixed(a, b, [place]), b, CONFIG)) == set(found) - {place}


@pytest.mark.parametrize("mode", Execution)
def test_the_spot_has_the_bits_of_a_walk(made: Casts, mode: Execution) -> None:
    """Logits at the spot are those of walking along every token, carried or run again."""
    one = recipe(replace(F32, execution=ExecutionAxes(mode=mode)))
    model = Model(CONFIG, one, Weights(made, one.semantics))
    *_, last = walk([model], [SPOT.prompt], [[*SPOT.forced, 0]])
    assert torch.equal(forced_along(rows_to(model, SPOT), SPOT), last.logits[0])
    assert torch.equal(Runner(made).logits(one, SPOT), last.logits[0][0])


@pytest.mark.parametrize(
    ("planted", "site", "layer"),
    [({"short_conv": (0,)}, "short_conv", 0), ({"o_proj": (1,)}, "o_proj", 1), ({"combine": (2,)}, "combine", 2)],
    ids=str,
)
def test_first_difference_is_where_it_was_planted(made: Casts, planted: dict, site: str, layer: int) -> None:
    """A rounding at one site of one layer: the first value that differs lies there, and rounding explains it all."""
    first = first_difference(Runner(made), recipe(F32), rounded(**planted), SHORT)
    assert first.at_all is not None
    assert (first.at_all.site, first.at_all.layer, first.at_all.step) == (site, layer, 0)
    assert 1e-4 < first.at_all.relative < 2**-8
    assert (first.beyond, first.function) == ((), ())


def test_a_difference_of_function_is_told_from_rounding(made: Casts) -> None:
    """kv_a_layernorm's eps and A_log in bf16 are named at float64, hidden or not by the roundings of a bf16 run.

    bf16 rounds away an eps off by 1e-5; it does not hide A_log, whose gate is computed in float32.
    """
    meant = {"norm": NormAxes(kv_eps=KvNormEps.eps_1e6), "params": ParamAxes(a_log=Param.bf16)}
    first = first_difference(Runner(made), recipe(F32), recipe(tiny.plain(Stream.bf16, Gemm.bf16, **meant)), SHORT)
    assert [(e.site, e.layer) for e in first.function] == [("decay_gate", 0), ("kv_a_norm", 1), ("decay_gate", 2)]
    assert all(e.ratio > 1e3 for e in first.function)
    assert {e.site for e in first.beyond} == {"decay_gate"}


def test_a_prompt_in_pieces_is_compared_piece_by_piece(made: Casts) -> None:
    """Each piece of B meets the same piece of A: what differs in the last layer alone is found there."""
    a, b = (r.with_execution(prefill_piece=3) for r in (recipe(F32), rounded(combine=(2,))))
    assert len(SHORT.prompt) == 9  # pieces of one shape, which could pass for each other
    first = first_difference(Runner(made), a, b, SHORT)
    assert first.at_all is not None
    assert (first.at_all.site, first.at_all.layer, first.at_all.step) == ("combine", 2, 0)
    assert 1e-4 < first.at_all.relative < 2**-8


def test_no_value_differs_between_a_recipe_and_itself(made: Casts) -> None:
    """Nothing at all, and nothing to flip: both choose one token."""
    a = recipe(F32)
    assert first_difference(Runner(made), a, a, SHORT).at_all is None
    flip = minimal_flip(Runner(made), a, a, SHORT)
    assert (flip.minimal, flip.candidates, flip.complete) == ((), (), True)


def test_a_planted_place_is_the_minimal_set(made: Casts) -> None:
    """Two sites are rounded, one turns the token: that one alone is found, with margins on both sides of zero."""
    a, b = recipe(F32), rounded(mlp_residual=(0,), o_norm=(2,))
    flip = minimal_flip(Runner(made), a, b, SPOT, alone=True)
    assert flip.candidates == (("mlp_residual", 0), ("o_norm", 2))
    assert flip.minimal == (("mlp_residual", 0),)
    assert flip.alone == flip.minimal
    assert flip.one_minimal
    assert flip.complete
    assert flip.token_a != flip.token_b
    assert flip.margin_swapped is not None
    assert flip.margin_a > 0 > flip.margin_swapped
    assert flip.margin_b < 0


def test_a_set_among_many_places_flips_and_is_needed_whole(made: Casts) -> None:
    """Everything in bf16 against float32: the set turns the token in a model of its own, and no smaller part of it."""
    a, b = recipe(F32), recipe(tiny.plain(Stream.bf16, Gemm.bf16))
    spot = replace(SPOT, forced=SPOT.forced[:13])
    flip = minimal_flip(Runner(made), a, b, spot)
    assert flip.minimal
    assert len(flip.candidates) > 80
    assert flip.sets < len(flip.candidates)

    def chosen(swapped: tuple) -> int:
        one = mixed(a, b, swapped)
        return token_of(forced_along(rows_to(Model(CONFIG, one, Weights(made, one.semantics)), spot), spot)[0])

    assert chosen(flip.minimal) == flip.token_b == token_of(Runner(made).logits(b, spot))
    for place in flip.minimal:
        assert chosen(tuple(p for p in flip.minimal if p != place)) != flip.token_b


@pytest.mark.parametrize(("mode", "each"), [(Execution.incremental, 1 + len(SPOT.forced)), (Execution.recompute, 1)])
def test_forwards_are_counted(made: Casts, mode: Execution, each: int) -> None:
    """A set costs the prefill and a step for each forced token, or one pass; A and B themselves cost as much."""
    axes = {"execution": ExecutionAxes(mode=mode)}
    a = recipe(replace(F32, **axes))
    b = recipe(replace(F32, **axes, override={"o_norm": SiteOverride(output=Store.bf16)}))
    runner = Runner(made)
    flip = minimal_flip(runner, a, b, SPOT, alone=True)
    assert flip.forwards == (flip.sets + 2) * each
    assert runner.count.forwards == flip.forwards


def test_the_way_of_running_is_a_place(made: Casts) -> None:
    """Recompute against carried state with the state in bf16: execution is among the places, rules keep their phase."""
    a = recipe(replace(F32, execution=ExecutionAxes(mode=Execution.recompute)))
    b = recipe(replace(F32, kda=replace(F32.kda, state=Store.bf16)))
    exchange = Exchange(Runner(made), a, b, SHORT)
    assert exchange.candidates[0] == ("execution.mode", NOWHERE)
    assert torch.equal(exchange.swapped(exchange.candidates), exchange.logits_b)
    assert not torch.equal(exchange.swapped([("execution.mode", NOWHERE)]), exchange.logits_b)
    assert torch.equal(exchange.swapped([p for p in exchange.candidates if p[0] == "kda_state"]), exchange.logits_a)


def test_a_token_that_no_set_flips_is_said_so(made: Casts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the places that are known do not make B, the set is None and the run says that B is not complete."""
    monkeypatch.setattr(localize, "differing_places", lambda a, b, config: [("o_norm", 2)])
    flip = minimal_flip(Runner(made), recipe(F32), rounded(mlp_residual=(0,), o_norm=(2,)), SPOT)
    assert flip.minimal is None
    assert flip.margin_swapped is None
    assert not flip.one_minimal
    assert not flip.complete


def test_first_token_is_the_first_that_differs(made: Casts) -> None:
    """Prompt by prompt, position by position, as two loops over all of them find it; None for equal recipes."""
    a, b = recipe(F32), rounded(mlp_residual=(0,))
    prompts, tokens = [SHORT.prompt, SPOT.prompt], [list(SHORT.forced), [*SPOT.forced, 0]]
    runner = Runner(made)
    assert first_token(runner, a, b, prompts, tokens) == (1, 25)
    assert runner.count.forwards == 2 * (3 + 26)
    assert first_token(runner, a, a, prompts[:1], tokens[:1]) is None


def test_places_are_grouped_by_site() -> None:
    """All layers of a site together, sites in the order in which they come."""
    assert by_site([("b", 0), ("a", 0), ("b", 1)]) == {"b": [("b", 0), ("b", 1)], "a": [("a", 0)]}


def test_command_names_the_place_and_puts_it_on_record(tmp_path: Path, capsys: Captured) -> None:
    """On the shipped gate: a place of the first layers turns the first token that differs; the row holds it.

    Which token, and whether a place does so alone, follows the processor: its bf16 products have their own bits.
    """
    argv = ["bisect", "a=f64_islands", "b=device_kda", f"results={tmp_path}"]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    flip, minimal = document["flip"], document["flip"]["minimal"]
    assert len(document["place"]) == 2
    assert flip["token_a"] != flip["token_b"]
    assert flip["one_minimal"]
    assert {site for site, _ in minimal} <= {"q_l2norm", "k_l2norm", "kda_v", "kda_core"}  # what the axis rounds
    assert (flip["alone"] == []) == (len(minimal) > 1)
    assert document["first"]["at_all"]["site"] == "q_l2norm"
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert (row["experiment"], row["variant"], row["status"]) == ("bisect", "f64_islands", "ok")
    assert [row["verdict"]["site"], row["verdict"]["layer"]] in minimal
    assert row["detail"]["bisect"]["flip"] == document["flip"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["a=f32"], "b=NAME"),
        (["a=f32", "b=f32"], "the same arm"),
        (["a=f32", "b=f23"], "f23"),
        (["a=f32", "variant=bf16_stream", "b=oracle"], "both name the first"),
        (["a=f32", "b=oracle", "against=oracle"], "both name the second"),
        (["a=f32", "b=oracle", "token=[1]"], r"token=[1]"),
        (["a=f32", "b=oracle", "token=[8,0]"], "8 prompts"),
        (["a=f32", "b=oracle", "token=[0,16]"], "16 tokens"),
        (["a=f32", "b=oracle", "orders=5"], "orders= has no effect"),
        (["a=f32", "b=oracle", "shares=true", "token=[0,1]"], "token= has no effect"),
        (["a=f32", "b=oracle", "shares=true", "score=half"], "score=half"),
        (["engine=replay", "engine.folder=x", "b=f32"], "engine=replay has none"),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, capsys: Captured, argv: list[str], said: str) -> None:
    """Exit code 2 and the reason."""
    assert main(["bisect", *argv, f"results={tmp_path}"]) == UsageError.exit_code
    assert said in capsys.readouterr().err
