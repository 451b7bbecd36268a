"""The power experiment: its cells, its rules, its arithmetic, and that a stopped run goes on where it was."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import experiments.power as command
from experiments.words import Flags
from harness import power_cells, power_record
from harness.config import ModelSource
from harness.engines.assets import checkpoint_folder
from harness.engines.local import shared_casts
from harness.power import Bench
from harness.power_cells import CARRIER, GATE, Cell, Slice, benign_words, defect_cells, slices
from harness.power_record import PowerRecord, digests, read_record, write_record
from harness.power_report import area, benign, confusion, exercised, share, unexercised
from harness.power_rows import COLUMNS, append_rows, pack_rows, packed, read_rows, row_of
from harness.power_rules import RULES, Judgement, Observed, judge_all
from harness.power_watch import first_difference
from harness.significance import Interval
from variants.defects import DEFECTS
from variants.errors import InputError, UsageError

QUIET = Judgement(0.1, False)
LOUD = Judgement(7.0, True, "mla_core", 3)
INSTRUMENTS = ("replay", "replay_f32", "replay_f64", "ladder", "envelope")


@cache
def bench() -> Bench:
    return Bench(shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu"))


def test_benign_variants_are_thirty_recipes_that_resolve() -> None:
    """At least 30 benign variants resolve, each to a recipe of its own."""
    hashes = {bench().recipe(words).hash for words in benign_words().values()}
    assert len(hashes) == len(benign_words()) >= 30


def test_there_are_three_hundred_benign_runs() -> None:
    """Variants x batteries give at least 300 benign cells, and every cell has a key of its own."""
    cells = command.full_cells(command.Settings.seeds)
    assert sum(c.benign for c in cells) >= 300
    assert len({c.key for c in cells}) == len(cells)
    assert {c.defect for c in cells if not c.benign} == set(DEFECTS)


def test_batteries_are_drawn_the_same_way_every_time() -> None:
    """A seed names its prompts; two seeds name different ones."""
    assert slices([1, 2]) == slices([1, 2])
    assert slices([1])[-1][1].rows != slices([2])[-1][1].rows


def test_carrier_runs_every_kind_of_code() -> None:
    """No defect is refused by the variant that carries them."""
    from harness.probes import Tap

    for cell in defect_cells(DEFECTS, ("heavy",), ("one",)):
        make = bench()._maker(cell)
        make(bench().recipe(CARRIER), Tap())


def observed(logits: Tensor, oracle: Tensor, **more: Any) -> Observed:
    base: dict[str, Any] = {"other": oracle + 0.01, "instruments": dict.fromkeys(INSTRUMENTS, QUIET)}
    return Observed(logits=logits, oracle=oracle, **(base | more))


def flags(o: Observed) -> dict[str, bool | None]:
    return {name: j.flagged for name, j in judge_all(o).items()}


ORACLE = torch.tensor([[4.0, 3.4, 1.0, 0.0, -1.0, -2.0, -3.0]], dtype=torch.float64)


def test_equal_logits_pass_every_rule() -> None:
    """Nothing is raised on logits that are the oracle's, and rules without tokens say nothing."""
    found = flags(observed(ORACLE, ORACLE))
    assert found.pop("expected") is None
    assert found.pop("all_128") is None
    assert found.pop("most_122") is None
    assert not any(found.values())


@pytest.mark.parametrize(
    ("swap", "raised"),
    [
        ((0, 1), {"band", "kl", "top1", "relative", "sigma"}),  # 0.6 nat behind, still second; cosine sees nothing
        ((0, 5), {"band", "top5", "kl", "top1", "cosine", "relative", "sigma"}),  # sixth of the oracle
    ],
)
def test_each_rule_on_logits_has_its_own_edge(swap: tuple[int, int], raised: set[str]) -> None:
    """A second token that is 0.6 nat behind leaves the band, a sixth one the top 5 and the cosine too."""
    logits = ORACLE.clone()
    logits[:, list(swap)] = ORACLE[:, list(swap[::-1])]
    assert {name for name, flag in flags(observed(logits, ORACLE)).items() if flag} == raised


