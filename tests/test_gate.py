"""The gate compares what can be compared, counts it rightly, holds it to what was asked for, and leaves a row."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.cli import main
from harness.compose import load
from harness.engines import loaded, make_engine
from harness.engines.local import LocalEngine
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.gate import part_of, run_gate
from harness.golden import Bar, Golden, load_golden
from harness.ledger import Ledger
from harness.observe import Observed
from variants.errors import InputError, UsageError

SAMPLES = Path(__file__).parents[1].parent / "shared" / "samples"
Captured = pytest.CaptureFixture[str]


class Recited:
    """An engine that says given tokens, and notes how it was asked."""

    def __init__(self, tokens: np.ndarray, *, finite: np.ndarray | None = None) -> None:
        self.tokens, self.asked = tokens, []
        self.finite = np.ones(tokens.shape, bool) if finite is None else finite

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(name="recited", version="1", device="cpu", dtype="f32")

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        self.asked.append((len(prompts), max_tokens, stop_at_eos))
        n = len(prompts)
        return Generation(
            tokens=self.tokens,
            finite=self.finite,
            gaps=np.full(self.tokens.shape, 0.5),
            prefill_s=np.full(n, 0.1),
            prefill_tokens=np.full(n, 4),
            decode_s=tuple(np.full(max_tokens - 1, 0.01) for _ in range(n)),
        )

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20) -> Scored:
        raise AssertionError("a gate asks for tokens only")


@pytest.fixture
def strict() -> Golden:
    return load_golden("gate")


@pytest.fixture
def two_ways(strict: Golden) -> Golden:
    """Its runs differ in the last place of prompt 0."""
    tokens = strict.tokens.copy()
    tokens[1, 0, -1] += 1
    return replace(strict, tokens=tokens)


def one_off(golden: Golden) -> np.ndarray:
    tokens = golden.tokens[0].copy()
    tokens[3, 5] += 1
    return tokens


@pytest.mark.parametrize(
    ("require", "all_agree", "one_differs"),
    [(None, True, True), ("bar", True, False), ("strict", True, False), ("exact", True, False), ("127", True, True)],
)
def test_a_requirement_is_met_or_not(require: str | None, all_agree: bool, one_differs: bool, strict: Golden) -> None:
    """128/128 meets each of them, 127/128 only what asks for no more."""
    assert run_gate(strict, Recited(strict.tokens[0]), require=require).met is all_agree
    assert run_gate(strict, Recited(one_off(strict)), require=require).met is one_differs
    assert run_gate(strict, Recited(one_off(strict)), require="128").met is False


def test_the_bar_of_several_runs_is_to_be_one_of_them(two_ways: Golden) -> None:
    """Equal to run 1 meets a DISTRIBUTIONAL bar, but `exact` asks for run 0 and `strict` cannot be asked at all."""
    engine = Recited(two_ways.tokens[1])
    assert two_ways.bar is Bar.DISTRIBUTIONAL
    assert run_gate(two_ways, engine, require="bar").met is True
    assert run_gate(two_ways, engine, require="exact").met is False
    with pytest.raises(UsageError, match="the runs of golden gate differ"):
        run_gate(two_ways, engine, require="strict")


def test_no_bar_without_a_second_run(strict: Golden) -> None:
    """K = 1 cannot be required of, is no PASS at full agreement, and can be held to a number."""
    once = replace(strict, tokens=strict.tokens[:1])
    engine = Recited(once.tokens[0])
    with pytest.raises(UsageError, match="its bar is unmeasured"):
        run_gate(once, engine, require="bar")
    result = run_gate(once, engine, require="128")
    assert (result.met, result.agreement.bar_met, result.verdict["class"]) == (True, None, None)


def test_non_finite_logits_are_invalid_and_never_agree(strict: Golden) -> None:
    """A right token out of NaN logits is not counted, meets nothing, and makes the run invalid."""
    finite = np.ones(strict.tokens.shape[1:], bool)
    finite[2, 7] = False
    result = run_gate(strict, Recited(strict.tokens[0], finite=finite), require="1")
    assert (result.agreement.matched, result.met) == (127, False)
    assert result.verdict == {"class": "INVALID", "reason": "non-finite logits, first at prompt 2, step 7"}
    assert result.record()["status"] == "invalid"


def test_other_prompts_are_refused_before_a_token(strict: Golden) -> None:
    """An input mismatch is named and the engine is never asked."""
    engine = Recited(strict.tokens[0])
    with pytest.raises(InputError, match="input mismatch at prompt 0: candidate lacks BOS"):
        run_gate(strict, engine, prompts=[p[1:] for p in strict.prompts])
    with pytest.raises(InputError, match="another tokenizer"):
        run_gate(strict, engine, vocab_size=100)
    assert engine.asked == []


@pytest.mark.parametrize(("eos", "stop"), [("ignored", False), ("stop", True)])
def test_the_golden_says_where_to_stop(eos: str, stop: bool, strict: Golden) -> None:
    """The candidate follows the EOS rule that the golden was made with."""
    engine = Recited(strict.tokens[0])
    run_gate(replace(strict, sampling={**strict.sampling, "eos": eos}), engine)
    assert engine.asked == [(8, 16, stop)]


def test_a_part_is_measured_anew(two_ways: Golden) -> None:
    """A part has its own name, hash and bar; the whole is the golden itself; more than there is is refused."""
    part = part_of(two_ways, prompts=2, tokens=4)
    assert part.tokens.shape == (3, 2, 4)
    assert part.top_ids is not None
    assert part.top_ids.shape[:2] == (2, 4)
    assert (part.name, part.bar) == ("gate[:2,:4]", Bar.STRICT)
    assert part.hash != two_ways.hash
    assert part_of(two_ways, prompts=8, tokens=0) is two_ways
    with pytest.raises(UsageError, match="has 8 prompts of 16 tokens; got limit=9"):
        part_of(two_ways, prompts=9)


def test_rates_leave_out_the_first_token(strict: Golden) -> None:
    """Prefill makes the first token: 4 prompt tokens in 0.1 s are 40 tok/s, a step of 10 ms is 100 tok/s."""
    timing = run_gate(strict, Recited(strict.tokens[0])).timing
    assert timing.prefill_tok_s.median == pytest.approx(40.0)
    assert timing.decode_tok_s.median == pytest.approx(100.0)
    assert timing.decode_tok_s.steps == 8 * 15


def test_f32_scores_what_other_float32_implementations_score(tmp_path: Path) -> None:
    """109/128 against vLLM: transformers in float32 and llama.cpp in float32 agree on that. A row holds it all."""
    assert main(["gate", "variant=f32", f"results={tmp_path}"]) == 0
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert (row["agreement"]["matched"], row["agreement"]["total"], row["agreement"]["exact_prompts"]) == (109, 128, 6)
    golden = load_golden("gate")
    assert (row["golden_hash"], row["battery_hash"], row["bar"]) == (golden.hash, golden.battery_hash, "STRICT")
    assert row["model_hash"] == golden.provenance["model_sha256"]
    assert row["recipe"]["declared"]["sites"]["q_proj"]["accum"] == "f32"
    assert row["recipe"]["observed"]["q_proj.decode"][0]["leaves"] == ["f32"]
    assert len(row["variant_hash"]) == 64
    assert row["decode_tok_s"]["steps"] >= 8 * 15 - 8
    assert row["peak_memory_bytes"] > 24_901_488
    assert np.shape(row["detail"]["tokens"]) == (8, 16)


def test_a_requirement_is_the_exit_code(tmp_path: Path, capsys: Captured) -> None:
    """Below what --require asks for is exit 1 with its row and table; without --require it is a result and exit 0."""
    argv = ["gate", "variant=f32", "limit=1", "max_tokens=9", f"results={tmp_path}"]
    assert [main([*argv, *more]) for more in ([], ["--require=7"], ["--require=9"], ["--require"])] == [0, 0, 1, 1]
    rows = Ledger(tmp_path / "ledger").rows()
    assert [row["detail"]["met"] for row in rows] == [True, True, False, False]
    assert {row["status"] for row in rows} == {"ok"}
    assert "7/9" in capsys.readouterr().out


def test_one_load_serves_a_multirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Three jobs of one process read the weights once and come out as one table."""
    loads = []
    load_checkpoint = loaded.load_checkpoint
    monkeypatch.setattr(loaded, "load_checkpoint", lambda *a, **k: loads.append(a) or load_checkpoint(*a, **k))
    loaded.shared_casts.cache_clear()
    words = ["variant=f32,incremental_chunk,bf16_stream", "limit=1", "max_tokens=2", f"results={tmp_path}"]
    assert main(["gate", "-m", *words]) == 0
    assert len(loads) == 1
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == ["variant", "f32", "incremental_chunk", "bf16_stream"]


