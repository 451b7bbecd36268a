"""`neartie cross`: engines against each other on the prompts of goldens: agreement, verdict and largest margin."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path

from experiments.words import Flags
from harness import strict_json
from harness.capture import Plan, capture
from harness.compose import groups, load
from harness.config import Config, EngineKind
from harness.cross import Cell, cross
from harness.engines import make_engine
from harness.gate import part_of
from harness.golden import Golden, load_golden
from harness.journal import Journal
from harness.numerics import check_device, policy
from harness.pregate import check_length
from harness.progress import tracked
from harness.text_table import text_table
from variants.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """engines: each a variant's name, an engine's name, or words of a command line. goldens: names or paths."""

    engines: list[str] = field(default_factory=list)
    goldens: list[str] = field(default_factory=lambda: ["gate"])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.engines or not self.goldens:
            raise UsageError("cross: name them, as in engines=[f32,transformers] goldens=[gate,wide]")
        if self.engine.kind is not EngineKind.local or self.require is not None:
            raise UsageError("cross: engine= and require= have no effect; name engines with engines=[...]")
        if self.golden != Config.golden:
            raise UsageError(f"cross: golden={self.golden} has no effect; name goldens with goldens=[{self.golden}]")


def run(config: Settings, flags: Flags) -> int:
    """Run every engine on every golden once, then hold each against the others; a result exits 0 whatever it is."""
    choices = [(name, engine_config(name, config)) for name in config.engines]
    _refuse_twice(choices)
    tables: dict[str, list[Cell]] = {}
    for name in config.goldens:
        golden = part_of(load_golden(name), prompts=config.limit, tokens=config.max_tokens)
        engines = tracked(golden.name, choices, len(choices))
        runs = {choice.label: _once(choice, golden) for _, choice in engines}
        tables[golden.name] = cross(golden, runs)
    if flags.json:
        print(strict_json.dumps({name: [asdict(c) for c in cells] for name, cells in tables.items()}).decode())
    else:
        print("\n\n".join(text(name, cells) for name, cells in tables.items()))
    return 0


def _refuse_twice(choices: Sequence[tuple[str, Config]]) -> None:
    """Raises UsageError for two entries that would be one column, or that are one variant by two names."""
    for (first, a), (second, b) in combinations(choices, 2):
        if a.label == b.label or replace(a, label=b.label) == b:
            raise UsageError(f"cross: {first!r} and {second!r} name one engine twice; name each once")


def engine_config(name: str, config: Settings) -> Config:
    """The settings of one engine of the list. Raises UsageError for a word that is none."""
    words, known = shlex.split(name), groups()
    if words[0] in known["engine"]:
        words[0] = f"engine={words[0]}"
    elif "=" not in words[0]:
        words[0] = f"variant={words[0]}"
    return load([*words, f"results='{config.results}'"])


def _once(config: Config, golden: Golden) -> Golden:
    """One greedy run of an engine with its logprobs; what it has finished outlives a failure."""
    check_device(config.device)
    stop = golden.sampling.get("eos") == "stop"
    plan = Plan(
        name=config.label,
        prompts=golden.prompts,
        texts=None,
        runs=1,
        max_tokens=golden.tokens.shape[2],
        stop_at_eos=stop,
        arms=False,
    )
    with policy(config.device, tf32=config.variant.tf32, reduced_sums=config.variant.reduced_sums):
        engine = make_engine(config)
        check_length(golden, engine.info)
        about = {"engine": config.label, "version": engine.info.version, "model": engine.info.model_sha256}
        asked = {"golden": golden.battery_hash, "tokens": plan.max_tokens, "eos": stop, "url": config.engine.url}
        journal = Journal(Path(config.results) / "unfinished", {"cross": about | asked})
        made = capture(engine, plan, journal=journal, made={})
        journal.remove()
    return made


def text(name: str, cells: list[Cell]) -> str:
    """One table: references down, candidates across; in a cell tokens that agree, verdict, largest margin in nats."""
    candidates = list(dict.fromkeys(c.candidate for c in cells))
    by_place = {(c.reference, c.candidate): str(c) for c in cells}
    rows = [[r, *(by_place.get((r, c)) for c in candidates)] for r in dict.fromkeys(c.reference for c in cells)]
    head = f"{name}: agreement of {cells[0].total} tokens, verdict by tokens, reference's largest margin in nats"
    return f"{head}\n{text_table(['reference', *candidates], rows)}"


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["cross", *sys.argv[1:]]))
