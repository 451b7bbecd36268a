"""Goldens and runs as users bring them: each is scored right, told, or refused in one line that says what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.cli import main
from harness.engines.replay import ReplayEngine
from harness.gate import run_gate
from harness.golden import Golden, import_folder, load_golden
from harness.row_ends import end_ids, without_padding
from harness.token_run import read_run
from variants.errors import InputError

Captured = pytest.CaptureFixture[str]
EOS, TOKENS = 9, np.array([[3, 4, 5, 6], [5, 9, -1, -1], [6, 7, 9, -1]], np.int32)
PROMPTS = [[1, 20, 21], [1, 22], [1, 23, 24, 25]]


def folder(path: Path, prompts: list[list[int]] = PROMPTS, width: str = "<i4", **arrays: Any) -> Path:
    path.mkdir(parents=True)
    for i, prompt in enumerate(prompts):
        np.array(prompt, width).tofile(path / f"p{i}_prompt.i32")
    for name, array in ({"greedy_ids": TOKENS} | arrays).items():
        np.save(path / f"{name}.npy", array)
    return path


def gate(path: Path) -> tuple[int, int, tuple[str, ...]]:
    """Matched, total and notes of the candidate in a folder, as the command scores it."""
    from experiments.gate import with_gaps

    golden, engine = load_golden(path), ReplayEngine(path)
    result = run_gate(with_gaps(golden, engine), engine)
    return result.agreement.matched, result.agreement.total, result.notes


@pytest.mark.parametrize("fill", [EOS, 0])
def test_padding_after_the_end_is_no_token(fill: int, tmp_path: Path) -> None:
    """A candidate padded with EOS or with 0 where the golden has -1 agrees in every place, and the reader is told."""
    matched, total, notes = gate(folder(tmp_path / "a", our_ids=np.where(TOKENS < 0, fill, TOKENS)))
    assert (matched, total) == (9, 9)
    assert "rows 1, 2: what fills them after the golden's end of sequence is padding" in notes


def test_what_was_said_after_the_end_is_no_padding(tmp_path: Path) -> None:
    """Where different tokens follow EOS the candidate went on: the rows differ, and no row of the file is cut."""
    said = np.where(TOKENS < 0, np.array([7, 7, 8, 9]), TOKENS)
    assert gate(folder(tmp_path / "a", our_ids=said))[:2] == (9, 12)
    golden = import_folder(tmp_path / "a")
    assert end_ids(golden) == {EOS}
    assert without_padding(said, {EOS})[1] == ()


def test_a_golden_padded_with_its_end_is_told_and_mended(tmp_path: Path, capsys: Captured) -> None:
    """Rows that end in one id again and again are named; --eos leaves their padding out, of both sides."""
    filled = np.where(TOKENS < 0, EOS, TOKENS)
    path = folder(tmp_path / "a", greedy_ids=filled, our_ids=filled)
    matched, total, notes = gate(path)
    assert (matched, total) == (12, 12)
    assert any("rows 1, 2 end in id 9 again and again" in note for note in notes)
    assert main(["golden", "import", str(path), str(tmp_path / "g"), "--eos=9"]) == 0
    golden = load_golden(tmp_path / "g.json")
    assert golden.tokens[0].tolist() == TOKENS.tolist()
    assert golden.recorded is not None
    assert golden.recorded.tokens.tolist() == golden.tokens[0].tolist()
    assert "again and again" not in capsys.readouterr().out


def test_an_unsigned_end_is_an_end(tmp_path: Path) -> None:
    """-1 that was saved as uint16 is 65535 at the rows' ends; runs stored [K, N, T] are known by run 0."""
    runs = np.stack([TOKENS, TOKENS])
    path = folder(tmp_path / "a", our_ids=TOKENS.astype(np.uint16), greedy_dist=runs)
    assert gate(path)[:2] == (9, 9)
    assert load_golden(path).tokens.shape == (2, 3, 4)


