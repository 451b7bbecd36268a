"""What makes the commands pleasant: status, completion, progress where somebody looks, and an end by Ctrl-C."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.cli import main
from experiments.commands import available
from harness import progress as progress_module
from harness.ledger import Ledger
from harness.progress import progress, tracked

ROOT = Path(__file__).resolve().parents[1]
Captured = pytest.CaptureFixture[str]


def test_status_tells_what_runs_what_crashed_and_what_ended(tmp_path: Path, capsys: Captured) -> None:
    """A run in flight, one whose process is gone and one that ended, each in its place, and the free space."""
    ledger = Ledger(tmp_path / "ledger")
    with ledger.begin({"experiment": "gate", "variant": "ended"}) as run:
        run.finish({})
    gone = ledger.begin({"experiment": "gate", "variant": "gone"})
    marker = json.loads(gone.marker.read_bytes())
    marker["process"]["started"] = "never"
    gone.marker.write_text(json.dumps(marker))
    ledger.begin({"experiment": "verdict", "variant": "here"})
    assert main(["status", f"results={tmp_path}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [[row["variant"] for row in told[part]] for part in ("running", "crashed", "last")] == [
        ["here"],
        ["gone"],
        ["ended"],
    ]
    assert 0 < told["free_bytes"] <= shutil.disk_usage(tmp_path).total
    assert main(["status", f"results={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("GiB free", "crashed, 1:", "ended last:", "0:00:"))


def test_status_of_an_empty_ledger(tmp_path: Path, capsys: Captured) -> None:
    """A folder that is not there yet has no rows, and its disk has space."""
    assert main(["status", f"results={tmp_path / 'none'}"]) == 0
    assert "nothing runs on this machine" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


COMPLETE = """
source "$1"; COMP_LINE="$2"; COMP_POINT=${#2}; COMP_WORDS=($2); COMP_CWORD=$3; _neartie; echo "${COMPREPLY[*]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("neartie verd", "verdict"),
        ("neartie ledger fro", "frontier"),
        ("neartie gate variant=bf16_stream_", "bf16_stream_recompute bf16_stream_triton"),
        ("neartie gate golden=gate_t", "gate_transformers gate_triton gate_triton_batched"),
        ("neartie gate --req", "--require="),
    ],
)
def test_bash_completes_commands_flags_and_names(tmp_path: Path, capsys: Captured, typed: str, expected: str) -> None:
    """The printed script, in a bash, gives what begins with what was typed."""
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    argv = ["bash", "-c", COMPLETE, "bash", str(script), typed, str(len(typed.split()) - 1)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_reads_its_script(tmp_path: Path, capsys: Captured, shell: str) -> None:
    """Every command is in it, and the shell itself, where it is here, finds no fault with its grammar."""
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    assert all(name in script.read_text() for name in available())
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(script)], check=True)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing where stderr is no terminal; there a bar with the steps and the time left, and one within it below."""
    for stream, shown in ((io.StringIO(), False), (_Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with progress("outer", 2) as done:
            assert list(tracked("inner", "ab", 2)) == ["a", "b"]
            done()
            time.sleep(1.2 / progress_module.REFRESHES)
        assert ("outer" in stream.getvalue()) is shown
        assert ("1/2" in stream.getvalue() and "left" in stream.getvalue()) is shown
    assert progress_module._shown == []


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background of a shell has it ignored
from experiments import gate
from experiments.cli import main
def run(config, row):
    print("begun", flush=True)
    time.sleep(60)
gate._gate = run
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("many", [False, True])
def test_ctrl_c_leaves_a_row_and_says_how_to_go_on(tmp_path: Path, *, many: bool) -> None:
    """A real SIGINT in the first job: exit code 130, a row that says so, no marker, the jobs not begun, one hint."""
    words = ["gate", *(["-m"] if many else []), "variant=f32", "max_tokens=1,2" if many else "max_tokens=1"]
    argv = [sys.executable, "-c", SLOW, *words, f"results={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert (row["status"], row["detail"]["reason"]) == ("failed", "interrupted")
    assert list((tmp_path / "ledger").glob("*.running")) == []
    assert "interrupted; the same command again does what is missing" in said
    assert ("not started: [variant=f32 max_tokens=2]" in said) is many
    assert ("resume=true runs what is missing" in said) is many
    assert "Traceback" not in said
