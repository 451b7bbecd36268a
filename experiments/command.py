"""What a subcommand is. It imports nothing heavy, so that help and a misspelt word cost no time.

A command is a module with `run(config, flags) -> int`, the exit code of one job. It may also have `report(flags)`,
called once after all jobs with what `run` appended to `flags.results`, and `Settings`, its own subclass of Config.
"""

import importlib.util
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A word that begins with `--`; `value` names its value if it takes one, `default` is that if it is left out."""

    name: str
    help: str
    value: str = ""
    default: str = ""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand; `actions` are its second words, each with the names of the words that follow it.

    words: the names of the words that a command without actions takes. rows: each job leaves a row of the ledger.
    """

    name: str
    summary: str
    module: str
    usage: str
    text: str
    example: str
    flags: tuple[Flag, ...] = ()
    actions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    rows: bool = False

    @property
    def exists(self) -> bool:
        """Whether its module is there; a command without one is not shown and cannot be run."""
        return importlib.util.find_spec(self.module) is not None


JSON = Flag(name="json", help="one JSON document on stdout; errors too")
CONFIG = Flag(name="config", help="print the settings of the run instead of running")
HELP = Flag(name="help", help="this text")
EVERYWHERE = (JSON, CONFIG, HELP)
