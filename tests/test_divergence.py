"""One divergence: which cause, from two sides' margins, what rounding does to them, and how it reads."""

import numpy as np
import pytest

from harness.divergence import FAR, SAME, Cause, Divergence, Side, cause_of, far, golden_margin, side_p

ALPHA = 1e-3
NOISE = 0.035


def cause(candidate: Side, golden: Side, oracle: float, members: int = 8) -> Cause:
    return cause_of(candidate, golden, oracle, members=members, alpha=ALPHA)[0]


def side(margin: float, sigma: float = NOISE, *, least: bool = False) -> Side:
    return Side(margin=margin, sigma=sigma, least=least)


def divergence(**changes: object) -> Divergence:
    given = {
        "prompt": 2, "position": 0, "golden_token": 276, "token": 305, "margin": 0.02, "cause": Cause.rounding,
        "candidate": side(0.0, least=True), "golden": side(0.01), "p": 0.6,
    }  # fmt: skip
    return Divergence(**{**given, **changes})  # pyright: ignore[reportArgumentType]


def test_a_shift_of_a_few_sigma_is_rounding_and_of_many_a_defect() -> None:
    """The candidate's side is judged by its own noise; from 8 members 2 sigma is rounding and 10 is not."""
    assert cause(side(-2 * NOISE), side(0.0, least=True), 0.0) is Cause.rounding
    assert cause(side(-10 * NOISE), side(0.0, least=True), 0.0) is Cause.defect


def test_the_goldens_own_error_is_not_the_candidates() -> None:
    """Where the candidate stands by the oracle and the golden 10 sigma off, it is the golden's side."""
    assert cause(side(-0.01), side(10 * NOISE), 0.0) is Cause.golden_side
    assert cause(side(-10 * NOISE), side(10 * NOISE), 0.0) is Cause.defect


def test_a_tie_is_told_where_a_side_really_has_one() -> None:
    """Two equal logits on a side are a tie; a bound on an unknown margin that happens to be 0 is none."""
    assert cause(side(0.0), side(0.01), 0.01) is Cause.tie
    assert cause(side(-0.01), side(0.0), 0.01) is Cause.tie
    assert cause(side(0.0, least=True), side(0.01), 0.01) is Cause.rounding


def test_a_tie_that_rounding_does_not_explain_is_a_defect() -> None:
    """Equal logits where the oracle has them 10 sigma apart, or a far candidate beside a golden's tie, stay defects."""
    assert cause(side(0.0), side(0.35), 0.35) is Cause.defect
    assert cause(side(-0.5), side(0.0), 0.01) is Cause.defect


def test_few_members_are_not_believed_far() -> None:
    """The fewer members a sigma was estimated from, the larger the p-value of the same shift."""
    p = [side_p(side(-6 * NOISE), 0.0, members) for members in (2, 4, 8, 100)]
    assert p == sorted(p, reverse=True)
    assert p[0] > 0.02
    assert p[-1] < 1e-7
    assert side_p(side(0.0), 0.0, 8) == 1.0


def test_no_noise_explains_nothing_but_the_order_of_float64_sums() -> None:
    """With sigma 0 a shift under 1e-9 nat counts as none, any other as infinitely many sigmas."""
    assert side(SAME / 2, 0.0).z(0.0) == 0.0
    assert side(2 * SAME, 0.0).z(0.0) == float("inf")
    assert cause(side(-1e-3, 0.0), side(0.0, least=True), 0.0) is Cause.defect


def test_the_p_value_is_of_the_less_likely_side() -> None:
    """The smaller of both sides' probabilities is reported."""
    sides = side(-NOISE), side(3 * NOISE)
    _, p = cause_of(*sides, 0.0, members=8, alpha=ALPHA)
    assert p == min(side_p(s, 0.0, 8) for s in sides) == side_p(sides[1], 0.0, 8)


def test_the_reason_is_one_line_with_everything_in_it() -> None:
    """Place, tokens, margin in nats and ULP, sigmas of both sides, cause and evidence, in one line."""
    found = divergence(ulps=0.32, logits_format="bf16", evidence={"layer": 4, "gap": 1e-4})
    assert found.reason == (
        "p2[0]: 276 vs 305, oracle margin +0.02 nat (0.32 bf16 ulp), candidate at least 0.6 sigma, golden 0.3 sigma: "
        "rounding (layer 4, gap 0.0001)"
    )
    assert "ulp" not in divergence().reason


def test_the_record_holds_sizes_in_every_unit() -> None:
    """The ledger's row has nats, ULP, sigma, z and p of the divergence, and its class by name."""
    row = divergence(ulps=0.32, logits_format="bf16", cause=Cause.routing).record()
    assert (row["oracle_margin_nats"], row["oracle_margin_ulp"], row["ulp_of"]) == (0.02, 0.32, "bf16")
    assert (row["candidate_at_least"], row["golden_margin_nats"], row["candidate_sigma_nats"]) == (True, 0.01, NOISE)
    assert row["candidate_z"] == pytest.approx(0.02 / NOISE)
    assert row["class"] == "rounding amplified by routing"
    assert divergence().record()["ulp_of"] is None


def test_a_goldens_margin_is_known_where_both_tokens_were_recorded() -> None:
    """Logprob of the golden's token minus the other's; None where the list lacks one of them."""
    ids, logprobs = np.array([7, 3, 9]), np.array([-0.5, -0.75, -4.0])
    assert golden_margin(ids, logprobs, 7, 3) == 0.25
    assert golden_margin(ids, logprobs, 3, 7) == -0.25
    assert golden_margin(ids, logprobs, 7, 8) is None


def test_far_places_are_counted_by_class() -> None:
    """Only where the candidate puts its own token more than FAR above the golden's; a class without one is left out."""
    near, beyond = (divergence(candidate=side(-FAR - more), cause=Cause.rounding) for more in (0.0, 1e-6))
    routed = divergence(candidate=side(-2 * FAR), cause=Cause.routing)
    assert far([near, beyond, routed, routed]) == {"rounding": 1, "rounding amplified by routing": 2}
    assert far([near]) == {}
