"""A roofline of one run: what each launch and each prefill reached, beside the two ceilings measured with them."""

from matplotlib.figure import Figure

from harness.floors import Floors
from variants.model_config import LayerKind, ModelConfig

BF16_BYTES = 2


def roofline(found: Floors, config: ModelConfig) -> Figure:
    """Operations per byte against TFLOP/s, both logarithmic; a decode step's launches do one multiply-add a weight."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    memory, peak = found.ceilings.read_gb_s / 1e3, found.ceilings.bf16_tflop_s
    span = [0.3, peak / memory, 1e4]
    label = f"{memory:.2f} TB/s, {peak:.0f} TFLOP/s bf16"
    axes.plot(span, [min(peak, memory * x) for x in span], color="black", label=label)
    timed = [r for r in found.launches if r["floor_us"] > 0]
    reached = [r["floor_us"] * found.ceilings.read_gb_s / r["us"] / 1e3 for r in timed]
    axes.scatter([1.0] * len(timed), reached, marker="x", color="tab:blue", label="launches of a decode step")
    for tokens, t in found.prefill.items():
        flop, moved = prefill_work(config, tokens)
        axes.scatter([flop / moved], [flop / t.median / 1e9], marker="s", color="tab:orange")
        axes.annotate(f"prefill {tokens}", (flop / moved, flop / t.median / 1e9), fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.legend(fontsize=8)
    return figure


def prefill_work(c: ModelConfig, tokens: int) -> tuple[float, float]:
    """Operations of the products of a prompt, and bytes of the weights that it reads: every expert that is chosen."""
    d, h = c.hidden_size, c.kda_num_heads
    kda = d * h * (2 * c.kda_head_dim + 2 * c.kda_v_head_dim) + c.kda_v_head_dim * (2 * d + h * 2 * c.kda_head_dim)
    mla = d * (c.num_heads * (c.qk_head_dim + c.v_head_dim) + c.kv_lora_rank + c.qk_rope_head_dim)
    mla += c.kv_lora_rank * c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
    expert, flop, moved = 3 * d * c.moe_intermediate_size, 0.0, 0.0
    chosen = c.num_experts * (1 - (1 - c.experts_per_token / c.num_experts) ** tokens)
    for kind, sparse in zip(c.layer_kinds, c.moe_layers, strict=True):
        mixer = kda if kind is LayerKind.kda else mla
        shared = expert * c.num_shared_experts if sparse else 3 * d * c.intermediate_size
        flop += 2 * tokens * (mixer + shared + (expert * c.experts_per_token if sparse else 0))
        moved += BF16_BYTES * (mixer + shared + (expert * chosen if sparse else 0))
    head = d * c.vocab_size
    return flop + 2 * head, moved + BF16_BYTES * head
