"""`neartie plan`: how many prompts and tokens a battery needs to tell two variants apart."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.words import Flags
from harness import strict_json
from harness.compose import named_variant
from harness.config import Config, EngineKind
from harness.engines.local import LocalEngine
from harness.gate import part_of
from harness.golden import Golden, load_golden
from harness.noise_scale import Noise, measure
from harness.numerics import policy
from harness.oracle import Forced, consult
from harness.plan import (
    Contrast,
    check_rematch,
    free_running,
    free_running_contrast,
    hazard,
    of_length,
    quantiles,
    smallest_difference,
    teacher_forced_contrast,
)
from harness.pregate import check_vocabulary
from harness.text_table import text_table
from variants.errors import UsageError
from variants.recipe import difference

LENGTHS = (0.25, 0.5, 1, 2, 4)  # of the golden's tokens a prompt
INTERVAL = 1.96  # standard deviations on either side of a 95 % interval


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """against: the variant to be told from variant=.

    power, alpha: of the two-sided test. difference: the share of tokens by which the scores shall differ, 0 for what
    the two variants' noise makes it. rematch: the share of tokens that agree after a divergence.
    """

    against: str | None = None
    power: float = 0.8
    alpha: float = 0.05
    difference: float = 0.0
    rematch: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine.kind is not EngineKind.local:
            raise UsageError(f"plan compares variants, and engine={self.engine.kind.name} has none; leave engine= out")
        quantiles(power=self.power, alpha=self.alpha)
        check_rematch(self.rematch)
        if not 0 <= self.difference < 1:
            raise UsageError(f"difference={self.difference}: expected a share of tokens, 0 or more and under 1")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant on this golden: its noise, and the hazard [N, T] that it makes of the oracle's leads."""

    label: str
    noise: Noise
    flips: np.ndarray


def run(config: Settings, flags: Flags) -> int:
    """Measure both variants' noise on a golden, then plan."""
    if config.against is None:
        raise UsageError("plan needs a second variant: against=NAME, as in against=f32 (`neartie variants` lists them)")
    golden = part_of(load_golden(config.golden), prompts=config.limit, tokens=config.max_tokens)
    mine = LocalEngine.from_config(config)
    other = LocalEngine(mine.casts, named_variant(config.against), name=config.against, device=config.device)
    if not difference(mine.recipe, other.recipe):
        raise UsageError(f"{config.label} and {config.against} are the same arm: no battery tells them apart")
    check_vocabulary(golden, mine.casts.checkpoint.config.vocab_size)
    arms = [_arm(engine, golden, Path(config.results) / "cache") for engine in (mine, other)]
    document = _document(config, golden, arms)
    print(strict_json.dumps(document).decode() if flags.json else _text(document), end="" if flags.json else "\n")
    return 0


def _arm(engine: LocalEngine, golden: Golden, cache: Path) -> Arm:
    """A variant is held against the oracle of its own declared semantics: what is measured is rounding alone."""
    checkpoint, semantics = engine.casts.checkpoint, engine.recipe.semantics
    with policy(engine.device, tf32=engine.recipe.tf32, reduced_sums=engine.recipe.reduced_sums):
        oracle = consult(checkpoint, Forced.of(golden), semantics=semantics, device=engine.casts.device, cache=cache)
        noise = measure(engine, oracle)
    return Arm(label=engine.name, noise=noise, flips=noise.flips(oracle.leads))


def _document(config: Settings, golden: Golden, arms: list[Arm]) -> dict[str, object]:
    a, b = (free_running(arm.flips, rematch=config.rematch) for arm in arms)
    least = smallest_difference(a.sd, b.sd, power=config.power, alpha=config.alpha)
    places = int(np.count_nonzero(~np.isnan(arms[0].flips)))
    return {
        "golden": golden.name,
        "golden_hash": golden.hash,
        "tokens": places,
        "power": config.power,
        "alpha": config.alpha,
        "difference": config.difference or None,
        "rematch": config.rematch,
        "variants": [
            {"variant": arm.label, "noise_nats": arm.noise.scale_nats, "hazard": hazard(arm.flips), "mean": m.total,
             "sd": m.sd, "low": max(0.0, m.total - INTERVAL * m.sd), "high": min(places, m.total + INTERVAL * m.sd),
             "teacher_forced": places * (1 - hazard(arm.flips))}
            for arm, m in zip(arms, (a, b), strict=True)
        ],
        "smallest_difference": least,
        "free_running": _needed(config, arms, free=True),
        "teacher_forced": _needed(config, arms, free=False),
    }  # fmt: skip


