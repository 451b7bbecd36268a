"""A regression is found with its place and its reason; an untouched tree, and a machine's noise, are not."""

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from torch import Tensor

from experiments import regress
from experiments.cli import main
from experiments.words import Flags
from harness import baseline
from harness.ci_report import Checked, junit, markdown
from harness.compose import load
from harness.ledger import Ledger
from harness.regress import Bands, Finding, baseline_of, compare
from variants import decode
from variants.errors import InputError, UsageError

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["variant=f32", "limit=2", "max_tokens=8", "device.threads=1", "repeats=1"]
ENVIRONMENT = {"git": "aa", "dirty": False, "torch": "2.13", "cpu": "x", "threads": 1}
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def make(tmp_path: Path):
    """A function of changes that makes one arm's row, as a ledger gives it."""
    ledger = Ledger(tmp_path / "rows")

    def row(**more: Any) -> dict:
        speed = more.pop("speed", 100.0)
        detail = {"agreement": {"members": more.pop("members", None)}}
        if timing := more.pop("timing", None):
            detail["timing"] = {"decode_tok_cpu_s": {"median": timing[0]}, "waited_share": timing[1]}
        place = {"prompt": 4, "position": 6, "golden_id": 1858, "candidate_id": 320}
        score: dict[str, Any] = {"matched": 109, "total": 128, "bar_met": False, "first_divergence": [place]}
        record: dict[str, Any] = {
            "variant": "f32", "golden": "gate", "golden_hash": "g", "battery_hash": "b", "model_hash": "m",
            "variant_hash": "v", "bar": "STRICT", "environment": ENVIRONMENT, "peak_memory_bytes": 1000,
            "decode_tok_s": {"median": speed}, "agreement": score | more.pop("agreement", {}),
            "recipe": {"declared": {"sites": {"kda_state": {"output": "keep"}}}},
            "detail": detail,
        }  # fmt: skip
        with ledger.begin(record | more) as run:
            return run.finish()

    return row


def kinds(base: list[dict], now: list[dict], **bands: float) -> list[str]:
    return [finding.kind for finding in compare(baseline_of(base), now, Bands(**bands))]


def test_the_same_run_again_has_no_finding(make):
    """An untouched tree passes, ten times of ten."""
    base = [make()]
    assert all(kinds(base, [make()]) == [] for _ in range(10))


def test_a_changed_axis_is_found_with_position_and_reason(make):
    """Score, divergence with its position, and the declared rule that changed are findings, in that order."""
    place = {"prompt": 4, "position": 2, "golden_id": 7, "candidate_id": 8}
    rules = {"declared": {"sites": {"kda_state": {"output": "bf16"}}}}
    now = make(agreement={"matched": 90, "first_divergence": [place]}, variant_hash="w", recipe=rules)
    found = compare(baseline_of([make()]), [now], Bands())
    assert [finding.kind for finding in found] == ["agreement", "divergence", "arithmetic"]
    assert found[0].text == "109/128 agreed, 90 do now"
    assert found[1].text == ("prompt 4 diverges at position 6 (320 for 1858) and now diverges at position 2 (8 for 7)")
    assert found[2].text == "kda_state.output was keep and is bf16"


def test_a_better_score_is_a_finding_too(make):
    """A baseline that is too low hides the next regression."""
    assert kinds([make()], [make(agreement={"matched": 119})]) == ["agreement"]


def test_distributional_bars_count_members(make):
    """With runs that differ another token of the golden's own set is none; one outside it, or a missed bar, is."""
    place = {"prompt": 4, "position": 2, "golden_id": 7, "candidate_id": 8}
    base = [make(bar="DISTRIBUTIONAL", members=128, agreement={"bar_met": True})]
    other = {"matched": 100, "first_divergence": [place]}
    assert kinds(base, [make(bar="DISTRIBUTIONAL", members=128, agreement=other | {"bar_met": True})]) == []
    worse = make(bar="DISTRIBUTIONAL", members=120, agreement=other | {"bar_met": False})
    assert kinds(base, [worse]) == ["agreement", "agreement"]


