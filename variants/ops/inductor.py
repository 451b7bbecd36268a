"""Implementation `inductor`: our own lines of the elementwise operations, each compiled by torch.compile (Inductor).

The compiler joins the lines into one kernel and, left to itself, keeps float32 from its first line to its last: a store
to bfloat16 on the way is left out, which is why compiled and eager code differ. Here every store that is asked for is
made (`emulate_precision_casts`); a compiler left to itself is the same operation with no store on the way.

One kernel serves any number of rows: only its first dimension is left open. The first call of each compiles, which
takes seconds, and torch keeps what was compiled on the disk for later runs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from variants.errors import DeviceError
from variants.ops import conv, kda, moe, norm
from variants.ops.calls import listening, tell

Store = torch.dtype | None  # None: the value is kept as it was computed
Stores = tuple[Store, Store, Store, Store]
Rows = Sequence[Tensor]  # each [N, ...], N left open
# Every cast is made. One thread: these operations are small, and a second pool of threads beside torch's would spin.
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True, "cpp.threads": 1}
_waiting: list[Callable[[], None]] = []


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, between: Store, out: Store, value: Tensor | None = None
) -> Tensor:
    """As `norm.rms_norm` over [..., D] in the weight's dtype, variance of x, value or x normalised; leaves as `out`."""
    rows = tuple(y.flatten(0, -2) for y in (x, value) if y is not None)
    return _call(_rms_norm, rows, (weight,), (eps, between, out)).view(x.shape)


def _rms_norm(rows: Rows, fixed: Rows, eps: float, between: Store, out: Store) -> Tensor:
    x, value, weight = rows[0], rows[-1], fixed[0]
    rstd = torch.rsqrt(x.to(weight.dtype).square().mean(-1, keepdim=True) + eps)
    return _leaving(weight * _stored(value.to(weight.dtype) * rstd, between), out)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, *, out: Store) -> Tensor:
    """As `norm.gated_rms_norm` over [..., H, V], of the gate before its sigmoid; it leaves as `out`."""
    return _call(_gated_rms_norm, (o.flatten(0, -3), gate.flatten(0, -3)), (weight,), (eps, out)).view(o.shape)


def _gated_rms_norm(rows: Rows, fixed: Rows, eps: float, out: Store) -> Tensor:
    (weight,) = fixed
    o, gate = (x.to(weight.dtype) for x in rows)
    return _leaving(norm.gated_rms_norm(o, weight, torch.sigmoid(gate), eps=eps), out)


def silu_and_mul(gate: Tensor, up: Tensor, *, accum: torch.dtype, between: Store, out: Store) -> Tensor:
    """silu(gate) * up over [..., I] in `accum`; silu is stored as `between`, the product leaves as `out`."""
    return _call(_silu_and_mul, (gate.flatten(0, -2), up.flatten(0, -2)), (), (accum, between, out)).view(gate.shape)


def _silu_and_mul(rows: Rows, _: Rows, accum: torch.dtype, between: Store, out: Store) -> Tensor:
    gate, up = (x.to(accum) for x in rows)
    return _leaving(_stored(torch.nn.functional.silu(gate), between) * up, out)


def short_conv(window: Tensor, weight: Tensor, *, between: Store, out: Store) -> Tensor:
    """SiLU of `conv.taps`: window [B, T + W - 1, C], weight [C, W] -> [B, T, C]; the sum is stored as `between`."""
    length = window.shape[1] - weight.shape[1] + 1
    rows = tuple(window[:, j : j + length].flatten(0, 1) for j in range(weight.shape[1]))
    return _call(_short_conv, rows, (weight,), (between, out)).view(-1, length, window.shape[-1])


def _short_conv(rows: Rows, fixed: Rows, between: Store, out: Store) -> Tensor:
    (weight,) = fixed
    total = conv.taps(torch.stack([x.to(weight.dtype) for x in rows], 1), weight).squeeze(1)
    return _leaving(torch.nn.functional.silu(_stored(total, between)), out)


def route(
    logits: Tensor, bias: Tensor, *, k: int, factor: float, renormalize: bool, weigh: str, between: Store
) -> tuple[Tensor, Tensor]:
    """Choice and weights as `moe`: logits [N, E] -> ids and weights [N, k]; scores are stored as `between`."""
    return _call(_route, (logits,), (bias,), (k, factor, renormalize, weigh, between))


