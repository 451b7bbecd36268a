"""Sweeps: one identity, every job with a row, interrupted ones taken up again, the same rows by Hydra's launchers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from experiments import gate, launch
from experiments.cli import main
from harness import compose, sweep
from harness.golden import load_golden, write_golden
from harness.ledger import Ledger
from variants.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["golden=gate", "limit=1", "device.threads=1"]
TWELVE = ["variant=f32,oracle,device_kda", "max_tokens=1,2,3,4", *SMALL]
FORTY = ["variant=f32,oracle,device_kda,incremental_chunk", "max_tokens=1,2,3,4,5,6,7,8,9,10", *SMALL]
Captured = pytest.CaptureFixture[str]

# A sweep whose process is killed, without a chance to say so, when it has begun job number N.
KILLED = """
import os, signal, sys
from experiments import gate
from experiments.cli import main
left = int(sys.argv[1])
real = gate._gate
def run(config, row):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(config, row)
gate._gate = run
sys.exit(main(sys.argv[2:]))
"""


def killed_in(job: int, words: list[str], results: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(job), "gate", "-m", *words, f"results={results}"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL


def rows_of(results: Path) -> list[dict]:
    return Ledger(results / "ledger").rows()


def files_of(results: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (results / "ledger").glob("*.json")}


def resumed_after_a_kill(words: list[str], results: Path, *, job: int, jobs: int) -> None:
    killed_in(job, words, results)
    before = files_of(results)
    assert len(before) == job - 1
    assert main(["gate", "-m", *words, f"results={results}", "resume=true"]) == 0
    after = files_of(results)
    assert {name: after[name] for name in before} == before
    ended = [tuple(row["sweep"]["words"]) for row in rows_of(results) if row["status"] == "ok"]
    assert len(ended) == len(set(ended)) == jobs
    assert [row["status"] for row in rows_of(results)].count("crashed") == 1
    assert len({row["sweep"]["id"] for row in rows_of(results)}) == 1
    assert main(["gate", "-m", *words, f"results={results}", "resume=true"]) == 0
    assert files_of(results) == after


def test_a_killed_sweep_is_resumed_job_by_job(tmp_path: Path):
    """P36: of 12 jobs killed in the 6th, exactly 7 run again, the 5 rows stay byte for byte, no key twice."""
    resumed_after_a_kill(TWELVE, tmp_path, job=6, jobs=12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forty_jobs_killed_in_the_middle(tmp_path: Path):
    """A sweep of 40 jobs killed in the 21st and resumed has each job once, rows before the kill byte-identical."""
    resumed_after_a_kill(FORTY, tmp_path, job=21, jobs=40)


def test_resume_refuses_to_mix_changed_inputs(tmp_path: Path, capsys: Captured):
    """P36: a golden or a weight that changed since the rows were made is named, and nothing runs; so is a new sweep."""
    golden = load_golden("gate")
    path = tmp_path / "mine.json"
    write_golden(golden, path)
    words = ["variant=f32", f"golden={path}", "limit=1", "max_tokens=1,2", f"results={tmp_path}"]
    assert main(["gate", "-m", *words, "resume=true"]) == 2
    assert "leave resume=true out to start it" in capsys.readouterr().err
    assert main(["gate", "-m", *words]) == 0
    tokens = golden.tokens.copy()
    tokens[:, 0, 0] += 1
    for file in tmp_path.glob("mine.*"):
        file.unlink()
    write_golden(replace(golden, tokens=tokens, top_ids=None, top_logprobs=None), path)
    before = files_of(tmp_path)
    assert main(["gate", "-m", *words, "resume=true"]) == 2
    said = capsys.readouterr().err
    assert "cannot be resumed: golden's hash" in said
    assert "start anew without resume=true" in said
    assert files_of(tmp_path) == before


def test_a_changed_setting_is_named():
    """The setting whose value differs from the row's is named with both values; unknown inputs are not compared."""
    row = {"sweep": {"id": "s", "words": ["variant=f32"]}, "golden_hash": "g", "model_hash": None}
    row["detail"] = {"config": {"variant": {"kda": {"state": "keep"}}}}
    sweep.refuse_changed([row], lambda _: {"golden_hash": None, "model_hash": "m", "config": row["detail"]["config"]})
    now = {"config": {"variant": {"kda": {"state": "bf16"}}}}
    with pytest.raises(UsageError, match=r"setting variant.kda.state of \[variant=f32\] was keep and is now bf16"):
        sweep.refuse_changed([row], lambda _: now)


def test_a_sweep_is_known_by_its_jobs_and_each_start_by_its_id():
    """P37: order does not matter to what a sweep is; eight starts in one second have eight ids."""
    jobs = [["variant=f32", "golden=gate"], ["variant=oracle", "golden=gate"]]
    turned = [list(reversed(job)) for job in reversed(jobs)]
    assert sweep.identity("gate", jobs) == sweep.identity("gate", turned)
    assert sweep.identity("gate", jobs) != sweep.identity("verdict", jobs)
    assert sweep.identity("gate", jobs) != sweep.identity("gate", jobs[:1])
    assert len({sweep.new_id("abc") for _ in range(8)}) == 8