def test_gaps_are_used_as_far_as_they_were_measured(tmp_path: Path) -> None:
    """NaN is not measured, infinity outside; zeros everywhere are none; a 0 is no margin."""
    other = TOKENS.copy()
    other[0, 2:], other[2, 1:] = 8, [8, 9, -1]
    gaps = np.array([[0, 0, 250, 0], [0, np.nan, 0, 0], [0, np.inf, 0, 0]])
    golden = import_folder(folder(tmp_path / "a", our_ids=other, neartie_gap_mnats=gaps))
    assert golden.recorded is not None
    assert (golden.recorded.gap_nats[0, 2], golden.recorded.gap_nats[2, 1]) == (0.25, np.inf)
    assert np.isnan(golden.recorded.gap_nats[1, 1])
    zero = import_folder(folder(tmp_path / "b", our_ids=other, neartie_gap_mnats=np.zeros((3, 4), int)))
    assert zero.recorded is not None
    assert np.isnan(zero.recorded.gap_nats).all()
    assert "read as not measured" in zero.provenance["import_notes"][0]
    gaps[0, 2] = 0
    some = folder(tmp_path / "c", our_ids=other, neartie_gap_mnats=gaps)
    result = run_gate(load_golden(some), ReplayEngine(some))
    assert [d.golden_margin_nats for d in result.agreement.first_divergence] == [None, None]


def test_a_candidate_of_another_shape_is_left_out_and_can_be_scored(tmp_path: Path, capsys: Captured) -> None:
    """The golden is imported without it; the line says how to score what both have, and that line runs."""
    path = folder(tmp_path / "a", our_ids=TOKENS[:, :3], neartie_gap_mnats=np.zeros((3, 3), int))
    assert load_golden(path).recorded is None
    assert main(["gate", f"golden={path}", "engine=replay", f"engine.folder={path}", f"results={tmp_path}"]) == 3
    said = capsys.readouterr().err
    assert "our_ids.npy holds 3 x 3 tokens, the golden 3 x 4: left out; score what both have with: " in said
    words = said.split("with: ")[1].split(";")[0].split()
    assert words[-1] == "max_tokens=3"
    assert main(["gate", f"golden={path}", *words, f"results={tmp_path}"]) == 0
    assert "8/8" in capsys.readouterr().out


def _double(path: Path) -> Golden:
    return import_folder(folder(path, prompts=[[1, 1, 20], [1, 1, 22], [1, 1, 23]]))


def test_a_bos_in_every_prompt_twice_is_told(tmp_path: Path) -> None:
    """Both sides may have run it, so it is no mismatch; whoever reads the score is told."""
    assert _double(tmp_path / "a").provenance["import_notes"] == [
        "every prompt begins with id 1 twice: a double BOS, if that is the BOS"
    ]


