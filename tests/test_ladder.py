"""The precision ladder: correct code's error falls with u, a defect leaves a floor that begins at its layer."""

import math
from functools import cache

import pytest
from instruments import climb, engine, planted

from harness.ladder import EXCESS, FALL, Ladder, Rung, falls_with_u, other_order
from harness.verdict import ladder_findings
from variants.dtypes import DType
from variants.recipe import difference

KDA_CORES = ("kda_core.prefill", "kda_core.decode")


@cache
def clean(precision: DType) -> Rung:
    return climb(None, precision=precision).rungs[0]


def rung(*excess: float, precision: DType = DType.f32, reference: bool = True) -> Rung:
    """A rung that stands so far above its reference, layer by layer."""
    base = -9.0
    error = tuple(base + e for e in excess)
    return Rung(
        precision=precision, error=error, p95=error, worst=error, reference=(base,) * len(excess) if reference else None
    )


def test_correct_code_falls_with_u() -> None:
    """From f32 to f64 every layer's error falls as u does, and neither rung has a floor."""
    coarse, fine = clean(DType.f32), clean(DType.f64)
    assert all(falls_with_u(coarse, fine))
    assert Ladder((coarse, fine)).floor() is None
    assert max(map(abs, coarse.excess())) < EXCESS / 2


@pytest.mark.parametrize("name", ["gate_bias_scaled", "mla_scaled", "rounded_router_scores", "conv_oldest_tap_scaled"])
def test_a_defect_leaves_a_floor_at_its_layer(name: str) -> None:
    """At its lightest (0.1 %, or a rounding to f16) it stays where f32 leaves, from its own layer on."""
    p = planted(name)
    found = climb(p)
    assert found.floor() == (p.layers[0], DType.f32)
    (finding,) = ladder_findings(found)
    assert finding.layer == p.layers[0]
    assert finding.site is None
    before = found.rungs[0].excess()[: p.layers[0]]
    assert max(map(abs, before)) < EXCESS


def test_a_floor_does_not_fall_with_u() -> None:
    """Under a defect the error of its layer and the later ones falls by less than correct code's."""
    p = planted("gate_bias_scaled")
    fell = falls_with_u(clean(DType.f32), climb(p, precision=DType.f64).rungs[0])
    assert all(fell[: p.layers[0]])
    assert not any(fell[p.layers[0] :])


def test_one_high_layer_is_no_floor() -> None:
    """A floor stays to the end; an excess that a later layer loses is amplification."""
    assert Ladder((rung(0, 2, 2, 0),)).floor() is None
    assert Ladder((rung(0, 0, 2, 2),)).floor() == (2, DType.f32)
    assert Ladder((rung(0, 0, 2, EXCESS),)).floor() is None


def test_the_earliest_layer_of_all_rungs_is_named() -> None:
    """A finer rung that shows the floor earlier is the one that is reported."""
    found = Ladder((rung(0, 0, 0, 2), rung(0, 3, 3, 3, precision=DType.f64)))
    assert found.floor() == (1, DType.f64)
    (finding,) = ladder_findings(found)
    assert "floor at f64" in finding.reason


def test_an_error_that_is_no_number_is_a_floor() -> None:
    """A rung whose layers are NaN from somewhere on is not taken for one without excess."""
    nan = float("nan")
    assert Ladder((rung(0, nan, nan, nan),)).floor() == (1, DType.f32)


def test_without_a_reference_nothing_is_called_a_floor() -> None:
    """A precision that has no correct run to be held against is reported only."""
    found = Ladder((rung(5, 5, reference=False),))
    assert found.floor() is None
    assert not ladder_findings(found)


def test_the_share_of_the_fall_is_of_ln_u() -> None:
    """The fall that counts is FALL of the step in ln u: just under it does not pass, just over it does."""
    promised = math.log(DType.f32.unit_roundoff / DType.f64.unit_roundoff)
    coarse = rung(0.0, 0.0)
    fine = rung(-FALL * promised - 0.01, -FALL * promised + 0.01, precision=DType.f64)
    assert falls_with_u(coarse, fine) == (True, False)


def test_the_reference_sums_in_another_order_and_rounds_alike() -> None:
    """Only algorithm and sizes of the two cores differ from the candidate's recipe, for every phase of both."""
    for variant in ("f32", "incremental_chunk", "bf16_engine"):
        recipe = engine(variant).recipe
        rows = difference(recipe, other_order(recipe))
        assert {row["field"] for row in rows} <= {"algorithm", "chunk_size", "tile_q", "tile_k", "kv_splits"}
        assert {row["site"] for row in rows} >= {*KDA_CORES, "mla_core.prefill", "mla_core.decode"}
