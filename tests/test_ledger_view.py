"""The ledger's reader: nothing lost, nothing taken for what it is not, and only like compared with like."""

import csv
import json
import math
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest

from harness.ledger import Ledger
from harness.ledger_read import read_folder
from harness.ledger_schema import FIELDS, SCHEMA, columns
from harness.ledger_view import compare, diff, export, frame, list_rows, mean_of, published, show_row, value_at
from harness.report import frame_table, gate_table, published_table, text
from harness.strict_json import dumps, loads
from variants.errors import DeviceError, InputError, UsageError

HASHES = {"battery_hash": "b", "golden_hash": "g", "model_hash": "m"}
RECIPE = {"q_proj": {"input": "bf16", "output": "f32"}, "router": {"output": "bf16"}}


def add(ledger: Ledger, **record: object) -> dict:
    with ledger.begin(record) as run:
        return run.finish()


def fail(ledger: Ledger, **record: object) -> None:
    with pytest.raises(ValueError, match="broken"), ledger.begin(record):
        raise ValueError("broken")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def test_a_ledger_that_is_not_there_is_empty(ledger: Ledger):
    """Reading before the first run gives no rows, and a frame that already has every column."""
    assert ledger.rows() == []
    assert list(ledger.frame().columns) == [name for name, _ in columns()]


def test_torn_and_foreign_files_are_listed_with_their_reason(ledger: Ledger):
    """A torn row, an empty file, a foreign object and a renamed row are skipped and named, never silently lost."""
    row = add(ledger, variant="f32")
    (path,) = ledger.root.iterdir()
    whole = path.read_bytes()
    (ledger.root / "1-torn.json").write_bytes(whole[:-30])
    (ledger.root / "2-empty.json").touch()
    (ledger.root / "3-foreign.json").write_text('{"schema": 1, "status": "great"}')
    (ledger.root / "4-renamed.json").write_bytes(whole)
    (ledger.root / "5-bad.running").write_text("{}")
    with pytest.warns(UserWarning, match="skipped") as warned:
        assert ledger.rows() == [row]
    assert len(warned) == 5
    listed = {file["file"]: file["reason"] for file in list_rows(ledger)["unreadable"]}
    assert sorted(listed) == ["1-torn.json", "2-empty.json", "3-foreign.json", "4-renamed.json", "5-bad.running"]
    assert all(listed.values())


def test_every_cut_of_a_row_is_caught(ledger: Ledger):
    """P39: a row cut short at any byte but its last newline is no row."""
    add(ledger, variant="f32", detail={"gaps": [1.0, 2.0]})
    (path,) = ledger.root.iterdir()
    whole = path.read_bytes()
    for length in range(len(whole) - 1):
        with pytest.raises(ValueError, match=r"Expecting|Unterminated|utf-8|delimiter"):
            loads(whole[:length])
    assert loads(whole[:-1])["variant"] == "f32"


def test_an_older_schema_is_read_by_name_and_a_newer_one_is_refused(ledger: Ledger):
    """P42: a reader reads its schema and older ones by name, missing fields null; a newer row is refused in a line."""
    ledger.root.mkdir()
    old = {"schema": 1, "run_id": "aa", "time_utc": "t", "status": "failed", "old_name": 3, "variant": "f32"}
    new = {"schema": SCHEMA, "run_id": "bb", "time_utc": "t", "status": "ok", "wall_s": 1, "agreement": {"matched": 5}}
    (ledger.root / "1-aa.json").write_bytes(dumps(old))
    (ledger.root / "2-bb.json").write_bytes(dumps(new))
    first, second = ledger.rows()
    assert (first["variant"], first["wall_s"], first["agreement"]["total"]) == ("f32", None, None)
    assert first["detail"] == {"unmapped": {"/old_name": 3}}
    assert second["agreement"]["matched"] == 5
    with pytest.raises(InputError, match=f"row bb has schema {SCHEMA}, this reader knows up to 1; update neartie"):
        read_folder(ledger.root, newest=1)
    (ledger.root / "3-cc.json").write_bytes(dumps(new | {"schema": SCHEMA + 1, "run_id": "cc"}))
    with pytest.raises(InputError, match=f"row cc has schema {SCHEMA + 1}"):
        ledger.rows()


