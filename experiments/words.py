"""A command line taken apart: command, action and its words, overrides, flags."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from experiments.command import EVERYWHERE, HELP, Command
from harness.nearest import did_you_mean
from variants.errors import UsageError

if TYPE_CHECKING:
    from harness.sweep import Place

# A key as it is typed; the words of an action (a path, say) may hold an equals sign of their own.
OVERRIDE = re.compile(r"^(~|\+{0,2}[A-Za-z_][\w./@]*=)")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What a command is told beyond its Config.

    values: flags by name, with their value or "". action: the second word of a command that has actions, and `words`
    those after it. many: whether -m was given. results: what each job leaves for `report`; `rows`: the rows of a sweep,
    for its report. place: where in a sweep this job stands; job: its words.
    """

    values: dict[str, str] = field(default_factory=dict)
    action: str = ""
    words: tuple[str, ...] = ()
    many: bool = False
    results: list = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)
    place: "Place | None" = None
    job: tuple[str, ...] = ()

    @property
    def json(self) -> bool:
        return "json" in self.values


@dataclass(frozen=True, kw_only=True)
class Line:
    overrides: tuple[str, ...]
    flags: Flags
    help: bool = False


def read(command: Command, argv: Sequence[str]) -> Line:
    """Take the words after the command apart; raises UsageError for one that is none of its own."""
    values: dict[str, str] = {}
    overrides: list[str] = []
    words: list[str] = []
    many = False
    for word in _joined(command, argv):
        if word in ("-m", "--multirun"):
            many = True
        elif word == "-h":
            values[HELP.name] = ""
        elif word.startswith("-"):
            values.update([_flag(command, word)])
        elif OVERRIDE.match(word) or not (command.actions or command.words):
            overrides.append(word)
        else:
            words.append(word)
    if HELP.name in values:
        return Line(overrides=(), flags=Flags(), help=True)
    action = _action(command, words) if command.actions else ""
    flags = Flags(values=values, action=action, words=tuple(words[1:] if action else words), many=many)
    _check_words(command, flags.words)
    if "require" in values:
        overrides.append(f"require='{values['require']}'")
    return Line(overrides=tuple(overrides), flags=flags)


def _joined(command: Command, argv: Sequence[str]) -> list[str]:
    """`--require 100` becomes `--require=100`; a word that is an override or a flag is no value."""
    valued = {f"--{f.name}" for f in command.flags if f.value}
    out: list[str] = []
    for word in argv:
        if out and out[-1] in valued and not word.startswith("-") and not OVERRIDE.match(word):
            out[-1] = f"{out[-1]}={word}"
        else:
            out.append(word)
    return out


def _flag(command: Command, word: str) -> tuple[str, str]:

    name, equals, value = word.removeprefix("--").partition("=")
    known = {f.name: f for f in (*command.flags, *EVERYWHERE)}
    if not word.startswith("--") or name not in known:
        near = did_you_mean(name, known) or "; settings are KEY=VALUE, without dashes"
        raise UsageError(f"{command.name} has no flag {word.partition('=')[0]!r}{near}")
    flag = known[name]
    if equals and not flag.value:
        raise UsageError(f"--{name} takes no value, got {value!r}")
    if flag.value and not value and not flag.default:
        raise UsageError(f"--{name} needs a value: --{name}={flag.value}")
    return name, value or flag.default


def _check_words(command: Command, words: Sequence[str]) -> None:
    if command.words and len(words) != len(command.words):
        raise UsageError(f"{command.name} takes {len(command.words)} word, got {len(words)}: {command.usage}")


def _action(command: Command, words: Sequence[str]) -> str:

    action = words[0] if words else next(iter(command.actions))
    if action not in command.actions:
        near = did_you_mean(action, command.actions) or f"; there are {', '.join(command.actions)}"
        raise UsageError(f"{command.name} has no action {action!r}{near}")
    wanted, got = command.actions[action], max(len(words) - 1, 0)
    if got != len(wanted):
        usage = " ".join(["neartie", command.name, action, *wanted])
        raise UsageError(f"{command.name} {action} takes {len(wanted)} words, got {got}: {usage}")
    return action
