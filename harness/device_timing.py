"""Times of a fused decode step on a GPU: device events around replays, each kind of launch alone, and ceilings.

Host clocks are in no figure. Every time is beside a floor: the bytes that must move, from the config, over the rate of
a large read in the same run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from variants.fused import FusedStep
from variants.fused_layers import Launch
from variants.graph import captured
from variants.model_config import LayerKind, ModelConfig

COPY_BYTES = 1 << 32
PRODUCT = 8192


@dataclass(frozen=True)
class Timed:
    """Median and spread (5th to 95th percentile) of repeated times, in milliseconds."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, ms: Sequence[float]) -> "Timed":
        ordered = sorted(ms)
        return cls(median(ordered), ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20], len(ordered))


def events_ms(call: Callable[[], object], repeats: int, *, warm: int = 3) -> Timed:
    """Times of single calls by device events, after `warm` that are in no figure."""
    for _ in range(warm):
        call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return Timed.of([begin.elapsed_time(end) for begin, end in marks])


@dataclass(frozen=True)
class Ceilings:
    """What this device reached: bytes read and written per second by a copy, read by a sum, bf16 operations."""

    copy_gb_s: float
    read_gb_s: float
    bf16_tflop_s: float


@torch.inference_mode()
def ceilings(device: str) -> Ceilings:
    """Measure them on random data, several times the cache in size."""
    x = torch.empty(COPY_BYTES // 2, dtype=torch.bfloat16, device=device).normal_()
    y = torch.empty_like(x)
    copy = events_ms(lambda: y.copy_(x), 5).median
    rows = x.view(-1, PRODUCT)
    one = torch.randn(PRODUCT, dtype=torch.bfloat16, device=device)
    read = events_ms(lambda: rows @ one, 5).median
    a, b = x[: PRODUCT**2].view(PRODUCT, -1), x[PRODUCT**2 : 2 * PRODUCT**2].view(PRODUCT, -1)
    product = events_ms(lambda: a @ b, 5).median
    return Ceilings(2 * COPY_BYTES / copy / 1e6, COPY_BYTES / read / 1e6, 2 * PRODUCT**3 / product / 1e9)


@torch.inference_mode()
def decode_ms(step: FusedStep, position: int, steps: int, repeats: int) -> Timed:
    """Milliseconds a step of greedy decode from a position on, no host between steps; the position is set back."""

    def some() -> None:
        step.buffers.position.fill_(position)
        step.run(steps)

    t = events_ms(some, repeats)
    return Timed(t.median / steps, t.low / steps, t.high / steps, repeats)


@torch.inference_mode()
def kinds_us(step: FusedStep, repeats: int = 20) -> dict[str, tuple[int, float]]:
    """Launches of each kind and microseconds of one: all of a kind one after the other, as one graph, alone."""
    kinds: dict[str, list[Launch]] = {}
    for launch in step.launches:
        kinds.setdefault(launch.name, []).append(launch)
    changed = (*step.carried, *step.buffers.moved)
    before = [x.clone() for x in changed]
    out: dict[str, tuple[int, float]] = {}
    for name, launches in kinds.items():
        times = -(-8 // len(launches))  # a kind of one launch is repeated, for a replay costs about as much as it

        def every(launches: list[Launch] = launches, times: int = times) -> None:
            for one in launches * times:
                one()

        replay = captured(every, changed[-1:])
        out[name] = (len(launches), 1e3 * events_ms(replay, repeats).median / (len(launches) * times))
    for x, old in zip(changed, before, strict=True):
        x.copy_(old)
    return out


def bytes_by_kind(c: ModelConfig, context: int) -> dict[str, int]:
    """Bytes that one launch of each kind must move: bf16 weights, the float32 state read and written, the latent."""
    h, k, v, d, w = c.kda_num_heads, c.kda_head_dim, c.kda_v_head_dim, c.hidden_size, 2
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    shared, inner, slots = c.num_shared_experts * c.moe_intermediate_size, c.moe_intermediate_size, c.experts_per_token
    return {
        "embed": w * d,
        "kda_project": w * d * (2 * h * k + h * v + 2 * v + h),
        "kda_gates": w * v * (h * k + h * v),
        "kda_core": 2 * 4 * h * k * v,
        "kda_out": w * d * h * v,
        "mla_project": w * d * (c.num_heads * c.qk_head_dim + latent),
        "mla_latent": w * c.num_heads * c.qk_nope_head_dim * c.kv_lora_rank,
        "mla_runs": w * latent * context,
        "mla_merge": 0,
        "mla_expand": w * c.num_heads * c.v_head_dim * c.kv_lora_rank,
        "mla_out": w * d * c.num_heads * c.v_head_dim,
        "dense_up": w * d * 2 * c.intermediate_size,
        "dense_act": 0,
        "dense_down": w * d * c.intermediate_size,
        "router": w * d * (c.num_experts + 2 * shared),
        "experts_up": w * d * (slots * 2 * inner + shared),
        "experts_down": w * d * slots * inner,
        "final_norm": 0,
        "lm_head": w * d * c.vocab_size,
        "finish": 0,
    }


def bytes_a_token(c: ModelConfig, context: int) -> int:
    """Bytes that one decode step must move, over all layers."""
    one = bytes_by_kind(c, context)
    kinds = {kind: [i for i, x in enumerate(c.layer_kinds) if x is kind] for kind in LayerKind}
    counts: dict[str, int] = dict.fromkeys(("embed", "lm_head", "final_norm", "finish"), 1)
    for name in one:
        prefix = name.split("_")[0]
        if prefix in ("kda", "mla"):
            counts[name] = len(kinds[LayerKind.kda if prefix == "kda" else LayerKind.mla])
        elif name in ("router", "experts_up", "experts_down"):
            counts[name] = sum(c.moe_layers)
        elif prefix == "dense":
            counts[name] = c.num_layers - sum(c.moe_layers)
    return sum(n * one[name] for name, n in counts.items())


def table(step: FusedStep, c: ModelConfig, context: int, gb_s: float) -> list[dict[str, Any]]:
    """One row a kind of launch: how many, microseconds, its floor at `gb_s`, and the share of the floor in it."""
    one, rows = bytes_by_kind(c, context), []
    for name, (count, us) in kinds_us(step).items():
        floor = one[name] / gb_s / 1e3
        rows.append({"launch": name, "count": count, "us": us, "floor_us": floor, "share": floor / us})
    return rows
