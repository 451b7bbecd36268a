"""`neartie completion`: a script for bash, zsh or fish, made of the commands and names that there are."""

import json
import sys
from collections.abc import Callable

from experiments.command import EVERYWHERE, Command
from experiments.commands import available
from experiments.words import Flags
from harness.compose import groups
from harness.config import Config
from harness.golden import golden_names

SETTINGS = ("limit=", "max_tokens=", "results=", "seed=", "device.threads=", "resume=true")


def run(config: Config, flags: Flags) -> int:
    """Print the script of one shell."""
    commands = available()
    script = SHELLS[flags.action]({name: _words(command) for name, command in commands.items()}, _named())
    print(json.dumps({"shell": flags.action, "script": script}) if flags.json else script)
    return 0


def _words(command: Command) -> list[str]:
    """What may follow a command: its actions, or settings, and its flags with `=` where they take a value."""
    flags = [f"--{flag.name}{'=' if flag.value else ''}" for flag in (*command.flags, *EVERYWHERE)]
    return [*command.actions, *(() if command.actions else SETTINGS), *flags]


def _named() -> list[str]:
    """`variant=f32` and the like, for every name that there is."""
    there: dict[str, tuple[str, ...]] = {**groups(), "golden": golden_names()}
    kept = ("variant", "golden", "engine", "model", "device", "experiment")
    return [f"{group}={name}" for group in kept for name in sorted(there.get(group, ()))]


def _bash(commands: dict[str, list[str]], named: list[str]) -> str:
    cases = "\n".join(f"    {name}) words='{' '.join(words)}' ;;" for name, words in commands.items())
    return f"""# neartie: completion for bash
_neartie() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" words="" word
  local current="${{line##* }}"
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -le 1 ]; then words='{" ".join(commands)}'; else words="$words {" ".join(named)}"; fi
  COMPREPLY=()
  for word in $(compgen -W "$words" -- "$current"); do
    # bash takes what follows the last = for a word of its own
    case "$current" in *=*) COMPREPLY+=("${{word#*=}}") ;; *) COMPREPLY+=("$word") ;; esac
  done
  case "${{COMPREPLY[*]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -F _neartie neartie"""


def _zsh(commands: dict[str, list[str]], named: list[str]) -> str:
    cases = "\n".join(f"    {name}) candidates=({' '.join(words)}) ;;" for name, words in commands.items())
    return f"""#compdef neartie
_neartie() {{
  local -a candidates
  if (( CURRENT == 2 )); then compadd -- {" ".join(commands)}; return; fi
  case "$words[2]" in
{cases}
  esac
  candidates+=({" ".join(named)})
  compadd -S '' -- ${{(M)candidates:#*=}}
  compadd -- ${{candidates:#*=}}
}}
compdef _neartie neartie"""


def _fish(commands: dict[str, list[str]], named: list[str]) -> str:
    lines = ["# neartie: completion for fish", "complete -c neartie -f"]
    lines.append(f"complete -c neartie -n __fish_use_subcommand -a '{' '.join(commands)}'")
    for name, words in commands.items():
        lines.append(f"complete -c neartie -n '__fish_seen_subcommand_from {name}' -a '{' '.join(words)}'")
    lines.append(f"complete -c neartie -n 'not __fish_use_subcommand' -a '{' '.join(named)}'")
    return "\n".join(lines)


SHELLS: dict[str, Callable[[dict[str, list[str]], list[str]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["completion", *sys.argv[1:]]))
