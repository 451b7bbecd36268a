"""Time the delta rule's Triton kernels on a GPU, beside the published ones where the fla package is installed.

Same inputs, same run, replays of a captured graph, so that the host's launches are in neither. Errors are against the
float64 reference on the same inputs. `python -m experiments.bench_kernels OUT.json [--sweep]` writes the figures to a
file, and a row to results/ledger.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench_cudagraph

from harness.ledger import Ledger
from harness.provenance import environment
from variants.ops import kda, kda_chunk_triton, kda_triton
from variants.ops.kda_chunk_triton import FLA, NARROW_TILES, VLLM, Tiles
from variants.ops.launch_triton import ragged

HEADS, WIDTH = 32, 128
RECURRENT, CHUNK = (1, 64), (64, 512, 2048, 8192)
FUSED = kda_triton.Fused(normalize=True, scale=WIDTH**-0.5)
BF16 = torch.bfloat16
# what a stage may be launched with; each is timed with the others left as they are
CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "scores": {"scores_k": (32, 64), "scores_warps": (1, 2, 4), "scores_unroll": (1, 4)},
    "solve": {"solve_d": (64, 128), "solve_warps": (4,)},
    "carry": {"state_v": (16, 32), "state_warps": (4,), "state_stages": (3, 4)},
    "output": {"output_k": (64,), "output_v": (64, 128), "output_warps": (4,)},
}  # fmt: skip
SWEPT = (64, 2048)


def inputs(length: int) -> tuple[Tensor, ...]:
    """q, k, v bfloat16 [1, T, H, 128], g and beta float32, state float32 [1, H, 128, 128]."""
    make = torch.Generator(device="cuda").manual_seed(length)
    q, k, v, f = (torch.randn(1, length, HEADS, WIDTH, device="cuda", generator=make) for _ in range(4))
    beta = torch.randn(1, length, HEADS, device="cuda", generator=make).sigmoid()
    state = torch.randn(1, HEADS, WIDTH, WIDTH, device="cuda", generator=make)
    return q.to(BF16), k.to(BF16), v.to(BF16), torch.nn.functional.logsigmoid(f), beta, state


def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    return kda.recurrent(kda.l2norm(q) * WIDTH**-0.5, kda.l2norm(k), v, g, beta, state)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def microseconds(call: Callable[[], Any]) -> list[float]:
    """Two medians of graph replays, so that their spread shows."""
    medians: list[Any] = [do_bench_cudagraph(call, rep=20, return_mode="median") for _ in range(2)]
    return [1e3 * ms for ms in medians]


def measured(call: Callable[[], tuple[Tensor, Tensor]], expected: tuple[Tensor, Tensor]) -> dict[str, Any]:
    o, state = call()
    row = {"error": error(o, expected[0]), "state_error": error(state, expected[1])}
    return row | {"us": microseconds(call)}


def ours(length: int, form: str, x: tuple[Tensor, ...], expected: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Errors from the call that returns a new state; times with the state in its slot, updated in place."""
    *operands, state = x
    batch, pool = ragged([length], [0], device="cuda"), state.clone()
    more: dict[str, Any] = {"fused": FUSED, "out_dtype": BF16}
    core: Callable[..., Any] = kda_triton.recurrent
    if form != "recurrent":
        core, more["rounding"] = kda_chunk_triton.chunk, VLLM if form == "chunk_vllm" else FLA
    row = measured(lambda: core(*operands, state, **more), expected)
    return row | {"us": microseconds(lambda: core(*operands, pool, batch=batch, **more))}


