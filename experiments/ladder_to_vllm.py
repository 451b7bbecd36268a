"""`neartie ladder-to-vllm`: float32, then the engine's rounding points one at a time, and what each brings."""

import sys
from dataclasses import asdict, dataclass, replace

from experiments.words import Flags
from harness import strict_json
from harness.compose import named_variant
from harness.config import Config, EngineKind
from harness.engines.local import LocalEngine
from harness.gate import part_of
from harness.golden import load_golden
from harness.localize import Runner
from harness.numerics import check_device, policy
from harness.text_table import text_table
from harness.toward import Row, toward
from variants.errors import UsageError
from variants.recipe import resolve

HEADER = ("point", "set", "median nats", "forced", "free", "expected (95 %)", "free is")


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """target: the variant whose rounding points are turned on. start: where the walk begins. members: noisy runs."""

    target: str = "vllm_mirror"
    start: str = "f32"
    members: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine.kind is not EngineKind.local:
            raise UsageError(f"ladder-to-vllm walks between variants; engine={self.engine.kind.name} has none")


def run(config: Settings, flags: Flags) -> int:
    """Walk from `start` to `target` and print a line a step."""
    check_device(config.device)
    golden = part_of(load_golden(config.golden), prompts=config.limit, tokens=config.max_tokens)
    engine = LocalEngine.from_config(replace(config, variant=named_variant(config.start), label=config.start))
    model = engine.casts.checkpoint.config
    target = resolve(named_variant(config.target), model)
    runner = Runner(engine.casts, config.device)
    with policy(config.device, tf32=target.tf32):
        rows = []
        for row in toward(runner, engine.recipe, target, golden, members=config.members):
            rows.append(row)
            print("neartie: " + "  ".join(str(c) for c in _cells(row)), file=sys.stderr, flush=True)
    if flags.json:
        print(strict_json.dumps([asdict(row) for row in rows]).decode())
        return 0
    print(text_table(HEADER, [_cells(row) for row in rows]))
    print(f"{config.start} to {config.target} against {golden.name}; nats: |logprob difference| over its recorded top")
    return 0


def _cells(row: Row) -> tuple[object, ...]:
    e = row.expected
    interval = None if e is None else f"{e.mean:.1f}, {e.low:.0f}..{e.high:.0f}"
    inside = None if row.inside is None else "inside" if row.inside else "OUTSIDE"
    kind = "cumulative" if row.cumulative else "alone"
    scores = (f"{row.forced}/{row.total}", f"{row.free}/{row.total}")
    return row.point, kind, f"{row.median_nats:.4f}", *scores, interval, inside


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["ladder-to-vllm", *sys.argv[1:]]))
