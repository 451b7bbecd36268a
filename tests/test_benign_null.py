"""p-values against what correct runs show: uniform at any battery size, and small where something is wrong."""

import numpy as np
import pytest
from scipy import stats

from harness.benign_null import outside
from variants.errors import UsageError

PLACES = 5


def prompts(count: int, random: np.random.Generator) -> np.ndarray:
    """Prompts' parts [count, PLACES]: alike over places, and one in seven jumps from some place on."""
    common = random.normal(0, 0.1, (count, 1)) + random.normal(0, 0.05, (count, PLACES))
    from_place = np.arange(PLACES) >= random.integers(0, PLACES, (count, 1))
    return common + (random.random((count, 1)) < 0.15) * random.gamma(2, 0.5, (count, 1)) * from_place


def variants(count: int, random: np.random.Generator, spread: float = 0.1) -> np.ndarray:
    """Variants' parts [count, PLACES]."""
    return 0.1 + spread * (random.normal(0, 1, (count, 1)) + random.normal(0, 0.3, (count, PLACES)))


def correct(random: np.random.Generator, *, runs: int = 9, each: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Shifts of correct runs [runs, each, PLACES], and the part of one further variant."""
    parts = variants(runs + 1, random)
    return np.stack([part + prompts(each, random) for part in parts[:-1]]), parts[-1]


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_p_is_uniform_for_a_correct_run_of_any_size(size: int) -> None:
    """Heavy-tailed prompts, a variant never seen: the least p of all places is uniform (Kolmogorov-Smirnov at 1 %)."""
    random, p = np.random.default_rng(size), []
    for n in range(250):
        known, part = correct(random)
        p.append(outside(part + prompts(size, random), known, draws=500, seed=n).p.min())
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert (np.array(p) < 0.05).mean() < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 250)


@pytest.mark.parametrize("size", [1, 4])
def test_a_run_that_is_larger_everywhere_is_far_outside(size: int) -> None:
    """Errors e^3 times as large on every prompt: p is as small as the number of runs allows."""
    random = np.random.default_rng(1)
    known, part = correct(random)
    assert outside(part + 3.0 + prompts(size, random), known).p.max() < 0.012
    if size > 1:
        assert outside(part + 3.0 + prompts(size, random), known).p.max() < 0.001


def test_what_happens_once_in_n_prompts_is_not_taken_for_much_rarer() -> None:
    """However far one prompt lies beyond all of 216 seen, p is within a factor of three of 1 in 217.

    Where one of three prompts does, of 3 in 219.
    """
    random = np.random.default_rng(2)
    known, part = correct(random)
    one, three = part + prompts(1, random), part + prompts(3, random)
    three[1:] = part
    one += 50
    three[:1] += 50
    assert 1 / 3 < 217 * outside(one, known, draws=20_000).p.min() < 3
    assert 1 / 3 < 219 / 3 * outside(three, known, draws=20_000).p.min() < 3


def test_the_place_that_is_outside_is_the_one_with_the_small_p() -> None:
    """p is corrected for all places, and each has its own."""
    random = np.random.default_rng(3)
    known, part = correct(random)
    own = part + prompts(6, random)
    own[:, 3] += 4.0
    found = outside(own, known)
    assert found.p[3] < 0.005 < found.p[[0, 1, 2, 4]].min()
    assert found.z.argmax() == 3


def test_places_without_spread_count_only_where_they_are_left() -> None:
    """Correct runs that are all alike: a run that is as they are has p 1, one above them has the least there is."""
    known = np.zeros((4, 3, 2))
    assert outside(np.zeros((2, 2)), known).p.tolist() == [1.0, 1.0]
    assert outside(np.array([[0.0, 1.0], [0.0, 1.0]]), known).p[1] < 0.3


def test_two_correct_runs_are_refused() -> None:
    """Fewer than three have no spread worth the name."""
    with pytest.raises(UsageError, match="got 2 correct runs"):
        outside(np.zeros((1, 2)), np.zeros((2, 3, 2)))
