"""How many prompts part, against the golden's own gaps: noise excuses as many as it turns, and no more."""

from dataclasses import replace

import numpy as np
import pytest

from harness.engines.protocol import Generation
from harness.golden import Golden, load_golden
from harness.golden_data import Bar
from harness.question_hints import hint
from harness.sampling import plain_greedy_settings
from harness.score import score
from harness.too_many import FEWEST, parted
from harness.verdict import RunClass
from harness.verdict_tokens import judge_tokens, noise_of

ROWS, T = 12, 20


def golden_of(gaps: np.ndarray) -> Golden:
    """Token 1 leads token 2 by `gaps` [N, T] nats everywhere."""
    ids = np.broadcast_to(np.array([1, 2], np.int32), (*gaps.shape, 2)).copy()
    return Golden(
        name="g",
        prompts=tuple((9, 10 + n) for n in range(len(gaps))),
        tokens=np.ones((2, *gaps.shape), np.int32),
        top_ids=ids,
        top_logprobs=np.stack([-0.1 + 0 * gaps, -0.1 - gaps], -1),
        sampling=plain_greedy_settings(),
    )


def run_of(tokens: np.ndarray) -> Generation:
    return Generation(
        tokens=tokens.astype(np.int32),
        finite=np.ones(tokens.shape, bool),
        gaps=np.full(tokens.shape, np.nan),
        prefill_s=np.full(len(tokens), np.nan),
        prefill_tokens=np.full(len(tokens), 2),
        decode_s=(),
    )


def turned(gaps: np.ndarray, sigma: float, seed: int) -> np.ndarray:
    """A correct engine's tokens: noise of `sigma` on every margin turns a token, and the row is another from there."""
    flips = np.random.default_rng(seed).normal(0, sigma, gaps.shape) > gaps
    return np.where(np.logical_or.accumulate(flips, -1), 2, 1)


@pytest.mark.parametrize("seed", range(5))
def test_as_many_part_as_noise_turns(seed: int) -> None:
    """Of correct runs the count is a Poisson variable's: no alarm at 1e-3, and the mean is what was told."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1.0, (ROWS, T))
    golden = golden_of(gaps)
    seen, expected = [], []
    for trial in range(8):
        run = run_of(turned(gaps, 0.125, 100 * seed + trial))
        found = parted(golden, score(golden, run), 0.125)
        if found is None:
            continue
        assert found.p > 1e-3
        seen.append(found.seen)
        expected.append(found.expected)
    assert seen
    assert np.mean(seen) == pytest.approx(np.mean(expected), rel=0.5)


def test_all_rows_at_wide_gaps_are_too_many() -> None:
    """Every row parts where the golden was sure: a DEFECT that says how many are turned; three rows say nothing."""
    gaps = np.full((ROWS, T), 0.4)
    golden = golden_of(gaps)
    tokens = np.ones((ROWS, T), int)
    tokens[:, 3:] = 2
    run = run_of(tokens)
    verdict = judge_tokens(golden, run, score(golden, run), noise=None)
    assert verdict.run_class is RunClass.defect
    assert verdict.confidence == "low"
    assert verdict.reason.startswith("12 prompts part where noise of 0.125 nat turns 0.0")
    few = np.ones((ROWS, T), int)
    few[: FEWEST - 1, 3:] = 2
    assert parted(golden, score(golden, run_of(few)), 0.125) is None


def test_another_prompt_and_a_penalty_are_hinted_at() -> None:
    """Most rows wrong from the first token on, or each token that came before avoided: said, never decided."""
    golden = golden_of(np.full((ROWS, T), 0.4))
    other = np.full((ROWS, T), 2)
    assert "differ in their first token" in hint(golden, score(golden, run_of(other)))
    avoiding = np.ones((ROWS, T), int)
    avoiding[:, 1:] = 2  # token 1 was said at the first place
    assert "12 of 12 first divergences avoid a token that came before" in hint(golden, score(golden, run_of(avoiding)))
    repeating = np.ones((ROWS, T), int)
    repeating[:, 1:] = 9  # which every prompt holds
    assert hint(golden, score(golden, run_of(repeating))) == ""


@pytest.mark.parametrize("name", ["wide_llama_cpp", "wide_transformers", "wide_mlx"])
def test_the_shipped_goldens_of_three_engines_say_the_same_4096_tokens(name: str) -> None:
    """In float32, K = 3 alike; against vLLM's bf16 as many prompts part as the measured noise turns: 26 and 26.2."""
    wide, other = load_golden("wide"), load_golden(name)
    assert other.bar is Bar.STRICT
    assert other.prompts == wide.prompts
    np.testing.assert_array_equal(other.tokens[0], load_golden("wide_mlx").tokens[0])
    run = replace(run_of(other.tokens[0]), top_ids=other.top_ids, top_logprobs=other.top_logprobs)
    agreement = score(wide, run)
    assert agreement.matched == 2957
    noise = noise_of(wide, run, agreement)
    assert noise is not None
    found = parted(wide, agreement, noise.sigma)
    assert found is not None
    assert (found.seen, round(found.expected, 1)) == (26, 26.2)
