"""The one console command, `neartie`: a subcommand, then Hydra override words and `--flags`.

Jobs of a multirun run one after the other in this process, so that a model is loaded once, and each is contained: its
failure is one line, the others still run, and the exit code is the worst. Hydra composes and parses; it makes no output
folder, since a run's record is its row in the ledger.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from experiments import usage, words
from experiments.commands import Command, available
from experiments.outcome import INTERRUPTED, Contained
from harness.nearest import did_you_mean
from variants.errors import UsageError

if TYPE_CHECKING:
    from harness.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code (README lists them)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    whole = Contained("")
    with whole:
        whole.code = _dispatch(argv)
        sys.stdout.flush()
    if whole.kind == BrokenPipeError.__name__:  # else the interpreter's own flush at exit fails on it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if whole.message:
        _print_error(whole, as_json="--json" in argv)
    return whole.code


def _dispatch(argv: Sequence[str]) -> int:
    commands = available()
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage.top(commands.values()))
        return 0
    if argv[0] == "--version":
        print(_version())
        return 0
    if argv[0] not in commands:
        near = did_you_mean(argv[0], commands) or f"; there are {', '.join(commands)}"
        raise UsageError(f"no command {argv[0]!r}{near}")
    command = commands[argv[0]]
    line = words.read(command, argv[1:])
    if line.help:
        print(usage.of(command))
        return 0
    return _run(command, line)


def _run(command: Command, line: words.Line) -> int:
    """Every job's settings are composed before the first one runs, so that a misspelt word costs nothing."""
    from harness.compose import as_yaml, load
    from harness.config import Config
    from harness.overrides import jobs

    module = importlib.import_module(command.module)
    root = getattr(module, "Settings", Config)
    work = jobs(line.overrides) if line.flags.many else [list(line.overrides)]
    configs = [load(job, root=root) for job in work]
    if "config" in line.flags.values:
        print("---\n".join(as_yaml(config) for config in configs), end="")
        return 0
    outcomes: list[Contained] = []
    for job, config in zip(work, configs, strict=True):
        outcomes.append(_run_job(module, job, config, line.flags))
        if outcomes[-1].code == INTERRUPTED:
            break
    if hasattr(module, "report"):
        module.report(line.flags)
    if line.flags.many:
        _summarise(outcomes, len(work))
    return max(outcome.code for outcome in outcomes)


def _run_job(module: ModuleType, job: Sequence[str], config: "Config", flags: words.Flags) -> Contained:
    """One job; an error is kept in what is returned for a multirun, and raised for a single run."""
    outcome = Contained(" ".join(job), contain=flags.many)
    with outcome:
        outcome.code = module.run(config, flags)
    return outcome


def _summarise(outcomes: Sequence[Contained], planned: int) -> None:
    """On stderr: each job that failed, and how many were never started."""
    failed = [o for o in outcomes if o.message]
    if failed or len(outcomes) < planned:
        left = planned - len(outcomes)
        print(f"neartie: {len(failed)} of {planned} jobs failed, {left} not started", file=sys.stderr)
    for outcome in failed:
        print(f"neartie: error: [{outcome.job}] {outcome.message}", file=sys.stderr)


def _print_error(outcome: Contained, *, as_json: bool) -> None:
    print(f"neartie: error: {outcome.message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": outcome.as_dict()}))


def _version() -> str:
    from importlib.metadata import version

    return f"neartie {version('neartie')}"


if __name__ == "__main__":
    sys.exit(main())
