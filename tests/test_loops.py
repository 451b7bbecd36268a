"""Repeat loops: their period, their start, and whether the golden had one too."""

import numpy as np
import pytest

from harness.loops import find_loop, find_loops


@pytest.mark.parametrize("period", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("lead", [0, 1, 6])
def test_period_and_start_of_a_planted_loop(period: int, lead: int) -> None:
    """A tail that repeats is found from its first token on, at its least period."""
    tail = [100 + i for i in range(period)] * 8
    loop = find_loop([*range(lead), *tail])
    assert loop is not None
    assert (loop.period, loop.start, loop.length) == (period, lead, 8 * period)


def test_start_reaches_into_a_partial_period() -> None:
    """The loop starts at the first token that takes part, also in the middle of a period."""
    loop = find_loop([9, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert loop is not None
    assert (loop.period, loop.start, loop.length) == (3, 1, 10)


@pytest.mark.parametrize(
    "row",
    [
        [],
        [5],
        list(range(64)),
        [7] * 7,  # under eight tokens
        [1, 2, 3, 4, 1, 2, 3, 4],  # twice is not a loop
        [*([7] * 20), 1],  # left again
        [1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2],  # 2.75 periods of four
    ],
)
def test_what_is_not_a_loop(row: list[int]) -> None:
    """Short runs, two repeats and a loop that was left are not loops."""
    assert find_loop(row) is None


def test_the_end_of_a_row_is_cut_before_looking() -> None:
    """Padding after an early end is not a loop of -1, and does not hide one."""
    assert find_loop(np.array([1, 2, 3] + [-1] * 20)) is None
    loop = find_loop(np.array([4, *([6] * 9), -1, -1, -1]))
    assert loop is not None
    assert (loop.period, loop.start) == (1, 1)


def test_a_candidate_loop_is_told_apart_from_one_that_the_golden_shares() -> None:
    """A loop that the golden has as well is reported as such; a golden that loops alone is no finding."""
    loop, prose = [3, 4] * 8, list(range(16))
    golden = np.array([loop, prose, loop])
    candidate = np.array([[3, 4] * 8, [0, 1, *([9] * 14)], prose])
    found = find_loops(golden, candidate)
    assert [f.prompt for f in found] == [0, 1]
    assert found[0].golden is not None
    assert found[1].golden is None
    assert str(found[0]) == "prompt 0: repeats every 2 tokens from 0; so does the golden, every 2 from 0"
    assert str(found[1]) == "prompt 1: repeats every 1 tokens from 2; the golden does not loop"
