"""The short form of a row: nothing is lost, whatever a row holds, and old rows are brought forward once."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import ODD

from harness import strict_json
from harness.ledger import Ledger
from harness.ledger_forward import adopted
from harness.ledger_migrate import migrate
from harness.ledger_pack import packed, unpacked
from harness.ledger_schema import SCHEMA, shaped
from variants.axes import Variant
from variants.recipe import resolve

SHIPPED = Path(__file__).resolve().parents[1] / "results" / "ledger"
OWN: dict[str, Any] = {"schema": SCHEMA, "run_id": "r", "time_utc": "t", "status": "ok", "nulls": {}}


def again(row: dict) -> dict:
    return adopted(strict_json.loads(strict_json.dumps(packed(row))))


def entry(layers: list[int], **seen: list[str]) -> dict:
    rest = {"arrives": ["f32"], "values": [], "arithmetic": ["add:f32", "mul:f32", "sum:bf16"]}
    return {"layers": layers, **rest, **seen}


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"recipe": {"declared": {"sites": {}}, "observed": {}}},
        {"recipe": {"observed": {"sequence": "abc", "q.prefill": [entry([-1, 0, 1, 2, 4])], "q.decode": [entry([3])]}}},
        {"recipe": {"observed": {"q.prefill": [entry([5]), entry([0, 7], arrives=["bf16", "f32"])], "sequence": ""}}},
        {"recipe": {"observed": {"q.prefill": [entry([0], arrives=["a b"])]}}},  # a space would read as two words
        {"recipe": {"observed": {"q.prefill": [entry([1], arithmetic=["add", "mul:f32"])]}}},
        {"recipe": {"observed": {"q.prefill": []}}},
        {"recipe": {"declared": {"sites": {"a": {"input": "keep", "n": 3}, "b": {"input": "keep", "n": True}}}}},
        {"recipe": {"declared": {"sites": {"a": {"input": "keep"}, "b": {"accum": "f32"}}}}},
        {"agreement": {"matched": 3, "mine": None, "first_divergence": [{"prompt": 0}, {"prompt": 1}]}},
        {"agreement": {"first_divergence": [{"prompt": 0}, {"position": 1}]}},
        {"agreement": {"matched": 3, "total": 4}, "detail": {"agreement": {"matched": 3, "total": 4.0, "bar": None}}},
        {"agreement": {"matched": 3}, "detail": {"agreement": {"per_prompt": [{"a": 1}, {"a": None}], "loops": []}}},
        {"detail": {"kept": None, "empty": {}}, "verdict": {"class": None, "more": None}, "environment": {"fla": None}},
        {"detail": {}, "seeds": None},
    ],
)
def test_a_short_row_reads_back_equal(record: dict[str, Any]):
    """Whatever a row holds, odd recipes and nulls of its own too, its short form reads back as the same JSON."""
    row = shaped(record | OWN)
    assert json.dumps(again(row), sort_keys=True) == json.dumps(row, sort_keys=True)


def test_a_resolved_recipe_is_said_once():
    """Sites of one rule are one line of words, and a recipe takes less than half the bytes."""
    declared = resolve(Variant(), ODD).as_dict()
    row = shaped(OWN | {"recipe": {"declared": declared}})
    short = packed(row)["recipe"]["declared"]
    assert again(row)["recipe"]["declared"] == declared
    assert len(json.dumps(short)) < len(json.dumps(declared)) / 2
    assert "q_proj k_proj v_proj" in " ".join(short["sites"]["rules"].values())


def test_a_short_form_that_cannot_be_read_is_no_row():
    """A short form with more words than fields, or none at all, is named as unreadable rather than guessed at."""
    for observed in ({"seen": {"f32 f32": {"0": "q"}}, "fields": "arrives", "phases": "prefill"}, {"seen": {"f32": 1}}):
        with pytest.raises(ValueError, match="its short form cannot be read"):
            unpacked({"recipe": {"observed": observed}})


def test_shipped_rows_are_short_and_whole():
    """Every shipped row has today's schema, of the 128-token gate at most 12 KB, a verdict's 16; recipes are whole."""
    for path in sorted(SHIPPED.glob("*.json")):
        stored = strict_json.loads(path.read_bytes())
        row = adopted(stored)
        assert stored["schema"] == SCHEMA, path.name
        assert packed(row) == stored, path.name
        most = 16_000 if row["experiment"] == "verdict" else 12_000
        assert row["golden"] != "gate" or path.stat().st_size < most, path.name
        if row["experiment"] == "gate" and row["engine"] == "local":
            assert row["recipe"]["observed"]["q_proj.prefill"][0]["leaves"], path.name


def test_migration_changes_nothing_that_a_reader_sees(tmp_path: Path):
    """A row of schema 1 is written again once, under its name, shorter, and reads as before; a torn file is left."""
    ledger = Ledger(tmp_path)
    with ledger.begin({"variant": "f32"}) as run:
        run.finish({"recipe": {"observed": {f"s{i}.prefill": [entry([0, 1, 2])] for i in range(20)}}})
    whole = ledger.rows()[0] | {"schema": 1}
    run.path.write_bytes(strict_json.dumps(whole))
    (tmp_path / "torn.json").write_text("{")
    before = ledger.read().rows
    done = migrate(tmp_path)
    assert (done.rows, [name for name, _ in done.left]) == (1, ["torn.json"])
    assert done.bytes_after < done.bytes_before / 2
    assert ledger.read().rows == before
    assert strict_json.loads(run.path.read_bytes())["schema"] == SCHEMA
    assert migrate(tmp_path).rows == 0