RAGGED = np.array([[3, 4, 5], [6]], object)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: folder(p, greedy_dist=np.full((3, 4, 20), 0.05)), "a distribution .*token ids of all K runs"),
        (lambda p: folder(p, greedy_dist=np.stack([TOKENS + 1] * 2, -1)), r"\[3, 4\] is not run 0 of .*\[3, 4, 2\]"),
        (lambda p: folder(p, width="<i8"), "hold int64, not int32"),
        (lambda p: folder(p, our_ids=RAGGED), "rows of unequal length; pad them with -1"),
        (lambda p: folder(p, our_ids=TOKENS.astype(float)), "expected integers: token ids, saved as int32"),
        (lambda p: folder(p, our_ids=TOKENS, neartie_gap_mnats=np.full((3, 4), 0.25)), "nats go times 1000"),
        (lambda p: folder(p, prompts=[]), r"expected p0_prompt.i32 to p2_prompt.i32.*found none"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_what_to_do(make: Callable[[Path], Path], said: str, tmp_path: Path) -> None:
    """A distribution for ids, int64 prompts, ragged rows, floats, nats for thousandths, no prompts: an input error."""
    with pytest.raises(InputError, match=said):
        import_folder(make(tmp_path / "a"))


def lines(rows: list[Any]) -> str:
    return "\n".join(map(json.dumps, rows))


ROWS = [[11, 12], [13, 14], [15, 16]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "0,1\n11,12\n13,14\n15,16\n"),
        ("a.csv", "t0;t1\r\n11;12\r\n13;14\r\n15;16\r\n\r\n"),
        ("a.csv", "\ufeff11.0,12.0\n13.0,14.0\n15.0,16.0\n"),
        ("a.csv", 'prompt,output_ids\nx,"[11, 12]"\ny,"13 14"\nz,"15,16"\n'),
        ("a.csv", "row,step,token_id\n0,0,11\n0,1,12\n1,0,13\n1,1,14\n2,1,16\n2,0,15\n"),
        ("a.jsonl", lines(ROWS)),
        ("a.jsonl", lines([{"output_token_ids": row, "text": "x"} for row in ROWS])),
    ],
)  # fmt: skip
def test_odd_tables_are_read(name: str, content: str, tmp_path: Path) -> None:
    """Headings, separators, a byte order mark, floats of a spreadsheet, lists in cells, other names of columns."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert read_run(tmp_path / name).tokens.tolist() == ROWS


TOPS = {"token_ids": [3], "top_ids": [[3, 4]]}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "0,11\n1,13\n2,15\n", "its first column counts 0, 1, 2, ...: an index"),
        ("a.csv", "prompt,position,token\n1,0,5\n", "it has no prompt 0"),
        ("a.csv", "prompt,position,token\n0,0,5\n0,0,6\n", "the same prompt and position"),
        ("a.csv", "prompt,text\na,b\n", "text alone cannot be compared"),
        ("a.jsonl", lines([{"choices": []}]), "holds choices, expected one of tokens"),
        ("a.jsonl", lines([{"token_ids": [3], "top_logprobs": [[-0.1]]}]), "come together, in one shape"),
        ("a.jsonl", lines([{**TOPS, "top_logprobs": [[0.9, 0.1]]}]), "above 0: probabilities or logits, no logprobs"),
        ("a.jsonl", lines([{**TOPS, "top_logprobs": [[-0.05, -1.0]]}]), "sum to 1.319: no natural logprobs"),
    ],
)
def test_tables_that_would_score_wrong_are_refused(name: str, content: str, said: str, tmp_path: Path) -> None:
    """An index for tokens, prompts from 1, probabilities or log10 for logprobs: never a score."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        read_run(tmp_path / name)


def test_files_become_a_golden_of_k_runs(tmp_path: Path, capsys: Captured) -> None:
    """A file a run, the prompts in each; shuffled rows of a candidate are found by their prompts."""
    runs = tmp_path / "runs"
    runs.mkdir()
    said = [[i for i in row if i >= 0] for row in TOKENS.tolist()]
    rows = [{"prompt_ids": p, "token_ids": t} for p, t in zip(PROMPTS, said, strict=True)]
    for k in range(2):
        (runs / f"run{k}.jsonl").write_text(lines(rows))
    words = ["golden", "import", str(runs), str(tmp_path / "g")]
    assert main(words) == 2
    assert "say so: --greedy" in capsys.readouterr().err
    assert main([*words, "--greedy"]) == 0
    assert "3 prompts x 4 tokens, K = 2, bar STRICT" in capsys.readouterr().out
    (tmp_path / "c.jsonl").write_text(lines(rows[::-1]))
    again = ["gate", f"golden={tmp_path}/g.json", "engine=replay", f"engine.folder={tmp_path}/c.jsonl"]
    assert main([*again, "--require", f"results={tmp_path}"]) == 0
    (runs / "run2.jsonl").write_text(lines(rows[:2]))
    assert main([*words[:3], str(tmp_path / "h"), "--greedy"]) == 3
    assert "its prompts are not those of" in capsys.readouterr().err
    assert main(["golden", "show", "gate", "--eos=2"]) == 2
