"""A search over axes: agreement counts at the floor's speed, and the sweeper's trials are rows like any others."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from experiments.cli import main
from experiments.search import objective
from harness.ledger import Ledger

Captured = pytest.CaptureFixture[str]


def row(matched: int, speed: float | None) -> dict:
    return {"agreement": {"matched": matched, "total": 128}, "decode_tok_s": {"median": speed}}


def test_a_slow_run_counts_below_every_fast_one():
    """At the floor a run scores its tokens; under it, or untimed, less than none; without a floor speed is nothing."""
    assert objective(row(100, 60.0), 60.0) == 100
    assert objective(row(128, 59.9), 60.0) == -1
    assert objective(row(100, 10.0), 60.0) < objective(row(101, 10.0), 60.0) < objective(row(0, 60.0), 60.0)
    assert objective(row(100, None), 60.0) < 0
    assert objective(row(100, None), 0.0) == 100


def test_a_floor_without_a_sweeper_is_refused(capsys: Captured):
    """floor= has no effect on a plain sweep."""
    assert main(["gate", "-m", "variant=f32,oracle", "floor=60"]) == 2
    assert "floor= is of hydra/sweeper=optuna" in capsys.readouterr().err


@pytest.mark.filterwarnings("default")  # Optuna 2 warns when it is imported
def test_a_search_leaves_a_row_for_each_trial(tmp_path: Path, capsys: Captured):
    """Three trials of Optuna's are three rows of one sweep, and the best is told."""
    if find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        pytest.skip("hydra-optuna-sweeper is not installed; pip install 'neartie[optuna]'")
    hydra = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    words = ["variant=f32", "variant.kda.state=keep,bf16", "limit=1", "max_tokens=3", f"results={tmp_path}"]
    assert main(["gate", "-m", *hydra, *words]) == 0
    assert "neartie: best of 3: 3.0 with variant.kda.state=" in capsys.readouterr().err
    rows = Ledger(tmp_path / "ledger").rows()
    assert [(row["sweep"]["job"], row["sweep"]["of"]) for row in rows] == [(0, 3), (1, 3), (2, 3)]
    assert len({row["sweep"]["id"] for row in rows}) == 1
