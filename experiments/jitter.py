"""`neartie jitter`: how far a variant is from itself when its products move in their last bits, and what that tells.

Beside that floor: its distance to the golden, where logprobs were recorded, and to the float64 oracle. With
rounding_points=true each of the recipe's rounding points is taken out alone, and said to stand out of the floor or not.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from experiments.gate import announced
from experiments.words import Flags
from harness import strict_json
from harness.config import Config, EngineKind
from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.gate import part_of
from harness.golden import Golden, load_golden
from harness.jitter import RELATIVE, Distance, JitterFloor, jitter_floor
from harness.ledger import Ledger, Run
from harness.numerics import check_device, policy
from harness.pregate import check_vocabulary
from harness.provenance import environment
from harness.rounding_points import SEEDS, Removed, rounding_points
from harness.text_table import text_table
from variants.errors import UsageError

POINT_TOKENS = 2  # forced after each prompt where points are taken out: one prefill and one step of decode


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """relative: how far products are moved. rounding_points: also take each point out alone.

    jitters: of every layer that has a point, for the floor of its points.
    """

    relative: float = RELATIVE
    rounding_points: bool = False
    jitters: int = SEEDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine.kind is not EngineKind.local:
            raise UsageError(f"jitter moves a variant's products, and engine={self.engine.kind.name} has none to move")
        if not self.relative > 0:
            raise UsageError(f"relative={self.relative}: expected above 0 (1e-7 is float32's last place)")
        if self.jitters != SEEDS and not self.rounding_points:
            raise UsageError("jitters= has no effect without rounding_points=true; leave it out")
        if self.jitters < 3:
            raise UsageError(f"jitters={self.jitters}: expected 3 or more, points are ranked among them")


def run(config: Settings, flags: Flags) -> int:
    """Measure once and put it on record."""
    with Ledger(Path(config.results) / "ledger").begin(announced(config, flags, "jitter")) as row:
        check_device(config.device)
        with policy(config.device, tf32=config.variant.tf32):
            floor, points = _measured(config, row)
        document = {"floor": asdict(floor) | {"ratio": floor.ratio, "resolution": floor.resolution}}
        document |= {"points": [_plain(p) for p in points]}
        row.finish({"detail": {"jitter": document}})
    if flags.json:
        print(strict_json.dumps(strict_json.encode({"run_id": row.run_id, **document})[0]).decode(), end="")
    else:
        print("\n".join([*_floor_text(config, floor), *_points_text(points)]))
    return 0


def _measured(config: Settings, row: Run) -> tuple[JitterFloor, list[Removed]]:
    row.add({"environment": environment(device=config.device.torch_name)})
    golden = part_of(load_golden(config.golden), prompts=config.limit, tokens=config.max_tokens)
    row.add({"golden_hash": golden.hash, "battery_hash": golden.battery_hash, "bar": golden.bar.name})
    engine = LocalEngine.from_config(config)
    row.add({"model_hash": engine.casts.checkpoint.sha256, "variant_hash": engine.recipe.hash})
    row.add({"recipe": {"declared": engine.recipe.as_dict()}})
    check_vocabulary(golden, engine.casts.checkpoint.config.vocab_size)
    floor = jitter_floor(engine.recipe, engine.casts, golden, relative=config.relative, seed=config.seed)
    if not config.rounding_points:
        return floor, []
    return floor, rounding_points(
        engine.recipe, engine.casts, _few_tokens(golden), relative=config.relative, seeds=config.jitters
    )


def _few_tokens(golden: Golden) -> Battery:
    """Prompts that have as many tokens as are forced."""
    battery = Battery.of(golden)
    rows = [n for n, c in enumerate(battery.continuations) if len(c) >= min(POINT_TOKENS, golden.tokens.shape[2])]
    return battery.part(rows, POINT_TOKENS)


def _plain(p: Removed) -> dict[str, object]:
    """A point's figures: shares as their means over prompts and jitters."""
    shares = {"changed": float(np.mean(p.changed)), "floor": float(np.mean(p.floors))}
    return {"point": p.point, "layer": p.layer, "p": p.p, **shares, "is": _verdict(p)}


def _floor_text(config: Settings, floor: JitterFloor) -> list[str]:
    rows = [["itself, products moved", *_figures(floor.itself)], ["float64 oracle", *_figures(floor.oracle)]]
    if floor.golden is not None:
        rows.append([f"golden {config.golden}", *_figures(floor.golden)])
    table = text_table(("distance to", "median", "rms", "forced token's rms", "other best"), rows)
    head = f"{config.label}: {floor.itself.positions} positions, products moved by {floor.relative:g}; in nats"
    return [head, table, _said(floor)]


def _figures(d: Distance) -> list[str]:
    return [f"{d.median:.3g}", f"{d.rms:.3g}", f"{d.token_rms:.3g}", str(d.argmax_changes)]


def _said(floor: JitterFloor) -> str:
    if floor.resolution is None:
        return "the floor is 0: more than half of the logprobs stay bit-equal, so any distance to a reference counts"
    if floor.ratio is None:
        return f"the oracle is {floor.resolution:.2g} times as far as the floor; the golden has no logprobs"
    return (
        f"the golden is {floor.ratio:.2g} times as far as the floor, the oracle {floor.resolution:.2g} times: at 1 "
        "every rounding point is matched, at the oracle's figure none"
    )


def _points_text(points: list[Removed]) -> list[str]:
    if not points:
        return []
    rows = [
        [p.point, p.layer, f"{np.mean(p.changed):.3g}", f"{np.mean(p.floors):.2g}", f"{p.p:.1e}", _verdict(p)]
        for p in points
    ]
    exercised = [p for p in points if p.exercised]
    count = sum(p.separated for p in exercised)
    return [
        "",
        "each rounding point taken out of one layer: share of the values leaving that layer that change",
        text_table(("point", "layer", "changed", "floor", "p", ""), rows),
        f"{count} of {len(exercised)} points that act here stand out of the floor; {len(points) - len(exercised)} "
        "change no bit: what they round fits already, its reader rounds it alike, or another site stands for them",
    ]


def _verdict(p: Removed) -> str:
    if not p.exercised:
        return "not exercised"
    return "separated" if p.separated else "not separated"


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["jitter", *sys.argv[1:]]))
