"""`neartie bench against=floors`: a fused step and a prefill on a GPU, beside what its memory and its units allow."""

from dataclasses import asdict
from pathlib import Path

from experiments.bench import ALONE, Settings
from experiments.gate import announced
from experiments.words import Flags
from harness import strict_json
from harness.config import DeviceKind
from harness.engines.local import LocalEngine
from harness.floors import Floors, measured
from harness.ledger import Ledger
from harness.measure import Rate
from harness.numerics import check_device, policy
from harness.provenance import environment
from harness.roofline_plot import roofline
from harness.text_table import text_table
from variants.errors import UsageError


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
        record = _record(found)
        row.finish(record)
    reports = Path(config.results) / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    figure = reports / f"roofline-{row.run_id}.png"
    roofline(found, engine.casts.checkpoint.config).savefig(figure, dpi=120)
    print(strict_json.dumps({"run_id": row.run_id, **record}).decode() if flags.json else _text(found, figure))
    return 0


def _check(config: Settings) -> None:
    if config.device.kind is not DeviceKind.cuda:
        raise UsageError("against=floors times by device events: set device=cuda, or another against=")
    if tuple(config.batches) != ALONE:
        raise UsageError("batches is not read with a fused step, which runs one sequence; choose variant=paged_engine")


def _record(found: Floors) -> dict[str, object]:
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


def _text(found: Floors, figure: Path) -> str:
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
        f"roofline: {figure}",
    ])  # fmt: skip