def test_a_near_tie_stays_inside_the_band() -> None:
    """A token that the oracle has 0.1 nat behind its best is another top-1, and no alarm of the band."""
    oracle = torch.tensor([[2.0, 1.9, 0.0]], dtype=torch.float64)
    found = flags(observed(torch.tensor([[1.9, 2.0, 0.0]], dtype=torch.float64), oracle))
    assert found["top1"]
    assert not found["band"]


def test_what_is_not_finite_alarms_every_rule_on_logits() -> None:
    """One NaN is an alarm, never a comparison that is false."""
    logits = ORACLE.clone()
    logits[0, 3] = float("nan")
    found = flags(observed(logits, ORACLE))
    assert all(found[rule] for rule in ("band", "top5", "kl", "top1", "cosine", "sigma", "relative"))


def test_token_rules() -> None:
    """127 of 128 fails the strict bar alone, 121 the loose one too; 4 lies outside a correct run's interval."""
    more: dict[str, Any] = {"expected": Interval(100.0, 87.0, 128.0), "expected_p": 0.5}
    by_score = {n: flags(observed(ORACLE, ORACLE, matched=n, **more)) for n in (128, 127, 121, 4)}
    assert [by_score[n]["all_128"] for n in by_score] == [False, True, True, True]
    assert [by_score[n]["most_122"] for n in by_score] == [False, False, True, True]
    assert [by_score[n]["expected"] for n in by_score] == [False, False, False, True]


def test_combined_rule_names_the_first_instrument_that_alarms() -> None:
    """Ladder + local replay alarms when one of them does, and says where that one says."""
    one = dict.fromkeys(INSTRUMENTS, QUIET) | {"replay": LOUD, "ladder": Judgement(1.0, True, None, 0)}
    found = judge_all(observed(ORACLE, ORACLE, instruments=one))["ladder_replay"]
    assert (found.flagged, found.site, found.layer, found.score) == (True, "mla_core", 3, 7.0)


def test_first_difference_is_in_order_and_outside_kernels() -> None:
    """The first value that differs counts; what a chunk holds inside does not, and equal runs have none."""
    clean = [(("kda_aqk", 1), b"a"), (("kda_core", 1), b"b"), (("o_norm", 1), b"c")]
    run = [(("kda_aqk", 1), b"x"), (("kda_core", 1), b"y"), (("o_norm", 1), b"z")]
    assert first_difference(run, clean) == ("kda_core", 1)
    assert first_difference(clean, clean) is None


def made(score: float, flag: bool, *, defect: str = "", used: bool = True) -> dict[str, str]:
    cell = Cell(subject=defect or "b", words="", battery=GATE, seed=0, defect=defect, severity="light", spread="one")
    judged = dict.fromkeys(RULES, Judgement(score, flag, "mla_core", 7))
    truth = {"exercised": used, "want_sites": "mla_core/mla_q", "want_layer": 7} if defect else {}
    return row_of(cell, judged, setting="s", family="f", **truth)


def test_area_is_the_share_of_ordered_pairs() -> None:
    """Scores 3 and inf against 1, 3 give (1 + 1/2 + 1 + 1) / 4; a rule that tells nothing apart gives a half."""
    rows = [made(1, False), made(3, False), made(3, True, defect="mla_scaled"), made(float("inf"), True, defect="x")]
    assert area(rows, "kl") == 0.875
    assert area([made(1, False), made(1, True, defect="x")], "kl") == 0.5
    assert area([made(1, False)], "kl") is None


