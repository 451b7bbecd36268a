"""`neartie variants`: the named variants, a line each."""

import json
import sys

from experiments.words import Flags
from harness.compose import choice_summary, groups, named_variant
from harness.config import Config
from harness.text_table import text_table
from variants.axes import Status


def run(config: Config, flags: Flags) -> int:
    """Print every variant of conf/variant/: what it is, what is known of it, whose kernels it runs."""
    rows = [_row(name) for name in groups()["variant"]]
    if flags.json:
        print(json.dumps({name: {"status": s, "impl": i, "summary": about} for name, s, i, about in rows}))
    else:
        shown = [(name, "-" if s == Status.open.name else s, i, about) for name, s, i, about in rows]
        print(text_table(("variant", "status", "impl", "what it is"), shown))
    return 0


def _row(name: str) -> tuple[str, str, str, str]:
    variant = named_variant(name)
    kernels = sorted({i.name for i in vars(variant.impl).values()} - {"torch"})
    return name, variant.status.name, ", ".join(kernels) or "torch", choice_summary("variant", name)


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["variants", *sys.argv[1:]]))
