"""Paired timing: each step of one side beside the same step of the other, and the row that it leaves."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import build, casts, oracle, plain, prompt

from experiments.bench import LIBRARY
from experiments.cli import main
from harness.ledger import Ledger
from harness.paired import WARM_UP, Pairs, VariantSide, rate_of, timed
from harness.paired_llama import BLOCKS
from variants import decode
from variants.axes import Gemm, Stream

needs_library = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is optional")
Captured = pytest.CaptureFixture[str]


class Clock:
    """Time that passes only where a side says so; the processor's at half the pace of the wall's."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> tuple[int, int]:
        return self.now, self.now // 2


class Fake:
    """A side whose steps take given nanoseconds, the first ones `warming` times as long; it notes what it was fed."""

    def __init__(self, clock: Clock, name: str, log: list[tuple[str, int]], *, cost: int, first: int = 100) -> None:
        self.clock, self.name, self.log, self.cost, self.first = clock, name, log, cost, first
        self.taken, self.left = 0, WARM_UP

    def start(self, prompt: Sequence[int]) -> int:
        return self.first

    def step(self, token: int) -> int:
        self.clock.now += self.cost * (50 if self.left > 0 else 1)
        self.left -= 1
        self.log.append((self.name, token))
        return token + (1 if self.name == "ours" else 1 + token % 2)


def pairs(ours: int, theirs: int, *, steps: int = 6) -> tuple[Pairs, list[tuple[str, int]]]:
    clock, log = Clock(), []
    left, right = Fake(clock, "ours", log, cost=ours), Fake(clock, "theirs", log, cost=theirs, first=7)
    return timed(left, right, [1, 2], steps=steps, clock=clock), log


def test_each_side_is_charged_its_own_steps() -> None:
    """Seconds of both clocks go to the side that ran; the warm-up, fifty times as slow, is in no figure."""
    run, _ = pairs(1000, 3000)
    assert np.array_equal(run.wall_s, np.tile([1e-6, 3e-6], (6, 1)))
    assert run.cpu_s is not None
    assert np.array_equal(run.cpu_s, np.tile([0.5e-6, 1.5e-6], (6, 1)))
    record = json.loads(json.dumps(run.record()))
    assert record["wall"]["ratio"] == {"median": pytest.approx(3), "low": pytest.approx(3), "high": pytest.approx(3)}
    assert record["cpu"]["ours_ms"]["median"] == pytest.approx(5e-4)


@pytest.mark.parametrize(("ours", "theirs", "ratio"), [(1000, 1000, 1), (2000, 1000, 0.5), (1000, 2500, 2.5)])
def test_the_ratio_is_theirs_over_ours(ours: int, theirs: int, ratio: float) -> None:
    """Above one where ours is faster, and the rate is ours alone."""
    run, _ = pairs(ours, theirs)
    assert np.median(run.wall_s[:, 1] / run.wall_s[:, 0]) == pytest.approx(ratio)
    assert rate_of([run, run]).median == pytest.approx(1e9 / ours)
    assert rate_of([run], side=1).median == pytest.approx(1e9 / theirs)
    assert rate_of([run, run]).steps == 12


def test_both_sides_run_the_same_tokens_and_take_turns_at_going_first() -> None:
    """Each pair is forced to what ours chose, whatever theirs chose; where they differ they do not count as agreed."""
    run, log = pairs(10, 10)
    steps = [log[i : i + 2] for i in range(0, len(log), 2)]
    assert [s[0][0] for s in steps] == ["ours", "theirs"] * (len(steps) // 2)
    assert [{token for _, token in s} for s in steps] == [{100 + i} for i in range(len(steps))]
    assert run.agreed == 3  # at even tokens theirs gives the same successor


def test_a_variants_side_decodes_as_the_variant_does() -> None:
    """Its tokens are those of a plain greedy run, from prefill on and after a second start."""
    model, ids, steps = build(oracle(), casts()), prompt(5), 4
    wanted: list[int] = []

    def choose(t: int, logits: torch.Tensor) -> torch.Tensor:
        wanted.append(int(decode.greedy(logits)))
        return decode.greedy(logits)

    decode.steps(model, [ids], steps, choose)
    side = VariantSide(model, steps=steps)
    for _ in range(2):
        got = [side.start(ids)]
        while len(got) < steps:
            got.append(side.step(got[-1]))
        assert got == wanted


def test_two_variants_are_timed_on_real_steps() -> None:
    """Every figure of a real pair is positive, and a variant agrees with itself at each step."""
    made = casts()
    sides = [VariantSide(build(plain(Stream.f32, Gemm.f32), made), steps=3 + WARM_UP) for _ in range(2)]
    run = timed(sides[0], sides[1], prompt(4), steps=3)
    assert run.agreed == 3
    assert (run.wall_s > 0).all()
    assert run.cpu_s is not None
    assert run.wall_s.shape == run.cpu_s.shape == (3, 2)


def benched(folder: Path, *words: str) -> dict:
    quick = ("steps=2", "runs=1", "device.threads=1", f"results={folder}")
    assert main(["bench", *words, *quick]) == 0
    (row,) = Ledger(folder / "ledger").rows()
    return row


def test_a_bench_leaves_a_row(tmp_path: Path, capsys: Captured) -> None:
    """Recipe declared and observed, rate of ours, both sides and their ratio; the table names both."""
    row = benched(tmp_path, "variant=f32_fast", "against=f32")
    assert (row["status"], row["experiment"], row["variant"]) == ("ok", "bench", "f32_fast")
    assert all([*row["recipe"].values(), row["battery_hash"], row["model_hash"]])
    found = row["detail"]["bench"]
    assert (found["against"], len(found["runs"]), found["runs"][0]["steps"]) == ("f32", 1, 2)
    assert found["runs"][0]["wall"]["ratio"]["median"] > 0
    assert row["decode_tok_s"]["steps"] == 2
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("f32_fast", "f32", "ratio", "2/2"))
    assert "one variant" not in shown


