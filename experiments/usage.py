"""Help that fits a screen of 24 lines by 80 columns."""

from collections.abc import Iterable

from experiments.command import EVERYWHERE, Command, Flag

TOP = """neartie: is a token that differs rounding or a bug, and where?
usage: neartie COMMAND [KEY=A,B ...] [-m: each combination] [--json] [--help]
{commands}
example: neartie gate -m variant=f32,bf16_stream golden=gate
exit: 0 ran, 1 bar or findings, 2 usage, 3 input, 4 device, 5 engine, 6 bug"""


# Named in one line, so that the list fits a screen.
ALSO = ("ladder-to-vllm", "calibrate", "convert", "train", "identity", "bench")


def top(commands: Iterable[Command]) -> str:
    """`neartie --help`."""
    there = list(commands)
    lines = [f"  {c.name:<9} {c.summary}" for c in there if c.name not in ALSO]
    also = ", ".join(c.name for c in there if c.name in ALSO)
    return TOP.format(commands="\n".join([*lines, *([f"  also: {also}"] if also else [])]))


def of(command: Command) -> str:
    """`neartie COMMAND --help`."""
    flags = "\n".join(_flag(f) for f in (*command.flags, *EVERYWHERE))
    return f"{command.summary}\nusage: {command.usage}\n\n{command.text}\n\n{flags}\n\nexample: {command.example}"


def _flag(flag: Flag) -> str:
    value = f"[={flag.value}]" if flag.default else f"={flag.value}" if flag.value else ""
    head = f"  --{flag.name}{value}"
    lines = flag.help.splitlines()
    first = [f"{head:<12}{lines[0]}"] if len(head) < 12 else [head, f"{'':<12}{lines[0]}"]
    return "\n".join([*first, *(f"{'':<12}{line}" for line in lines[1:])])