def test_the_fixed_names_are_there():
    """The names that other tools rely on are columns of every frame."""
    names = {name for name, _ in columns()}
    fixed = """schema run_id time_utc status experiment engine variant variant_hash recipe.declared recipe.observed
        golden golden_hash bar model model_hash battery_hash agreement.matched agreement.total agreement.exact_prompts
        agreement.prompts agreement.first_divergence teacher_forced.matched teacher_forced.total expected.mean
        expected.low expected.high verdict.class verdict.reason verdict.site verdict.layer decode_tok_s.median
        decode_tok_s.low decode_tok_s.high decode_tok_s.steps prefill_tok_s.median peak_memory_bytes environment.git
        environment.dirty environment.device environment.driver environment.torch environment.triton environment.cuda
        environment.threads seeds wall_s error"""
    assert names >= set(fixed.split())
    assert set(FIELDS) >= {"detail", "nulls"}


def test_the_frame_keeps_types_whatever_the_rows_hold(ledger: Ledger):
    """A frame of failed rows only has the types of one with figures, and infinities and NaN stay floats."""
    fail(ledger, variant="f32")
    before = ledger.frame().dtypes
    add(ledger, wall_s=math.inf, agreement={"matched": 109}, environment={"dirty": True, "fla": "0.5"})
    table = ledger.frame()
    assert before.equals(table.dtypes.drop("environment.fla"))
    assert table["agreement.matched"].tolist() == [pd.NA, 109]
    assert table["wall_s"].tolist()[1] == math.inf
    assert json.loads(table["nulls"].tolist()[1]) == {"/wall_s": "inf"}
    assert table["environment.fla"].tolist()[1] == "0.5"


def test_a_nan_is_not_dropped_from_a_mean(ledger: Ledger):
    """P40: the mean over rows of which one is NaN is NaN; a row that has no value at all is left out."""
    add(ledger, wall_s=1.0, expected={"mean": 100.0})
    add(ledger, wall_s=math.nan)
    add(ledger, wall_s=3.0, expected={"mean": 102.0})
    rows = ledger.rows()
    assert math.isnan(mean_of(rows, "wall_s") or 0.0)
    assert mean_of(rows, "expected.mean") == 101.0
    assert mean_of(rows, "expected.low") is None
    assert value_at(rows[0], "wall_s") == 1.0


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_failed_rows_survive_export(ledger: Ledger, tmp_path: Path, suffix: str):
    """P42: an export holds every row, the failed one too, with floats that read back bit for bit."""
    add(ledger, variant="f32", decode_tok_s={"median": 0.1 + 0.2})
    fail(ledger, variant="bf16")
    path = tmp_path / f"rows{suffix}"
    assert export(ledger, path) == 2
    with open(path, newline="", encoding="utf-8") if suffix == ".csv" else nullcontext() as file:
        rows = list(csv.DictReader(file)) if file else pd.read_parquet(path).to_dict("records")
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert rows[1]["error"] == "ValueError: broken"
    assert float(rows[0]["decode_tok_s.median"]) == 0.1 + 0.2


def test_an_export_that_cannot_be_is_refused(ledger: Ledger, tmp_path: Path):
    """Another suffix and a folder that is not there are one clear error each."""
    with pytest.raises(UsageError, match=r"expected .csv or .parquet"):
        export(ledger, tmp_path / "rows.xlsx")
    with pytest.raises(DeviceError, match="name a file to write"):
        export(ledger, tmp_path / "absent" / "rows.csv")


def test_a_difference_names_the_sites_of_the_recipe(ledger: Ledger):
    """diff gives the fields that differ and no others; a site that one recipe lacks stands against null."""
    a = add(ledger, variant="a", recipe={"declared": RECIPE}, wall_s=1.0, **HASHES)
    changed = {**RECIPE, "q_proj": {"input": "f32", "output": "f32"}, "o_proj": {"output": "f32"}}
    b = add(ledger, variant="b", recipe={"declared": changed}, wall_s=1.0, **HASHES)
    assert diff(a, b) == [
        {"field": "variant", "a": "a", "b": "b"},
        {"field": "recipe.declared.q_proj.input", "a": "bf16", "b": "f32"},
        {"field": "recipe.declared.o_proj.output", "a": None, "b": "f32"},
    ]
    assert diff(a, a) == []


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("other", ["x", None])
def test_rows_of_another_battery_golden_or_model_do_not_compare(ledger: Ledger, name: str, other: str | None):
    """Each of the three hashes must be known and equal, or the comparison is refused with its name."""
    a, b = add(ledger, **HASHES), add(ledger, **(HASHES | {name: other}))
    with pytest.raises(UsageError, match=f"do not compare: {name} is"):
        compare(a, b)
    c = add(ledger, **(HASHES | {name: None}))
    with pytest.raises(UsageError, match=f"do not compare: {name} is None and None"):
        compare(c, c)


