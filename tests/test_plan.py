"""The planner: closed forms against simulation, and the battery sizes that follow from them."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.cli import main
from harness.plan import (
    Contrast,
    free_running,
    free_running_contrast,
    hazard,
    of_length,
    smallest_difference,
    teacher_forced_contrast,
)
from variants.errors import UsageError

Captured = pytest.CaptureFixture[str]
DRAWS = 40_000
# Standard errors of a mean and of a variance of DRAWS draws stay under 1 % here; four of them are allowed.
MONTE_CARLO = 0.04


def hazards(prompts: int, tokens: int, *, seed: int) -> np.ndarray:
    """Places like a real battery's: most never turn, some may, a few are even."""
    random = np.random.default_rng(seed)
    return random.beta(0.12, 3.0, (prompts, tokens))


def simulated(flips: np.ndarray, *, rematch: float, draws: int, seed: int) -> np.ndarray:
    """Scores [draws, N] of members that decode freely: agree until the first turn, then with `rematch` each."""
    random = np.random.default_rng(seed)
    turned = random.random((draws, *flips.shape)) < flips
    prefix = np.logical_and.accumulate(~turned, -1)
    first = ~prefix & np.concatenate([np.ones((*prefix.shape[:-1], 1), bool), prefix[..., :-1]], -1)
    again = (random.random(prefix.shape) < rematch) & ~prefix & ~first
    return (prefix | again).sum(-1)


@pytest.mark.parametrize("rematch", [0.0, 0.35])
def test_free_running_moments_are_those_of_members(rematch: float) -> None:
    """Mean and variance of each prompt's score equal those of 40 000 simulated members."""
    flips = hazards(4, 16, seed=1)
    scores = simulated(flips, rematch=rematch, draws=DRAWS, seed=2)
    moments = free_running(flips, rematch=rematch)
    assert moments.mean == pytest.approx(scores.mean(0), rel=MONTE_CARLO)
    assert moments.variance == pytest.approx(scores.var(0), rel=MONTE_CARLO)
    assert moments.total == pytest.approx(scores.sum(-1).mean(), rel=MONTE_CARLO)
    assert moments.sd == pytest.approx(scores.sum(-1).std(), rel=MONTE_CARLO)


@pytest.mark.parametrize("h", [0.001, 0.03, 0.4])
def test_constant_hazard_is_geometric(h: float) -> None:
    """One hazard h everywhere: the mean prefix is q (1 - q^T) / h, and its square's mean the sum of (2t - 1) q^t."""
    t, q = np.arange(1, 17), 1 - h
    moments = free_running(np.full((1, 16), h))
    mean = q * (1 - q**16) / h
    assert moments.mean[0] == pytest.approx(mean, rel=1e-12)
    assert moments.variance[0] == pytest.approx(((2 * t - 1) * q**t).sum() - mean**2, rel=1e-9)


def test_certain_and_ended_rows() -> None:
    """No hazard scores everything, a sure turn what stands before it, an ended row its length; none of it varies."""
    flips = np.array([[0.0, 0, 0, 0], [0, 0, 1, 0], [0, 0, np.nan, np.nan], [np.nan] * 4])
    moments = free_running(flips)
    assert moments.mean.tolist() == [4.0, 2.0, 2.0, 0.0]
    assert moments.variance.tolist() == [0.0] * 4


def test_trial_statement() -> None:
    """128 free-running tokens, members' sd 7: 91 and 115 are not far enough apart to be told apart with power 0.8.

    Both lie within two sd of the members' mean of 100.6, and a true difference of 24 would be missed in a third of
    trials; a battery four times as large would find it.
    """
    assert 115 - 91 < smallest_difference(7, 7, power=0.8, alpha=0.05) < 30
    assert 100.6 - 1.96 * 7 < 91 < 115 < 100.6 + 2.06 * 7
    assert smallest_difference(7, 7, power=0.6, alpha=0.05) < 115 - 91
    assert smallest_difference(14, 14, power=0.8, alpha=0.05) < 4 * (115 - 91)