def test_a_job_leaves_no_casts_behind(tmp_path: Path) -> None:
    """After a job the process holds the checkpoint alone: a float64 copy of it is not in the next job's peak."""
    part = ["limit=1", "max_tokens=2", f"results={tmp_path}"]
    assert main(["gate", "variant=oracle", *part]) == 0
    engine = make_engine(load(["variant=oracle"]))
    assert isinstance(engine, LocalEngine)
    assert engine.casts.nbytes == 0
    assert engine.model is not None
    assert engine.casts.nbytes > 8 * 12_000_000


def test_equal_arms_are_told(tmp_path: Path, capsys: Captured) -> None:
    """Two jobs in which the same ran at every site are called the same arm; two in which it did not are not."""
    part = ["limit=1", "max_tokens=2", f"results={tmp_path}"]
    assert main(["gate", "-m", "variant=f32", "variant.execution.prefill_piece=0,64", *part]) == 0
    assert "the same arm, for what ran is equal" in capsys.readouterr().out
    assert main(["gate", "-m", "variant=f32,bf16_stream", *part]) == 0
    assert "the same arm" not in capsys.readouterr().out


def test_json_is_the_rows(tmp_path: Path, capsys: Captured) -> None:
    """One job prints its row as one JSON document, a multirun a list of them."""
    part = ["limit=1", "max_tokens=2", f"results={tmp_path}", "--json"]
    main(["gate", "variant=f32", *part])
    row = json.loads(capsys.readouterr().out)
    assert (row["variant"], row["agreement"]["total"]) == ("f32", 2)
    main(["gate", "-m", "variant=f32,oracle", *part])
    assert [r["variant"] for r in json.loads(capsys.readouterr().out)] == ["f32", "oracle"]