def _route(
    rows: Rows, fixed: Rows, k: int, factor: float, renormalize: bool, weigh: str, between: Store
) -> tuple[Tensor, Tensor]:
    (logits,), (bias,) = rows, fixed
    scores = _stored(torch.sigmoid(logits.to(bias.dtype)), between)
    ids = moe.top_k_lowest_id(scores + bias, k)
    return ids, moe.WEIGHTS[weigh](scores.gather(-1, ids), factor, renormalize)


def delta_step(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gate: tuple[Tensor, Tensor],
    state: Tensor,
    *,
    scale: float,
    eps: float,
    stores: Stores,
) -> tuple[Tensor, Tensor]:
    """One token of `kda.recurrent` in each of N rows, L2 norms and gates included, in the dtype of the state.

    operands: q, k, v [N, H, .], the gate's projection [N, H, K] and beta [N, H] before its sigmoid. gate: rate [H, 1]
    and dt_bias [H, K]. state [N, H, K, V]. stores: of normalised q and k, of the log-decay, of beta. Returns
    o [N, H, V] and the new state.
    """
    return _call(_delta_step, (*operands, state), gate, (scale, eps, stores))


def _delta_step(rows: Rows, fixed: Rows, scale: float, eps: float, stores: Stores) -> tuple[Tensor, Tensor]:
    state = rows[-1]
    q, k, v, f, beta = (x.to(state.dtype) for x in rows[:-1])
    q, k = _stored(kda.l2norm(q, eps=eps), stores[0]), _stored(kda.l2norm(k, eps=eps), stores[1])
    g = _stored(kda.decay_gate(f, *fixed), stores[2])
    beta = _stored(torch.sigmoid(beta), stores[3])
    state = state * g.exp().unsqueeze(-1)
    error = (v - (state * k.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * error.unsqueeze(-2)
    return (state * (q * scale).unsqueeze(-1)).sum(-2), state


def _stored(x: Tensor, store: Store) -> Tensor:
    """x through a format, in the dtype that goes on being computed in."""
    return x if store is None or store == x.dtype else x.to(store).to(x.dtype)


def _leaving(x: Tensor, store: Store) -> Tensor:
    return x if store is None else x.to(store)


def compilations(compiling: Callable[[], None]) -> AbstractContextManager[None]:
    """Call compiling() before each operation that is compiled, or loaded from the disk, while the block runs."""
    return listening(_waiting, compiling)


def _call(function: FunctionType, rows: Rows, fixed: Rows, settings: tuple[object, ...]) -> Any:
    """function(rows, fixed, *settings), compiled once for these sizes and settings; told to whoever listens.

    Raises DeviceError where it cannot be compiled.
    """
    rows, fixed = tuple(map(_plain, rows)), tuple(map(_plain, fixed))
    name = function.__name__.removeprefix("_")
    tell(name, [*rows, *fixed], repr(settings))
    key = (*((x.shape[1:], x.dtype) for x in rows), *((x.shape, x.dtype) for x in fixed), settings, rows[0].device)
    with _disable_current_modes():
        return _compiled(function, key)(rows, fixed, settings)


def _plain(x: Tensor) -> Tensor:
    """x with the strides that its shape gives and nothing before it, so that one kernel fits however it was cut."""
    plain = x.contiguous()
    strides = torch.empty(plain.shape, device="meta").stride()  # of a dimension of one, any number counts as contiguous
    own = plain.storage_offset() == 0 and plain.stride() == strides
    return plain if own else plain.clone(memory_format=torch.contiguous_format)


@cache
def _compiled(function: FunctionType, key: tuple[object, ...]) -> Callable[[Rows, Rows, tuple[object, ...]], Any]:
    """One function for one key: torch keeps compiled code by code object and gives up at the eighth of one."""
    from torch._dynamo.decorators import mark_unbacked
    from torch._dynamo.exc import TorchDynamoException

    alone = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    run = torch.compile(alone, fullgraph=True, dynamic=False, options=OPTIONS)
    ready = False

    def called(rows: Rows, fixed: Rows, settings: tuple[object, ...]) -> Any:
        nonlocal ready
        for x in rows:
            mark_unbacked(x, 0)  # open, and no special code for a single row
        if ready:
            return run(rows, fixed, *settings)
        for compiling in _waiting:
            compiling()
        try:
            result = run(rows, fixed, *settings)
        except TorchDynamoException as error:
            why = " ".join(str(error).split("\n\n")[0].split())
            raise DeviceError(f"impl inductor: torch.compile failed on {function.__name__[1:]}: {why}") from error
        ready = True
        return result

    return called
