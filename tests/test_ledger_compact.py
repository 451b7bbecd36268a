"""A compacted ledger: the raw files stay the truth, and every question has the answer that they alone would give."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cli import main
from harness.ledger import Ledger
from harness.ledger_compact import NAME, compact, table
from harness.ledger_query import frontier, history, query
from harness.ledger_schema import SCHEMA
from variants.errors import InputError, UsageError

HASHES = {"battery_hash": "b", "golden_hash": "g", "model_hash": "m", "environment": {"device": "cpu"}}


def add(ledger: Ledger, variant: str, matched: int, speed: float | None, **more: object) -> dict:
    agreement, rate = {"matched": matched, "total": 128}, {"median": speed}
    with ledger.begin({"experiment": "gate", "variant": variant, **HASHES, **more}) as run:
        return run.finish({"agreement": agreement, "decode_tok_s": rate})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "ledger")
    add(made, "f32", 100, 50.0)
    add(made, "f32", 109, 40.0)
    add(made, "fast", 104, 90.0)
    add(made, "slow", 90, 10.0)
    add(made, "f32", 128, 500.0, environment={"device": "gpu", "mine": "x"})
    with pytest.raises(ValueError, match="broken"), made.begin({"variant": "f32"}):
        raise ValueError("broken")
    return made


def flat(ledger: Ledger) -> list[dict]:
    return table(ledger.root)[0].to_pylist()


def test_a_compacted_ledger_reads_the_same_and_a_second_time_nothing_is_written(ledger: Ledger):
    """Compaction keeps every raw file and changes no answer; done again it adds and writes nothing."""
    before, files = flat(ledger), {path.name: path.read_bytes() for path in ledger.root.iterdir()}
    done = compact(ledger.root, verify=True)
    stored = (ledger.root / NAME).read_bytes()
    assert (done.rows, done.added, done.unreadable, done.wrong) == (6, 6, (), ())
    assert flat(ledger) == before
    again = compact(ledger.root, verify=True)
    assert (again.rows, again.added) == (6, 0)
    assert (ledger.root / NAME).read_bytes() == stored
    assert {path.name: path.read_bytes() for path in ledger.root.iterdir() if path.name != NAME} == files


def test_new_and_lost_raw_files_count_at_once(ledger: Ledger):
    """A row added after compaction is seen, one removed is not, a torn one is named, a crashed one is there."""
    compact(ledger.root)
    add(ledger, "new", 128, 1.0)
    first = min(ledger.root.glob("*.json"))
    first.unlink()
    (ledger.root / "torn.json").write_text("{")
    run = ledger.begin({"variant": "gone"})
    marker = json.loads(run.marker.read_bytes())
    marker["process"]["started"] = "never"
    run.marker.write_text(json.dumps(marker))
    found, unreadable = table(ledger.root)
    assert [row["variant"] for row in found.to_pylist()] == ["f32", "fast", "slow", "f32", "f32", "new", "gone"]
    assert found.to_pylist()[-1]["status"] == "crashed"
    assert [file.file for file in unreadable] == ["torn.json"]


def test_a_raw_file_that_changed_under_the_same_size_is_found(ledger: Ledger):
    """A check by hash finds a raw file of the same length with other bytes, and takes the row from it again."""
    compact(ledger.root)
    path = max(ledger.root.glob("*fast*.json"))
    path.write_bytes(path.read_bytes().replace(b'"matched":104', b'"matched":105'))
    done = compact(ledger.root, verify=True)
    assert done.wrong == (path.name,)
    assert [row["agreement_matched"] for row in flat(ledger) if row["variant"] == "fast"] == [105]


def test_a_parquet_file_of_a_newer_schema_is_refused(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    """An older reader refuses what a newer one compacted."""
    monkeypatch.setattr("harness.ledger_compact.SCHEMA", SCHEMA + 1)
    compact(ledger.root)
    monkeypatch.undo()
    with pytest.raises(InputError, match=f"has schema {SCHEMA + 1}, this reader knows up to {SCHEMA}"):
        table(ledger.root)


@pytest.mark.parametrize("compacted", [False, True])
def test_the_frontier_compares_like_with_like(ledger: Ledger, *, compacted: bool):
    """Newest gate of each variant, best where none has more of both; a row of another device is a group of its own."""
    if compacted:
        compact(ledger.root)
    rows = [(r["variant"], r["agreement_matched"], r["environment_device"], r["best"]) for r in frontier(ledger.root)]
    cpu = [("f32", 109, "cpu", True), ("fast", 104, "cpu", True), ("slow", 90, "cpu", False)]
    assert rows == [*cpu, ("f32", 128, "gpu", True)]


def test_a_history_says_what_changed(ledger: Ledger):
    """Runs of one variant in order, with the change since the last that compares; failed runs are there too."""
    rows = [(row["status"], row["agreement_matched"], row["change"]) for row in history(ledger.root, "f32")]
    assert rows == [("ok", 100, None), ("ok", 109, 9), ("ok", 128, None), ("failed", None, None)]
    with pytest.raises(UsageError, match="no run of variant 'nosuch'"):
        history(ledger.root, "nosuch")


def test_sql_over_all_rows(ledger: Ledger):
    """A SELECT over `runs` sees compacted and new rows; SQL that is wrong is one line."""
    pytest.importorskip("duckdb")
    compact(ledger.root)
    add(ledger, "new", 1, None)
    names, rows = query(ledger.root, "select variant, max(agreement_matched) m from runs group by 1 order by 1")
    assert names == ["variant", "m"]
    assert rows == [("f32", 128), ("fast", 104), ("new", 1), ("slow", 90)]
    with pytest.raises(UsageError, match="SQL refused") as caught:
        query(ledger.root, "selec nothing")
    assert "\n" not in str(caught.value)


def test_without_duckdb_one_line_says_what_to_install(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    """The extra is named, with exit code 4."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert main(["ledger", "query", "select 1", f"results={ledger.root.parent}"]) == 4


def test_the_parquet_file_is_no_part_of_a_merge():
    """Git does not track the Parquet file, so that branches merge by their raw files alone."""
    root = Path(__file__).resolve().parents[1]
    ignored = subprocess.run(["git", "check-ignore", "-q", f"results/ledger/{NAME}"], cwd=root, check=False)
    assert ignored.returncode in (0, 128)  # 128: not a checkout