def _needed(config: Settings, arms: list[Arm], *, free: bool) -> list[dict[str, object]]:
    """What is needed at several lengths of a prompt's continuation, the golden's own among them."""
    own = arms[0].flips.shape[1]
    at_own = _contrast(config, arms, own, free=free)
    rows = []
    for tokens in dict.fromkeys(max(1, int(own * share)) for share in LENGTHS):
        contrast = _contrast(config, arms, tokens, free=free)
        # Past the golden's tokens nothing new was measured: the error grows with the length.
        error = contrast.mean_error if tokens <= own else at_own.mean_error * tokens / own
        effect = config.difference * tokens or None
        prompts = contrast.prompts(power=config.power, alpha=config.alpha, difference=effect)
        rows.append(
            {
                "tokens_per_prompt": tokens,
                "extrapolated": tokens > own,
                "prompts": prompts,
                "tokens": None if prompts is None else prompts * tokens,
                "difference_per_prompt": effect or contrast.mean,
                "standard_error": None if effect or math.isnan(error) else error,
                "determined": bool(effect or abs(contrast.mean) >= 2 * error),
                "sd_per_prompt": math.sqrt(contrast.prompt_variance),
            }
        )
    return rows


def _contrast(config: Settings, arms: list[Arm], tokens: int, *, free: bool) -> Contrast:
    a, b = (of_length(arm.flips, tokens) for arm in arms)
    return free_running_contrast(a, b, rematch=config.rematch) if free else teacher_forced_contrast(a, b)


def _text(document: dict) -> str:
    variants = [
        [v["variant"], f"{v['noise_nats']:.3g}", f"{v['hazard']:.3g}", f"{v['mean']:.1f}", f"{v['sd']:.1f}",
         f"{v['low']:.0f} to {v['high']:.0f}", f"{v['teacher_forced']:.1f}"]
        for v in document["variants"]
    ]  # fmt: skip
    header = ("variant", "noise (nat)", "hazard/token", "score", "sd", "95 % of runs", "teacher-forced")
    total, least = document["tokens"], document["smallest_difference"]
    return "\n".join(
        [
            f"golden {document['golden']}: {total} tokens; power {document['power']:g}, alpha {document['alpha']:g}",
            "",
            text_table(header, variants),
            f"Free-running on these {total} tokens, two scores must lie {least:.1f} tokens apart to be told apart"
            + (": more than there are." if least > total else "."),
            *(line for kind in ("free_running", "teacher_forced") for line in _plan_text(document, kind)),
        ]
    )


def _plan_text(document: dict, kind: str) -> list[str]:
    rows = document[kind]
    cells = [
        [f"{r['tokens_per_prompt']}{'*' if r['extrapolated'] else ''}", _sure(r, "prompts"), _sure(r, "tokens"),
         f"{r['difference_per_prompt']:+.3g}", None if r["standard_error"] is None else f"{r['standard_error']:.2g}",
         f"{r['sd_per_prompt']:.3g}"]
        for r in rows
    ]  # fmt: skip
    header = ("tokens a prompt", "prompts", "tokens", "difference a prompt", "its error", "sd a prompt")
    lines = ["", kind.replace("_", "-"), text_table(header, cells)]
    if any(r["extrapolated"] for r in rows):
        lines.append("* past the golden's own tokens every place has the mean hazard")
    if any(r["prompts"] is None for r in rows):
        lines.append("-: the two are expected to score alike, so no number of prompts tells them apart")
    if not all(r["determined"] for r in rows):
        lines.append(
            "?: the difference is under twice its error, this golden does not fix it; plan with difference=SHARE"
        )
    return lines


def _sure(row: dict, name: str) -> str | int | None:
    return row[name] if row["determined"] or row[name] is None else f"{row[name]}?"


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["plan", *sys.argv[1:]]))
