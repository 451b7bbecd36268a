"""The ledger's writer: every run leaves one whole row, whatever ends it, and writers never harm each other."""

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.ledger import Ledger
from harness.ledger_forward import adopted
from harness.ledger_schema import FIELDS
from variants.errors import DeviceError, InputError, NeartieError

ROOT = Path(__file__).resolve().parents[1]

WRITER = """
import sys
from harness.ledger import Ledger
ledger, writer, rows = Ledger(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for index in range(rows):
    mark = f"{writer}-{index}"
    filling = "x" * (70_000 if index % 10 == 0 else 100)
    with ledger.begin({"variant": f"w{writer}", "detail": {"first": mark}}) as run:
        run.finish({"detail": {"filling": filling, "last": mark}})
"""

HANGING = """
import sys, time
from harness.ledger import Ledger
with Ledger(sys.argv[1]).begin({"variant": "hangs", "golden_hash": "abc"}):
    print("began", flush=True)
    time.sleep(600)
"""


def python(script: str, *arguments: str | Path) -> subprocess.Popen:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)


def test_a_finished_run_is_one_strict_file_named_for_it(tmp_path: Path):
    """A run's row is one strict JSON file named by UTC time, variant and run id; its marker is gone."""
    ledger = Ledger(tmp_path / "ledger")
    with ledger.begin({"variant": "a/b c", "experiment": "gate"}) as run:
        assert [row["run_id"] for row in ledger.read().running] == [run.run_id]
        written = ledger.finish(run, {"agreement": {"matched": 109, "total": 128}, "seeds": [0]})
    (path,) = ledger.root.iterdir()
    assert adopted(json.loads(path.read_text(), parse_constant=pytest.fail)) == written
    stamp, variant, run_id = path.stem.split("-")
    assert (variant, run_id) == ("a_b_c", run.run_id)
    assert stamp == written["time_utc"].replace("-", "").replace(":", "")
    assert ledger.rows() == [written]
    assert written["variant"] == "a/b c"
    assert written["status"] == "ok"
    assert written["wall_s"] > 0


def test_an_exception_leaves_a_failed_row_and_goes_on(tmp_path: Path):
    """A run that raises leaves a failed row with one line, a traceback without our folders, and what was known."""
    ledger = Ledger(tmp_path)
    with pytest.raises(InputError, match="bad golden"), ledger.begin({"variant": "f32"}) as run:  # noqa: PT012
        run.add({"model_hash": "m"})
        raise InputError("bad golden\nin two lines")
    (row,) = ledger.rows()
    assert (row["status"], row["model_hash"]) == ("failed", "m")
    assert row["error"] == "InputError: bad golden in two lines"
    assert 'File "tests/test_ledger.py"' in row["detail"]["traceback"]
    assert str(ROOT) not in row["detail"]["traceback"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(7), GeneratorExit()])
def test_an_interruption_leaves_a_row_and_goes_on(tmp_path: Path, error: BaseException):
    """P35: an interrupt and sys.exit leave a failed row with the reason `interrupted`, and still interrupt."""
    ledger = Ledger(tmp_path)
    with pytest.raises(type(error)), ledger.begin({"variant": "f32"}):
        raise error
    (row,) = ledger.rows()
    assert (row["status"], row["detail"]["reason"]) == ("failed", "interrupted")
    assert row["error"].startswith(f"interrupted ({type(error).__name__}")


def test_every_job_of_a_sweep_leaves_a_row(tmp_path: Path):
    """P35: of jobs that end well, raise, run out of memory and exit, each leaves its row in order."""
    ledger = Ledger(tmp_path)
    for variant, error in {
        "one": None,
        "two": ValueError("two"),
        "three": MemoryError(),
        "four": SystemExit(7),
    }.items():
        try:
            with ledger.begin({"variant": variant}) as run:
                if error:
                    raise error
                run.finish()
        except (ValueError, MemoryError, SystemExit):
            continue
    rows = [(row["variant"], row["status"]) for row in ledger.rows()]
    assert rows == [("one", "ok"), ("two", "failed"), ("three", "failed"), ("four", "failed")]


def test_a_run_that_forgets_its_result_has_failed(tmp_path: Path):
    """Leaving the block without a result is a failed row, never silence."""
    with Ledger(tmp_path).begin({"variant": "f32"}):
        pass
    assert Ledger(tmp_path).rows()[0]["error"] == "the run ended without a result"


def test_a_row_is_never_rewritten(tmp_path: Path):
    """A second finish is refused, and an exception after the first leaves the row as it was."""
    ledger = Ledger(tmp_path)
    with pytest.raises(AssertionError, match="already has its row"), ledger.begin({}) as run:  # noqa: PT012
        run.finish()
        before = run.path.read_bytes()
        run.finish({"status": "failed"})
    assert run.path.read_bytes() == before
    assert not run.marker.exists()


