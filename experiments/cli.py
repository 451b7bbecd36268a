"""The one console command, `neartie`: a subcommand, then Hydra override words and `--flags`.

Jobs of a multirun run one after the other in this process, so that a model is loaded once, and each is contained: its
failure is one line, the others still run, and the exit code is the worst (`experiments.sweep`). Hydra composes and
parses; it makes no output folder, since a run's record is its row in the ledger.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from experiments import usage, words
from experiments.command import Command
from experiments.commands import available
from experiments.outcome import Contained, naming
from harness.nearest import did_you_mean
from variants.errors import UsageError


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
    if argv and argv[0].startswith("experiment="):  # the same question by its other name
        argv = [argv[0].removeprefix("experiment=").replace("_", "-"), *argv[1:]]
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
    """One run, or with -m the sweep."""
    from experiments import sweep
    from harness.compose import as_yaml, load
    from harness.config import Config

    module = importlib.import_module(command.module)
    root = getattr(module, "Settings", Config)
    if line.flags.many:
        return sweep.run(command, line, module, root)
    sweep.refuse_outside(line.overrides)
    with naming(line.overrides):
        config = load(line.overrides, root=root)
        if "config" in line.flags.values:
            print(as_yaml(config), end="")
            return 0
        flags = replace(line.flags, job=line.overrides)
        code = module.run(config, flags)
    if hasattr(module, "report"):
        module.report(flags)
    return code


def _print_error(outcome: Contained, *, as_json: bool) -> None:
    print(f"neartie: error: {outcome.message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": outcome.as_dict()}))


def _version() -> str:
    from importlib.metadata import version

    return f"neartie {version('neartie')}"


if __name__ == "__main__":
    sys.exit(main())
