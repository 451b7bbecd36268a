"""Where a run was made: enough to tell environments apart, and nothing about anybody's machine."""

import getpass
import json
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from harness import provenance
from harness.ledger_schema import FIELDS
from harness.provenance import checkout, cpu_model, environment
from harness.strict_json import encode
from variants.errors import UsageError


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "results").mkdir(parents=True)
    (root / "module.py").write_text("x = 1\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "start")
    return root


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def test_every_fixed_environment_name_is_given():
    """All of the ledger's environment names are there, and all values are plain."""
    found = environment()
    assert isinstance(FIELDS["environment"], dict)
    assert found.keys() >= FIELDS["environment"].keys()
    plain, nulls = encode(found)
    assert plain == found
    assert nulls == {}


def test_flags_are_read_when_asked(monkeypatch: pytest.MonkeyPatch):
    """Threads, determinism, TF32 and a switch in the environment are those of now, not of the import."""
    before = environment()
    threads = torch.get_num_threads()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads + 1)
    try:
        now = environment()
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert (before["threads"], now["threads"]) == (threads, threads + 1)
    assert (before["deterministic"], now["deterministic"]) == (False, True)
    assert (before["tf32"], now["tf32"]) == (False, True)
    assert now["switches"] == {**before["switches"], "ONEDNN_MAX_CPU_ISA": "AVX2"}  # pyright: ignore


def test_the_record_names_no_person_and_no_place():
    """No host name, user name, home folder or path is in it."""
    text = json.dumps(environment())
    for personal in (platform.node(), getpass.getuser(), str(Path.home()), str(provenance.ROOT)):
        assert f'"{personal}"' not in text
        assert len(personal) < 5 or personal not in text
    assert "/" not in text


def test_a_clean_checkout_has_its_commit(repository: Path):
    """git is the commit that is checked out; a clean tree is not dirty."""
    assert checkout(repository) == {"git": git(repository, "rev-parse", "HEAD"), "dirty": False}


@pytest.mark.parametrize(("file", "dirty"), [("module.py", True), ("new.py", True), ("results/row.json", False)])
def test_dirtiness_is_that_outside_results(repository: Path, file: str, dirty: bool):
    """A changed or a new module makes the tree dirty; a new row under results/ does not."""
    (repository / file).write_text("x = 2\n")
    assert checkout(repository)["dirty"] is dirty


def test_git_variables_of_a_hook_do_not_mislead(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """GIT_DIR set by a hook of another repository changes nothing."""
    before = checkout(repository)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another" / ".git"))
    assert checkout(repository) == before


def test_a_copy_has_the_commit_that_it_was_told(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Outside a checkout NEARTIE_COMMIT names it, whether it was changed unknown; a checkout knows better."""
    monkeypatch.setenv("NEARTIE_COMMIT", "a" * 40)
    assert checkout(tmp_path) == {"git": "a" * 40, "dirty": None}
    assert checkout(repository)["git"] == git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("NEARTIE_COMMIT", "main")
    with pytest.raises(UsageError, match="NEARTIE_COMMIT=main: expected the 40"):
        checkout(tmp_path)


def test_outside_a_checkout_git_is_null(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No checkout, a folder inside somebody else's, no commit yet and no git at all are null, never an error."""
    unknown = {"git": None, "dirty": None}
    assert checkout(tmp_path) == unknown
    (repository / "venv").mkdir()
    assert checkout(repository / "venv") == unknown
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    git(fresh, "init", "-q")
    assert checkout(fresh) == {"git": None, "dirty": False}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout(repository) == unknown


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (builder)",
    ],
)
def test_the_driver_is_read_from_the_kernel_module(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Both forms of the NVIDIA kernel module tell the driver; without the module it is null."""
    monkeypatch.setattr(provenance, "NVIDIA_VERSION", tmp_path / "version")
    assert provenance._driver() is None
    (tmp_path / "version").write_text(line + "\nGCC version:  gcc 12\n")
    assert provenance._driver() == "550.54.15"


def test_the_cpu_is_its_makers_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The model name is the maker's, and null where the system gives none."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nprocessor\t: 1\nmodel name\t: Other\n")
    monkeypatch.setattr(provenance, "CPUINFO", cpuinfo)
    assert cpu_model() == "Some CPU @ 2 GHz"
    cpuinfo.write_text("processor\t: 0\n")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert cpu_model() is None


@pytest.mark.gpu
def test_a_device_has_its_name_and_driver():
    """On CUDA the device is its model name, with its capability and driver."""
    found = environment(device="cuda")
    assert found["device"] == torch.cuda.get_device_name()
    assert isinstance(found["driver"], str)
    assert found["driver"].count(".") in (1, 2)
    assert isinstance(found["cuda"], str)