def published(form: str, x: tuple[Tensor, ...], expected: tuple[Tensor, Tensor]) -> dict[str, Any] | None:
    """The same call of the fla package, or None where it is not installed."""
    if find_spec("fla") is None:
        return None
    package = import_module("fla.ops.kda")
    core = package.fused_recurrent_kda if form == "recurrent" else package.chunk_kda
    *operands, state = x
    more = {"scale": WIDTH**-0.5, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with torch.inference_mode():
        return measured(lambda: core(*operands, initial_state=state, **more), expected)


def compared() -> list[dict[str, Any]]:
    rows = []
    cases = [("recurrent", n) for n in RECURRENT] + [(f, n) for n in CHUNK for f in ("chunk_fla", "chunk_vllm")]
    for form, length in cases:
        x = inputs(length)
        expected = reference(*x)
        row = {"form": form, "tokens": length, "ours": ours(length, form, x, expected)}
        if form != "chunk_vllm":
            row["fla"] = published(form, x, expected)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def stages(length: int, tiles: Tiles) -> dict[str, Callable[[], Any]]:
    """Each launch of the chunked form alone, on what the launches before it made."""
    q, k, v, g, beta, state = inputs(length)
    batch = ragged([length], [0], device="cuda")
    q, k = kda_chunk_triton._normalized(q, k, BF16)
    run = kda_chunk_triton._Run(q, k, v, beta, state, batch, FUSED, FLA, tiles)
    total = run.decay(g)
    a, aqk = run.scores(total)
    u, w, kg = run.solve(a, total)
    h, v_new = run.carry(u, w, kg, total)
    return {
        "normalize": lambda: kda_chunk_triton._normalized(q, k, BF16),
        "decay": lambda: run.decay(g),
        "scores": lambda: run.scores(total),
        "solve": lambda: run.solve(a, total),
        "carry": lambda: run.carry(u, w, kg, total),
        "output": lambda: run.output(total, h, aqk, v_new, BF16),
    }


def swept() -> list[dict[str, Any]]:
    """Every choice of every stage at two lengths; one that does not fit the device is a row without a time."""
    rows = [{"stage": name, "tokens": n, "tiles": {}, "us": microseconds(call)}
            for n in SWEPT for name, call in stages(n, NARROW_TILES).items()]  # fmt: skip
    for stage, options in CHOICES.items():
        for values, length in product(product(*options.values()), SWEPT):
            chosen = dict(zip(options, values, strict=True))
            try:
                us = microseconds(stages(length, replace(NARROW_TILES, **chosen))[stage])
            except triton.runtime.errors.OutOfResources:
                us = None
            rows.append({"stage": stage, "tokens": length, "tiles": chosen, "us": us})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def fastest(rows: list[dict[str, Any]]) -> dict[str, int]:
    """For every stage the tiles whose time, relative to the best at each length, is least in the geometric mean."""
    tiles: dict[str, int] = {}
    for stage in CHOICES:
        timed = [r for r in rows if r["stage"] == stage and r["tiles"]]
        choices = [dict(t) for t in dict.fromkeys(tuple(r["tiles"].items()) for r in timed)]
        tiles |= min(choices, key=lambda c: prod(min(r["us"] or [inf]) for r in timed if r["tiles"] == c))
    return tiles


def run(out: Path, *, sweep: bool = False) -> dict[str, Any]:
    """Compare, with `sweep` after timing every choice of tiles and with the fastest of them.

    Writes strict JSON to `out` and returns it.
    """
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "heads": HEADS, "width": WIDTH,
    }  # fmt: skip
    tiles = NARROW_TILES
    if sweep:
        result["sweep"] = swept()
        tiles = replace(NARROW_TILES, **fastest(result["sweep"]))
        print(json.dumps({"fastest": asdict(tiles)}), flush=True)
        kda_chunk_triton.NARROW_TILES = tiles
    result |= {"tiles": asdict(tiles), "rows": compared()}
    out.write_text(json.dumps(result, indent=1, allow_nan=False))
    return result


def recorded(out: Path, ledger: Ledger, *, sweep: bool = False, device: str = "cuda") -> str:
    """As `run`, on record; returns the row's id. A run that fails leaves a row that says so."""
    with ledger.begin({"experiment": "bench_kernels", "engine": "local"}) as row:
        row.add({"environment": environment(device=device)})
        row.finish({"detail": {"kernels": run(out, sweep=sweep)}})
    return row.run_id


if __name__ == "__main__":
    recorded(Path(sys.argv[1]), Ledger("results/ledger"), sweep="--sweep" in sys.argv[2:])