def test_another_environment_asks_for_both_codes_here_first(make):
    """P33: torch moved and the score with it: the first finding says to run old and new code here."""
    now = make(environment=ENVIRONMENT | {"torch": "2.14", "git": "bb"}, agreement={"matched": 90})
    found = compare(baseline_of([make()]), [now], Bands())
    assert [finding.kind for finding in found] == ["environment", "agreement"]
    assert found[0].text == "torch was 2.13 and is 2.14: compare old and new code here first (--ab)"


def test_other_inputs_are_not_compared(make):
    """Another golden or other weights end the comparison: nothing else is said."""
    assert kinds([make()], [make(model_hash="other", agreement={"matched": 1})]) == ["input"]


def test_speed_both_ways_and_memory(make):
    """30 % slower is found, 50 % faster is found, 10 % of noise is not in 20 runs; memory counts upward alone."""
    chance = random.Random(3)
    base = [make(speed=100 * chance.uniform(0.92, 1.08)) for _ in range(3)]
    for _ in range(20):
        quiet = [make(speed=100 * chance.uniform(0.92, 1.08)) for _ in range(3)]
        slow = [make(speed=70 * chance.uniform(0.92, 1.08)) for _ in range(3)]
        assert kinds(base, quiet) == []
        assert kinds(base, slow) == ["speed"]
    assert kinds(base, [make(speed=150.0)]) == ["speed"]
    assert kinds(base, [make(peak_memory_bytes=1200)]) == ["memory"]
    assert kinds(base, [make(peak_memory_bytes=500)]) == []


def test_memory_is_the_least_of_the_peaks(make):
    """What the allocator kept of earlier runs is no finding; where every run takes more, it is one."""
    base = [make(peak_memory_bytes=n) for n in (1000, 1200)]
    assert kinds(base, [make(peak_memory_bytes=n) for n in (1050, 1400)]) == []
    assert kinds(base, [make(peak_memory_bytes=n) for n in (1150, 1200)]) == ["memory"]


def test_a_spread_that_overlaps_is_no_finding(make):
    """Where one run of the one side reaches the other's, medians apart say nothing."""
    assert kinds([make(speed=100.0), make(speed=60.0)], [make(speed=55.0), make(speed=62.0), make(speed=56.0)]) == []


def test_a_busy_machine_is_held_by_processor_time_alone(make):
    """A quarter of the speed by the clock is no finding where runs stood in line; 30 % per processor second is one."""
    base = [make(timing=(100.0, 0.0)) for _ in range(3)]
    assert kinds(base, [make(speed=25.0, timing=(97.0, 0.7))]) == []
    assert kinds(base, [make(speed=25.0, timing=(70.0, 0.7))]) == ["speed"]
    assert kinds([make(speed=25.0, timing=(100.0, 0.7))], [make(timing=(103.0, 0.0))]) == []


def test_a_step_that_sleeps_is_found_on_a_quiet_machine(make):
    """Equal processor time and 30 % less by the clock, with nobody else there: the step waits for something."""
    base = [make(timing=(100.0, 0.01)) for _ in range(3)]
    (found,) = compare(baseline_of(base), [make(speed=70.0, timing=(100.0, None))], Bands())
    assert found.text.startswith("decode_tok_s slower: 0.70 times")


def git(folder: Path, *arguments: str) -> None:
    named = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *named, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, make) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    baseline.write(folder / "base", "f32-gate.json", baseline_of([make(agreement={"matched": 128})]))
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "start")
    git(folder, "checkout", "-qb", "change")
    return folder


def test_the_baseline_is_read_from_the_merge_base(checkout: Path, make):
    """P34: a branch that rewrites the baseline to 90 is held against 128 all the same, and the edit is a finding."""
    baseline.write(checkout / "base", "f32-gate.json", baseline_of([make(agreement={"matched": 90})]))
    git(checkout, "commit", "-qam", "lower")
    stored, found = baseline.read(checkout / "base", "f32-gate.json", base="main")
    assert stored["agreement"]["matched"] == 128
    assert [finding.kind for finding in found] == ["baseline"]
    assert "edits (agreement 128 to 90) f32-gate.json" in found[0].text
    assert [finding.kind for finding in compare(stored, [make(agreement={"matched": 90})], Bands())] == ["agreement"]


