"""`neartie calibrate`: measure benign variants against their envelopes and store how far correct implementations stand.

The variants here were composed for this alone and bear no name of conf/variant/, so that a variant that is judged later
did not take part in fixing what is normal.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from experiments.words import Flags
from harness.calibration import UNIT, Calibration, Measured, calibrate, load_calibration, measured, write_calibration
from harness.compose import named_variant
from harness.config import Config, EngineKind
from harness.engines.loaded import casts_of
from harness.forced_errors import Battery
from harness.gate import part_of
from harness.golden import Golden, load_golden
from harness.progress import tracked
from harness.text_table import text_table
from variants.errors import InputError, UsageError

OUT = "assets/calibration/kimi_linear_12m.json"
BENIGN = {
    "bf16": (
        "f64_islands gemm=bf16",
        "bf16_stream gemm=bf16 norm.rounding=twice elementwise.swiglu=stepwise",
        "bf16_stream kda.chunk_size=32 logits=bf16",
        "incremental_recurrent gemm=bf16 mla.inputs=bf16",
        "bf16_stream gemm=bf16 elementwise.conv=stepwise moe.experts=grouped",
        "bf16_stream mla.kv_cache=bf16 kda.conv_state=bf16 mla.probs=bf16 mla.prefill=dense_f32 mla.decode=dense_f32",
        "bf16_stream kda.state=bf16 kda.outputs=bf16",
        "bf16_residual gemm=bf16 moe.expert_sum=bf16 norm.variance=stored",
        "transformers_mirror norm.rounding=once params.a_log=as_stored norm.kv_eps=config",
        "transformers_mirror elementwise.beta=keep logits=f32",
        "bf16_residual norm.variance=mixed kda.inputs=bf16 mla.inputs=bf16",
        "f32 gemm=bf16_f32out kda.prefill=chunk moe.router=bf16_f32out",
    ),
    "f16": (
        "f32 stream=f16",
        "f32 gemm=f16",
        "f32 stream=f16 gemm=f16 kda.prefill=chunk",
        "f32 stream=f16 norm.variance=stored norm.rounding=twice",
        "f32 gemm=f16 logits=f16 moe.experts=grouped",
        "f32 stream=f16 gemm=f16 elementwise.swiglu=stepwise mla.prefill=online_f32 mla.decode=online_f32",
        "f32 stream=f16 gemm=f16 norm.variance=stored elementwise.conv=stepwise mla.prefill=flash mla.tile_k=32",
        "f32 stream=f16 gemm=f16 kda.prefill=island_f32 kda.decode=island_f32 logits=f16",
        "f32 gemm=f16 norm.rounding=twice mla.prefill=absorbed mla.decode=absorbed mla.kv_splits=2 mla.tile_k=32",
        "f32 stream=f16 gemm=f16 kda.prefill=recurrent_gemv kda.decode=recurrent_gemv moe.experts=grouped",
    ),
    "f32": (
        "f32 kda.prefill=chunk kda.chunk_size=16",
        "f32 mla.prefill=online_f32 mla.decode=online_f32",
        "f32 kda.prefill=island_f32 kda.decode=island_f32",
        "f32 kda.prefill=chunk moe.experts=grouped mla.cache=expanded",
        "f32 mla.prefill=flash mla.tile_q=16 mla.tile_k=32 kda.decode=recurrent_gemv",
        "f32 mla.prefill=absorbed mla.decode=absorbed mla.kv_splits=2 mla.tile_k=32",
        "f32 fused_projections=true execution.batch=8 moe.router_scale=before",
        "f32 kda.prefill=recurrent_gemv kda.decode=recurrent_gemv mla.decode=sdpa mla.prefill=sdpa",
        "f32 execution.prefill_piece=5 kda.prefill=recurrent mla.prefill=dense_f32 mla.decode=online_f32",
        "f32 gemm=f32 kda.prefill=chunk kda.chunk_size=8 moe.experts=grouped mla.prefill=sdpa",
        "f32 kda.prefill=chunk mla.prefill=dense_f32 mla.decode=online_f32",
        "f32 kda.prefill=chunk kda.chunk_size=32 fused_projections=true mla.prefill=sdpa",
        "f64_islands gemm=f32 moe.router=f32 kda.prefill=island_f32 kda.decode=island_f32",
        "f64_islands gemm=f32 moe.router=f32 execution.batch=8 mla.prefill=flash mla.decode=flash moe.experts=grouped",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """members: noisy runs for each variant. workers: processes. out: the file that is written."""

    golden: str = "wide"
    limit: int = 24
    max_tokens: int = 4
    members: int = 8
    workers: int = 1
    out: str = OUT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine.kind is not EngineKind.local:
            raise UsageError(f"calibrate runs variants, and engine={self.engine.kind.name} has none; leave engine= out")
        if self.members < 3:
            raise UsageError(f"members={self.members}: expected at least 3, their spread is read off them")
        if self.workers < 1:
            raise UsageError(f"workers={self.workers}: expected 1 or more")


def run(config: Settings, flags: Flags) -> int:
    """Measure, write, and print what changed against the file that was there."""
    from harness.numerics import check_device

    check_device(config.device)
    out = Path(config.out)
    before = _there(out)
    labels = [words for group in BENIGN.values() for words in group]
    found = calibrate(
        tracked("calibrate", _measured(config, labels), len(labels)),
        model_sha256=casts_of(config).checkpoint.sha256,
        battery=_battery(config),
        members=config.members,
        seed=config.seed,
        named={"golden": config.golden, "golden_hash": _golden(config).hash},
    )
    write_calibration(found, out)
    print(json.dumps(found.as_dict() | {"hash": found.hash}) if flags.json else _text(found, before, out))
    return 0


def _measured(config: Settings, labels: Sequence[str]) -> Iterator[Measured]:
    """Each variant in order; one worker is this process."""
    if config.workers == 1:
        yield from (measure(config, words) for words in labels)
        return
    pool = ProcessPoolExecutor(config.workers, mp_context=get_context("spawn"))
    try:
        yield from pool.map(measure, [config] * len(labels), labels)
    finally:
        pool.shutdown(cancel_futures=True)


def measure(config: Settings, words: str) -> Measured:
    """One benign variant, by the words that compose it, in this process."""
    from harness.numerics import policy

    variant = named_variant("+".join(words.split()))
    with policy(config.device):
        return measured(words, variant, casts_of(config), _battery(config), members=config.members, seed=config.seed)


def _golden(config: Settings) -> Golden:
    return part_of(load_golden(config.golden), prompts=config.limit, tokens=config.max_tokens)


def _battery(config: Settings) -> Battery:
    return Battery.of(_golden(config))


def _there(out: Path) -> Calibration | None:
    """What the file held; one that cannot be read is said to be replaced."""
    if not out.is_file():
        return None
    try:
        return load_calibration(out)
    except InputError as error:
        print(f"replacing {out}: {error}", file=sys.stderr)
        return None


def _text(found: Calibration, before: Calibration | None, out: Path) -> str:
    ends = (0, len(found.places) - 2, len(found.places) - 1)
    longest = len(found.lengths) - 1
    means = {b.variant: np.array(b.shifts[longest]).mean(0) / UNIT for b in found.benign}
    rows = [[b.family, b.variant, *(f"{means[b.variant][i]:+.3f}" for i in ends)] for b in found.benign]
    for name in BENIGN:
        shifts = np.array([means[b.variant] for b in found.benign if b.family == name])
        rows.append([name, "(mean, sd)", *(f"{shifts[:, i].mean():+.3f} {shifts[:, i].std(ddof=1):.3f}" for i in ends)])
    same = "" if before is None else f"; was {before.hash[:12]}" + ("" if before.hash != found.hash else ", the same")
    size = f"{len(found.benign[0].shifts[0])} prompts x {found.lengths[longest]} tokens"
    head = f"{out}: {len(found.benign)} benign variants, {size}, hash {found.hash[:12]}{same}"
    return "\n".join([head, "", text_table(("family", "variant", *(found.places[i] for i in ends)), rows)])


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["calibrate", *sys.argv[1:]]))
