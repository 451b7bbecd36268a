"""Where a baseline is read from: the merge base with the branch that a change goes to, never the change itself.

A baseline is a folder of small JSON files, one an arm, so that branches which add arms merge cleanly. One that the
change edits would be compared with itself; it is read as it was before, and the edit is a finding of its own.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.ledger import replace_whole
from harness.regress import VERSION, Finding
from variants.errors import InputError, UsageError


def file_name(variant: str, golden: str) -> str:
    """The name of an arm's file; a path or a changed axis in it becomes underscores."""
    return re.sub(r"[^A-Za-z0-9_.+=-]", "_", f"{variant}-{golden}") + ".json"


def merge_base(folder: Path, base: str) -> tuple[Path, str]:
    """The top of the checkout that holds `folder`, and the commit from which HEAD and `base` parted.

    Raises UsageError where there is no checkout, or git knows no such commit.
    """
    here = next(path for path in (folder, *folder.parents) if path.is_dir())
    top = _git(here, "rev-parse", "--show-toplevel")
    if top is None:
        raise UsageError(
            f"baseline {folder} is in no git checkout, so there is no merge base; base=none reads it as is"
        )
    commit = _git(here, "merge-base", "HEAD", base)
    if commit is None:
        raise UsageError(f"no merge base of HEAD and {base}; fetch it (fetch-depth: 0 in CI), or name another branch")
    return Path(top.strip()), commit.strip()


def read(folder: Path, name: str, *, base: str, needed: bool = True) -> tuple[dict[str, Any], list[Finding]]:
    """The baseline of an arm as it was at the merge base, and a finding where the change edits it.

    base: a branch or commit; `none` reads the file as it lies. Raises InputError for a file that is no baseline, or is
    not there although it is needed.
    """
    path = (folder / name).resolve()
    here = path.read_text(encoding="utf-8") if path.is_file() else None
    if base == "none":
        return _loaded(path, here), []
    top, commit = merge_base(path, base)
    before = _git(top, "show", f"{commit}:{path.relative_to(top).as_posix()}")
    if before is None and here is None and not needed:
        return {}, []
    if before is None and here is not None:
        text = f"{name} is new in this change, so it has nothing to be compared with"
        return _loaded(path, here), [Finding(kind="baseline", text=text)]
    if before == here:
        return _loaded(path, before), []
    loaded = _loaded(path, before)
    what = "removes" if here is None else f"edits ({_edits(loaded, here)})"
    return loaded, [
        Finding(kind="baseline", text=f"this change {what} {name}; compared with it as it was at {commit[:10]}")
    ]


def write(folder: Path, name: str, baseline: Mapping[str, Any]) -> Path:
    """Put an arm's baseline in place; a reviewer sees the edit, and the next `regress` tells of it."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_whole(folder / name, (json.dumps(baseline, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())
    return folder / name


@contextmanager
def worktree(folder: Path, commit: str) -> Iterator[Path]:
    """The code as it was at `commit`, in a folder of its own for as long as the block runs."""
    with TemporaryDirectory(prefix="neartie-ab-") as temporary:
        where = Path(temporary) / "base"
        if _git(folder, "worktree", "add", "--detach", str(where), commit) is None:
            raise InputError(f"git cannot check out {commit} beside {folder}")
        try:
            yield where
        finally:
            _git(folder, "worktree", "remove", "--force", str(where))


def _loaded(path: Path, text: str | None) -> dict[str, Any]:
    if text is None:
        raise InputError(f"no baseline {path}; make it with `neartie regress ... --record` and commit it")
    try:
        loaded = json.loads(text)
        if loaded["baseline"] > VERSION:
            raise InputError(f"baseline {path} is of version {loaded['baseline']}, this reader knows {VERSION}; update")
        return loaded
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"baseline {path} cannot be read ({error}); make it again with --record") from error


def _edits(before: Mapping[str, Any], here: str) -> str:
    try:
        now = json.loads(here)
        was, new = before["agreement"]["matched"], now["agreement"]["matched"]
    except (ValueError, KeyError, TypeError):
        return "to what is no baseline"
    return f"agreement {was} to {new}" if was != new else "not its agreement"


def _git(folder: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
