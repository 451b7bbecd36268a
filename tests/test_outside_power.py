"""Runs that stand beside the same members are told the same as alone, and a planted fault is counted as one."""

import lzma
from dataclasses import replace

import numpy as np
import pytest

from experiments.power_outside import BATTERIES, CARRIERS, append, cells, rates, read
from harness.beside import stand_beside
from harness.compose import named_variant
from harness.engines.local import LocalEngine, shared_casts
from harness.gate import part_of, run_gate
from harness.golden import load_golden
from harness.outside_power import SIGHTS, answers
from harness.power_cells import Cell, Slice
from harness.verdict_outside import OutsideQuestion, forced_choices, judge_outside
from variants.errors import InputError
from variants.recipe import resolve

CASTS = shared_casts("assets/kimi-linear-12m", None, "cpu")
PART = part_of(load_golden("gate"), prompts=2, tokens=4)


def test_standing_together_changes_no_verdict() -> None:
    """Two variants beside the same members: each verdict has the figures of its own walk, to the last bit."""
    config = CASTS.checkpoint.config
    declared = resolve(named_variant("bf16_engine"), config)
    plain = OutsideQuestion(golden=PART, casts=CASTS, declared=declared, reference=declared, members=3)
    engines = [LocalEngine(CASTS, named_variant(n), name=n) for n in ("bf16_stream", "f32")]
    asked = [replace(plain, scored=e.score(PART.prompts, PART.tokens[0].tolist(), top_k=64)) for e in engines]
    gates = [run_gate(PART, e) for e in engines]
    taken = [forced_choices(PART, q.scored)[0] for q in asked if q.scored]
    together = stand_beside(PART, CASTS, declared, declared, taken, members=3, seed=0)
    for n, (question, gate) in enumerate(zip(asked, gates, strict=True)):
        alone = judge_outside(question, gate)
        beside = judge_outside(question, gate, together.of(n, 2))
        assert beside.reason == alone.reason
        for name, value in alone.figures.items():
            np.testing.assert_equal(beside.figures[name], value)


def test_a_correct_run_and_a_fault_are_told_apart() -> None:
    """The float32 carrier is no defect by any sight; with the routed scale off everywhere its logprobs show it."""
    part = Slice("gate", (0, 1), 4)
    words = CARRIERS["f32"]
    fault = Cell(subject="f", words=words, battery=part, seed=0, defect="routed_scale", severity="heavy", spread="all")
    good, bad = answers(CASTS, [replace(fault, defect="", subject="c"), fault])
    assert {t.flagged for t in good.told.values()} <= {False, None}
    assert bad.shows
    assert bad.told["forced"].flagged
    assert set(good.told) == {name for name, sight in SIGHTS.items() if not sight.finer}


def test_the_experiment_is_whole() -> None:
    """Each defect is planted in one carrier at one severity; keys are unique; a file of other columns is refused."""
    every = cells()
    assert len({c.key for c in every}) == len(every)
    assert {c.battery for c in every if c.benign} == set(BATTERIES)
    assert {c.severity for c in every if not c.benign} == {"light", "medium", "heavy"}


def test_rates_count_what_was_told(tmp_path) -> None:
    """Of two correct runs one is flagged and one cannot be told; a defect that shows nothing is left out."""
    row = {"declared": "f32", "sight": "tokens", "defect": "", "severity": "", "shows": "1", "flagged": "1"}
    rows = [
        row,
        row | {"flagged": ""},
        row | {"defect": "d", "severity": "light"},
        row | {"defect": "d", "severity": "light", "shows": "0", "flagged": "0"},
    ]
    (line,) = rates(rows)
    assert str(line["false alarms"]).startswith("1/2")
    assert str(line["correct, not told"]).startswith("1/2")
    assert str(line["caught"]).startswith("1/1")
    path = tmp_path / "o.csv.xz"
    append(path, rows[:1])
    append(path, rows[2:])
    assert [r["defect"] for r in read(path)] == ["", "d", "d"]
    path.write_bytes(lzma.compress(b"key,other\n"))
    with pytest.raises(InputError, match="other columns"):
        read(path)