def test_a_record_that_does_not_fit_is_refused_and_the_run_still_has_a_row(tmp_path: Path):
    """A misspelt field, a wrong type, a foreign status or the ledger's own field is named in a failed row."""
    ledger = Ledger(tmp_path)
    wrong = {
        "has no field /agreemnt": {"agreemnt": {}},
        "/agreement/matched is 'all'": {"agreement": {"matched": "all"}},
        "/decode_tok_s is 3.0": {"decode_tok_s": 3.0},
        "/teacher_forced/total is True": {"teacher_forced": {"total": True}},
        "status is 'fine'": {"status": "fine"},
        "gives run_id": {"run_id": "mine"},
        "has type builtins.set": {"detail": {"x": {1}}},
    }
    for message, record in wrong.items():
        with pytest.raises(NeartieError, match=message), ledger.begin({}) as run:
            run.finish(record)
    rows = ledger.rows()
    assert [row["status"] for row in rows] == ["failed"] * len(wrong)
    assert all(message in row["error"] for message, row in zip(wrong, rows, strict=True))


def test_failed_and_ok_rows_have_one_shape(tmp_path: Path):
    """P42: whichever way a run ends, its row has every fixed field, null where unknown."""
    ledger = Ledger(tmp_path)
    with ledger.begin({}) as run:
        run.finish({"agreement": {"matched": 1}})
    with pytest.raises(ValueError, match="x"), ledger.begin({}):
        raise ValueError("x")
    for row in ledger.rows():
        assert list(row) == list(FIELDS)
        fixed = ["matched", "total", "exact_prompts", "prompts", "first_divergence", "bar_met"]
        assert list(row["agreement"]) == fixed


def test_a_later_value_takes_the_reason_of_an_earlier_nan_away(tmp_path: Path):
    """A field that was NaN and is then given a number, or replaced whole, keeps no reason for a null."""
    with Ledger(tmp_path).begin({"wall_s": float("nan"), "detail": {"a": [float("inf")], "b": float("nan")}}) as run:
        row = run.finish({"wall_s": 2.0, "detail": {"a": 1}})
    assert row["nulls"] == {"/detail/b": "nan"}
    assert row["wall_s"] == 2.0


@pytest.mark.parametrize("place", ["file/ledger", "file"])
def test_an_unwritable_folder_is_told_before_the_run(tmp_path: Path, place: str):
    """Where results/ cannot be written, begin says so in one line that names the folder (exit code 4)."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DeviceError, match=f"{place} cannot be written") as caught:
        Ledger(tmp_path / place).begin({})
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_folder_lost_during_the_run_does_not_hide_the_first_error(tmp_path: Path):
    """When even the failed row cannot be written, the run's own error is raised, with the second as a note."""
    ledger = Ledger(tmp_path / "ledger")
    with pytest.raises(ValueError, match="first") as caught, ledger.begin({}) as run:  # noqa: PT012
        run.marker.unlink()
        ledger.root.rmdir()
        raise ValueError("first")
    assert "cannot be written" in caught.value.__notes__[0]


