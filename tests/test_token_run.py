"""A finished run in any of the formats is the same tokens, with what came beside them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from experiments.cli import main
from harness.engines.replay import ReplayEngine
from harness.golden import load_golden
from harness.ledger import Ledger
from harness.token_run import read_run
from variants.errors import InputError

TOKENS = np.array([[3, 4, 5], [6, 7, 8]], np.int32)


def written(folder: Path, kind: str, tokens: np.ndarray) -> Path:
    path = folder / f"run.{kind}"
    if kind == "npy":
        np.save(path, tokens)
    elif kind == "i32":
        tokens.astype("<i4").tofile(path)
    elif kind == "csv":
        path.write_text("\n".join(",".join(map(str, row)) for row in tokens.tolist()))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"token_ids": row}) for row in tokens.tolist()))
    else:
        save_file({"tokens": tokens}, path)
    return path


@pytest.mark.parametrize("kind", ["npy", "i32", "csv", "jsonl", "safetensors"])
def test_every_format_scores_the_same(kind: str, tmp_path: Path) -> None:
    """The golden's own run in each format is 127/128 once one token is changed, and the row says how rows were laid."""
    tokens = load_golden("gate").tokens[0].copy()
    tokens[3, 5] += 1
    path = written(tmp_path, kind, tokens)
    assert main(["gate", "engine=replay", f"engine.folder={path}", f"results={tmp_path}"]) == 0
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert (row["agreement"]["matched"], row["engine"]) == (127, "replay")
    assert any("rows are taken in the golden's order" in note for note in row["detail"]["notes"])


def test_prompts_and_gaps_come_along(tmp_path: Path) -> None:
    """JSONL and long CSV with gaps, safetensors with logprobs: nothing that was kept is dropped."""
    lines = [
        {"prompt_ids": [1, 2], "ids": [3, 4], "gap_nats": [0.0, None]},
        {"prompt_ids": [1], "ids": [5], "gap_nats": [2.0]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read_run(tmp_path / "a.jsonl")
    assert (run.prompts, run.tokens.tolist()) == (((1, 2), (1,)), [[3, 4], [5, -1]])
    np.testing.assert_array_equal(run.gap_nats, [[0.0, np.nan], [2.0, np.nan]])
    (tmp_path / "b.csv").write_text("prompt,position,token,gap_nats\n0,0,3,0.5\n0,1,4,\n1,0,5,inf\n")
    run = read_run(tmp_path / "b.csv")
    assert run.tokens.tolist() == [[3, 4], [5, -1]]
    np.testing.assert_array_equal(run.gap_nats, [[0.5, np.nan], [np.inf, np.nan]])
    top = np.zeros((2, 3, 2), np.int32)
    values = np.full((2, 3, 2), -1.0, np.float32)
    save_file({"tokens": TOKENS, "top_ids": top, "top_logprobs": values}, tmp_path / "c.safetensors")
    engine = ReplayEngine(tmp_path / "c.safetensors")
    assert engine.info.top_logprobs == 2
    assert engine.generate([(1,), (2,)], 3).gaps.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.npy", b"no array", "damaged or not a .npy of tokens"),
        ("a.i32", b"123", "damaged or not a .i32"),
        ("a.csv", b"1,x", "damaged or not a .csv"),
        ("a.jsonl", b'{"text": "a"}', "text alone cannot be compared"),
        ("a.jsonl", b'{"ids": [1], "gap_nats": [-1.0]}', "gap_nats below 0"),
        ("a.jsonl", b'{"ids": [1]}\n{"other": 1}', "line 2: lacks one of ids"),
        ("a.jsonl", b'{"ids": [1.5]}', "expected integers"),
        ("a.csv", b"1,-1,2", "after its end"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    """Damaged, of the wrong type, contradicting itself: one input error."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_run(tmp_path / name)


def test_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    """Two rows do not answer for three prompts; raw ids must divide evenly; a file has no run to choose."""
    engine = ReplayEngine(written(tmp_path, "npy", TOKENS))
    with pytest.raises(InputError, match="not 3 rows"):
        engine.generate([(1,), (2,), (3,)], 3)
    with pytest.raises(InputError, match="not 4 rows"):
        ReplayEngine(written(tmp_path, "i32", TOKENS)).generate([(1,)] * 4, 1)
    with pytest.raises(InputError, match="is one run"):
        ReplayEngine(written(tmp_path, "npy", TOKENS), run=0)
