"""`neartie bench against=floors`: a fused step and a prefill on a GPU, beside what its memory and its units allow."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.bench import ALONE, Settings
from experiments.gate import announced
from experiments.words import Flags
from harness import strict_json
from harness.compose import named_variant
from harness.config import DeviceKind
from harness.engines.local import LocalEngine
from harness.floors import PROMPT, Floors, measured
from harness.ledger import Ledger
from harness.logit_error import HEADER, LogitError, logit_errors
from harness.measure import Rate
from harness.numerics import check_device, policy
from harness.provenance import environment
from harness.roofline_plot import roofline
from harness.text_table import text_table
from variants.errors import UsageError

PLAIN = "bf16_engine"  # what the fused step is told beside: the same roundings by the library's products
TOLD = "mean over tokens (largest); float64 weights were held a layer at a time"


def run(config: Settings, flags: Flags) -> int:
    """Compare, time, print, plot, and put a row on record."""
    _check(config)
    check_device(config.device)
    with Ledger(Path(config.results) / "ledger").begin({**announced(config, flags, "bench"), "golden": None}) as row:
        row.add({"environment": environment(device=config.device.torch_name)})
        engine = LocalEngine.from_config(config)
        row.add({"model_hash": engine.info.model_sha256, "variant_hash": engine.recipe.hash})
        row.add({"recipe": {"declared": engine.recipe.as_dict()}})
        with policy(config.device, tf32=engine.recipe.tf32, reduced_sums=engine.recipe.reduced_sums):
            found = measured(engine, steps=config.steps, contexts=config.contexts, prefills=config.prefills,
                             seed=config.seed)  # fmt: skip
            apart = _beside_float64(config, engine)
        record = _record(found)
        if apart:
            told = {name: error.record() for name, error in apart.items()}
            record["detail"]["bench"]["float64"] = {"prompt": PROMPT, **told}
        row.finish(record)
    reports = Path(config.results) / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    figure = reports / f"roofline-{row.run_id}.png"
    roofline(found, engine.casts.checkpoint.config).savefig(figure, dpi=120)
    print(strict_json.dumps({"run_id": row.run_id, **record}).decode() if flags.json else _text(found, apart, figure))
    return 0


def _beside_float64(config: Settings, engine: LocalEngine) -> dict[str, LogitError]:
    """Nothing unless asked for: the float64 model is run a layer at a time."""
    if not config.oracle_tokens:
        return {}
    random = torch.Generator().manual_seed(config.seed)
    prompt = torch.randint(3, engine.casts.checkpoint.config.vocab_size, (PROMPT,), generator=random).tolist()
    plain = LocalEngine(engine.casts, named_variant(PLAIN), name=PLAIN, device=engine.device)
    return logit_errors(engine, {PLAIN: plain}, prompt, config.oracle_tokens)


def _check(config: Settings) -> None:
    if config.device.kind is not DeviceKind.cuda:
        raise UsageError("against=floors times by device events: set device=cuda, or another against=")
    if tuple(config.batches) != ALONE:
        raise UsageError("batches is not read with a fused step, which runs one sequence; choose variant=paged_engine")


def _record(found: Floors) -> dict[str, Any]:
    first, longest = found.decode[min(found.decode)], max(found.prefill)
    t = found.prefill[longest]
    decode = Rate(median=1e3 / first.median, low=1e3 / first.high, high=1e3 / first.low,
                  steps=first.repeats * found.compared)  # fmt: skip
    prefill = Rate(median=1e3 * longest / t.median, low=1e3 * longest / t.high, high=1e3 * longest / t.low,
                   steps=t.repeats)  # fmt: skip
    return {
        "status": "ok", "decode_tok_s": asdict(decode), "prefill_tok_s": asdict(prefill),
        "peak_memory_bytes": found.peak_bytes, "detail": {"bench": found.record()},
    }  # fmt: skip


def _text(found: Floors, apart: dict[str, LogitError], figure: Path) -> str:
    launches = [[r["launch"], r["count"], f"{r['us']:.2f}", f"{r['floor_us']:.2f}", f"{r['share']:.2f}"]
                for r in found.launches]  # fmt: skip
    decode = [[n, f"{1e3 / t.median:.1f}", f"{t.median:.3f}", f"{found.floor_ms(n):.3f}",
               f"{found.floor_ms(n) / t.median:.2f}"] for n, t in found.decode.items()]  # fmt: skip
    prefill = [[n, f"{t.median:.1f}", f"{t.low:.1f} to {t.high:.1f}", f"{1e3 * n / t.median:.0f}"]
               for n, t in found.prefill.items()]  # fmt: skip
    c = found.ceilings
    return "\n".join([
        f"fused and plain: the same bits in {found.compared} tokens' logits",
        text_table(("launch", "count", "us", "floor us", "share"), launches),
        text_table(("context", "tok/s", "ms", "floor ms", "share"), decode),
        text_table(("prefill", "ms", "5 to 95 %", "tok/s"), prefill),
        f"ceilings: copy {c.copy_gb_s:.0f} GB/s, read {c.read_gb_s:.0f} GB/s, bf16 {c.bf16_tflop_s:.0f} TFLOP/s; "
        f"weights {found.weights_bytes / 1e9:.2f} GB, peak {found.peak_bytes / 1e9:.2f} GB",
        *([text_table(HEADER, [[n, *e.cells()] for n, e in apart.items()]), TOLD] if apart else []),
        f"roofline: {figure}",
    ])  # fmt: skip