def test_smallest_difference_is_found_as_often_as_said() -> None:
    """Two scores that truly differ by it lie significantly apart in 80 % of simulated pairs."""
    random = np.random.default_rng(3)
    gap = smallest_difference(7, 5, power=0.8, alpha=0.05)
    pairs = random.normal(gap, 7, DRAWS) - random.normal(0, 5, DRAWS)
    assert np.mean(np.abs(pairs) > 1.959964 * np.hypot(7, 5)) == pytest.approx(0.8, abs=0.01)


def found(differences: np.ndarray) -> float:
    """The share of trials [trials, prompts] in which a paired t test over prompts is significant at 5 %."""
    from scipy import stats

    t = differences.mean(1) / stats.sem(differences, axis=1)
    return float(np.mean(np.abs(t) > stats.t.ppf(0.975, differences.shape[1] - 1)))


@pytest.mark.parametrize("free", [True, False])
def test_planned_size_has_the_planned_power(free: bool) -> None:
    """As many prompts as planned, drawn like those that were measured, find the difference in 80 % of trials."""
    a, b = hazards(60, 12, seed=5), np.clip(hazards(60, 12, seed=5) + hazards(60, 12, seed=6), 0, 1)
    contrast = free_running_contrast(a, b) if free else teacher_forced_contrast(a, b)
    n = contrast.prompts(power=0.8, alpha=0.05)
    assert n is not None
    assert 8 < n < 200
    trials = 1500
    chosen = np.random.default_rng(7).integers(0, 60, trials * n)
    if free:
        x, y = (simulated(f[chosen], rematch=0.0, draws=1, seed=s)[0] for f, s in ((a, 8), (b, 9)))
    else:
        random = np.random.default_rng(8)
        x, y = ((random.random((trials * n, 12)) >= f[chosen]).sum(-1) for f in (a, b))
    # sd of the share over 1500 trials is 1 %, and the t test's power is a little off where scores are not normal.
    assert found((x - y).reshape(trials, n)) == pytest.approx(0.8, abs=0.06)


def test_teacher_forced_counts_are_mcnemars() -> None:
    """Difference and variance of one place are those of its two discordant counts."""
    contrast = teacher_forced_contrast(np.array([[0.1]]), np.array([[0.3]]))
    only_a, only_b = 0.9 * 0.3, 0.1 * 0.7
    assert contrast.difference[0] == pytest.approx(only_a - only_b)
    assert contrast.variance[0] == pytest.approx(only_a + only_b - (only_a - only_b) ** 2)


def test_no_difference_needs_no_prompts_because_none_help() -> None:
    """Equal hazards are not told apart by any number of prompts; a difference that is asked for has a number."""
    same = free_running_contrast(hazards(8, 16, seed=1), hazards(8, 16, seed=1))
    assert same.prompts(power=0.8, alpha=0.05) is None
    asked = same.prompts(power=0.8, alpha=0.05, difference=1.0)
    twice = same.prompts(power=0.8, alpha=0.05, difference=2.0)
    assert asked is not None
    assert twice is not None
    assert asked > 3 * twice


def test_prompts_that_differ_among_themselves_count() -> None:
    """Without any noise the spread between prompts alone sets the number: (1.96 + 0.84)^2 * 2 / 2^2 + 1.96^2 / 2."""
    assert Contrast(np.array([1.0, 3.0]), np.zeros(2)).prompts(power=0.8, alpha=0.05) == 6
    assert Contrast(np.array([2.0, 2.0]), np.zeros(2)).prompts(power=0.8, alpha=0.05) == 2


def test_more_is_asked_for_more_needed() -> None:
    """More power, a smaller alpha and a noisier prompt need more prompts; swapping the variants changes nothing."""
    c = Contrast(np.array([1.0, 2.0, 1.5]), np.array([4.0, 5.0, 6.0]))
    base = c.prompts(power=0.8, alpha=0.05) or 0
    assert base < (c.prompts(power=0.95, alpha=0.05) or 0)
    assert base < (c.prompts(power=0.8, alpha=0.001) or 0)
    assert base < (Contrast(c.difference, 2 * c.variance).prompts(power=0.8, alpha=0.05) or 0)
    assert base == Contrast(-c.difference, c.variance).prompts(power=0.8, alpha=0.05)


