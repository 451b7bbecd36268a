"""The launches of each kind of layer of a fused step, bound to weights, buffers and state."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from variants.binding import Binder
from variants.dtypes import DType
from variants.model_config import ModelConfig
from variants.ops import mla_triton, row_fused_triton, row_mix_triton, row_triton
from variants.ops.launch_triton import block, format_of
from variants.state import State

BF16, F32 = torch.bfloat16, torch.float32
AS_IS, NORMED = 0, 1  # as row_fused_triton names what a product reads
LOWEST = -(2**62)
# programs of a launch that share a multiprocessor; "router": one for each of its blocks
SIDE_BY_SIDE = {"project": 4, "router": 64, "up": 2, "down": 2}


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, operands and constants: called, it is launched."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    operands: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.operands, **self.constants)


@dataclass(frozen=True)
class Buffers:
    """What launches hand to each other, made once: bf16 between operations, float32 inside an attention's runs.

    moved: what a step changes that is not the state.
    """

    config: ModelConfig
    device: str
    max_len: int
    stream: Tensor
    logits: Tensor
    token: Tensor
    position: Tensor
    best: Tensor
    taken: Tensor
    count: Tensor
    made: dict[str, Tensor]
    processors: int

    @classmethod
    def of(cls, config: ModelConfig, state: State, device: str, *, taken: int) -> "Buffers":
        def whole(n: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(n, dtype=dtype, device=device)

        return cls(
            config, device, state.max_len, stream=whole(config.hidden_size, BF16),
            logits=whole(config.vocab_size, BF16), token=whole(1), position=whole(1, torch.int32),
            best=whole(1) + LOWEST, taken=whole(taken), count=whole(1), made={},
            processors=processors(device),
        )  # fmt: skip

    @property
    def moved(self) -> tuple[Tensor, ...]:
        return self.stream, self.token, self.position, self.best, self.taken, self.count

    def named(self, name: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """A buffer that layers of one kind share; larger where a later one needs it."""
        n, found = prod(shape), self.made.get(name)
        if found is None or found.numel() < n:
            found = self.made[name] = torch.zeros(n, dtype=dtype, device=self.device)
        return found

    @property
    def overlap(self) -> dict[str, Any]:
        """On a GPU a launch may begin beside the end of the one before it, which it waits for inside."""
        return {"PDL": True, "launch_pdl": True} if self.device != "cpu" else {"PDL": False}

    def programs(self, kind: str, *blocks: int) -> tuple[int, ...]:
        """How many programs share each of these numbers of blocks, evenly: no more than run side by side."""
        rounds = cdiv(sum(blocks), self.processors * SIDE_BY_SIDE[kind])
        return tuple(cdiv(n, rounds) for n in blocks)

    def most_programs(self, kind: str, blocks: int) -> tuple[int]:
        """As many as run side by side, though some then take a block more than others; for so many blocks."""
        return (min(blocks, self.processors * SIDE_BY_SIDE[kind]),)


def processors(device: str) -> int:
    """Multiprocessors of a CUDA device; one of any other."""
    kind = torch.device(device).type
    return torch.cuda.get_device_properties(device).multi_processor_count if kind == "cuda" else 1


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def starting(b: Binder, buf: Buffers) -> list[Launch]:
    width = b.config.hidden_size
    table = b.weights.get("model.embed_tokens.weight", DType.bf16)
    constants = {"D": width, "BD": 256, "num_warps": row_triton.WARPS, **buf.overlap}
    operands = (buf.token, table, buf.stream)
    return [Launch("embed", row_fused_triton.embed_kernel, (cdiv(width, 256),), operands, constants)]


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of a step: its operand and how it is made, its weight, and where the result goes."""

    x: Tensor
    weight: Tensor
    read: int = AS_IS
    norm: Tensor | None = None
    eps: float = 0.0
    out: Tensor | None = None
    residual: bool = False
    top: bool = False

    def launch(self, name: str, buf: Buffers) -> Launch:
        (n, k), rows = self.weight.shape, row_triton.rows_of(self.weight.shape[1])
        none = self.x
        operands = (
            self.x, none if self.norm is None else self.norm, self.weight, none if self.out is None else self.out,
            buf.stream, buf.best, n, self.eps,
        )  # fmt: skip
        constants = {
            **row_triton.split(k), "BN": rows, "READ": self.read,
            "RESIDUAL": self.residual, "TOP": self.top, "num_warps": row_triton.WARPS, **buf.overlap,
        }  # fmt: skip
        return Launch(
            name, row_fused_triton.project_kernel, buf.programs("project", cdiv(n, rows)), operands, constants
        )


