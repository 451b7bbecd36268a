"""`neartie regress`: an arm against its baseline at the merge base; any finding is exit code 1."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from experiments import gate
from experiments.words import Flags
from harness import baseline, ci_report
from harness.ci_report import Checked
from harness.config import Config
from harness.ledger_read import read_row
from harness.regress import Bands, Finding, baseline_of, compare
from variants.errors import EngineError, UsageError

FOUND = 1


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """baseline: the folder of baselines. base: the branch that the change goes to, or `none`. repeats: runs an arm.

    speed, memory: bands as shares. junit, summary: files to write; a GitHub step's own summary is written too.
    """

    baseline: str = "results/baseline"
    base: str = "main"
    repeats: int = 3
    speed: float = 0.2
    memory: float = 0.1
    junit: str | None = None
    summary: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats < 1:
            raise UsageError(f"repeats={self.repeats}: expected 1 or more")
        for name in ("speed", "memory"):
            if not 0 < getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: expected a share between 0 and 1")


OWN = tuple(field.name for field in fields(Settings) if field.name not in {f.name for f in fields(Config)})


def run(config: Settings, flags: Flags) -> int:
    """Run one arm and hold it against its baseline, or with --record make it the baseline."""
    began = time.monotonic()
    folder, name = Path(config.baseline), baseline.file_name(config.label, config.golden)
    if "record" in flags.values:
        path = baseline.write(folder, name, baseline_of(_runs(config, flags)))
        print(f"{path} written; commit it", file=sys.stderr)
        flags.results.append((config, path))
        return 0
    ab = "ab" in flags.values
    stored, edited = baseline.read(folder, name, base=config.base, needed=not ab)
    if ab:
        stored, rows = _ab(config, flags)
    else:
        rows = _runs(config, flags)
    edited = [] if "accept" in flags.values else edited
    findings = (*edited, *compare(stored, rows, Bands(speed=config.speed, memory=config.memory)))
    flags.results.append((config, _checked(config, rows, findings, time.monotonic() - began)))
    return FOUND if findings else 0


def report(flags: Flags) -> None:
    """One table of all arms with every finding, to stdout and to the files that were asked for."""
    checked = [one for _, one in flags.results if isinstance(one, Checked)]
    if not checked:
        if flags.json:
            print(json.dumps([{"recorded": str(path)} for _, path in flags.results]))
        return
    config: Settings = flags.results[0][0]
    text = ci_report.markdown(checked)
    if config.junit:
        Path(config.junit).write_bytes(ci_report.junit(checked))
    for place in {config.summary, os.environ.get("GITHUB_STEP_SUMMARY")} - {None, ""}:
        ci_report.append(Path(str(place)), text)
    arms = [{"arm": one.arm, "agree": one.agree, "findings": [vars(f) for f in one.findings]} for one in checked]
    print(json.dumps(arms) if flags.json else text, end="\n" if flags.json else "")


def _checked(config: Settings, rows: Sequence[dict], findings: tuple[Finding, ...], seconds: float) -> Checked:
    agreement, speed = rows[-1]["agreement"], rows[-1]["decode_tok_s"]["median"]
    return Checked(
        arm=f"{config.label} {config.golden}",
        agree=f"{agreement['matched']}/{agreement['total']}",
        tok_s="-" if speed is None else f"{speed:.1f}",
        seconds=seconds,
        findings=findings,
    )


def _runs(config: Settings, flags: Flags) -> list[dict]:
    """The rows of `repeats` gates in this process; a run that fails has its row too."""
    rows = []
    plain = Config(**{field.name: getattr(config, field.name) for field in fields(Config)})
    for _ in range(config.repeats):
        one = replace(flags, results=[], values={"json": ""})
        gate.run(plain, one)
        rows.append(read_row(one.results[0].row.path))
    return rows


def _ab(config: Settings, flags: Flags) -> tuple[dict[str, Any], list[dict]]:
    """Old and new code in turn on this machine: the baseline is what the old code does here."""
    top, commit = baseline.merge_base(Path(config.baseline).resolve(), config.base)
    words = [word for word in flags.job if word.partition("=")[0] not in (*OWN, "results")]
    old: list[dict] = []
    new: list[dict] = []
    with baseline.worktree(top, commit) as before:
        for _ in range(config.repeats):
            old.append(_gate(before, words, before / "results" / "ab"))
            new.append(_gate(top, words, Path(config.results).resolve()))
    return baseline_of(old), new


def _gate(code: Path, words: Sequence[str], results: Path) -> dict:
    argv = [sys.executable, "-m", "experiments.cli", "gate", *words, f"results='{results}'", "--json"]
    done = subprocess.run(
        argv, cwd=code, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(code)}
    )
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise EngineError(f"gate of the code in {code.name} failed ({said[0]}); run it there by hand") from error
