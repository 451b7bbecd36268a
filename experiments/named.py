"""`neartie variants`: the named variants, a line each."""

import json
import sys

from experiments.words import Flags
from harness.compose import choice_summary, groups
from harness.config import Config
from harness.text_table import text_table


def run(config: Config, flags: Flags) -> int:
    """Print every variant of conf/variant/ with what it is."""
    named = {name: choice_summary("variant", name) for name in groups()["variant"]}
    print(json.dumps(named) if flags.json else text_table(("variant", "what it is"), list(named.items())))
    return 0


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["variants", *sys.argv[1:]]))