def test_a_removed_or_new_baseline_is_a_finding(checkout: Path, make):
    """A file that the change takes away is read from before; one that it adds is compared, and told."""
    (checkout / "base" / "f32-gate.json").unlink()
    stored, found = baseline.read(checkout / "base", "f32-gate.json", base="main")
    assert (stored["agreement"]["matched"], "removes" in found[0].text) == (128, True)
    baseline.write(checkout / "base", "new.json", baseline_of([make()]))
    _, found = baseline.read(checkout / "base", "new.json", base="main")
    assert "is new in this change" in found[0].text


def test_an_untouched_baseline_has_no_finding_and_what_cannot_be_read_is_one_line(checkout: Path, tmp_path: Path):
    """No edit, no finding; no such branch, no checkout and no file are refused with what to do."""
    assert baseline.read(checkout / "base", "f32-gate.json", base="main")[1] == []
    with pytest.raises(UsageError, match="no merge base of HEAD and nosuch"):
        baseline.read(checkout / "base", "f32-gate.json", base="nosuch")
    with pytest.raises(UsageError, match="base=none reads it as is"):
        baseline.read(tmp_path / "elsewhere", "f32-gate.json", base="main")
    with pytest.raises(InputError, match="--record"):
        baseline.read(checkout / "base", "other.json", base="main")


def test_reports_hold_every_finding():
    """JUnit parses and counts; Markdown keeps its table whole whatever a text holds."""
    found = (Finding(kind="speed", text="x|y\n<z>"),)
    bad = Checked(arm="a|b gate", agree="1/2", tok_s="3", seconds=1.5, findings=found)
    good = Checked(arm="f32 gate", agree="2/2", tok_s="3", seconds=0.5, findings=())
    suite = ElementTree.fromstring(junit([bad, good]))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [case.get("name") for case in suite] == ["a|b gate", "f32 gate"]
    assert suite[0][0].text == "speed: x|y\n<z>"
    text = markdown([bad, good])
    assert "| a\\|b gate | 1/2 | 3 | speed |" in text
    assert "- **speed** a\\|b gate: x\\|y <z>" in text