def test_every_job_leaves_a_row_and_the_summary_lists_all(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
):
    """P35: of four jobs one raises, one exits with 7, one is out of memory: four rows, three lines of what failed."""
    errors: Iterator[BaseException | None] = iter([ValueError("two"), SystemExit(7), None, MemoryError("big")])
    real = gate._gate

    def run(config, row):
        if (error := next(errors)) is not None:
            raise error
        return real(config, row)

    monkeypatch.setattr(gate, "_gate", run)
    code = main(["gate", "-m", "variant=f32", "max_tokens=1,2,3,4", *SMALL, f"results={tmp_path}"])
    said = capsys.readouterr().err
    assert code == 6
    assert [row["status"] for row in rows_of(tmp_path)] == ["failed", "failed", "ok", "failed"]
    assert "3 of 4 jobs failed, 0 not started" in said
    failed = [line for line in said.splitlines() if line.startswith("neartie: error: [variant=f32 max_tokens=")]
    assert len(failed) == 3
    assert "out of memory" in failed[2]


@pytest.mark.parametrize("name", ["a,b", "a=b", "a b", "a'b", "a,b=c d"])
def test_values_round_trip(tmp_path: Path, name: str):
    """P38: a golden's path with a comma, slash, equals sign, space or quote is one job, and in its row unchanged."""
    path = write_golden(load_golden("gate"), tmp_path / name / "g.json").path
    from harness.compose import quote

    word = f"golden={quote(str(path))}"
    words = ["variant=f32", word, "limit=1", "max_tokens=1,2", f"results={tmp_path}"]
    assert main(["gate", "-m", *words]) == 0
    rows = rows_of(tmp_path)
    assert [row["golden"] for row in rows] == [str(path)] * 2
    assert all(word in row["sweep"]["words"] for row in rows)


def test_an_experiment_file_is_a_sweep(capsys: Captured):
    """experiment=NAME runs what its file sweeps over; a word typed stands for the file's; -m is needed."""
    assert main(["gate", "-m", "experiment=first_seven", "--config"]) == 0
    assert capsys.readouterr().out.count("---") == 6
    assert main(["gate", "-m", "experiment=first_seven", "variant=f32", "golden=gate,wide", "--config"]) == 0
    assert capsys.readouterr().out.count("golden: wide") == 1
    assert main(["gate", "experiment=first_seven"]) == 2
    assert "is a sweep; add -m" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["explain", "variant=f32,oracle"], ["golden", "show", "gate", "seed=1,2"]])
def test_json_of_a_sweep_is_one_document(command: list[str], capsys: Captured):
    """`-m --json` prints one list with a document for each job, whatever the command."""
    assert main([command[0], "-m", *command[1:], "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_gpus_spread_jobs_over_devices(capsys: Captured):
    """gpus=2 gives jobs the device indices 0, 1, 0."""
    assert main(["gate", "-m", "variant=f32,oracle,device_kda", "device=cuda", "gpus=2", "--config"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("index:")] == ["index: 0", "index: 1", "index: 0"]


@pytest.mark.parametrize("word", ["hydra/launcher=joblib", "resume=true", "gpus=2"])
def test_words_of_a_sweep_are_refused_in_a_single_run(word: str, capsys: Captured):
    """A launcher, resume or gpus without -m has no effect and is refused."""
    assert main(["gate", "variant=f32", word]) == 2
    assert "add -m" in capsys.readouterr().err


LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=10", "hydra.sweeper.max_batch_size=4"],
    "ray": ["hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"],
}
TIMES = ("run_id", "time_utc", "wall_s", "decode_tok_s", "prefill_tok_s", "peak_memory_bytes", "sweep", "environment")


def without_times(results: Path) -> dict[tuple[str, ...], dict]:
    """Rows by their words, less what is of the clock, the process or the start of the sweep."""
    found = {}
    for row in rows_of(results):
        detail = {name: value for name, value in row["detail"].items() if name not in ("timing", "memory_since")}
        found[tuple(row["sweep"]["words"])] = {k: v for k, v in row.items() if k not in TIMES} | {"detail": detail}
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("default")  # what the launchers' own libraries warn of is theirs
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_gives_the_same_rows(name: str, tmp_path: Path):
    """Hydra's launcher, in processes of its own, leaves the forty rows that one process leaves, less times."""
    if find_spec(f"hydra_plugins.hydra_{name}_launcher") is None:
        pytest.skip(f"hydra-{name}-launcher is not installed; pip install 'neartie[{name}]'")
    words = ["gate", "-m", *FORTY]
    assert main([*words, f"results={tmp_path / 'here'}"]) == 0
    assert main([*words, f"results={tmp_path / 'there'}", *LAUNCHERS[name]]) == 0
    assert without_times(tmp_path / "there") == without_times(tmp_path / "here")
    assert len(without_times(tmp_path / "here")) == 40


@pytest.mark.filterwarnings("default")
def test_a_launcher_is_given_jobs_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """max_batch_size=2 of five jobs is three launches; each job has its row, numbered as without."""
    parts: list[tuple[int, int]] = []

    def watched(*args: Any, **more: Any) -> Any:
        made = compose.launcher(*args, **more)
        real = made.launch

        def counted(overrides: Sequence, initial_job_idx: int) -> Sequence:
            parts.append((initial_job_idx, len(overrides)))
            return real(overrides, initial_job_idx)

        made.launch = counted  # pyright: ignore[reportAttributeAccessIssue]
        return made

    monkeypatch.setattr(launch, "launcher", watched)
    words = ["variant=f32", "max_tokens=1,2,3,4,5", *SMALL, f"results={tmp_path}"]
    assert main(["gate", "-m", *words, "hydra/launcher=basic", "hydra.sweeper.max_batch_size=2"]) == 0
    assert parts == [(0, 2), (2, 2), (4, 1)]
    assert [row["sweep"]["job"] for row in rows_of(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_launcher_that_is_not_there_says_how_to_get_it(capsys: Captured):
    """An unknown launcher is one line."""
    assert main(["gate", "-m", "variant=f32", "hydra/launcher=nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err