def test_one_variant_by_two_names_is_called_so(tmp_path: Path, capsys: Captured) -> None:
    """It is timed, as a control, and the last line says that both names mean the same."""
    benched(tmp_path, "variant=bf16_residual", "variant.stream=f32", "against=f64_islands")
    assert "bf16_residual+stream=f32 and f64_islands are one variant, the same arm" in capsys.readouterr().out


@needs_library
def test_the_library_is_the_default_other_side(tmp_path: Path) -> None:
    """Left out, against is the library in float32, which chooses the same tokens."""
    row = benched(tmp_path, "variant=f32_fast")
    assert row["detail"]["bench"]["against"] == "transformers"
    assert row["detail"]["bench"]["runs"][0]["agreed"] == 2
    assert set(LIBRARY) == {"transformers", "transformers_bf16"}


WRONG = {
    "runs=0": "runs=0: expected 1 or more",
    "steps=0": "steps=0: expected 1 or more",
    "limit=2": "limit is not read by bench",
    "max_tokens=2": "max_tokens is not read by bench",
    "engine=transformers": "is not read; name it by against=",
    "against=f33": "f33",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_wrong_word_is_one_line(word: str, tmp_path: Path, capsys: Captured) -> None:
    """Exit code 2, one line that says what to do."""
    assert main(["bench", word, f"results={tmp_path}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert WRONG[word] in lines[0]


def test_kernels_times_are_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured stands in one row, with where; a measurement that fails leaves one that says so."""
    kernels = pytest.importorskip("experiments.bench_kernels")
    ledger = Ledger(tmp_path)
    figures = [{"form": "recurrent", "tokens": 1}]
    monkeypatch.setattr(kernels, "run", lambda out, sweep: {"rows": figures, "sweep": sweep})
    kernels.recorded(tmp_path / "out.json", ledger, sweep=True, device="cpu")
    monkeypatch.setattr(kernels, "run", lambda out, sweep: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kernels.recorded(tmp_path / "out.json", ledger, device="cpu")
    made, failed = ledger.rows()
    assert (made["experiment"], made["status"], failed["status"]) == ("bench_kernels", "ok", "failed")
    assert made["detail"]["kernels"] == {"rows": figures, "sweep": True}
    assert made["environment"]["device"] == "cpu"


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp is optional")
def test_llama_answers_whole_and_in_turn(tmp_path: Path, capsys: Captured) -> None:
    """Its server chooses the same tokens in float32; there is a wall clock alone, and every token is compared."""
    row = benched(tmp_path, "variant=f32_native", "against=llama_server")
    (found,) = row["detail"]["bench"]["runs"]
    assert (found["steps"], found["agreed"], found["compared"]) == (BLOCKS, BLOCKS * 10, BLOCKS * 10)
    assert found["wall"]["ratio"]["median"] > 0
    assert "cpu" not in found
    assert "60/60" in capsys.readouterr().out


def test_another_side_that_is_not_there_is_named(capsys: Captured) -> None:
    """What may stand there, in one line."""
    assert main(["bench", "variant=f32", "against=nope", "device.threads=1"]) == 2
    assert (
        "expected transformers, transformers_bf16, llama_server, floors or a named variant" in capsys.readouterr().err
    )