def test_what_ran_must_be_what_was_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """A contradiction between recipe and observation fails the run, exit 5, and the row names it."""
    lie = Observed({}, ("layer 2 kda_core.decode: stored as bf16, declared f32", "another"))
    monkeypatch.setattr(LocalEngine, "observed", lambda *_: lie)
    assert main(["gate", "variant=f32", f"results={tmp_path}"]) == 5
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert row["status"] == "failed"
    assert "layer 2 kda_core.decode: stored as bf16, declared f32 (and 1 more)" in row["error"]
    assert row["error"].removeprefix("EngineError: ") in capsys.readouterr().err


def test_a_run_leaves_its_row_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs in one second are two rows; no output folder is made, from a time stamp or from the words typed."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a,b=c d"
    folder.mkdir()
    main(["golden", "export", "gate", str(folder)])
    words = [f"golden='{folder}'", "engine=replay", f"engine.folder='{folder}'"]
    (folder / "our_ids.npy").write_bytes((folder / "greedy_ids.npy").read_bytes())
    assert [main(["gate", *words]), main(["gate", "-m", *words])] == [0, 0]
    assert {p.name for p in tmp_path.iterdir()} == {"a,b=c d", "results"}
    assert [p.name for p in (tmp_path / "results").iterdir()] == ["ledger"]
    rows = Ledger(tmp_path / "results" / "ledger").rows()
    assert [row["golden"] for row in rows] == [str(folder)] * 2
    assert rows[0]["run_id"] != rows[1]["run_id"]


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the sample goldens are not beside this checkout")
@pytest.mark.parametrize(
    ("sample", "matched", "total", "exact", "divergences"),
    [
        ("deepseek_v2_greedy", 92, 128, 5, {2: 1, 3: 9, 5: 1}),
        ("olmo2_greedy_1b", 241, 256, 13, {1: 7, 6: 12, 10: 8}),
    ],
)
def test_samples_score_through_replay(
    sample: str, matched: int, total: int, exact: int, divergences: dict[int, int], tmp_path: Path
) -> None:
    """Recorded tokens of two real engines give the figures that came with them."""
    folder = SAMPLES / sample
    assert main(["gate", f"golden={folder}", "engine=replay", f"engine.folder={folder}", f"results={tmp_path}"]) == 0
    (row,) = Ledger(tmp_path / "ledger").rows()
    agreement = row["agreement"]
    assert (agreement["matched"], agreement["total"], agreement["exact_prompts"]) == (matched, total, exact)
    assert {d["prompt"]: d["position"] for d in agreement["first_divergence"]} == divergences
    assert row["bar"] == "STRICT"


@pytest.mark.parametrize("words", [["engine=replay", "engine.folder=/none"], ["model=/none"]])
def test_make_engine_refuses_what_is_not_there(words: list[str]) -> None:
    """A folder that is not there is an input error, whatever the engine."""
    with pytest.raises(InputError, match="/none"):
        make_engine(load(words))


def test_a_golden_that_contradicts_itself_is_told(strict: Golden) -> None:
    """A token that is not the first of its own recorded logprobs is a note of the run, with prompt and position."""
    assert strict.top_ids is not None
    tokens = strict.tokens.copy()
    tokens[:, 2, 3] = int(strict.top_ids[2, 3, 1])
    notes = run_gate(replace(strict, tokens=tokens), Recited(tokens[0])).notes
    assert [n for n in notes if "contradicts itself" in n and "prompt 2, position 3" in n]
    assert not [n for n in run_gate(strict, Recited(strict.tokens[0])).notes if "contradicts" in n]


def test_a_fixture_of_near_ties_passes_and_fails_nobody(strict: Golden) -> None:
    """P26: where most gaps are under one step of bf16 logits, a requirement is refused and a report says so."""
    assert strict.top_logprobs is not None
    close = strict.top_logprobs.copy()
    close[..., 1] = close[..., 0] - 0.006
    weak = replace(strict, top_logprobs=close)
    assert any("cannot discriminate" in note for note in run_gate(weak, Recited(strict.tokens[0])).notes)
    with pytest.raises(InputError, match="cannot discriminate"):
        run_gate(weak, Recited(strict.tokens[0]), require="100")
