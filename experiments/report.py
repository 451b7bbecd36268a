"""`neartie report`: the runs of one golden on record as one HTML file, and its figures for papers."""

import json
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from experiments.words import Flags
from harness.config import Config
from harness.engines.assets import checkpoint_folder
from harness.gate import part_of
from harness.golden import load_golden
from harness.golden_data import Golden
from harness.golden_model import is_made_of
from harness.near_ties import TokenText
from harness.token_text import token_text
from variants.errors import DeviceError, UsageError


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """out: the file to write, left out in results/reports. variants: those to show, none for all. against: the variant
    whose recipe the others are held against, left out the first that has one. figures: a folder for SVG and PNG. cells:
    how many tokens are drawn at most.
    """

    out: str | None = None
    variants: list[str] = field(default_factory=list)
    against: str | None = None
    figures: str | None = None
    cells: int = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cells < 0:
            raise UsageError(f"cells={self.cells}: expected how many tokens are drawn at most, 0 for none")


def run(config: Settings, flags: Flags) -> int:
    """Write the page and tell where it is; a ledger without a run of the golden gives a page that says so."""
    from harness.page.entries import select
    from harness.page.figures import save
    from harness.page.page import page

    golden = part_of(load_golden(config.golden), prompts=config.limit, tokens=config.max_tokens)
    selection = select(Path(config.results) / "ledger", golden, config.variants)
    _check(config, [entry.label for entry in selection.entries])
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by neartie from {config.results}/ledger."
    made_page = page(
        selection, golden, text=_texts(config, golden), against=config.against, cells=config.cells, made=made
    )
    path = Path(config.out or Path(config.results) / "reports" / f"report-{Path(config.golden).stem}.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made_page.html, encoding="utf-8")
    except OSError as error:
        raise DeviceError(f"cannot write {path} ({error.strerror}); name another file by out=") from error
    drawn = save(made_page.figures(), Path(config.figures)) if config.figures else []
    if flags.json:
        found = {"path": str(path), "runs": len(selection.entries), "lacking": list(made_page.lacking)}
        print(json.dumps(found | {"left_out": selection.left_out, "figures": [str(file) for file in drawn]}))
        return 0
    print(f"{path}: {len(selection.entries)} runs, {path.stat().st_size // 1024} KiB")
    left = [f"left out: {count} {why}" for why, count in selection.left_out.items()]
    print("\n".join([*made_page.lacking, *left, *([f"{config.figures}: {len(drawn)} files"] if drawn else [])]))
    return 0


def _check(config: Settings, labels: list[str]) -> None:
    """Refuse names that no run has."""
    for name in (*config.variants, *([config.against] if config.against else [])):
        if name not in labels:
            there = ", ".join(sorted(set(labels))) or "none"
            raise UsageError(f"no run of variant {name!r} and this golden is on record; there are {there}")


def _texts(config: Config, golden: Golden) -> TokenText | None:
    """What tokens say, where the golden is of the model that is here and has a tokenizer."""
    if not is_made_of(golden, config.model):
        return None
    file = checkpoint_folder(config.model.path) / "tokenizer.json"
    return token_text(file) if file.is_file() else None


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["report", *sys.argv[1:]]))
