"""The table of subcommands, in the order in which help lists them."""

from experiments.command import Command
from experiments.commands_read import READ
from experiments.commands_run import RUN

COMMANDS: tuple[Command, ...] = (*RUN, *READ)


def available() -> dict[str, Command]:
    """The commands whose module is there, by name."""
    return {c.name: c for c in COMMANDS if c.exists}