def packed(b: Binder, *names: str) -> Tensor:
    """Weights of one operand, one below the other: [sum N, K] in bf16."""
    full = tuple(f"model.layers.{b.layer}.{name}.weight" for name in names)
    return b.weights.cat(full, DType.bf16, operand=DType.bf16)


def normed(b: Binder, name: str, site: str) -> dict[str, Any]:
    """What makes a product read the norm of its operand."""
    weight = b.weights.get(f"model.layers.{b.layer}.{name}.weight", b.rule(site).accum)
    return {"read": NORMED, "norm": weight, "eps": b.config.rms_norm_eps}


def kda(b: Binder, buf: Buffers, state: State, slot: int) -> list[Launch]:
    """Projections; gates and convolution; delta rule and gated norm; output projection into the stream."""
    c, name = b.config, "self_attn"
    heads, k, v = c.kda_num_heads, c.kda_head_dim, c.kda_v_head_dim
    channels, wide = heads * (2 * k + v), heads * v
    weight = packed(b, *(f"{name}.{x}_proj" for x in ("q", "k", "v", "f_a", "g_a", "b")))
    proj, mixed = buf.named("proj", len(weight)), buf.named("mixed", channels)
    first = Product(x=buf.stream, weight=weight, out=proj, **normed(b, "input_layernorm", "input_norm"))
    f, g = buf.named("f", heads * k), buf.named("g", wide)
    o = buf.named("o", wide)
    last = Product(x=o, weight=packed(b, f"{name}.o_proj"), residual=True)
    gates = _gates(b, buf, (proj, f, g, mixed, state.conv[b.layer][slot]))
    core = _core(b, buf, (mixed, f, proj[channels + 2 * v :], state.recurrent[b.layer][slot], o, g))
    return [first.launch("kda_project", buf), gates, core, last.launch("kda_out", buf)]


def _gates(b: Binder, buf: Buffers, given: tuple[Tensor, ...]) -> Launch:
    c, (proj, f, g, mixed, carried) = b.config, given
    channels = c.kda_num_heads * (2 * c.kda_head_dim + c.kda_v_head_dim)
    f_b, g_b = packed(b, "self_attn.f_b_proj"), packed(b, "self_attn.g_b_proj")
    convs = tuple(f"model.layers.{b.layer}.self_attn.{x}_conv1d.weight" for x in "qkv")
    taps = b.weights.cat(convs, b.rule("conv_sum").accum).squeeze(1)
    rows = row_triton.rows_of(c.kda_v_head_dim)
    programs = cdiv(len(f_b), rows) + cdiv(len(g_b), rows) + cdiv(channels, row_triton.CHANNELS)
    constants = {
        **row_triton.split(c.kda_v_head_dim), "F_AT": channels, "G_AT": channels + c.kda_v_head_dim, "BN": rows,
        "C": channels, "W": c.conv_size, "BC": row_triton.CHANNELS, "num_warps": row_triton.WARPS, **buf.overlap,
    }  # fmt: skip
    operands = (proj, f_b, g_b, f, g, taps, carried, mixed, len(f_b), len(g_b))
    return Launch("kda_gates", row_fused_triton.gates_conv_kernel, (programs,), operands, constants)


