"""`neartie bench against=floors` of the paged runner, of the transformers library or of vLLM: rates on a GPU, one row.

Each is on weights of the model's geometry, ours and the library's on the same random ones, vLLM on its own dummies.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.bench import Settings
from experiments.gate import announced, environment_of
from experiments.words import Flags
from harness import strict_json
from harness.config import DeviceKind, EngineKind, WeightsFrom
from harness.engines.assets import geometry
from harness.engines.loaded import casts_of
from harness.engines.local import LocalEngine
from harness.ledger import Ledger, Run
from harness.measure import Rate
from harness.memory import peak_memory
from harness.numerics import check_device, policy
from harness.rates import Asked, Rates
from harness.rates import Row as Measured
from harness.text_table import text_table
from variants.axes import Execution
from variants.errors import EngineError, UsageError


def run(config: Settings, flags: Flags) -> int:
    """Time one engine and put it on record; a path that it could not run is told, and the exit code is an engine's."""
    _check(config)
    asked = Asked(contexts=tuple(config.contexts), batches=tuple(config.batches), prefills=tuple(config.prefills),
                  steps=config.steps, seed=config.seed)  # fmt: skip
    rates = Rates(told=_tell)
    with Ledger(Path(config.results) / "ledger").begin({**announced(config, flags, "bench"), "golden": None}) as row:
        row.add({"environment": environment_of(config)})
        with peak_memory("cuda:0" if config.engine.kind is EngineKind.vllm else config.device.torch_name) as memory:
            _timed(config, asked, rates, row)
        record = _record(rates) | {"peak_memory_bytes": memory.bytes}
        row.finish(record)
    print(strict_json.dumps({"run_id": row.run_id, **record}).decode() if flags.json else _text(rates))
    return EngineError.exit_code if rates.refused else 0


def _check(config: Settings) -> None:
    kind = config.engine.kind
    if kind is EngineKind.local and config.variant.execution.mode is not Execution.paged:
        raise UsageError("against=floors times a fused step (variant=fast_decode) or the paged runner (paged_engine)")
    if kind is not EngineKind.vllm:
        check_device(config.device)
        if config.device.kind is not DeviceKind.cuda:
            raise UsageError("against=floors times a GPU: set device=cuda, or another against=")
    if kind is not EngineKind.local and config.model.weights is not WeightsFrom.random:
        raise UsageError(f"engine={kind.name} is timed on random weights here; choose model=kimi_linear_48b")
    if kind is EngineKind.transformers and tuple(config.batches) != (1,):
        raise UsageError("batches is not read with engine=transformers, which runs one sequence")


def _timed(config: Settings, asked: Asked, rates: Rates, row: Run) -> None:
    if config.engine.kind is EngineKind.vllm:
        from harness import rates_vllm

        described = geometry(config.model.path)
        described = described / "config.json" if described.is_dir() else described
        rates_vllm.measured(described, asked, rates, memory=config.engine.memory, backend=config.engine.backend)
        return
    casts = casts_of(config)
    row.add({"model_hash": casts.checkpoint.sha256})
    if config.engine.kind is EngineKind.transformers:
        from harness import rates_library

        with policy(config.device, tf32=False):
            rates_library.measured(casts, asked, rates)
        return
    from harness import rates_runner

    engine = LocalEngine(casts, config.variant, name=config.label, device=config.device)
    row.add({"variant_hash": engine.recipe.hash, "recipe": {"declared": engine.recipe.as_dict()}})
    rates_runner.measured(engine, asked, rates)


def _record(rates: Rates) -> dict[str, Any]:
    """The row's own rates are those of a lone sequence at the shortest context, and of the longest prompt."""
    if not rates.rows:
        raise EngineError(f"nothing could be timed: {json.dumps(rates.refused)}")
    decode = min((r for r in rates.rows if r.phase == "decode"), key=lambda r: (r.sequences, r.tokens, r.ms.median))
    prefill = max((r for r in rates.rows if r.phase == "prefill"), key=lambda r: r.tokens, default=None)
    out = {"status": "ok", "decode_tok_s": asdict(_rate(decode)), "detail": {"bench": rates.record()}}
    return out if prefill is None else out | {"prefill_tok_s": asdict(_rate(prefill))}


def _rate(row: Measured) -> Rate:
    each, t = row.tok_s * row.ms.median, row.ms
    return Rate(median=row.tok_s, low=each / t.high, high=each / t.low, steps=t.repeats)


def _tell(r: Measured) -> None:
    print(f"neartie: {r.path} {r.phase} {r.sequences} x {r.tokens}: {r.ms.median:.3f} ms", file=sys.stderr, flush=True)


def _text(rates: Rates) -> str:
    rows = [[r.path, r.phase, r.sequences, r.tokens, f"{r.ms.median:.3f}", f"{r.ms.low:.3f} to {r.ms.high:.3f}",
             f"{r.tok_s:.1f}"] for r in rates.rows]  # fmt: skip
    table = text_table(("path", "phase", "sequences", "tokens", "ms", "5 to 95 %", "tok/s"), rows)
    return "\n".join([table, *(f"{path} not timed: {why}" for path, why in rates.refused.items())])