def test_a_row_appears_whole_and_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The row is synced under another name, then renamed to a name not there before, then its folder is synced."""
    calls: list[str] = []
    rename, fsync = os.rename, os.fsync

    def renames(source: Path, target: Path) -> None:
        assert source.parent == target.parent
        assert not target.exists()
        assert json.loads(source.read_bytes())["variant"] == "f32"
        calls.append("rename")
        rename(source, target)

    def syncs(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    run = Ledger(tmp_path).begin({"variant": "f32"})
    monkeypatch.setattr(os, "rename", renames)
    monkeypatch.setattr(os, "fsync", syncs)
    run.finish()
    assert calls == ["file", "rename", "folder"]


def test_concurrent_writers_lose_and_tear_nothing(tmp_path: Path):
    """P39: 8 processes of 50 rows, some over 64 KiB, make 400 whole rows, each with its own marks."""
    writers = [python(WRITER, tmp_path, str(writer), "50") for writer in range(8)]
    for writer in writers:
        writer.communicate(timeout=120)
    assert [writer.returncode for writer in writers] == [0] * 8
    rows = [json.loads(path.read_bytes(), parse_constant=pytest.fail) for path in tmp_path.iterdir()]
    marks = sorted((row["detail"]["first"], row["detail"]["last"]) for row in rows)
    assert marks == sorted((f"{w}-{i}", f"{w}-{i}") for w in range(8) for i in range(50))
    assert len({row["run_id"] for row in rows}) == 400


def test_a_killed_run_is_listed_as_crashed(tmp_path: Path):
    """P39: after kill -9 the run is a row with status crashed, and what it had said at its start is there."""
    with python(HANGING, tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "began\n"
        assert [row["variant"] for row in Ledger(tmp_path).read().running] == ["hangs"]
        assert Ledger(tmp_path).rows() == []
        child.kill()
    (row,) = Ledger(tmp_path).rows()
    assert (row["status"], row["variant"], row["golden_hash"]) == ("crashed", "hangs", "abc")


def test_kill_in_the_middle_of_writing_tears_nothing(tmp_path: Path):
    """P39: a writer killed at any moment leaves whole rows, at most one crashed one, and no torn file."""
    with python(WRITER, tmp_path, "0", "100000") as child:
        while len(list(tmp_path.glob("*.json"))) < 20:
            assert child.poll() is None
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
    listing = Ledger(tmp_path).read()
    assert (listing.unreadable, listing.running) == ((), ())
    crashed = [row for row in listing.rows if row["status"] == "crashed"]
    assert len(crashed) <= 1
    assert all(row["detail"]["first"] == row["detail"]["last"] for row in listing.rows if row["status"] == "ok")


ACKNOWLEDGING = WRITER.replace("int(sys.argv[2])", "sys.argv[2]").rstrip() + "\n    print(mark, flush=True)\n"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_at_random_over_200_appends_lose_nothing(tmp_path: Path):
    """P39: 8 writers are killed at random moments and started again until 200 rows were acknowledged: all are whole."""
    chance = random.Random(7)
    acknowledged: set[str] = set()
    kills = generation = 0
    while len(acknowledged) < 200:
        names = [f"{generation}{writer}" for writer in range(8)]
        writers = [python(ACKNOWLEDGING, tmp_path / "ledger", name, "1000") for name in names]
        there = len(list((tmp_path / "ledger").glob("*.json")))
        while len(list((tmp_path / "ledger").glob("*.json"))) < there + 20:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        for writer in writers:
            time.sleep(chance.uniform(0, 0.02))
            writer.kill()
            kills += 1
        for writer in writers:
            said, _ = writer.communicate()
            acknowledged |= set(said.split("\n")[:-1])
        generation += 1
    listing = Ledger(tmp_path / "ledger").read()
    ok = [row["detail"] for row in listing.rows if row["status"] == "ok"]
    crashed = [row for row in listing.rows if row["status"] == "crashed"]
    assert (listing.unreadable, listing.running) == ((), ())
    assert all(detail["first"] == detail["last"] for detail in ok)
    assert acknowledged <= {detail["last"] for detail in ok}
    assert len({detail["last"] for detail in ok}) == len(ok)
    assert len(crashed) <= kills


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the disk is full the run ends with one line that names the folder, and nothing half-written stays."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = Ledger(tmp_path).begin({"variant": "f32"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DeviceError, match=r"cannot be written \(No space left on device\)") as caught:
            run.finish()
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in tmp_path.iterdir()] == [".running"]


def test_another_process_under_the_same_id_is_not_taken_for_the_run(tmp_path: Path):
    """A marker with the id of a living process that began at another moment is a crashed run."""
    run = Ledger(tmp_path).begin({})
    marker = json.loads(run.marker.read_bytes())
    assert len(Ledger(tmp_path).read().running) == 1
    marker["process"]["started"] += "1"
    run.marker.write_text(json.dumps(marker))
    assert Ledger(tmp_path).rows()[0]["status"] == "crashed"


def test_a_marker_beside_its_row_is_not_a_second_run(tmp_path: Path):
    """A run killed between its row and the removal of its marker is there once, as it ended."""
    ledger = Ledger(tmp_path)
    run = ledger.begin({})
    marker = run.marker.read_bytes()
    run.finish()
    run.marker.write_bytes(marker.replace(b'"pid":', b'"pid":9'))
    assert [row["status"] for row in ledger.rows()] == ["ok"]


def test_two_branches_that_add_a_run_merge_without_conflict(tmp_path: Path):
    """P41: plain git merges two branches that each add a run; the folded view is the same whichever came first."""

    def git(*arguments: str) -> None:
        named = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *named, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def add(branch: str) -> None:
        git("checkout", "-q", "-b", branch, "start")
        with Ledger(tmp_path / "ledger").begin({"variant": branch}) as run:
            run.finish()
        git("add", "ledger")
        git("commit", "-qm", branch)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "start")
    git("tag", "start")
    add("left")
    add("right")
    views = []
    for first, second in (("left", "right"), ("right", "left")):
        git("checkout", "-q", "-B", "merged", first)
        git("merge", "-q", "--no-edit", second)
        views.append(Ledger(tmp_path / "ledger").rows())
    assert [row["variant"] for row in views[0]] == ["left", "right"]
    assert views[0] == views[1]
