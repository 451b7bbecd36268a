"""vLLM's entry points as plain torch on the CPU: the same arguments and layouts, our reference arithmetic.

What our bindings hand over (layouts, pools with a row that is never touched, buffers written in place) can then be
tested without the engine; that its kernels round as said is for the device.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.ops import kda, mla, moe, norm

LIBRARY = torch.library.Library("_C", "FRAGMENT")


def register() -> None:
    """The registered operations, once a process; those of an installed vLLM are left alone."""
    if hasattr(torch.ops._C, "rms_norm"):
        return
    LIBRARY.define("rms_norm(Tensor! out, Tensor x, Tensor weight, float eps) -> ()")
    LIBRARY.define("fused_add_rms_norm(Tensor! x, Tensor! residual, Tensor weight, float eps) -> ()")
    LIBRARY.define("silu_and_mul(Tensor! out, Tensor x) -> ()")
    LIBRARY.impl("rms_norm", _rms_norm, "CPU")
    LIBRARY.impl("fused_add_rms_norm", _fused_add, "CPU")
    LIBRARY.impl("silu_and_mul", _silu_and_mul, "CPU")


def _rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(norm.rms_norm(x.float(), weight.float(), eps))


def _fused_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    _rms_norm(x, residual, weight, eps)


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, -1)
    out.copy_(F.silu(gate.float()).to(x.dtype) * up)


def module(name: str) -> SimpleNamespace:
    """What stands for `vllm.NAME`."""
    return MODULES[name]


def _rms_norm_gated(x, gate, weight, bias, *, activation, eps):
    assert bias is None
    assert activation == "sigmoid"
    return x.copy_(norm.gated_rms_norm(x.float(), weight.float(), torch.sigmoid(gate.float()), eps=eps))


def _gate(raw, a_log, dt_bias):
    heads = a_log.numel()
    return kda.decay_gate(raw.float(), kda.decay_rate(a_log.view(heads, 1)), dt_bias.view(heads, -1))


def _fused_kda_gate(g, a_log, width, *, g_bias):
    return _gate(g.view(g.shape[0], a_log.numel(), width), a_log, g_bias)


def _sequences(cu_seqlens):
    return list(pairwise(cu_seqlens.tolist()))


def _chunk(*, q, k, v, raw_g, beta, A_log, g_bias, initial_state, cu_seqlens, **_):
    out, states = [], []
    g = _gate(raw_g, A_log, g_bias)
    for n, (a, b) in enumerate(_sequences(cu_seqlens)):
        qn, kn, *rest = (x[:, a:b].float() for x in (q, k, v, g, beta))
        qn, kn = kda.l2norm(qn) * q.shape[-1] ** -0.5, kda.l2norm(kn)
        o, s = kda.chunk(qn, kn, rest[0], rest[1], rest[2], initial_state[n : n + 1].transpose(2, 3), chunk_size=64)
        out.append(o)
        states.append(s.transpose(2, 3))
    return torch.cat(out, 1).to(q.dtype), torch.cat(states)


def _recurrent(*, q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, **_):
    """Row 0 of the pool is the engine's null block: it is neither read nor written."""
    assert 0 not in ssm_state_indices.tolist()
    assert g.shape[1] == len(ssm_state_indices) == len(_sequences(cu_seqlens))
    q, k, v, g, beta = (x.float().transpose(0, 1) for x in (q, k, v, g, beta))
    q, k = kda.l2norm(q) * q.shape[-1] ** -0.5, kda.l2norm(k)
    rows = ssm_state_indices.long()
    o, s = kda.recurrent(q, k, v, g, beta, initial_state[rows].transpose(2, 3))
    initial_state[rows] = s.transpose(2, 3)
    return o.transpose(0, 1).to(torch.bfloat16), initial_state


def _taps(window, weight):
    length = window.shape[1] - weight.shape[1] + 1
    terms = [window[:, j : length + j].float() * weight[:, j : j + 1] for j in range(weight.shape[1])]
    return F.silu(torch.stack(terms).sum(0))


def _conv_fn(x, weight, bias, *, conv_states, has_initial_state, cache_indices, query_start_loc, null_block_id, **_):
    assert null_block_id not in cache_indices.tolist()
    out, keep = torch.empty_like(x), weight.shape[1] - 1
    for n, (a, b) in enumerate(_sequences(query_start_loc)):
        before = conv_states[cache_indices[n]] * has_initial_state[n]
        window = torch.cat([before, x[:, a:b]], 1)
        out[:, a:b] = _taps(window, weight)
        conv_states[cache_indices[n]] = window[:, -keep:]
    return out