def _core(b: Binder, buf: Buffers, given: tuple[Tensor, ...]) -> Launch:
    c, (mixed, f, beta, carried, o, g) = b.config, given
    heads, k, v = c.kda_num_heads, c.kda_head_dim, c.kda_v_head_dim
    a_log = b.parameter("self_attn.A_log", "decay_gate").reshape(-1).contiguous()
    dt_bias = b.parameter("self_attn.dt_bias", "decay_gate").reshape(-1).contiguous()
    norm = b.parameter("self_attn.o_norm.weight", "o_norm")
    operands = (
        mixed, mixed[heads * k :], mixed[2 * heads * k :], f, beta, a_log, dt_bias, carried, carried, o, g, norm,
        c.kda_scale, c.rms_norm_eps,
    )  # fmt: skip
    constants = {
        "K": k, "V": v, "BK": block(k), "BV": block(v), "POOL": False, "TAIL": True, "OUT": format_of(BF16),
        "num_warps": row_triton.DELTA_WARPS, **buf.overlap,
    }  # fmt: skip
    return Launch("kda_core", row_mix_triton.delta_kernel, (heads,), operands, constants)


def mla(b: Binder, buf: Buffers, state: State, slot: int) -> list[Launch]:
    """Projections; the latent; attention over it in runs, merged; out of the latent; output projection."""
    c, heads, rank = b.config, b.config.num_heads, b.config.kv_lora_rank
    width = heads * c.qk_head_dim
    weight = packed(b, "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa")
    proj, q_latent = buf.named("proj", len(weight)), buf.named("q_latent", heads * rank)
    first = Product(x=buf.stream, weight=weight, out=proj, **normed(b, "input_layernorm", "input_norm"))
    both = b.parameter("self_attn.kv_b_proj.weight", "q_latent").view(heads, -1, rank)
    w_k, w_v = both.split([c.qk_nope_head_dim, c.v_head_dim], 1)
    cache = state.latent[b.layer]
    o = buf.named("mla_o", heads * c.v_head_dim)
    o_latent = buf.named("o_latent", heads * rank)
    into = _latent(b, buf, (proj, w_k, q_latent, proj[width:], cache[slot]))
    runs = _runs(b, buf, (q_latent, proj, cache, o_latent), slot)
    rows = row_triton.rows_of(rank)
    out = Launch(
        "mla_expand", row_triton.gemv_kernel, (cdiv(c.v_head_dim, rows), heads),
        (o_latent, w_v, o, c.v_head_dim, rank, w_v.stride(0), c.v_head_dim),
        {**row_triton.split(rank), "BN": rows, "OUT": format_of(BF16), "num_warps": row_triton.WARPS, **buf.overlap},
    )  # fmt: skip
    last = Product(x=o, weight=packed(b, "self_attn.o_proj"), residual=True)
    return [first.launch("mla_project", buf), into, *runs, out, last.launch("mla_out", buf)]


def _latent(b: Binder, buf: Buffers, given: tuple[Tensor, ...]) -> Launch:
    c, (q, w_k, q_latent, kv, cache) = b.config, given
    norm = b.parameter("self_attn.kv_a_layernorm.weight", "kv_a_norm")
    eps = b.recipe.semantics.kv_eps or c.rms_norm_eps
    parts = row_triton.split(c.kv_lora_rank)
    constants = {
        "HEADS": c.num_heads, "QK": c.qk_head_dim, "N": c.qk_nope_head_dim, "BN": block(c.qk_nope_head_dim),
        "R": c.kv_lora_rank, "R1": parts["K1"], "R2": parts["K2"], "P": c.qk_rope_head_dim,
        "BP": block(c.qk_rope_head_dim), "BM": row_triton.LATENT_COLUMNS, "num_warps": row_triton.WARPS, **buf.overlap,
    }  # fmt: skip
    programs = c.num_heads * cdiv(c.kv_lora_rank, row_triton.LATENT_COLUMNS) + 1
    operands = (q, w_k, q_latent, kv, norm, cache, buf.position, eps, w_k.stride(0))
    return Launch("mla_latent", row_fused_triton.latent_kernel, (programs,), operands, constants)


