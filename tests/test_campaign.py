"""The campaign's table and its command: what is published beside the ledger, and one row for every run."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.campaign import Settings, campaign_variants, part
from experiments.cli import main
from harness.campaign import HEADER, entries
from harness.compose import groups, load
from harness.ledger import Ledger
from harness.ledger_view import published_rows
from variants.errors import UsageError

Captured = pytest.CaptureFixture[str]


def row(variant: str, battery: str, matched: int, **more: Any) -> dict[str, Any]:
    """As much of a ledger row as the table reads."""
    return {
        "variant": variant,
        "battery_hash": battery,
        "status": more.get("status", "ok"),
        "run_id": f"{variant}-{matched}",
        "environment": {"device": more.get("device", "cpu")},
        "agreement": {"matched": matched, "total": 128},
        "teacher_forced": {"matched": more.get("forced"), "total": 128},
        "decode_tok_s": {"median": more.get("speed")},
        "detail": more.get("detail", {}),
    }


def test_each_row_stands_beside_its_published_one() -> None:
    """The newest run on each device counts, failed ones and other batteries do not, and a form in kernels stands
    beside the published row of its name."""
    repeats = {"repeats": {"runs": 3, "identical": False}}
    rows = [
        row("device_kda", "g", 100),
        row("device_kda", "g", 109, speed=39.51),
        row("device_kda", "g", 1, status="failed"),
        row("device_kda", "other", 2),
        row("device_kda_triton", "g", 111, device="GPU", speed=27.2, detail=repeats),
        row("incremental_chunk+execution.batch=16", "w", 60, device="GPU", forced=120),
        row("incremental_chunk", "w", 50),
    ]
    names = ["device_kda", "device_kda_triton", "incremental_chunk", "f32"]
    table = [e.cells() for e in entries(names, rows, published_rows(), ["g", "w"])]
    assert all(len(cells) == len(HEADER) for cells in table)
    assert table[0] == ["device_kda", "122/128", "4.24", "109/128", "39.5", None, None, None, None, None]
    assert table[1][1:7] == ["122/128", "4.24", None, None, "111/128", "27.2"]
    assert table[1][-1] == "3 DIFFER"
    assert table[2][7:9] == ["60/128", "120/128"], "a run on a GPU is shown before one on the CPU"
    assert table[3][1:3] == [None, None]


def test_every_published_row_that_has_a_variant_is_run() -> None:
    """In the order of the campaign, each followed by its form in kernels; nothing twice."""
    names = campaign_variants()
    published = [r["variant"] for r in published_rows() if r["variant"] in groups()["variant"]]
    assert [n for n in names if n in published] == published
    assert names.index("device_kda_triton") == names.index("device_kda") + 1
    assert len(set(names)) == len(names)


def test_the_command_leaves_a_row_for_each_run_and_prints_the_table(tmp_path: Path, capsys: Captured) -> None:
    """Two repeats of the gate are one row that says whether they were alike; a variant that carries state has a wide
    one, in batches and teacher-forced; one that recomputes has none."""
    words = [f"results={tmp_path}", "repeats=2", "wide_batch=2", "limit=2", "max_tokens=3", "device.threads=1"]
    assert main(["experiment=campaign", "variants=[f32,device_kda]", *words]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("f32", "122/128", "2 same"))
    rows = Ledger(tmp_path / "ledger").rows()
    assert [(r["variant"], r["golden"]) for r in rows] == [
        ("f32", "gate"), ("f32+execution.batch=2", "wide"), ("device_kda", "gate"),
    ]  # fmt: skip
    assert {r["experiment"] for r in rows} == {"campaign"}
    assert rows[0]["detail"]["repeats"]["identical"] is True
    assert len(rows[0]["detail"]["repeats"]["seconds"]) == 2
    assert all(set(r["detail"]["before_s"]) == {"load", "observe"} and "repeats" in rows[0]["detail"] for r in rows)
    assert rows[1]["teacher_forced"]["total"] == 6


def test_a_label_names_a_variant_and_prompts_run_together(tmp_path: Path, capsys: Captured) -> None:
    """What a row calls itself can be run again, and `gate_batch` is part of the name."""
    words = [f"results={tmp_path}", "repeats=1", "wide=", "gate_batch=2", "limit=2", "max_tokens=2"]
    assert main(["campaign", "variants=['f32+norm.kv_eps=eps_1e6']", "device.threads=1", *words]) == 0
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert row["variant"] == "f32+norm.kv_eps=eps_1e6+execution.batch=2"
    assert row["detail"]["config"]["variant"]["norm"]["kv_eps"] == "eps_1e6"
    assert row["detail"]["config"]["variant"]["execution"]["batch"] == 2
    assert "f32+norm.kv_eps=eps_1e6" in capsys.readouterr().out


def test_a_golden_with_fewer_prompts_runs_whole() -> None:
    """`limit` that only the wide golden has leaves the gate as it is; one that neither has is refused."""
    few = load(["limit=32", "max_tokens=20"], root=Settings)
    assert [part(few, name).tokens.shape[1:] for name in ("gate", "wide")] == [(8, 16), (32, 20)]
    assert part(few, "gate").name == "gate"
    with pytest.raises(UsageError, match="limit=65"):
        part(load(["limit=65"], root=Settings), "wide")


def test_what_this_machine_cannot_run_is_told_and_the_rest_runs(tmp_path: Path, capsys: Captured) -> None:
    """Named, it is an error of its exit code with a row; where the campaign chose it, it is a line."""
    words = [f"results={tmp_path}", "repeats=1", "wide=", "limit=1", "max_tokens=1"]
    assert main(["campaign", "variants=[fla_kda]", "--json", *words]) == 4
    said = capsys.readouterr()
    assert "[fla_kda] impl fla needs the package fla" in said.err
    assert json.loads(said.out)[0]["runs"] == {}
    (failed,) = Ledger(tmp_path / "ledger").rows()
    assert failed["status"] == "failed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["repeats=0"], "repeats=0, expected 1 or more"),
        (["variants=[f3]"], "no variant f3"),
        (["engine=transformers"], "engine=transformers has none"),
    ],
)
def test_settings_that_cannot_be_are_refused(words: list[str], said: str) -> None:
    """One line each."""
    with pytest.raises(UsageError, match=said):
        load(words, root=Settings)


def test_a_variant_is_named_in_the_list(capsys: Captured) -> None:
    """`variant=` would have no effect."""
    assert main(["campaign", "variant=f32"]) == 2
    assert "name what is to run in variants=[...]" in capsys.readouterr().err