def _conv_update(x, state, weight, bias, *, conv_state_indices, null_block_id, **_):
    assert null_block_id not in conv_state_indices.tolist()
    for n, slot in enumerate(conv_state_indices.tolist()):
        window = torch.cat([state[slot], x[n].unsqueeze(1)], 1)
        state[slot] = window[:, 1:]
        x[n] = _taps(window, weight)[:, 0]
    return x


def _dense(q, k, v, first, scale):
    positions = torch.arange(first, first + q.shape[0]).unsqueeze(0)
    return mla.dense(q.float()[None], k.float()[None], v.float()[None], positions, scale=scale)[0].to(q.dtype)


def _latent(q, q_pe, pages, table, lens, bounds, scale):
    out, rank = torch.empty_like(q), q.shape[-1]
    for n, (a, b) in enumerate(bounds):
        keys = pages[table[n].long()].flatten(0, 1)[: lens[n]]
        k = keys.unsqueeze(1).expand(-1, q.shape[1], -1)
        out[a:b] = _dense(torch.cat([q[a:b], q_pe[a:b]], -1), k, k[..., :rank], int(lens[n]) - (b - a), scale)
    return out


def _varlen(*, q, k, v, cu_seqlens_q, softmax_scale, q_v=None, block_table=None, seqused_k=None, **_):
    bounds = _sequences(cu_seqlens_q)
    if q_v is not None:
        pages = torch.cat([v, k], -1).squeeze(2)
        return _latent(q_v, q, pages, block_table, seqused_k, bounds, softmax_scale)
    parts = [_dense(q[a:b], k[a:b], v[a:b], 0, softmax_scale) for a, b in bounds]
    return torch.cat(parts)


def _decode(q, keys, values, o, lse, table, lens, partial, splits, scale, page, *, is_mla):
    assert is_mla
    assert page == keys.shape[1]
    assert partial.shape[2] == splits
    rank = values.shape[-1]
    bounds = [(n, n + 1) for n in range(q.shape[0])]
    o.copy_(_latent(q[..., :rank], q[..., rank:], keys.squeeze(2), table, lens, bounds, scale))


def _grouped_topk(logits, groups, top_groups, k, renormalize, factor, bias, scoring):
    assert (groups, top_groups, scoring) == (1, 1, 1)
    scores = torch.sigmoid(logits.float())
    ids = moe.top_k_lowest_id(scores + bias.float(), k)
    return moe.weights_before(scores.gather(1, ids), factor, renormalize), ids.int()


def _fused_experts(x, w13, w2, weights, ids):
    out = torch.zeros(*ids.shape, x.shape[1])
    for n in range(x.shape[0]):
        for j, e in enumerate(ids[n].tolist()):
            act = torch.empty(1, w2.shape[2], dtype=x.dtype)
            _silu_and_mul(act, x[n : n + 1] @ w13[e].T)
            out[n, j] = (act.float() @ w2[e].float().T)[0] * weights[n, j]
    return out.to(x.dtype).float().sum(1).to(x.dtype)


MODULES = {
    "_custom_ops": SimpleNamespace(grouped_topk=_grouped_topk),
    "third_party.flash_linear_attention.ops.kda": SimpleNamespace(
        rms_norm_gated=_rms_norm_gated, chunk_kda_with_fused_gate=_chunk, fused_kda_gate=_fused_kda_gate,
        fused_recurrent_kda=_recurrent,
    ),
    "model_executor.layers.mamba.ops.causal_conv1d": SimpleNamespace(
        causal_conv1d_fn=_conv_fn, causal_conv1d_update=_conv_update
    ),
    "vllm_flash_attn": SimpleNamespace(flash_attn_varlen_func=_varlen, get_scheduler_metadata=lambda **_: None),
    "v1.attention.backends.mla.triton_mla": SimpleNamespace(
        _compute_num_kv_splits=lambda longest, units: 1, decode_attention_fwd=_decode,
        current_platform=SimpleNamespace(num_compute_units=lambda: 132),
    ),
    "model_executor.layers.fused_moe.fused_moe": SimpleNamespace(fused_experts=_fused_experts),
}  # fmt: skip