def test_the_command_records_passes_and_fails(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch):
    """--record makes a baseline; the same run passes, one with another axis fails with position and reason."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    own = [f"baseline={tmp_path / 'base'}", "base=none", f"results={tmp_path}", "speed=0.99", "memory=0.9"]
    assert main(["regress", *SMALL, *own, "--record", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"recorded": str(tmp_path / "base" / "f32-gate.json")}]
    assert main(["regress", *SMALL, *own]) == 0
    assert "none" in (tmp_path / "step.md").read_text()
    (recorded,) = (tmp_path / "base").iterdir()
    stored = json.loads(recorded.read_text())
    stored["divergences"] = []
    stored["agreement"]["matched"] = 16
    stored["variant_hash"] = "another"
    recorded.write_text(json.dumps(stored))
    capsys.readouterr()
    assert main(["regress", *SMALL, *own, f"junit={tmp_path / 'j.xml'}"]) == 1
    said = capsys.readouterr().out
    assert "16/16 agreed, " in said
    assert "prompt 0 agrees throughout and now diverges at position 7 (1228 for 798)" in said
    assert ElementTree.parse(tmp_path / "j.xml").getroot().get("failures") == "1"


def in_pytest(tmp_path: Path, *words: str) -> subprocess.CompletedProcess:
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(gate, golden):\n    assert gate().agreement.total == 16\n    assert golden.name == 'gate'\n"
    )
    argv = [sys.executable, "-m", "pytest", *own_words(tmp_path), *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def own_words(tmp_path: Path) -> list[str]:
    plugin = ["-p", "experiments.pytest_plugin"] if "experiments.pytest_plugin" not in sys.modules else []
    argv = ["-q", "-p", "no:cacheprovider", *plugin, str(tmp_path / "test_mine.py")]
    return [*argv, "--gate", "variant=f32", "--gate", "limit=2", "--gate", "max_tokens=8"]


def test_the_pytest_plugin_gates_and_gives_fixtures(tmp_path: Path):
    """`pytest --gate` adds a test that fails with the position, and passes where less is required; fixtures work."""
    done = in_pytest(tmp_path, "--gate-golden=gate", f"--junitxml={tmp_path / 'j.xml'}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "15/16: --gate-require=bar is missed" in done.stdout
    assert "prompt 0 diverges at position 7: 1228 for 798" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert ElementTree.parse(tmp_path / "j.xml").getroot().find("testsuite").get("failures") == "1"  # pyright: ignore
    here = pytest.main([*own_words(tmp_path), "-p", "no:faulthandler", "--gate-require=15"])  # a start saved
    assert here == pytest.ExitCode.OK


RUNS = 20
SPEED = ["variant=f32", "limit=3", "device.threads=1", "base=none", "memory=0.9"]  # of forty runs in one process


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_slow_down_of_30_percent_is_found_and_real_noise_is_not(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
):
    """Twenty real runs of the same code have no finding; twenty whose decode is 30 % slower have that one, whatever
    else the machine has to do."""
    words = ["regress", *SPEED, f"baseline={tmp_path / 'base'}", f"results={tmp_path}"]
    assert main([*words, "--record"]) == 0
    assert [main(words) for _ in range(RUNS)] == [0] * RUNS, capsys.readouterr().out
    real = decode.Sequences.after

    def slower(self: decode.Sequences, tokens: Tensor) -> Tensor:
        began = time.process_time()
        logits = real(self, tokens)
        end = time.process_time() + (time.process_time() - began) * 0.3 / 0.7
        while time.process_time() < end:
            pass
        return logits

    monkeypatch.setattr(decode.Sequences, "after", slower)
    for _ in range(RUNS):
        capsys.readouterr()
        assert main([*words, "--json"]) == 1
        (arm,) = json.loads(capsys.readouterr().out)
        assert [finding["kind"] for finding in arm["findings"]] == ["speed"]
        assert arm["findings"][0]["text"].startswith("decode_tok_cpu_s slower: 0.")


DEFAULT = ["limit=5", "max_tokens=8", "device.threads=1", "base=none"]
PLANTED = "variant.stream=bf16"
PLANT = f"""
from dataclasses import replace
from harness import compose
load = compose.load
compose.load = lambda words, **more: replace(load(words, **more), variant=load([{PLANTED!r}]).variant)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_axis_changed_in_the_default_variant_is_found_and_an_untouched_tree_is_not(
    tmp_path: Path,
):
    """Ten processes of the same tree pass, all bands as they come; the stream in bf16 under the default's name fails
    with place and reason."""
    words = [*DEFAULT, f"baseline={tmp_path / 'base'}", f"results={tmp_path}"]
    argv = [sys.executable, "-m", "experiments.cli", "regress", *words]
    subprocess.run([*argv, "--record"], cwd=ROOT, check=True, capture_output=True)
    for _ in range(10):
        done = subprocess.run(argv, cwd=ROOT, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    config = load(words, root=regress.Settings)
    flags = Flags()
    assert regress.run(replace(config, variant=load([PLANTED]).variant), flags) == 1
    ((_, checked),) = flags.results
    found = "\n".join(f"{finding.kind}: {finding.text}" for finding in checked.findings)
    assert "prompt 4 diverges at position 6" in found
    assert "output was f32 and is bf16" in found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_pytest_plugin_finds_one_axis_changed_in_the_default_variant(tmp_path: Path):
    """The same change, made where the tests run, fails the plugin's test with place and reason."""
    once = [*DEFAULT, "repeats=1", f"baseline={tmp_path / 'base'}", f"results={tmp_path}"]
    assert main(["regress", *once, "--record"]) == 0
    (tmp_path / "conftest.py").write_text(PLANT)
    given = ["--gate", "limit=5", "--gate", "max_tokens=8", "--gate", "device.threads=1", "--gate", "speed=0.99"]
    given += [
        "--gate",
        f"results={tmp_path}",
        "--gate",
        "memory=0.9",
        f"--gate-baseline={tmp_path / 'base'}",
        "--gate-base=none",
    ]
    plugin = ["-p", "experiments.pytest_plugin"] if "experiments.pytest_plugin" not in sys.modules else []
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, str(tmp_path), *given]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "prompt 4 diverges at position 6" in done.stdout
    assert "output was f32 and is bf16" in done.stdout
