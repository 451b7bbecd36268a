"""Right tokens in the wrong place are an input mismatch, said in words; wrong tokens in the right place are not."""

from pathlib import Path

import numpy as np
import pytest

from experiments.cli import main
from harness.golden import load_golden
from harness.misplaced import misplaced

GATE = load_golden("gate")
TOKENS = GATE.tokens[0]


def echo(skip: int) -> np.ndarray:
    rows = [[*p[skip:], *row] for p, row in zip(GATE.prompts, TOKENS.tolist(), strict=True)]
    return np.array([row[: TOKENS.shape[1]] for row in rows], np.int32)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (np.roll(TOKENS, -1, 1), "100% of the tokens are the golden's, 1 too early"),
        (np.roll(TOKENS, 2, 1), "2 too late"),
        (TOKENS[::-1], "row 0 answers prompt 7"),
        (echo(0), "each row begins with its prompt"),
        (echo(1), "each row begins with its prompt"),
    ],
)
def test_another_reading_of_right_tokens_is_told(tokens: np.ndarray, said: str, tmp_path: Path) -> None:
    """Shifted by one or two, rows reversed, prompts echoed with and without BOS: exit code 3 before any score."""
    assert said in (misplaced(GATE, tokens) or "")
    np.save(tmp_path / "t.npy", tokens)
    assert main(["gate", "engine=replay", f"engine.folder={tmp_path / 't.npy'}", f"results={tmp_path}"]) == 3


@pytest.mark.parametrize("seed", range(4))
def test_wrong_tokens_have_no_other_reading(seed: int) -> None:
    """Random ids, rows that repeat one id, and rows that part from the golden's half way are what they are."""
    random = np.random.default_rng(seed)
    noise = random.integers(0, 4096, TOKENS.shape)
    assert misplaced(GATE, noise) is None
    assert misplaced(GATE, np.full_like(TOKENS, TOKENS[0, seed])) is None
    half = np.where(np.arange(TOKENS.shape[1]) < 2 * (seed + 1), TOKENS, noise)
    assert misplaced(GATE, half) is None
    assert misplaced(GATE, TOKENS) is None
