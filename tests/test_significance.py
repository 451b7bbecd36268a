"""p-values, corrections and intervals: what they promise, counted."""

import numpy as np
import pytest
from scipy import special, stats

from harness.significance import Spread, empirical_p, holm, next_run_p, prediction, upper_t, wilson
from variants.errors import UsageError


def uniform_p(values: np.ndarray) -> float:
    """p-value of the Kolmogorov-Smirnov test against the uniform distribution."""
    return float(stats.kstest(values, "uniform").pvalue)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def test_an_empirical_p_counts_the_value_itself() -> None:
    """Above every one of n null values it is 1 / (1 + n), never 0; below all of them it is 1; a tie counts against."""
    null = [1.0, 2.0, 3.0]
    assert empirical_p(9.0, null) == 0.25
    assert empirical_p(0.0, null) == 1.0
    assert empirical_p(2.0, null) == 0.75
    assert empirical_p(np.array([9.0, 0.0]), null).tolist() == [0.25, 1.0]


def test_an_empirical_p_is_valid_where_value_and_null_are_exchangeable(random: np.random.Generator) -> None:
    """Under a heavy-tailed null each p on the grid k / (n + 1) is reached by that share of values, within 4 sigma."""
    n, trials = 9, 20_000
    draws = random.standard_cauchy((trials, n + 1))
    p = np.array([empirical_p(row[0], row[1:]) for row in draws])
    for k in range(1, n + 1):
        share = k / (n + 1)
        assert abs((p <= share + 1e-12).mean() - share) < 4 * np.sqrt(share * (1 - share) / trials)


@pytest.mark.parametrize("null", [[], [1.0, float("nan")]])
def test_an_empirical_p_refuses_no_null_and_nan(null: list[float]) -> None:
    """Without a null value there is no p-value, and a NaN among them means that something went wrong before."""
    with pytest.raises(UsageError, match="at least one null value"):
        empirical_p(1.0, null)


def test_holm_gives_the_textbook_values_in_the_order_given() -> None:
    """Smallest times m, next times m - 1 but never under the one before, at most 1; order in is order out."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([]).size == 0


def test_holm_holds_the_family_wise_error_where_plain_p_values_do_not(random: np.random.Generator) -> None:
    """Nine true nulls at 5 %: some corrected p is under it in at most 5 % of families, some plain p in a third."""
    families = random.random((5000, 9))
    corrected = np.array([holm(p) for p in families])
    assert (corrected.min(1) <= 0.05).mean() < 0.05 + 4 * np.sqrt(0.05 * 0.95 / 5000)
    assert (families.min(1) <= 0.05).mean() > 0.3


def test_wilson_gives_the_published_bounds() -> None:
    """0 of 10 goes up to 27.75 %, 5 of 10 from 23.66 to 76.34 %; no trial is refused."""
    assert wilson(0, 10).high == pytest.approx(0.27753, abs=1e-5)
    assert wilson(0, 10).low == 0.0
    assert (wilson(5, 10).low, wilson(5, 10).high) == pytest.approx((0.23659, 0.76341), abs=1e-5)
    assert wilson(300, 300).high == pytest.approx(1.0, abs=1e-12)
    with pytest.raises(UsageError, match="at least one trial"):
        wilson(0, 0)


def test_wilson_agrees_with_scipy() -> None:
    """Every share of 17 trials has scipy's bounds."""
    for k in range(18):
        theirs = stats.binomtest(k, 17).proportion_ci(0.95, "wilson")
        assert (wilson(k, 17).low, wilson(k, 17).high) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("runs", [2, 4, 8])
def test_the_p_of_a_next_run_is_uniform_under_the_null(runs: int, random: np.random.Generator) -> None:
    """However few runs the spread was read off, p is uniform; as if it were known, 1 % comes up twice as often."""
    draws = random.normal(3.0, 2.0, (4000, runs + 1))
    spreads = Spread.of(draws[:, 1:].T)
    assert uniform_p(next_run_p(draws[:, 0], spreads)) > 0.01
    known = special.ndtr(-(draws[:, 0] - spreads.mean) / np.sqrt(spreads.variance))
    assert (known < 0.01).mean() > 0.02


def test_the_p_of_a_next_run_with_two_sources_is_nearly_uniform(random: np.random.Generator) -> None:
    """A run that is a draw of each of two sources has p under 5 % in 4 to 6 % of cases, under 1 % in at most 1.5 %."""
    trials = 20_000
    one, other = random.normal(0, 1.0, (9, trials)), random.normal(0.5, 0.7, (7, trials))
    p = next_run_p(one[0] + other[0], Spread.of(one[1:]), Spread.of(other[1:]))
    assert 0.04 < (p < 0.05).mean() < 0.06
    assert (p < 0.01).mean() < 0.015


def test_without_any_spread_only_the_rank_is_known() -> None:
    """Runs that are all alike: a higher value has p = 1 / (1 + runs), one that is not higher has 1."""
    alike = Spread.of(np.full((7, 2), 3.0))
    assert next_run_p(np.array([3.0, 3.5]), alike).tolist() == [1.0, 0.125]


def test_a_spread_needs_two_runs() -> None:
    """One run has no spread, and no spread is not a spread of zero."""
    with pytest.raises(UsageError, match="at least 2 runs"):
        Spread.of(np.zeros((1, 3)))


def test_a_prediction_covers_as_often_as_it_says(random: np.random.Generator) -> None:
    """A further run of a normal process lies inside in 95 % of 4000 cases, within 4 sigma."""
    inside = 0
    for row in random.normal(100.0, 7.0, (4000, 9)):
        seen = row[1:]
        inside += row[0] in prediction(float(seen.mean()), float(seen.var(ddof=1)), 7.0, runs=8)
    assert abs(inside / 4000 - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 4000)


def test_upper_t_is_scipys_survival_function() -> None:
    """P(T >= t) for a few t and degrees of freedom, whole and not."""
    for t in (-3.0, 0.0, 1.7, 8.0):
        for df in (1.0, 2.5, 7.0):
            assert float(upper_t(t, df)) == pytest.approx(float(stats.t.sf(t, df)), rel=1e-10)
