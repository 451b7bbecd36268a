"""The envelope: noise where a recipe rounds and nowhere else, and what stands out of it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from scipy import stats

from harness.calibration import alone, alone_logprobs, of_recipe
from harness.compose import named_variant
from harness.engines.assets import checkpoint_folder
from harness.engines.local import shared_casts
from harness.envelope import Envelope, envelope, model_maker
from harness.forced_errors import Battery, Party, errors_against
from harness.forced_values import LastTokens, ModelCandidate, layer_places
from harness.golden import load_golden
from harness.rounding_noise import PlaceNoise, RoundingNoise, last_place, member, noise_plan, stream, twin
from variants import decode
from variants.axes import Gemm, KdaAxes, KdaCore, MlaAxes, MlaCore, NormAxes, NormRounding, NormVariance, Store, Stream
from variants.dtypes import DType, ulp
from variants.errors import EngineError, UsageError
from variants.model import Model
from variants.recipe import Recipe, resolve
from variants.rounding import Step
from variants.weights import Casts, Weights

ODD = tiny.ODD
BF16 = tiny.plain(Stream.bf16, Gemm.bf16, norm=NormAxes(variance=NormVariance.stored), logits=Store.bf16)


@pytest.fixture(scope="module")
def odd() -> Casts:
    return tiny.casts()


@pytest.fixture(scope="module")
def shipped() -> Casts:
    return shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu")


def battery(rows: int = 3, tokens: int = 4, *, seed: int = 0) -> Battery:
    prompts = [tiny.prompt(3 + 2 * n, seed=seed + n) for n in range(rows)]
    return Battery(prompts=prompts, continuations=[tiny.prompt(tokens, seed=90 + seed + n) for n in range(rows)])


def patched(recipe: Recipe, casts: Casts, change: Callable[[Model], None]) -> ModelCandidate:
    """A recipe as a candidate whose model is changed after it was built."""

    def build(seen: LastTokens) -> Model:
        model = Model(casts.checkpoint.config, recipe, Weights(casts, recipe.semantics), probe=seen)
        change(model)
        return model

    return ModelCandidate(build, recipe.execution.batch)


def one_rounding(casts: Casts, site: str, layer: int) -> Recipe:
    """The oracle's recipe with one site of one layer rounded to bf16."""
    recipe = resolve(tiny.oracle(), casts.checkpoint.config)
    rounded = replace(recipe.rules[site], output=DType.bf16, storage=DType.f64)
    return replace(recipe, exceptions={(site, layer): rounded})


# --- the noise ---


def test_the_last_place_read_off_bits_is_the_ulp() -> None:
    """For zero, subnormal, huge and every ordinary size `last_place` is `ulp`, and its input stays."""
    x = torch.randn(5000, dtype=torch.float64) * torch.exp2(torch.randint(-140, 120, (5000,)).double())
    x[:4] = torch.tensor([0.0, -0.0, 2.0**-126, 1.0])
    before = x.clone()
    for dtype in (DType.bf16, DType.f16, DType.f32):
        assert torch.equal(last_place(x, dtype), ulp(x, dtype))
        narrow = x.float()
        assert torch.equal(last_place(narrow, dtype), ulp(narrow, dtype))
    assert torch.equal(x, before)


