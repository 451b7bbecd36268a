"""Engines that cannot be looked into: by tokens alone, or beside the oracle where their checkpoint is here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mock_server import Handler, completion, serving

from experiments.cli import main
from harness.divergence import Cause
from harness.engines.protocol import Generation
from harness.golden import Golden, Recorded, load_golden
from harness.ledger import Ledger
from harness.sampling import plain_greedy_settings
from harness.score import score
from harness.verdict import RunClass, Verdict
from harness.verdict_tokens import judge_tokens

SAMPLES = Path(__file__).parents[1].parent / "shared" / "samples"
Out = pytest.CaptureFixture[str]


def lists(margins: np.ndarray, first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
    """Top lists [1, T, 3] in which `first` leads `second` by these nats (a negative lead ranks second first)."""
    lead = np.abs(margins)
    ids = np.where(margins[..., None] >= 0, [first, second, 99], [second, first, 99]).astype(np.int32)
    return ids[None], np.stack([-0.1 + 0 * lead, -0.1 - lead, -9 + 0 * lead], -1)[None]


def judged(golden_margins: list[float], own_margins: list[float], **more: Any) -> Verdict:
    """One row in which the tokens 1 (golden) and 2 compete; the last place diverges."""
    t = len(golden_margins)
    theirs, own = np.array(golden_margins), np.array(own_margins)
    ids, values = lists(theirs, 1, 2)
    golden = Golden(
        name="g",
        prompts=((3, 4),),
        tokens=np.full((2, 1, t), 1, np.int32),
        top_ids=ids,
        top_logprobs=values,
        sampling=plain_greedy_settings(),
    )
    made = run_of(np.where(own >= 0, 1, 2)[None], *lists(own, 1, 2))
    return judge_tokens(golden, made, score(golden, made), noise=more.get("noise"))


def run_of(tokens: np.ndarray, ids: np.ndarray | None = None, values: np.ndarray | None = None) -> Generation:
    return Generation(
        tokens=tokens.astype(np.int32),
        finite=np.ones(tokens.shape, bool),
        gaps=np.full(tokens.shape, np.nan),
        prefill_s=np.full(len(tokens), np.nan),
        prefill_tokens=np.full(len(tokens), 2),
        decode_s=(),
        top_ids=ids,
        top_logprobs=values,
    )


NOISE = [0.03, -0.04, 0.035, -0.03, 0.04, -0.035, 0.03, -0.04, 0.035, -0.03, 0.04, -0.035]


@pytest.mark.parametrize(
    ("golden_margin", "run_class", "cause"), [(0.036, "ROUNDING", Cause.rounding), (0.36, "SUSPECT", Cause.suspect)]
)
def test_p24_a_gap_of_one_sigma_is_rounding_and_of_ten_is_not(
    golden_margin: float, run_class: str, cause: Cause
) -> None:
    """Noise of 0.035 rms is measured at the shared places; 0.036 and 0.36 nats are held against it."""
    shared = [2.0] * len(NOISE)
    own = [2.0 + n for n in NOISE]
    verdict = judged([*shared, golden_margin], [*own, -1e-6])
    assert verdict.run_class.value == run_class
    (d,) = verdict.divergences
    assert d.cause is cause  # type: ignore[attr-defined]
    assert verdict.figures["noise_nats"] == pytest.approx(0.035, rel=0.1)
    assert verdict.confidence == "low"


def test_a_noise_that_hides_every_gap_is_no_verdict() -> None:
    """Gaps all under the measured noise: the battery cannot discriminate."""
    verdict = judged([0.01] * 13, [*[0.01 + 10 * abs(n) for n in NOISE], -0.1])
    assert verdict.run_class is RunClass.invalid
    assert "cannot discriminate" in verdict.reason


@pytest.mark.parametrize(
    ("gap", "noise", "run_class", "said"),
    [
        (0.0, None, "INVALID", "no evidence of a tie"),
        (0.25, None, "ROUNDING", "2.0 sigma: rounding (by the reference"),
        (0.25, 0.03, "SUSPECT", "8.3 sigma: suspect"),
        (np.inf, None, "SUSPECT", "outside the list of the reference"),
        (np.nan, None, "INVALID", "no gap was recorded here"),
    ],
)
def test_recorded_gaps_are_used_and_zero_is_no_tie(gap: float, noise: float | None, run_class: str, said: str) -> None:
    """What the reference gave for the candidate's token decides; where it gave nothing, nothing is decided."""
    tokens = np.array([[1, 5]])
    gaps = np.array([[0.0, gap]])
    recorded = Recorded(tokens=tokens, gap_nats=gaps, outside=np.isposinf(gaps))
    golden = Golden(
        name="g", prompts=((3,),), tokens=np.array([[[1, 2]]] * 2), sampling=plain_greedy_settings(), recorded=recorded
    )
    made = run_of(tokens)
    verdict = judge_tokens(golden, made, score(golden, made), noise=noise)
    assert verdict.run_class.value == run_class
    assert said in verdict.divergences[0].reason
    assert verdict.divergences[0].cause is not Cause.tie  # type: ignore[attr-defined]


