"""Which function of `variants.ops` each declared algorithm is, for the observer to hold against what it saw.

Written out, and not read from the tables that the model binds from: a table that was changed under a name must not
vouch for itself.
"""

from variants.recipe import Rule

FUNCTIONS = {
    "gemm": "linear.gemm",
    "gemm_rows": "linear.gemm_rows",
    "gemm_columns": "linear.gemm_columns",
    "taps": "conv.taps",
    "taps_fused": "conv.taps_fused",
    "conv1d": "conv.conv1d",
    "l2norm": "kda.l2norm",
    "l2norm_fused": "kda.l2norm_fused",
    "softplus": "kda.decay_gate",
    "softplus_fused": "kda.decay_gate_fused",
    "scale_before": "moe.weights_before",
    "scale_after": "moe.weights_after",
    "sum_loop": "moe.sum_loop",
    "sum_grouped": "moe.sum_grouped",
}
# Where one name means several functions.
SITE_FUNCTIONS = {
    "kda_core": {
        "island_f64": "kda.recurrent",
        "island_f32": "kda.recurrent",
        "recurrent": "kda.recurrent",
        "recurrent_gemv": "kda.recurrent_gemv",
        "chunk": "kda.chunk",
        "chunk_rows": "kda.chunk_rows",
    },
    "mla_core": {
        "island_f64": "mla.dense",
        "dense_f32": "mla.dense",
        "dense_bf16": "mla.dense",
        "sdpa": "mla.sdpa",
        "online_f32": "mla.tiles",
        "flash": "mla.tiles",
        "island_f64_rows": "mla.rows",
        "dense_f32_rows": "mla.rows",
        "online_f32_rows": "mla.rows",
        "flash_rows": "mla.rows",
        "absorbed": "mla.per_head",  # what runs last; attention itself ends at o_latent
        "absorbed_rows": "mla.per_head_rows",
    },
    "q_latent": {"bmm": "mla.per_head", "bmm_rows": "mla.per_head_rows"},
    "o_latent": {"bmm": "mla.absorbed", "bmm_rows": "mla.absorbed_rows"},
    "o_norm": {
        "sigmoid": "norm.gated_rms_norm",
        "sigmoid_lanes": "norm.gated_rms_norm",
        "sigmoid_fused": "norm.gated_rms_norm_fused",
    },
}

# What each kernel implementation is at a site, or at every site of an algorithm; a swallowed site has none of its own.
KERNELS = {
    "triton": {
        "gemm": "linear_triton.gemm",
        "rms_norm": "norm_triton.rms_norm",
        "o_norm": "norm_triton.gated_rms_norm",
        "short_conv": "conv_triton.short_conv",
        "kda_core recurrent": "kda_triton.recurrent",
        "kda_core chunk": "kda_chunk_triton.chunk",
        "mla_core": "mla_triton.tiles",
        "o_latent": "mla_triton.absorbed",
        "routed": "moe_triton.experts",
    },
    "row": {
        "gemm": "row.linear",
        "rms_norm": "row_triton.rms_norm",
        "o_norm": "row_triton.gated_rms_norm",
        "mlp_act": "row_triton.silu_and_mul",
        "shared_act": "row_triton.silu_and_mul",
        "short_conv": "row.short_conv",
        "kda_core recurrent": "row.delta_step",
        "kda_core chunk": "kda_chunk_triton.chunk",
        "mla_core flash": "mla_triton.tiles",
        "mla_core absorbed": "row.expand",  # what runs last; attention itself ends at o_latent
        "q_latent": "row.absorb",
        "o_latent": "mla_triton.absorbed",
        "router_weights": "row_mix_triton.route",
        "routed": "row.experts",
    },
    "native": {
        "gemm": "native.linear",
        "rms_norm": "native.rms_norm",
        "o_norm": "native.gated_rms_norm",
        "mlp_act": "native.silu_and_mul",
        "shared_act": "native.silu_and_mul",
        "short_conv": "native.short_conv",
        "kda_core recurrent": "native.delta_rule",
        "mla_core": "native.attention",
        "router_weights": "native.route",
        "routed": "native.experts",
    },
    "inductor": {
        "rms_norm": "inductor.rms_norm",
        "o_norm": "inductor.gated_rms_norm",
        "mlp_act": "inductor.silu_and_mul",
        "shared_act": "inductor.silu_and_mul",
        "short_conv": "inductor.short_conv",
        "kda_core recurrent": "inductor.delta_step",
        "router_weights": "inductor.route",
    },
    "fla": {
        "rms_norm": "fla_kernels.rms_norm",
        "o_norm": "fla_kernels.gated_rms_norm",
        "short_conv": "fla_kernels.short_conv",
        "kda_core recurrent": "fla_kernels.recurrent",
        "kda_core chunk": "fla_kernels.chunk",
    },
    "vllm": {
        "gemm": "linear.gemm_flat",
        "rms_norm": "vllm_norm.rms_norm",
        "o_norm": "vllm_norm.gated_rms_norm",
        "mlp_act": "vllm_norm.silu_and_mul",
        "shared_act": "vllm_norm.silu_and_mul",
        "short_conv": "vllm_kda.short_conv",
        "kda_core recurrent": "vllm_kda.recurrent",
        "kda_core chunk": "vllm_kda.chunk",
        "mla_core flash": "vllm_mla.flash",
        "mla_core absorbed": "vllm_mla.expand",  # what runs last; attention itself ends at o_latent
        "q_latent": "vllm_mla.absorb",
        "o_latent": "vllm_mla.absorbed",
        "router_weights": "vllm_moe.route",
        "routed": "vllm_moe.experts",
    },
}

# Sites whose value is computed together with that of the site before them, at whose place it is seen.
JOINED = ("k_l2norm",)
JOINED_UP = ("mlp_up", "shared_up")


def expected_function(site: str, rule: Rule) -> str:
    """The function of `variants.ops` that a rule's algorithm is at a site, "" where none of ours is."""
    if rule.impl != "torch":
        algorithm = "rms_norm" if rule.algorithm.startswith("rms_norm") else rule.algorithm
        table = {} if rule.inside else KERNELS[rule.impl]
        return next((table[key] for key in (site, f"{site} {rule.algorithm}", algorithm) if key in table), "")
    if rule.algorithm.startswith("rms_norm"):
        return "norm.rms_norm_fused" if rule.algorithm.startswith("rms_norm_fused") else "norm.rms_norm"
    return SITE_FUNCTIONS.get(site, FUNCTIONS).get(rule.algorithm, "")