def test_noise_of_a_format_is_uniform_in_half_an_ulp_either_way() -> None:
    """No draw is beyond half a unit in the last place, their rms is ulp / sqrt(12), and two roundings add in square."""
    x = torch.full((200_000,), 1.5, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    one = (PlaceNoise((DType.bf16,)).add(x, random) - x) / 2.0**-7
    assert one.abs().max() <= 0.5
    assert stats.kstest(one.numpy() + 0.5, "uniform").pvalue > 0.01
    two = (PlaceNoise((DType.bf16, DType.bf16)).add(x, random) - x) / 2.0**-7
    assert float(two.pow(2).mean()) == pytest.approx(2 / 12, rel=0.02)


def test_one_rounding_gives_errors_there_and_none_before(odd: Casts) -> None:
    """With layer 1's output alone rounded, layer 0 is off by float64's sums and layer 1 by ulp / sqrt(12)."""
    recipe = one_rounding(odd, "mlp_residual", 1)
    found = envelope(recipe, odd, battery(), members=40, seed=0)
    assert (found.errors[:, 0] < 1e-13 * found.table.scale[0]).all()
    taps = LastTokens([("mlp_residual", 1)])
    model = Model(odd.checkpoint.config, twin(recipe), Weights(odd, recipe.semantics), probe=taps)
    decode.steps(model, battery().prompts, 1, lambda t, logits: None)
    step = ulp(taps.values(3)[("mlp_residual", 1)], DType.bf16).pow(2).mean(-1).sqrt() / 12**0.5
    first = [found.table.index(n, 0) for n in range(3)]
    assert found.rms[1, first] == pytest.approx(step.numpy(), rel=0.05)
    assert (found.errors[:, 2] > 0).all()


def test_a_value_that_already_fits_its_format_gets_no_noise(odd: Casts) -> None:
    """In a bf16 stream the operand of a product is bf16 already; in a float32 stream the same place rounds it."""
    for variant, rounds in ((BF16, False), (tiny.plain(Stream.f32, Gemm.bf16), True)):
        plan = noise_plan(resolve(variant, ODD), odd, tiny.prompt(5))(5)
        assert all(bool(plan[("attn_in", 0, phase)]) is rounds for phase in ("prefill", "decode"))
        assert plan[("q_proj", 0, "decode")].formats == (DType.bf16,)
        assert not plan[("embed", -1, "prefill")]


def test_roundings_in_a_row_are_draws_in_a_row(odd: Casts) -> None:
    """A norm that rounds before its weight too has two draws, and so have bf16 scores (product, scaling)."""
    variant = replace(
        BF16, norm=NormAxes(variance=NormVariance.stored, rounding=NormRounding.twice),
        mla=MlaAxes(prefill=MlaCore.dense_bf16, decode=MlaCore.dense_bf16),
    )  # fmt: skip
    plan = noise_plan(resolve(variant, ODD), odd, tiny.prompt(5))(5)
    assert plan[("input_norm", 1, "decode")].formats == (DType.bf16, DType.bf16)
    assert plan[("mla_scores", 1, "decode")].formats == (DType.bf16, DType.bf16)
    found = envelope(resolve(variant, ODD), odd, battery(), members=2, seed=0)
    assert np.isfinite(found.errors).all()  # keys that a query does not see stay at minus infinity


def test_fine_roundings_are_kept_only_before_the_first_coarse_one(odd: Casts) -> None:
    """float32 noise stands in a float32 recipe, and in one with a single bf16 site only as far as that site."""
    recipe = resolve(tiny.plain(Stream.f32, Gemm.f32), ODD)
    plan = noise_plan(recipe, odd, tiny.prompt(5))(5)
    assert plan[("mlp_residual", 2, "decode")]
    coarse = replace(recipe.rules["o_proj"], output=DType.bf16, storage=DType.f32)
    mixed = replace(recipe, exceptions={("o_proj", 1): coarse})
    plan = noise_plan(mixed, odd, tiny.prompt(5))(5)
    assert plan[("mlp_residual", 0, "decode")]
    assert plan[("o_proj", 1, "decode")].coarse
    assert not plan[("mlp_residual", 2, "decode")]


@pytest.mark.parametrize("execution", [tiny.INCREMENTAL, tiny.RECOMPUTE])
def test_a_products_noise_follows_the_rows_that_it_has_then(
    execution: tiny.ExecutionAxes, odd: Casts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill has as many rows as its prompt has tokens; a later step one, or the whole prefix where that runs again.

    The prompt that the variant is watched on has no say.
    """
    monkeypatch.setattr("harness.rounding_noise.product_units", lambda shape, rows, **_: float(rows))
    recipe = resolve(tiny.plain(Stream.f32, Gemm.f32, execution=execution), ODD)
    for watched in (3, 40):
        _, noise = member(recipe, odd, tiny.prompt(watched), seed=0)
        rows = []
        for step in (
            Step("prefill", (0, 1, 2), (0, 0, 0), (7, 8, 30)),
            Step("decode", (0, 1, 2), (15, 16, 38), (1,) * 3),
        ):
            noise.begin(step)
            rows.append(noise.plan["q_proj", 0, step.phase].internal / DType.f32.unit_roundoff)
        assert rows == [8, 32 if execution is tiny.RECOMPUTE else 1]


def test_a_member_runs_in_float32_where_all_is_coarse_from_the_first_layer_on(odd: Casts) -> None:
    """A bf16 stream does, with coarse noise alone; float32 code, or one coarse site late in it, needs float64.

    With the same draws the two envelopes of a bf16 recipe agree: float32's own rounding is nothing beside the noise.
    """
    recipe = resolve(BF16, ODD)
    cheap, noise = member(recipe, odd, tiny.prompt(5), seed=0)
    assert {r.accum for r in cheap.rules.values()} == {DType.f32}
    assert not any(n.fine for n in noise.plan.values())
    fine = resolve(tiny.plain(Stream.f32, Gemm.f32), ODD)
    late = replace(fine, exceptions={("o_proj", 1): replace(fine.rules["o_proj"], output=DType.bf16)})
    for other in (fine, late):
        assert {r.accum for r in member(other, odd, tiny.prompt(5), seed=0)[0].rules.values()} == {DType.f64}
    found = envelope(recipe, odd, battery(), members=40, seed=0)
    wide = RoundingNoise(noise.plan_at, seed=0)
    party = Party(ModelCandidate(model_maker(twin(recipe), odd, wide)), copies=40)
    drawn = (
        errors_against(
            of_recipe(twin(recipe), odd),
            {"m": party},
            battery(),
            found.places,
            begin=lambda g: wide.restart(stream(0, g)),
        )
        .parties["m"]
        .rms
    )
    apart = np.abs(found.levels(found.errors) - found.levels(drawn))
    assert apart.max() < 1e-2


TWINS = {
    "chunk": replace(BF16, kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=3)),
    "flash": tiny.plain(
        Stream.f32, Gemm.f32, mla=MlaCore.online_f32, kda=KdaCore.recurrent_gemv, execution=tiny.RECOMPUTE
    ),
    "absorbed": replace(BF16, mla=MlaAxes(prefill=MlaCore.absorbed, decode=MlaCore.absorbed, tile_k=4)),
    "invariant": replace(tiny.plain(Stream.f32, Gemm.f32), batch_invariant=True),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_the_recipes_function_in_float64(name: str, odd: Casts) -> None:
    """Whatever cores, chunks and tiles a recipe has, its twin's logits are the oracle's within float64's rounding."""
    recipe = resolve(TWINS[name], ODD)
    oracle = of_recipe(resolve(tiny.oracle(), ODD), odd)
    party = Party(of_recipe(twin(recipe), odd))
    table = errors_against(oracle, {"twin": party}, battery(), layer_places(ODD))
    assert (table.parties["twin"].rms <= 1e-12 * table.scale).all()


# --- members ---


def test_a_seed_is_a_stream_of_its_own_and_zero_is_one(odd: Casts) -> None:
    """The same seed gives the same bits, another seed others, seed 0 included; members of a run all differ."""
    recipe = resolve(BF16, ODD)
    runs = [envelope(recipe, odd, battery(), members=3, seed=seed).errors for seed in (0, 0, 1)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.isclose(runs[0], runs[2]).any()
    assert len(np.unique(runs[0][:, -1, 0])) == 3


def test_a_candidate_in_float64_is_at_the_floor(odd: Casts) -> None:
    """What differs from the oracle by the order of float64 sums alone is no error: its level is the floor's."""
    recipe = resolve(tiny.oracle(), ODD)
    found = envelope(recipe, odd, battery(), members=2, seed=0, candidates={"same": of_recipe(recipe, odd)})
    errors = found.table.parties["same"].rms[0]
    assert np.array_equal(found.levels(errors), found.levels(np.zeros_like(errors)))
    assert (found.excess(errors) == 0).all()


def test_the_excess_is_the_mean_over_positions_of_the_log_ratio(odd: Casts) -> None:
    """Errors twice the envelope everywhere have an excess of ln 2 at every place, whatever the positions' sizes."""
    found = envelope(resolve(BF16, ODD), odd, battery(), members=3, seed=0)
    assert found.excess(2 * found.rms) == pytest.approx(np.full(4, np.log(2)), abs=1e-12)


@pytest.mark.parametrize("prompts", [1, 2])
def test_p_values_are_uniform_for_members_against_members(odd: Casts, prompts: int) -> None:
    """Of many small envelopes each first member has a uniform p among the others; with errors twice as large not.

    Kolmogorov-Smirnov at 1 %, against p from below: a battery of few prompts may only give a p that is too large.
    """
    recipe, p, planted = resolve(BF16, ODD), [], []
    for n in range(40):
        found = envelope(recipe, odd, battery(prompts, 2, seed=10 * (n % 6)), members=9, seed=n)
        rest = replace(found, errors=found.errors[1:])
        p.append(alone(rest, found.errors[0]).p.min())
        planted.append(alone(rest, 2 * found.errors[0]).p.min())
    assert stats.kstest(p, "uniform", alternative="greater").pvalue > 0.01
    assert stats.kstest(planted, "uniform", alternative="greater").pvalue < 0.01


def test_levels_are_prompt_by_prompt_and_members_are_about_nothing(odd: Casts) -> None:
    """A prompt's level is its mean ln(error), over its first tokens where asked; the members' shifts add up to 0."""
    found = envelope(resolve(BF16, ODD), odd, battery(), members=4, seed=0)
    mine = [found.table.index(1, t) for t in range(2)]
    by_hand = np.log(found.errors[2][:, mine]).mean(-1)
    assert found.levels(found.errors[2], 2)[1] == pytest.approx(by_hand)
    assert sum(found.shifts(e) for e in found.errors) == pytest.approx(np.zeros((3, 4)), abs=1e-12)
    assert found.shifts(2 * found.errors[0]) == pytest.approx(found.shifts(found.errors[0]) + np.log(2))
    assert found.leave_one_out()[0] == pytest.approx(
        found.levels(found.errors[0]) - found.levels(found.errors[1:]).mean(0)
    )


def test_sigma_is_the_spread_of_the_difference_of_two_tokens(odd: Casts) -> None:
    """It is the rms over members of the error of logit a minus logit b, the same either way round, 0 for a and a."""
    watch = np.tile(np.array([5, 11, -1]), (3, 4, 1))
    base = battery()
    one = Battery(prompts=base.prompts, continuations=base.continuations, watch=watch)
    found = envelope(resolve(BF16, ODD), odd, one, members=6, seed=0)
    p = found.table.index(1, 2)
    columns = [found.table.column(p, token) for token in (5, 11)]
    by_hand = found.deviations[:, p, columns[0]] - found.deviations[:, p, columns[1]]
    assert found.sigma(1, 2, 5, 11) == pytest.approx(float(np.sqrt((by_hand**2).mean())))
    assert found.sigma(1, 2, 11, 5) == found.sigma(1, 2, 5, 11) > 0
    assert found.sigma(1, 2, 5, 5) == 0
    unseen = next(t for t in range(67) if t not in found.table.ids[p])
    with pytest.raises(UsageError, match=f"token {unseen} was not watched"):
        found.sigma(1, 2, 5, unseen)


def test_logprobs_alone_are_judged_on_the_tokens_that_are_known(odd: Casts) -> None:
    """A member's own logprobs, half of them unknown, shift as the members do on the same tokens; five times, by ln 5.

    A prompt of which nothing is known is left out, and a position of which nothing is known does not count.
    """
    found = envelope(resolve(BF16, ODD), odd, battery(), members=5, seed=0)
    given = found.deviations[0].copy()
    given[:, 4:] = np.nan
    levels = np.log(np.sqrt((found.deviations[:, :, :4] ** 2).mean(-1)))
    by_hand = levels[0].reshape(3, 4).mean(-1) - levels.reshape(5, 3, 4).mean(-1).mean(0)
    assert found.logprob_shifts(given)[:, 0] == pytest.approx(by_hand)
    assert found.logprob_shifts(5 * given) == pytest.approx(found.logprob_shifts(given) + np.log(5))
    assert alone_logprobs(found, given).p.min() > 0.01
    given[4:8] = np.nan
    assert found.logprob_shifts(given).shape == (2, 1)
    given[1] = np.nan
    assert found.known_tokens(given) == 3


# --- the walk ---


def test_a_site_on_demand_is_walked_and_one_without_a_value_a_token_is_refused(odd: Casts) -> None:
    """The router's values come as tokens in a row and are taken apart; a state has no value for each token."""
    recipe = resolve(BF16, ODD)
    found = envelope(recipe, odd, battery(), members=2, seed=0, sites=(("router", 1), ("o_proj", 0)))
    assert found.places[-2:] == (("router", 1), ("o_proj", 0))
    assert (found.errors[:, -2:] > 0).all()
    with pytest.raises(UsageError, match="kda_state"):
        envelope(recipe, odd, battery(), members=2, seed=0, sites=(("kda_state", 0),))


def test_rows_end_where_their_tokens_end_and_come_in_order(odd: Casts) -> None:
    """Positions are those of the forced tokens, by prompt, however the prompts were grouped by length."""
    prompts = [tiny.prompt(9), tiny.prompt(2), tiny.prompt(5)]
    ragged = Battery(prompts=prompts, continuations=[[5, 6, 7], [8], [9, 10]])
    found = envelope(resolve(BF16, ODD), odd, ragged, members=40, seed=0)  # one prompt a group
    assert found.table.positions.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [2, 1]]


@pytest.mark.parametrize("execution", [tiny.INCREMENTAL, tiny.RECOMPUTE])
def test_a_candidates_values_are_its_own_run(execution: object, odd: Casts) -> None:
    """Errors of logits, by hand from a forced run of candidate and oracle, are those of the walk; batch 1 and all."""
    recipe = resolve(replace(BF16, execution=execution), ODD)
    one = battery()
    found = envelope(recipe, odd, one, members=2, seed=0, candidates={"c": of_recipe(recipe, odd)})
    oracle = twin(recipe)
    for n, (prompt, tokens) in enumerate(zip(one.prompts, one.continuations, strict=True)):
        both = []
        for r in (recipe, oracle):
            model = Model(ODD, r, Weights(odd, r.semantics))
            runs = decode.steps(model, [prompt], len(tokens), lambda t, _, tokens=tokens: torch.tensor([tokens[t]]))
            both.append(torch.stack([run.logits[0].double() for run in runs]))
        by_hand = (both[0] - both[1]).pow(2).mean(-1).sqrt()
        walked = [found.table.parties["c"].rms[0, found.head, found.table.index(n, t)] for t in range(len(tokens))]
        assert walked == pytest.approx(by_hand.numpy(), rel=1e-9)  # the oracle's sums run in another batch


def test_a_value_that_is_not_finite_is_named(odd: Casts) -> None:
    """An infinity in one layer ends the walk with the candidate's name, the site and the place."""
    recipe = resolve(BF16, ODD)

    def break_it(model: Model) -> None:
        for phase in model.phases.values():
            phase.layers[1].attention.scale = float("nan")

    with pytest.raises(EngineError, match=r"broken: a value is not finite at mlp_residual, layer 1, p0\[0\]"):
        envelope(recipe, odd, battery(), members=2, seed=0, candidates={"broken": patched(recipe, odd, break_it)})


def test_no_member_is_refused(odd: Casts) -> None:
    """An envelope of nothing would explain nothing."""
    with pytest.raises(UsageError, match="0 members"):
        envelope(resolve(BF16, ODD), odd, battery(), members=0)


# --- on the shipped checkpoint ---


def scale_128(model: Model) -> None:
    """The scale of the key's width without its position part, a classic, in layer 3."""
    for phase in model.phases.values():
        phase.layers[3].attention.scale = 128**-0.5


@pytest.fixture(scope="module")
def gate() -> Battery:
    return Battery.of(load_golden("gate")).part(range(4), 8)


def judged(name: str, casts: Casts, one: Battery) -> Envelope:
    recipe = resolve(named_variant(name), casts.checkpoint.config)
    parties = {"same": of_recipe(recipe, casts), "planted": patched(recipe, casts, scale_128)}
    return envelope(recipe, casts, one, members=6, seed=0, candidates=parties)


@pytest.mark.parametrize(("name", "lifted"), [("bf16_stream", 0.5), ("f32", 9.0)])
def test_correct_code_is_inside_and_a_wrong_scale_outside(
    name: str, lifted: float, shipped: Casts, gate: Battery
) -> None:
    """A correct variant is within 0.45 of its members at every layer; a wrong scale in layer 3 stands out from there.

    0.45 is three times the spread of a bf16 member over these 32 positions. For float32 it also says that `INTERNAL`
    is right: without its products alone float32 would be 0.6 too high.
    """
    found = judged(name, shipped, gate)
    same, planted = (found.table.parties[k].rms[0] for k in ("same", "planted"))
    assert np.abs(found.shifts(same).mean(0)).max() < 0.45
    assert found.excess(planted)[3] > lifted
    assert (found.excess(planted)[3:] > found.excess(same)[3:] + 0.3).all()
    assert alone(found, planted).p[3] < 0.05
    assert np.array_equal(found.excess(planted)[:3], found.excess(same)[:3])