@pytest.mark.parametrize(("gap", "run_class"), [(0.1, "ROUNDING"), (2.0, "SUSPECT"), (np.nan, "INVALID")])
def test_a_recorded_gap_of_zero_leaves_it_to_the_others(gap: float, run_class: str) -> None:
    """Of two divergences one has gap 0: the class is what the other one says, and the 0 is counted as not told."""
    tokens = np.array([[1, 5], [1, 6]])
    gaps = np.array([[0.0, 0.0], [0.0, gap]])
    golden = Golden(
        name="g",
        prompts=((3,), (4,)),
        tokens=np.array([[[1, 2], [1, 2]]] * 2),
        sampling=plain_greedy_settings(),
        recorded=Recorded(tokens=tokens, gap_nats=gaps, outside=np.zeros(gaps.shape, bool)),
    )
    verdict = judge_tokens(golden, run_of(tokens), score(golden, run_of(tokens)), noise=None)
    assert verdict.run_class.value == run_class
    assert verdict.divergences[0].cause is None  # type: ignore[attr-defined]
    if run_class == "ROUNDING":
        assert verdict.reason.startswith("1 of 2 first divergences are within noise")
        assert verdict.reason.endswith("1 with a recorded gap of 0 cannot be told")


def test_a_bar_of_runs_that_differ_is_met_not_agreed_with() -> None:
    """Every row is one of the reference's K runs, none of them run 0: PASS because the bar is met."""
    tokens = np.array([[1, 5]])
    golden = Golden(name="g", prompts=((3,),), tokens=np.array([[[1, 2]], [[1, 5]]]), sampling=plain_greedy_settings())
    verdict = judge_tokens(golden, run_of(tokens), score(golden, run_of(tokens)), noise=None)
    assert verdict.run_class is RunClass.passed
    assert verdict.reason == "the bar is met: every row is one of the reference's own, 1/2 with its run 0"


@pytest.mark.parametrize(("golden_row", "own_row"), [([1, -1], [1, 5]), ([1, 5], [1, -1])])
def test_another_end_rule_is_no_verdict_on_arithmetic(golden_row: list[int], own_row: list[int]) -> None:
    """By tokens alone too, one side that ends where the other goes on is INVALID: an input mismatch."""
    golden = Golden(name="g", prompts=((3,),), tokens=np.array([[golden_row]] * 2), sampling=plain_greedy_settings())
    made = run_of(np.array([own_row]))
    verdict = judge_tokens(golden, made, score(golden, made), noise=None)
    assert verdict.run_class is RunClass.invalid
    assert "EOS rule" in verdict.reason
    assert "input mismatch" in verdict.reason