def test_what_is_not_exercised_counts_for_no_rule() -> None:
    """A bit-identical run is listed apart and is neither caught nor missed."""
    rows = [made(0, False), made(0, False, defect="x", used=False), made(9, True, defect="y")]
    found = {r.rule: r for r in confusion(rows)}["ladder_replay"]
    assert (found.caught.hits, found.caught.trials) == (1, 1)
    assert (found.alarms.hits, found.alarms.trials) == (0, 1)
    assert found.site is not None
    assert (found.site.hits, found.site.trials) == (1, 1)
    assert [r["defect"] for r in unexercised(rows)] == ["x"]
    assert share(rows, "kl", exercised).trials == 1
    assert share(rows, "kl", benign).trials == 1


def test_finished_rows_come_back_and_a_torn_one_does_not(tmp_path: Path) -> None:
    """A line that was cut off by a killed run is left out on reading, and cut off before the next is appended."""
    path = tmp_path / "cells.csv"
    append_rows(path, [made(1, False)])
    whole = path.read_bytes()
    append_rows(path, [made(2, True, defect="x")])
    path.write_bytes(path.read_bytes()[:-200])
    assert [r["subject"] for r in read_rows(path, "s")] == ["b"]
    append_rows(path, [made(3, True, defect="y")])
    assert path.read_bytes().startswith(whole)
    assert [r["subject"] for r in read_rows(path, "s")] == ["b", "y"]


def test_packed_rows_read_as_before_and_more_can_follow(tmp_path: Path) -> None:
    """Packed and plain lines are one file to a reader, a line that stands in both once; a damaged pack is refused."""
    path = tmp_path / "cells.csv"
    rows = [made(1, False), made(2, True, defect="x")]
    append_rows(path, rows)
    plain = read_rows(path, "s")
    pack_rows(path, plain)
    assert not path.exists()
    assert read_rows(path, "s") == sorted(plain, key=lambda r: r["key"])
    append_rows(path, [rows[0], made(3, True, defect="y")])
    assert [r["subject"] for r in read_rows(path, "s")] == ["b", "x", "y"]
    packed(path).write_bytes(packed(path).read_bytes()[:-20])
    with pytest.raises(InputError, match=r"damaged .*restore it"):
        read_rows(path, "s")


def test_another_setting_or_other_columns_are_refused(tmp_path: Path) -> None:
    """Cells of another checkpoint, golden or threshold are not mixed with these."""
    path = tmp_path / "cells.csv"
    append_rows(path, [made(1, False)])
    with pytest.raises(UsageError, match="is of setting s, this is t"):
        read_rows(path, "t")
    path.write_text(",".join(COLUMNS[:-1]) + "\n")
    with pytest.raises(UsageError, match="other rules or columns"):
        read_rows(path, "s")


@pytest.mark.slow
def test_a_light_fault_is_found_where_it_sits_and_its_carrier_is_not() -> None:
    """A softmax scale off by 0.1 % in one layer: the carrier passes, the fault is named with site and layer."""
    clean = Cell(subject="carrier", words=CARRIER, battery=GATE, seed=0)
    faulty = defect_cells(["mla_scaled"], ("light",), ("one",))[0]
    good, bad = (bench().observe(cell, scored=False) for cell in (clean, faulty))
    judged = judge_all(bad.observed)["ladder_replay"]
    assert not judge_all(good.observed)["ladder_replay"].flagged
    assert (judged.flagged, judged.site, judged.layer, bad.acts_at) == (True, "mla_core", 7, ("mla_core", 7))


