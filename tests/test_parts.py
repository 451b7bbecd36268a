"""Seconds by part: what is inside another part is charged once, and a row says where its run's time went."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.cli import main
from harness import parts
from harness.parts import OTHER, part, recorded


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time that passes only by this call, the processor's at half the pace."""
    now = [0.0]
    monkeypatch.setattr(parts.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(parts.time, "process_time", lambda: now[0] / 2)

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_a_part_inside_another_is_charged_once(wait: Callable[[float], None]) -> None:
    """Each second goes to the innermost part, what lies in none to `other`, and all together are the whole."""

    @part("inner")
    def inner() -> None:
        wait(4)

    with recorded() as seen:
        wait(1)
        with part("outer"):
            wait(2)
            inner()
            wait(0.5)
        inner()
    assert seen.wall == {OTHER: 1, "outer": 2.5, "inner": 8}
    assert seen.record()["cpu"] == {OTHER: 0.5, "outer": 1.25, "inner": 4}
    assert seen.line() == "took 11.5 s (5.8 s of processors): inner 8.0, outer 2.5, other 1.0"
    inner()
    assert sum(seen.wall.values()) == 11.5  # nothing is recorded any more


def test_a_part_that_fails_is_ended(wait: Callable[[float], None]) -> None:
    """What comes after the failure is charged to what was open before."""

    @part("failing")
    def fails() -> None:
        wait(1)
        raise ValueError("no")

    with recorded() as seen:
        with pytest.raises(ValueError, match="no"):
            fails()
        wait(2)
    assert seen.wall == {"failing": 1, OTHER: 2}


def test_rows_tell_where_the_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A verdict names every instrument that ran, a gate its load and calls; the parts are nearly the whole run."""
    words = ["variant=f32", "limit=2", "max_tokens=4", f"results={tmp_path}", "device.threads=1"]
    assert main(["verdict", *words]) == 0
    assert "\ntook " in capsys.readouterr().out
    assert main(["gate", *words]) == 0
    verdict, gate = (json.loads(file.read_text()) for file in sorted((tmp_path / "ledger").glob("*.json")))
    spent = verdict["detail"]["seconds"]["wall"]
    assert {"load", "watched pass", "free run", "forced tokens", "ladder", "local replay", "definition", "envelope",
            "envelope of the golden", "expected score", "divergences", "reused slot", "watched twin", "stored weights",
            "roundings", OTHER} == set(spent)  # fmt: skip
    for row in (verdict, gate):
        assert 0.8 * row["wall_s"] < sum(row["detail"]["seconds"]["wall"].values()) < row["wall_s"]
    assert set(gate["detail"]["seconds"]["wall"]) == {"load", "watched pass", "free run", OTHER}
    calls = gate["detail"]["timing"]["seconds"]["wall"]
    assert set(calls) == {"prefill", "decode", "first calls"}
    assert 0 < sum(calls.values()) < gate["detail"]["seconds"]["wall"]["free run"]
