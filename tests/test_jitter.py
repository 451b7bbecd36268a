"""The jitter floor: what is moved, what is not, and that a missing rounding point stands out of it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from experiments.cli import main
from harness.calibration import of_recipe
from harness.compose import named_variant
from harness.engines.assets import checkpoint_folder
from harness.engines.local import shared_casts
from harness.engines.logits import log_softmax
from harness.forced_errors import Battery
from harness.forced_values import layer_places
from harness.gate import part_of
from harness.golden import Golden, load_golden
from harness.jitter import Distance, distance, forced_logprobs, jitter_floor, jittered, jittered_candidate
from harness.rounding_points import rounding_points, without_one
from variants.axes import Gemm, NormAxes, NormRounding, NormVariance, Store, Stream
from variants.dtypes import DType
from variants.errors import UsageError
from variants.recipe import difference, resolve
from variants.weights import Casts

ODD = tiny.ODD
BF16 = resolve(tiny.plain(Stream.bf16, Gemm.bf16, norm=NormAxes(variance=NormVariance.stored), logits=Store.bf16), ODD)
SHORT = Battery(
    prompts=[tiny.prompt(3 + n) for n in range(6)], continuations=[tiny.prompt(2, seed=n) for n in range(6)]
)
F32 = resolve(tiny.plain(Stream.f32, Gemm.f32), ODD)


@pytest.fixture(scope="module")
def odd() -> Casts:
    return tiny.casts()


@pytest.fixture(scope="module")
def shipped() -> Casts:
    return shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu")


@pytest.fixture(scope="module")
def golden() -> Golden:
    """Four prompts with forced tokens, one of them ending early, and no logprobs."""
    tokens = np.array([[tiny.prompt(5, seed=n) for n in range(4)]], dtype=np.int32)
    tokens[0, 2, 3:] = -1
    return Golden(name="tiny", prompts=tuple(tuple(tiny.prompt(3 + n)) for n in range(4)), tokens=tokens)


SAME = Distance(
    positions=18, median=0.0, rms=0.0, token_median=0.0, token_rms=0.0, full_median=0.0, full_rms=0.0, argmax_changes=0
)


def with_logprobs(golden: Golden, logprobs: np.ndarray, k: int = 5) -> Golden:
    ids = np.argsort(-logprobs, -1, kind="stable")[..., :k]
    values = np.take_along_axis(logprobs, ids, -1)
    return replace(golden, top_ids=ids.astype(np.int32), top_logprobs=values)


def test_jitter_keeps_every_rounding_point(odd: Casts) -> None:
    """A jittered recipe differs from its own in the sum of narrow products alone: what is rounded to what stays."""
    changed = difference(BF16, jittered(BF16))
    assert changed
    assert all((row["field"], row["a"], row["b"]) == ("accum", "bf16", "f32") for row in changed)
    assert difference(F32, jittered(F32)) == []


def test_a_variant_is_nearer_to_itself_the_less_it_is_jittered(odd: Casts, golden: Golden) -> None:
    """In float32 the floor falls with the jitter down to float32's last place; no jitter at all is refused."""
    floors = [jitter_floor(F32, odd, golden, relative=r).itself for r in (1e-3, 1e-5, 1e-7)]
    assert floors[0].median > 20 * floors[1].median > 0
    assert floors[1].median > 20 * floors[2].median > 0
    assert floors[2].rms < 1e-5
    with pytest.raises(UsageError, match="relative=0"):
        jitter_floor(F32, odd, golden, relative=0)


def test_in_bf16_a_jitter_of_1e_7_grows_to_the_size_of_the_rounding(shipped: Casts) -> None:
    """The floor is a tenth of the distance to the oracle or more, a thousand times the jitter: bf16 amplifies it."""
    recipe = resolve(named_variant("bf16_stream"), shipped.checkpoint.config)
    found = jitter_floor(recipe, shipped, part_of(load_golden("gate"), prompts=2, tokens=4))
    assert found.itself.median > 0.1 * found.oracle.median
    assert found.itself.median > 1e3 * 1e-7
    assert found.golden is not None
    assert found.ratio == found.golden.median / found.itself.median
    assert found.golden.full_rms is None


def test_without_the_goldens_logprobs_there_is_no_distance_to_it(odd: Casts, golden: Golden) -> None:
    """Floor and oracle are there all the same, over every position that a row has."""
    found = jitter_floor(BF16, odd, golden)
    assert found.golden is None
    assert found.ratio is None
    assert found.itself.positions == 18  # 4 rows of 5, one of which ends after 3


def test_a_seed_repeats_a_floor_and_zero_is_a_seed(odd: Casts, golden: Golden) -> None:
    """Seed 0 gives the same floor twice and seed 1 another; the distance to the oracle has no draw in it."""
    first, again, other = (jitter_floor(BF16, odd, golden, seed=s) for s in (0, 0, 1))
    assert first == again
    assert first.itself != other.itself
    assert first.oracle == other.oracle


@pytest.mark.slow
def test_a_reference_of_the_same_roundings_is_at_the_floor(shipped: Casts) -> None:
    """Held against logprobs of another jittered run its distance is about the floor; float32's are twice as far.

    So far that many roundings match is told from none; the resolution says beforehand that it can be.
    """
    names = ("transformers_mirror", "f32")
    recipe, other = (resolve(named_variant(n), shipped.checkpoint.config) for n in names)
    golden = part_of(load_golden("gate"), prompts=8, tokens=16)
    near = forced_logprobs(jittered_candidate(recipe, shipped, seed=7), shipped, golden, range(8))
    far = forced_logprobs(of_recipe(other, shipped), shipped, golden, range(8))
    floors = [jitter_floor(recipe, shipped, with_logprobs(golden, x)) for x in (near, far)]
    assert 0.5 < (floors[0].ratio or 0) < 1.5
    assert (floors[1].ratio or 0) > 1.5 * (floors[0].ratio or 9)
    assert (floors[0].resolution or 0) > 1.5


