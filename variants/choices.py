"""The choices that an axis of a variant has, each an Enum whose values are the words of a configuration."""

from enum import Enum


class Stream(Enum):
    """The residual stream. `bf16`: the buffers are bf16. `bf16_in_place`: float32 buffers rounded at every store."""

    f64 = "f64"
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    bf16_in_place = "bf16_in_place"


class Store(Enum):
    """What is done to a value where it is stored: kept as it was computed, or rounded (buffers of that dtype)."""

    keep = "keep"
    f64 = "f64"
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"


class NormVariance(Enum):
    """Which residual sum RMSNorm sees: before the store rounds it, after, or before for the variance alone."""

    pre_store = "pre_store"
    stored = "stored"
    mixed = "mixed"


class NormRounding(Enum):
    """RMSNorm output rounded once at the end, or also before the weight is applied."""

    once = "once"
    twice = "twice"


class KvNormEps(Enum):
    """eps of kv_a_layernorm: the config's rms_norm_eps, or the 1e-6 that the transformers library fixes."""

    config = "config"
    eps_1e6 = "eps_1e6"


class Gemm(Enum):
    """Operands and output of every linear. `bf16_f32out` sums in float32 and keeps it; `bf16` is the library's own."""

    f64 = "f64"
    f32 = "f32"
    f16 = "f16"
    bf16_f32out = "bf16_f32out"
    bf16 = "bf16"


class L2NormEps(Enum):
    """eps under the root of the L2 norm of q and k: 1e-6, or the config's rms_norm_eps as llama.cpp has it."""

    eps_1e6 = "eps_1e6"
    config = "config"


class KdaCore(Enum):
    """The delta rule: on the host in float64 or float32 (islands), on the device step by step, or in chunks.

    `recurrent` sums over keys elementwise; `recurrent_gemv` writes the same sums as matrix-vector products.
    """

    island_f64 = "island_f64"
    island_f32 = "island_f32"
    recurrent = "recurrent"
    recurrent_gemv = "recurrent_gemv"
    chunk = "chunk"


class MlaCore(Enum):
    """Softmax attention: host float64 island; dense; one key at a time; tiles of keys; over the latent (absorbed).

    `sdpa` is the library's own fused attention, in float32.
    """

    island_f64 = "island_f64"
    dense_f32 = "dense_f32"
    dense_bf16 = "dense_bf16"
    online_f32 = "online_f32"
    flash = "flash"
    absorbed = "absorbed"
    sdpa = "sdpa"


class ChunkForm(Enum):
    """How the chunked core rounds inside: nothing but what `override` names, or as vLLM's or fla's kernels do.

    The engines' forms round every site inside a chunk to bf16, take some products at TF32 and place the query's scale
    their own way. torch has vLLM's form, in products whose operands are cut to TF32; fla's is that of kernels alone.
    """

    plain = "plain"
    vllm = "vllm"
    fla = "fla"


class KvCache(Enum):
    """What is carried of MLA: the latent, expanded again at every step, or keys and values expanded once."""

    latent = "latent"
    expanded = "expanded"


class Router(Enum):
    """Router logits: float64, float32, bf16 operands with float32 logits, or bf16 operands and logits."""

    f64 = "f64"
    f32 = "f32"
    bf16_f32out = "bf16_f32out"
    bf16 = "bf16"


class RouterScale(Enum):
    """The routed scaling factor is applied before the weights are normalised (vLLM) or after (transformers)."""

    before = "before"
    after = "after"


class Experts(Enum):
    """Experts one after the other, or one grouped product over tokens sorted by expert."""

    loop = "loop"
    grouped = "grouped"


class Order(Enum):
    """Rounded once at the end of an elementwise chain, or after each of its steps."""

    once = "once"
    stepwise = "stepwise"


class TileOrder(Enum):
    """Which end of the keys an online softmax begins at: the first token's tile, or the last one's."""

    forward = "forward"
    backward = "backward"


class Param(Enum):
    """A parameter used as the checkpoint stores it, or rounded to bf16 when it is loaded."""

    as_stored = "as_stored"
    bf16 = "bf16"


class Impl(Enum):
    """Who computes an operation: torch, our Triton kernels, fla's, or vLLM's.

    `inductor`: torch's lines of it under torch.compile, every store that the recipe names being made.
    `row`: our decode kernels for one token of one sequence, for more the library's products and our tiled kernels.
    `native`: our float32 kernels on the CPU, whose bits follow neither rows nor threads nor instruction set.
    """

    torch = "torch"
    triton = "triton"
    row = "row"
    fla = "fla"
    vllm = "vllm"
    native = "native"
    inductor = "inductor"


class Status(Enum):
    """What is known of a named variant; `measured_negative`: it scored under what it changes, in the campaign and here.

    No arithmetic: it stays a variant like any other.
    """

    open = "open"
    measured_negative = "measured_negative"


class Execution(Enum):
    """The whole prefix again at every step, or state carried from step to step: in slots, or in slots and pages."""

    recompute = "recompute"
    incremental = "incremental"
    paged = "paged"


class Graph(Enum):
    """Launches of a decode step one by one, or all of them replayed as one CUDA graph."""

    off = "off"
    cuda = "cuda"


class Preempt(Enum):
    """What a sequence that has to give its pages up does later: it runs again, or comes back from the host."""

    recompute = "recompute"
    offload = "offload"
