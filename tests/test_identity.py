"""Library, paged runner and server at one arithmetic: told equal where they are, and only there."""

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the [serve] extra is not installed")
pytest.importorskip("uvicorn", reason="the [serve] extra is not installed")

import numpy as np

from experiments.cli import main
from harness.engines.local import LocalEngine
from harness.golden import load_golden
from harness.golden_data import Golden
from harness.ledger import Ledger
from harness.serving import identity
from harness.serving.identity import Arm

WORDS = ["variant=paged_batch", "goldens=[gate]", "limit=3", "max_tokens=4", "others=2", "device.threads=1", "--json"]


def test_four_arms_agree_in_every_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batch-invariant: tokens and logprobs of all, one at a time and under load; else bits follow the batch."""
    assert main(["experiment=identity", *WORDS, f"results={tmp_path}"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["arm"].split(",")[0] for r in rows] == ["library", "runner", "server", "server"] * 2
    assert [(r["tokens"], r["bits"], r["furthest_nats"]) for r in rows[:4]] == [(12, 12, 0)] * 4
    assert {r["verdict"] for r in rows[1:4]} == {"PASS"}
    assert rows[0]["follows"] == []
    assert "gemm" in rows[5]["follows"]
    assert rows[5]["bits"] < 12
    kept = Ledger(tmp_path / "ledger").rows()
    assert [r["detail"]["identity"]["batch_invariant"] for r in kept] == [True] * 4 + [False] * 4
    assert {r["agreement"]["total"] for r in kept} == {12}


def test_an_arm_that_differs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One logprob off in its last bit exits 1, though every token agrees; a token off has a verdict."""

    def lying(engine: LocalEngine, golden: Golden, *, at_once: int, others: int, folder: Path) -> Arm:
        arm = identity.library(engine, golden)
        assert arm.generation.top_logprobs is not None
        arm.generation.top_logprobs[1, 2, 3] = np.nextafter(arm.generation.top_logprobs[1, 2, 3], 0)
        return arm

    monkeypatch.setattr(identity, "server", lying)
    assert main(["identity", *WORDS, f"results={tmp_path}"]) == 1


def test_a_comparison_counts_tokens_bits_and_distance() -> None:
    """After a token that differs, logprobs lie on other prefixes and are not compared."""
    golden = load_golden("gate")
    table = identity._Table(golden)
    draw = np.random.default_rng(0)
    table.tokens[:] = golden.tokens[0]
    table.top_ids[:] = np.arange(identity.TOP)
    table.top_ids[..., 0] = golden.tokens[0]
    table.top_logprobs[:] = -np.sort(draw.random(table.top_logprobs.shape), -1)
    one, two = table.arm("one", 0.0), table.arm("two", 0.0)
    other = two.generation
    changed = {"tokens": other.tokens.copy(), "top_logprobs": np.array(other.top_logprobs)}
    changed["tokens"][0, 5] += 1
    changed["top_logprobs"][0, 5] -= 0.25
    changed["top_logprobs"][0, 6:] -= 3.0
    arm = Arm(name="two", generation=type(other)(**{**vars(other), **changed}), seconds=1.0)
    found = identity.compare(one, arm, golden)
    assert (found.equal, found.bits, found.total) == (127, 127 - 10, 128)
    assert found.furthest_nats == pytest.approx(0.25, abs=1e-12)  # a difference of float64 sums
    assert found.verdict != "PASS"


def test_what_the_server_does_not_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A variant without pages, no golden, another engine: usage, in one line."""
    for words in (["variant=f32"], ["variant=paged_batch", "goldens=[]"], ["engine=transformers"]):
        assert main(["identity", *words]) == 2
    assert "paged" in capsys.readouterr().err