def _runs(b: Binder, buf: Buffers, given: tuple[Tensor, ...], slot: int) -> list[Launch]:
    """The two launches of `mla_triton.absorbed`, over the slot's page; the query's other part lies beside its first."""
    c, (q_latent, q, cache, o_latent) = b.config, given
    sizes, probs = dict(b.rule("mla_core").options), b.rule("mla_probs").output
    heads, rank, splits = c.num_heads, c.kv_lora_rank, sizes["kv_splits"]
    page = torch.tensor([[slot]], dtype=torch.int32, device=buf.device)
    runs = buf.named("runs", heads * splits * rank, dtype=F32)
    lse = buf.named("lse", heads * splits, dtype=F32)
    shared = {"R": rank, "SPLITS": splits, "BASE2": False}
    constants = {
        **shared, "BR": block(rank), "PAGE": cache.shape[1], "H": heads, "P": c.qk_rope_head_dim,
        "BH": mla_triton.HEADS, "BP": block(c.qk_rope_head_dim), "BN": sizes["tile_k"], "WHOLE": True,
        "QP": c.qk_head_dim,
        "PROBS": format_of(F32 if probs is None else probs.torch), "PRECISION": "ieee",
        **mla_triton.RUN_LAUNCH, **buf.overlap,
    }  # fmt: skip
    operands = (q_latent, q[c.qk_nope_head_dim :], cache, page, buf.position, runs, lse, 1, 1, c.mla_scale)
    grid = (1, cdiv(heads, mla_triton.HEADS), splits)
    merge = {**shared, "BR": mla_triton.MERGED, "BS": block(splits), "OUT": format_of(BF16), "num_warps": 4,
             **buf.overlap}  # fmt: skip
    return [
        Launch("mla_runs", mla_triton.run_kernel, grid, operands, constants),
        Launch(
            "mla_merge", mla_triton.merge_kernel, (heads, cdiv(rank, mla_triton.MERGED)), (runs, lse, o_latent), merge
        ),
    ]


def dense(b: Binder, buf: Buffers) -> list[Launch]:
    """Gate and up; their activation; down into the stream."""
    weight = packed(b, "mlp.gate_proj", "mlp.up_proj")
    raw = buf.named("dense", len(weight))
    norm = normed(b, "post_attention_layernorm", "post_attn_norm")
    first = Product(x=buf.stream, weight=weight, out=raw, **norm)
    inner, act = b.config.intermediate_size, buf.named("dense_act", b.config.intermediate_size)
    constants = {"B": row_triton.CHANNELS, "num_warps": row_triton.WARPS, **buf.overlap}
    grid = (cdiv(inner, row_triton.CHANNELS),)
    activate = Launch("dense_act", row_fused_triton.act_kernel, grid, (raw, act, inner), constants)
    last = Product(x=act, weight=packed(b, "mlp.down_proj"), residual=True)
    return [first.launch("dense_up", buf), activate, last.launch("dense_down", buf)]


def head(b: Binder, buf: Buffers) -> list[Launch]:
    """The last norm, the head with the choice of the largest, and the bookkeeping of the step."""
    c, x = b.config, buf.named("x", b.config.hidden_size)
    norm = b.weights.get("model.norm.weight", b.rule("final_norm").accum)
    weight = b.weights.get("lm_head.weight", DType.bf16, operand=DType.bf16)
    constants = {
        **row_triton.split(c.hidden_size), "OUT": format_of(BF16), "num_warps": row_triton.WARPS, **buf.overlap,
    }  # fmt: skip
    operands = (buf.stream, norm, x, c.rms_norm_eps)
    first = Launch("final_norm", row_triton.norm_kernel, (1,), operands, constants)
    last = (buf.best, buf.token, buf.position, buf.taken, buf.count, buf.taken.numel())
    product = Product(x=x, weight=weight, out=buf.logits, top=True)
    finish = Launch("finish", row_fused_triton.finish_kernel, (1,), last, {"num_warps": 1, **buf.overlap})
    return [first, product.launch("lm_head", buf), finish]