def test_length() -> None:
    """A shorter battery is the golden's first places, a longer one goes on with the mean hazard."""
    flips = np.array([[0.0, 0.3], [0.1, np.nan]])
    assert hazard(flips) == pytest.approx(0.4 / 3)
    assert of_length(flips, 1).tolist() == [[0.0], [0.1]]
    assert of_length(flips, 4)[:, 2:] == pytest.approx(np.full((2, 2), 0.4 / 3))


@pytest.mark.parametrize(("power", "alpha"), [(0.0, 0.05), (1.0, 0.05), (0.8, 0.0), (0.8, 1.0), (0.02, 0.05)])
def test_impossible_tests_are_refused(power: float, alpha: float) -> None:
    """Probabilities of 0 and 1, and a power that chance alone has, are usage errors."""
    with pytest.raises(UsageError, match=r"power|alpha"):
        smallest_difference(7, 7, power=power, alpha=alpha)


def plan(argv: list[str], tmp_path: Path) -> int:
    return main(["plan", *argv, f"results={tmp_path}"])


def test_command_on_the_shipped_gate(tmp_path: Path, capsys: Captured) -> None:
    """Measured on `gate`: f32 scores what float64 scores and without spread, bf16 spreads by several tokens.

    So 91 and 115 of 128 cannot be told apart there: two runs of bf16 must lie further apart than that.
    """
    assert plan(["variant=bf16_stream", "against=f32", "--json"], tmp_path) == 0
    document = json.loads(capsys.readouterr().out)
    bf16, f32 = document["variants"]
    assert (f32["mean"], f32["teacher_forced"]) == (pytest.approx(109, abs=1e-6), pytest.approx(125, abs=1e-6))
    assert f32["sd"] < 1e-3
    assert 5 < bf16["sd"] < 12
    assert bf16["low"] < 109 < bf16["high"]
    assert smallest_difference(bf16["sd"], bf16["sd"], power=0.8, alpha=0.05) > 115 - 91 - 5
    assert [row["tokens_per_prompt"] for row in document["free_running"]] == [4, 8, 16, 32, 64]
    assert [row["extrapolated"] for row in document["free_running"]] == [False, False, False, True, True]
    errors = [row["standard_error"] for row in document["teacher_forced"]]
    assert errors[3:] == [2 * errors[2], 4 * errors[2]]  # nothing was measured there, so nothing is known better


def test_command_plans_for_a_difference(tmp_path: Path, capsys: Captured) -> None:
    """A share of tokens that is asked for is planned for, in text too; teacher-forced needs fewer tokens."""
    part = ["variant=incremental_chunk", "against=f32", "limit=3", "max_tokens=8", "difference=0.1"]
    assert plan(part, tmp_path) == 0
    out = capsys.readouterr().out
    assert "free-running" in out
    assert "?" not in out
    assert plan([*part, "--json"], tmp_path) == 0
    document = json.loads(capsys.readouterr().out)
    row = document["free_running"][2]
    assert (row["tokens_per_prompt"], row["difference_per_prompt"], row["determined"]) == (8, 0.8, True)
    assert row["tokens"] == 8 * row["prompts"]
    assert document["teacher_forced"][2]["tokens"] < row["tokens"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["variant=f32"], "against=NAME"),
        (["variant=f32", "against=f32"], "the same arm"),
        (["variant=f32", "against=f23"], "f23"),
        (["variant=f32", "against=oracle", "difference=1.5"], "difference=1.5"),
        (["engine=replay", "engine.folder=x"], "engine=replay has none"),
        (["variant=f32", "against=oracle", "rematch=1"], "rematch=1"),
        (["variant=f32", "against=oracle", "power=1"], "power=1"),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, capsys: Captured, argv: list[str], said: str) -> None:
    """Exit code 2 and the reason."""
    assert plan(argv, tmp_path) == UsageError.exit_code
    assert said in capsys.readouterr().err