def settings(**more: Any) -> command.Settings:
    return command.Settings(model=ModelSource(path="kimi-linear-12m"), **more)


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run keeps the first one's lines as they were and runs only the cell that is missing."""
    drawn = defect_cells(["rounded_correction_bias", "mla_scaled"], ("light",), ("one",))
    cells = [replace(cell, battery=Slice("gate", (0,))) for cell in drawn]  # one prompt: half the time of four
    ran: list[str] = []
    observe = Bench.observe
    monkeypatch.setattr(Bench, "observe", lambda self, cell, **o: (ran.append(cell.key), observe(self, cell, **o))[1])
    config = settings(out=str(tmp_path / "power"), results=str(tmp_path), workers=1)
    monkeypatch.setattr(command, "quick_cells", lambda names: cells[:1])
    assert command.run(config, Flags(values={"quick": ""})) == 0
    path, shared = tmp_path / "power" / "quick" / "cells.csv", command.setting(bench().casts.checkpoint.sha256)
    first = read_rows(path, shared)
    monkeypatch.setattr(command, "quick_cells", lambda names: cells)
    assert command.run(config, Flags(values={"quick": "", "json": ""})) == 0
    rows = {row["defect"]: row for row in read_rows(path, shared)}
    assert (len(first), rows[first[0]["defect"]]) == (1, first[0])
    assert (ran, path.exists()) == ([c.key for c in cells], False)
    assert [rows[c.defect]["exercised"] for c in cells] == ["0", "1"]
    found = rows["mla_scaled"]
    assert (found["ladder_replay_flag"], found["ladder_replay_site"], found["ladder_replay_layer"]) == (
        "1",
        "mla_core",
        "7",
    )


def test_a_whole_run_of_older_code_is_told_and_what_changed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing runs; with a cell missing it is not whole, and its cells are refused as another setting's."""
    cells = defect_cells(["mla_scaled"], ("light", "heavy"), ("one",))
    out = tmp_path / "quick"
    rows = [{**made(1, True), "key": cell.key} for cell in cells]
    append_rows(out / "cells.csv", rows)
    write_record(out, "s")
    assert read_record(out) == PowerRecord("s", digests())
    old = PowerRecord("s", {**digests(), "variants/model.py": "0" * 8})
    monkeypatch.setattr(power_record, "read_record", lambda folder: old)
    monkeypatch.setattr(command, "quick_cells", lambda names: cells)
    monkeypatch.setattr(command, "_bench", lambda *_: pytest.fail("nothing is to run"))
    config = settings(out=str(tmp_path), results=str(tmp_path), workers=1)
    assert command.run(config, Flags(values={"quick": ""})) == 0
    assert "as recorded; changed since: variants/model.py. out=DIR" in capsys.readouterr().out
    assert read_rows(out / "cells.csv", "s") == rows
    monkeypatch.undo()
    monkeypatch.setattr(power_record, "read_record", lambda folder: old)
    monkeypatch.setattr(
        command, "quick_cells", lambda names: [*cells, *defect_cells(["beta_scaled"], ("light",), ("one",))]
    )
    with pytest.raises(UsageError, match="is of setting s, this is"):
        command.run(config, Flags(values={"quick": ""}))


@pytest.mark.parametrize("text", ["{}", "[1]", '{"setting": "s", "files": 3}'])
def test_a_record_that_is_something_else_is_refused(text: str, tmp_path: Path) -> None:
    """One line that names the file."""
    (tmp_path / "code.json").write_text(text)
    with pytest.raises(InputError, match=r"code\.json: not the record of a power run"):
        read_record(tmp_path)
    assert read_record(tmp_path / "absent") is None


@pytest.mark.slow
def test_quick_mode_catches_its_defects_and_no_benign_variant(tmp_path: Path) -> None:
    """The few cells of CI: no alarm on a benign variant, every planted defect caught where it sits."""
    config = settings(out=str(tmp_path / "power"), results=str(tmp_path), workers=1)
    assert command.run(config, Flags(values={"quick": ""})) == 0
    rows = read_rows(tmp_path / "power" / "quick" / "cells.csv", command.setting(bench().casts.checkpoint.sha256))
    found = {r.rule: r for r in confusion(rows)}["ladder_replay"]
    assert found.alarms.hits == 0
    assert found.caught.hits == found.caught.trials == len(command.QUICK)
    assert power_cells.GATE.name in {row["battery"] for row in rows}