def test_rows_that_compare_tell_what_changed(ledger: Ledger):
    """compare gives b minus a, b over a in speed, and whether the observed arithmetic is one; failed rows have none."""
    speed = {"median": 10.0}
    a = add(ledger, agreement={"matched": 106}, decode_tok_s=speed, recipe={"observed": RECIPE}, **HASHES)
    b = add(ledger, agreement={"matched": 122}, decode_tok_s={"median": 25.0}, recipe={"observed": RECIPE}, **HASHES)
    change = {"matched": 16, "teacher_forced": None, "exact_prompts": None, "decode_speedup": 2.5, "same_arm": True}
    assert compare(a, b) == change
    assert compare(a, add(ledger, **HASHES))["same_arm"] is None
    fail(ledger, **HASHES)
    with pytest.raises(UsageError, match="is failed"):
        compare(a, ledger.rows()[-1])


def test_list_and_show(ledger: Ledger):
    """The newest rows come last, one row is found by the beginning of its id, and a wrong word is one clear error."""
    rows = [add(ledger, variant=str(number)) for number in range(4)]
    assert list_rows(ledger, limit=2) == {"rows": rows[2:], "running": [], "unreadable": []}
    assert show_row(ledger, rows[1]["run_id"][:11]) == rows[1]
    with pytest.raises(UsageError, match="no run id begins with 'zz'"):
        show_row(ledger, "zz")
    with pytest.raises(UsageError, match="4 run ids begin with ''"):
        show_row(ledger, "")
    with pytest.raises(UsageError, match="limit is 0"):
        list_rows(ledger, limit=0)


def test_the_published_rows_are_exact_and_have_their_source(ledger: Ledger, tmp_path: Path):
    """The campaign's figures are there to the digit, a range as its two ends, each row with its source."""
    table = published().set_index("variant")
    assert len(table) == 17
    assert all(str(source).startswith("parity campaign") for source in table["source"])
    assert set(table["total"]) == {128}
    scores = dict(zip(table.index, zip(table["matched_low"], table["matched_high"], strict=True), strict=True))
    assert scores["device_kda"] == scores["incremental_chunk"] == scores["paged_absorbed"] == (122, 122)
    assert scores["island_f32acc"] == (91, 106)
    assert scores["bf16_stream"] == (4, 4)
    assert table["decode_tok_s"].dropna().tolist()[:2] == [1.35, 1.3]
    rows = list_rows(ledger, published=True)["published"]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert rows[4]["decode_tok_s"] is None
    with pytest.raises(InputError, match="are not there"):
        published(tmp_path / "published.csv")


def test_tables_hold_what_the_rows_say(ledger: Ledger):
    """The gate table shows score, earliest divergence, speed, bar and verdict, and a failed run's error untouched."""
    divergences = [{"prompt": 2, "position": 9}, {"prompt": 7, "position": 6}]
    agreement = {"matched": 109, "total": 128, "exact_prompts": 6, "prompts": 8, "first_divergence": divergences}
    add(
        ledger,
        variant="f32",
        bar="STRICT",
        agreement=agreement | {"bar_met": False},
        decode_tok_s={"median": 1234.5, "low": 1.0, "high": 2.0, "steps": 9, "cv": 0.034},
        verdict={"class": "ROUNDING"},
    )
    with pytest.raises(ValueError, match="bold"), ledger.begin({"variant": "bf16"}):
        raise ValueError("not [bold] markup")
    lines = text(gate_table(ledger.rows())).splitlines()
    for cell in ("109/128", "6/8", "p7 @ 6 +1", "1234 ±3%", "STRICT missed", "ROUNDING"):
        assert cell in lines[1]
    assert "failed: ValueError: not [bold] markup" in " ".join(" ".join(lines[2:]).split())
    assert "91 to 106/128" in text(published_table(list_rows(ledger, published=True)["published"]))
    assert "109" in text(frame_table(frame(ledger.rows()), ["variant", "agreement.matched", "wall_s"]))


def test_a_ledger_reads_as_sql(ledger: Ledger):
    """The files read in DuckDB as they lie, by the fixed names."""
    duckdb = pytest.importorskip("duckdb")
    add(ledger, variant="f32", agreement={"matched": 109, "total": 128})
    fail(ledger, variant="bf16")
    query = f"select variant, agreement.matched from read_json('{ledger.root}/*.json') order by variant"
    assert duckdb.sql(query).fetchall() == [("bf16", None), ("f32", 109)]