def test_a_distance_is_what_it_says(golden: Golden) -> None:
    """Logprobs that differ by a known amount in known places give that median, rms and number of changes."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(4, 5, 67))
    a = np.array([[log_softmax(row) for row in rows] for rows in logits])
    assert distance(a, a, golden) == SAME
    b = a + 0.25
    found = distance(a, b, golden)
    assert (found.median, found.rms, found.token_median, found.full_rms) == pytest.approx((0.25,) * 4)
    assert found.argmax_changes == 0
    b = a.copy()
    b[1, 4, int(a[1, 4].argmin())] = 1.0
    b[2, 4] += 9.0  # past the end of its row: not compared
    found = distance(a, b, golden)
    assert found.argmax_changes == 1
    assert found.full_median == 0.0
    assert found.rms > 0.0


def test_each_rounding_point_is_taken_out_once(odd: Casts) -> None:
    """A case changes the rules of one site only, and leaves no narrow output, sum or second rounding there."""
    variant = tiny.plain(
        Stream.bf16, Gemm.bf16, norm=NormAxes(variance=NormVariance.stored, rounding=NormRounding.twice)
    )
    recipe = resolve(variant, ODD)
    cases = {point: changed for point, _, changed in without_one(recipe)}
    assert {"q_proj", "attn_residual", "input_norm", "input_norm (before the weight)"} <= cases.keys()
    assert not {"attn_in", "decay_gate", "kda_state"} & cases.keys()
    for point, changed in cases.items():
        site = point.split(" ")[0]
        rows = difference(recipe, changed)
        assert rows
        assert {str(row["site"]).split(".")[0] for row in rows} == {site}
    gone = cases["attn_residual"].rules["attn_residual"]
    assert (gone.output, gone.storage, gone.accum) == (DType.f32, DType.f32, DType.f32)
    assert cases["q_proj"].rules["q_proj"].accum is DType.f32
    with pytest.raises(UsageError, match="rounds nowhere"):
        rounding_points(F32, odd, SHORT)


def test_a_point_stands_out_where_it_acts_and_one_that_acts_nowhere_is_said_so(odd: Casts) -> None:
    """Of a small bf16 stream residual, product and head are told from the floor; the embedding rounds nothing.

    A floor is of the layer's own jitter: at the share that every point changes, moving products changes less.
    """
    found = {row.point: row for row in rounding_points(BF16, odd, SHORT, seeds=3)}
    assert not found["embed"].exercised
    assert all(found[point].separated for point in ("attn_residual", "mlp_residual", "q_proj", "lm_head"))
    assert all(row.p == 1.0 for row in found.values() if not row.exercised)
    assert all(len(row.changed) == 6 and len(row.floors) == 18 for row in found.values())
    assert np.mean(found["mlp_residual"].changed) > 0.3 > np.mean(found["mlp_residual"].floors)


def test_jitter_of_one_layer_leaves_the_others_alone(odd: Casts) -> None:
    """With the last layer's products moved alone, layers before it keep their bits and the last does not."""
    places = layer_places(ODD)
    own = next(of_recipe(F32, odd).values(SHORT.prompts, SHORT.continuations, places))
    moved = next(jittered_candidate(F32, odd, layer=2).values(SHORT.prompts, SHORT.continuations, places))
    assert [bool((own[p] == moved[p]).all()) for p in places] == [True, True, False, False]


def test_the_command_prints_floor_oracle_and_golden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three distances side by side and the points, and a row in the ledger; what has no effect is refused with 2."""
    words = ["jitter", "variant=bf16_stream", "limit=2", "max_tokens=2", f"results={tmp_path}", "device.threads=1"]
    monkeypatch.setattr("harness.rounding_points.without_one", lambda r: list(without_one(r))[-2:])
    assert main([*words, "rounding_points=true", "jitters=3"]) == 0
    out = capsys.readouterr().out
    assert all(line in out for line in ("itself, products moved", "float64 oracle", "golden gate"))
    assert "points that act here stand out of the floor" in out
    (row,) = (tmp_path / "ledger").glob("*.json")
    assert json.loads(row.read_text())["detail"]["jitter"]["floor"]["ratio"] > 0
    assert main([*words, "jitters=3"]) == 2
    assert main([*words, "relative=0"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_rounding_point_of_the_mirror_that_acts_is_told_from_the_floor(shipped: Casts) -> None:
    """Every rounding point of transformers_mirror, removed alone: of those that change a bit all are separated.

    That the mirror equals the library bit for bit is held by tests/test_transformers_agreement.py.
    """
    recipe = resolve(named_variant("transformers_mirror"), shipped.checkpoint.config)
    found = rounding_points(recipe, shipped, Battery.of(load_golden("gate")).part(range(8), 2))
    by_point = {row.point: row for row in found}
    assert sum(row.exercised for row in found) >= 30
    assert [row.point for row in found if row.exercised and not row.separated] == []
    assert not any(by_point[p].exercised for p in ("embed", "q_proj", "o_norm", "mlp_act"))