def test_tokens_that_agree_pass() -> None:
    """All equal: PASS, and with one run of the reference the reason says what that is worth."""
    tokens = np.array([[1, 5]])
    golden = Golden(name="g", prompts=((3,),), tokens=tokens[None], sampling=plain_greedy_settings())
    verdict = judge_tokens(golden, run_of(tokens), score(golden, run_of(tokens)), noise=None)
    assert verdict.run_class is RunClass.passed
    assert "K = 1" in verdict.reason


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the recorded samples are not beside this checkout")
@pytest.mark.parametrize(("name", "worst"), [("deepseek_v2_greedy", 0.25), ("olmo2_greedy_1b", 0.031)])
def test_the_samples_are_judged_by_their_recorded_gaps(name: str, worst: float, tmp_path: Path, capsys: Out) -> None:
    """Two real engines: three first divergences each, two of them of gap 0, the third decides."""
    folder = SAMPLES / name
    words = [f"golden={folder}", "engine=replay", f"engine.folder={folder}", f"results={tmp_path}"]
    assert main(["verdict", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ROUNDING")
    assert "1 of 3 first divergences are within noise" in out
    assert out.count("no evidence of a tie") == 2
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert row["verdict"]["figures"]["max_margin_nats"] == worst
    assert main(["verdict", *words, "noise=0.001", "--fail"]) == 1


def test_a_server_is_judged_beside_the_oracle(tmp_path: Path, capsys: Out) -> None:
    """Its checkpoint is the golden's: envelope and expected score run; wrong tokens and logprobs are a defect."""
    gate = load_golden("gate")
    words = ["engine=openai", "engine.dialect=vllm", "limit=1", "max_tokens=6", f"results={tmp_path}"]
    with serving(gate) as server:
        assert main(["verdict", f"engine.url={server.url}", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PASS")
    assert "a correct run of this recipe" in out

    def wrong(handler: Handler, body: dict[str, Any]) -> bool:
        whole = completion(gate, body)
        (choice,) = whole["choices"]
        rows = choice["logprobs"]["top_logprobs"]
        for row in rows:  # the likeliest third of the list has become the least likely
            keys, values = list(row), list(row.values())
            row.update(zip(keys[7:] + keys[:7], values, strict=True))
        choice["token_ids"] = [int(max(row, key=row.get).removeprefix("token_id:")) for row in rows]
        handler.answer(whole)
        return True

    with serving(gate, wrong) as server:
        assert main(["verdict", f"engine.url={server.url}", "--fail", *words]) == 1
    assert capsys.readouterr().out.startswith("DEFECT")
    row = Ledger(tmp_path / "ledger").rows()[-1]
    assert row["verdict"]["confidence"] == "low"
    assert row["verdict"]["site"] is None


def test_settings_without_effect_are_refused(tmp_path: Path, capsys: Out) -> None:
    """noise= is for tokens alone, declared= for what runs beside an oracle."""
    gate = load_golden("gate")
    with serving(gate) as server:
        words = [
            "verdict",
            "engine=openai",
            f"engine.url={server.url}",
            "limit=1",
            "max_tokens=2",
            f"results={tmp_path}",
        ]
        assert main([*words, "engine.dialect=vllm", "noise=0.1"]) == 2
    assert main(["verdict", "variant=f32", "noise=0.1", f"results={tmp_path}"]) == 2
    assert "noise=0.1 has no effect" in capsys.readouterr().err
    other = replace(gate, provenance={}, path=None)
    from harness.golden import write_golden

    path = write_golden(other, tmp_path / "other").path
    words = [f"golden={path}", "engine=replay", f"engine.folder={path}", "declared=f32", f"results={tmp_path}"]
    assert main(["verdict", *words]) == 2
    assert "declared=f32 has no effect" in capsys.readouterr().err
    assert main(["verdict", *words[:3], "device.threads=1", words[-1]]) == 2
    assert "device.threads=1 has no effect: the golden was not made of" in capsys.readouterr().err


def test_threads_are_the_oracles_where_tokens_come_from_a_file(tmp_path: Path, capsys: Out) -> None:
    """A verdict on replayed tokens runs the oracle, on as many threads as it is told, and the row says so.

    A gate of them runs nothing, and another device is refused for both.
    """
    words = [
        "engine=replay",
        f"engine.folder={load_golden('gate').path}",
        "limit=1",
        "max_tokens=1",
        f"results={tmp_path}",
    ]
    assert main(["gate", *words, "device.threads=1"]) == 2
    assert "device.threads=1 has no effect with engine=replay" in capsys.readouterr().err
    assert main(["verdict", *words, "device=cuda"]) == 2
    assert "device=cuda has no effect with engine=replay" in capsys.readouterr().err
    for threads in (1, 2):
        assert main(["verdict", *words, "members=8", f"device.threads={threads}"]) == 0
    rows = Ledger(tmp_path / "ledger").rows()
    assert sorted(row["environment"]["threads"] for row in rows if row["status"] == "ok") == [1, 2]
    assert sorted(row["detail"]["config"]["device"]["threads"] for row in rows if row["status"] == "ok") == [1, 2]
