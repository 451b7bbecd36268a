"""The delta rule against a definition in plain loops over float64, and what its faults look like."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tiny import relative
from torch import Tensor

from variants.dtypes import DType, round_to, ulp
from variants.ops import kda
from variants.ops.conv import taps

F64 = torch.float64


class Inputs(NamedTuple):
    """q, k [B, T, H, K]; v [B, T, H, V]; g [B, T, H, K]; beta [B, T, H]; state [B, H, K, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    def cut(self, start: int, stop: int, state: Tensor) -> "Inputs":
        return Inputs._make([*(x[:, start:stop] for x in self[:5]), state])

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(x.to(dtype) for x in self))

    def masked(self, pad: Tensor, names: str) -> "Inputs":
        """Zero where `pad` [T] in each of the named inputs."""
        keep = (~pad).to(F64).view(1, -1, 1)
        fields = {n: getattr(self, n) * (keep if n == "beta" else keep.unsqueeze(-1)) for n in names.split()}
        return self._replace(**fields)


Out = tuple[Tensor, Tensor]
Core = Callable[[Inputs], Out]


def drawn(b: int, t: int, h: int, k: int, v: int, *, decay: float = 0.5, fresh: bool = False) -> Inputs:
    """Normalised keys, log-decays between 0 and -decay, beta between 0 and 1, a state of its own unless fresh."""
    random = torch.Generator().manual_seed(b + 10 * t + 100 * h + 1000 * k + v)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=F64)

    def unit(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, dtype=F64)

    state = torch.zeros(b, h, k, v, dtype=F64) if fresh else normal(b, h, k, v)
    q, keys = kda.l2norm(normal(b, t, h, k)) * k**-0.5, kda.l2norm(normal(b, t, h, k))
    return Inputs(q, keys, normal(b, t, h, v), -decay * unit(b, t, h, k), unit(b, t, h), state)


def defined(x: Inputs) -> Out:
    """The rule, number by number: decay the state, measure the error of its prediction, correct, read."""
    b, t, h, kw = x.q.shape
    vw = x.v.shape[-1]
    out, last = torch.zeros(b, t, h, vw, dtype=F64), torch.zeros_like(x.state)
    for i in range(b):
        for j in range(h):
            s = x.state[i, j].tolist()
            for step in range(t):
                q, k, v, g = (y[i, step, j].tolist() for y in (x.q, x.k, x.v, x.g))
                s = [[math.exp(g[a]) * s[a][c] for c in range(vw)] for a in range(kw)]
                told = [sum(k[a] * s[a][c] for a in range(kw)) for c in range(vw)]
                error = [float(x.beta[i, step, j]) * (v[c] - told[c]) for c in range(vw)]
                s = [[s[a][c] + k[a] * error[c] for c in range(vw)] for a in range(kw)]
                out[i, step, j] = torch.tensor([sum(q[a] * s[a][c] for a in range(kw)) for c in range(vw)], dtype=F64)
            last[i, j] = torch.tensor(s, dtype=F64)
    return out, last


def recurrent(x: Inputs) -> Out:
    return kda.recurrent(*x)


def chunked(size: int) -> Core:
    return lambda x: kda.chunk(*x, chunk_size=size)


CORES: dict[str, Core] = {
    "recurrent": recurrent,
    "recurrent_gemv": lambda x: kda.recurrent_gemv(*x),
    "chunk 1": chunked(1),
    "chunk 4": chunked(4),
    "chunk 64": chunked(64),
    "chunk_rows 4": lambda x: kda.chunk_rows(*x, chunk_size=4),
}
SHAPES = [(1, 1, 1, 1, 1), (2, 7, 3, 5, 11), (1, 13, 2, 8, 8), (3, 5, 1, 7, 2), (1, 17, 2, 3, 1)]


def difference(a: Out, b: Out) -> float:
    return max(relative(x, y) for x, y in zip(a, b, strict=True))


def worst(core: Core) -> float:
    return max(difference(core(x), defined(x)) for x in (drawn(*s) for s in SHAPES))


def stepwise(update: Callable[..., Out]) -> Core:
    """A core from one step: update(state, q, k, v, exp(g), beta) -> o, state, all [B, H, ...]."""

    def core(x: Inputs) -> Out:
        state, out = x.state, []
        for t in range(x.q.shape[1]):
            o, state = update(state, x.q[:, t], x.k[:, t], x.v[:, t], x.g[:, t].exp(), x.beta[:, t].unsqueeze(-1))
            out.append(o)
        return torch.stack(out, 1), state

    return core


def told(state: Tensor, k: Tensor) -> Tensor:
    return (state * k.unsqueeze(-1)).sum(-2)


def write(state: Tensor, k: Tensor, error: Tensor) -> Tensor:
    return state + k.unsqueeze(-1) * error.unsqueeze(-2)


def error_first(s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Out:
    s = write(s * decay.unsqueeze(-1), k, (v - told(s, k)) * beta)
    return told(s, q), s


def decay_after(s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Out:
    s = write(s, k, (v - told(s, k)) * beta) * decay.unsqueeze(-1)
    return told(s, q), s


def read_before_write(s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Out:
    s = s * decay.unsqueeze(-1)
    return told(s, q), write(s, k, (v - told(s, k)) * beta)


def no_correction(s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Out:
    s = write(s * decay.unsqueeze(-1), k, v * beta)
    return told(s, q), s


def one_decay_a_head(x: Inputs) -> Out:
    return recurrent(x._replace(g=x.g.mean(-1, keepdim=True).expand_as(x.g)))


MUTANTS: dict[str, Core] = {
    "error before decay": stepwise(error_first),
    "decay after the write": stepwise(decay_after),
    "read before the write": stepwise(read_before_write),
    "no delta": stepwise(no_correction),
    "no decay": lambda x: recurrent(x._replace(g=torch.zeros_like(x.g))),
    "one decay a head": one_decay_a_head,
    "beta left out": lambda x: recurrent(x._replace(beta=torch.ones_like(x.beta))),
    "fresh state": lambda x: recurrent(x._replace(state=torch.zeros_like(x.state))),
    "decay in bf16": lambda x: recurrent(x._replace(g=round_to(x.g.exp(), DType.bf16).log())),
    "float32": lambda x: recurrent(x.to(torch.float32)),
}


@pytest.mark.parametrize("core", CORES)
def test_a_core_is_its_definition(core: str) -> None:
    """Output and state, to the rounding of float64, K != V, lengths of 1 and primes, a state carried in."""
    assert worst(CORES[core]) < 1e-13


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_core_is_seen(mutant: str) -> None:
    """Each mutant is farther from the definition than any order of float64 sums could be."""
    assert worst(MUTANTS[mutant]) > 1e-8


def test_cores_that_are_defined_right_do_not_depend_on_the_mutants_frame() -> None:
    """The frame that mutants are written in gives the rule itself when its step is the rule's."""

    def right(s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Out:
        s = s * decay.unsqueeze(-1)
        s = write(s, k, (v - told(s, k)) * beta)
        return told(s, q), s

    assert worst(stepwise(right)) < 1e-13


@pytest.mark.parametrize("size", [1, 16, 63, 64])
@pytest.mark.parametrize("length", [1, 31, 63, 64, 65, 130])
def test_chunks_are_the_recurrence(size: int, length: int) -> None:
    """Output and state in float64 within 1e-12 relative, whatever the chunk and the length."""
    x = drawn(2, length, 2, 8, 11, decay=2.0)
    assert difference(chunked(size)(x), recurrent(x)) < 1e-12


@pytest.mark.parametrize("length", [5, 63, 64, 65])
def test_chunks_and_steps_differ_by_rounding_alone(length: int) -> None:
    """float64 within 1e-15, float32 within 1e-6, and bf16 values within a few last places: no defect hides here."""
    x = drawn(1, length, 2, 8, 8, fresh=True)
    (o64, s64), (r64, z64) = chunked(64)(x), recurrent(x)
    assert float((o64 - r64).abs().max()) < 1e-15
    assert float((s64 - z64).abs().max()) < 4e-15
    x32 = x.to(torch.float32)
    o32, r32 = chunked(64)(x32)[0], recurrent(x32)[0]
    assert 0 < float((o32 - r32).abs().max()) < 1e-6
    x16 = Inputs(*(round_to(y, DType.bf16) for y in x)).to(torch.float32)
    o16, r16 = (round_to(core(x16)[0], DType.bf16).double() for core in (chunked(64), recurrent))
    assert float(((o16 - r16).abs() / ulp(r16, DType.bf16)).max()) <= 2


@pytest.mark.parametrize("length", [5, 63, 64, 65])
def test_zero_tokens_after_the_last_change_nothing(length: int) -> None:
    """With k, v, beta and g zero a token leaves the recurrent state bit-identical, the chunked one within 2e-17."""
    x = drawn(1, length, 2, 8, 8, decay=0.1)
    longer = [torch.cat([y, torch.zeros_like(y[:, :1]).expand(-1, 9, *y.shape[2:])], 1) for y in x[:5]]
    padded = Inputs._make([*longer, x.state])
    assert torch.equal(recurrent(padded)[1], recurrent(x)[1])
    assert torch.equal(recurrent(padded)[0][:, :length], recurrent(x)[0])
    for size in (16, 64):
        o, s = chunked(size)(padded)
        assert relative(s, chunked(size)(x)[1]) <= 2e-17
        assert relative(o[:, :length], chunked(size)(x)[0]) <= 2e-17


def one_anchor(limit: float) -> Core:
    """A chunk whose decays are all taken from its start, as some kernels do, with exponents held under a limit."""

    def core(x: Inputs) -> Out:
        total = x.g.cumsum(1).transpose(1, 2)
        q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
        back = (-total).clamp_max(limit).exp()
        beta = x.beta.transpose(1, 2).unsqueeze(-1)
        pairs = ((k * beta * total.exp()) @ (k * back).transpose(2, 3)).tril(-1)
        inverse = kda.unit_lower_inverse(pairs)
        new = inverse @ (v * beta) - inverse @ (k * beta * total.exp()) @ x.state
        o = (q * total.exp()) @ x.state + ((q * total.exp()) @ (k * back).transpose(2, 3)).tril() @ new
        return o.transpose(1, 2), x.state

    return core


@pytest.mark.parametrize("decay", [-1.0, -2.5, -3.0, -5.0])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-13), (torch.float32, 1e-5)])
def test_strong_decay_stays_at_rounding_level(decay: float, size: int, dtype: torch.dtype, bound: float) -> None:
    """A constant log-decay a token down to -5 leaves nothing infinite and nothing wrong in a chunk of 64."""
    x = drawn(1, 64, 2, 8, 8)
    x = x._replace(g=torch.full_like(x.g, decay))
    got = chunked(size)(x.to(dtype))
    assert all(bool(torch.isfinite(y).all()) for y in got)
    assert difference(got, recurrent(x)) < bound


def test_a_span_of_exponents_that_is_too_wide_is_seen_while_still_finite() -> None:
    """One anchor a chunk in float32: right at -1, wrong but finite from -2.5 on, NaN where nothing holds exponents."""
    x = drawn(1, 64, 2, 8, 8)

    def error(decay: float, limit: float) -> float:
        y = x._replace(g=torch.full_like(x.g, decay))
        return relative(one_anchor(limit)(y.to(torch.float32))[0], recurrent(y)[0])

    assert error(-1.0, 88.0) < 1e-5
    for decay in (-2.5, -3.0, -5.0):
        assert 0.01 < error(decay, 88.0) < math.inf
        assert error(decay, math.inf) == math.inf


HandOff = Callable[[Tensor], Tensor]


def handed(hand_off: HandOff, size: int) -> Core:
    """Chunks of `size` one after the other, the state between two of them passed through `hand_off`."""

    def core(x: Inputs) -> Out:
        state, out = x.state, []
        for start in range(0, x.q.shape[1], size):
            o, state = kda.chunk(*x.cut(start, start + size, hand_off(state) if start else state), chunk_size=size)
            out.append(o)
        return torch.cat(out, 1), state

    return core


def first_bad(a: Tensor, b: Tensor) -> int | None:
    """The first position [B, T, H, V] at which two outputs are farther apart than rounding."""
    bad = ((a - b).abs() > 1e-9).any(-1).any(-1).any(0)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def test_a_transposed_hand_off_shows_from_the_second_chunk_on() -> None:
    """With K = V one chunk agrees, and two diverge at token 33 by more than the largest value."""
    x = drawn(1, 64, 1, 8, 8, decay=0.1, fresh=True)
    wrong, right = handed(lambda s: s.transpose(-1, -2), 32)(x)[0], recurrent(x)[0]
    assert first_bad(wrong[:, :32], right[:, :32]) is None
    assert first_bad(wrong, right) == 32
    assert relative(wrong[:, 32:], right[:, 32:]) > 0.5
    assert first_bad(handed(lambda s: s, 32)(x)[0], right) is None


def test_a_transposed_hand_off_raises_where_k_is_not_v() -> None:
    """K = 8, V = 16: the shapes of a transposed state fit no product."""
    with pytest.raises(RuntimeError, match="size"):
        handed(lambda s: s.transpose(-1, -2), 32)(drawn(1, 64, 1, 8, 16))


@pytest.mark.parametrize(("length", "bad"), [(64, None), (128, 64), (130, 64)])
def test_a_state_that_is_reset_between_pieces_is_first_bad_at_the_second(length: int, bad: int | None) -> None:
    """Pieces of 64 give the whole at 64, 128 and 130; with a reset the first bad position is 64."""
    x = drawn(1, length, 2, 8, 8, decay=0.05, fresh=True)
    right = kda.chunk(*x, chunk_size=64)
    assert difference(handed(lambda s: s, 64)(x), right) == 0
    forgetful = handed(torch.zeros_like, 64)(x)[0]
    assert first_bad(forgetful, right[0]) == bad
    if bad:
        assert relative(forgetful[:, bad:], right[0][:, bad:]) > 0.3


def test_order_of_decay_and_error_is_only_seen_with_decay_and_two_tokens() -> None:
    """Error first differs by several percent; with all gates zero, or one token from a zero state, not by one bit."""
    x = drawn(1, 64, 2, 8, 8, fresh=True)
    other = stepwise(error_first)
    assert relative(other(x)[0], recurrent(x)[0]) > 0.03
    still = x._replace(g=torch.zeros_like(x.g))
    assert torch.equal(other(still)[0], recurrent(still)[0])
    one = drawn(1, 1, 2, 8, 8, fresh=True)
    assert torch.equal(other(one)[0], recurrent(one)[0])


@pytest.mark.parametrize(
    ("names", "least", "most"),
    [("k v beta g", 0, 0), ("beta g", 0, 0), ("v", 0.1, 1.0), ("k v beta", 0.01, 0.5), ("", 0.1, 2.0)],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_an_interior_pad_is_silent_only_when_its_gate_is_masked_too(
    names: str, least: float, most: float, batch: int
) -> None:
    """24 tokens, pads at 8 to 15: beta and gate must be zero; masking v, or all but the gate, changes later tokens."""
    x = drawn(batch, 24, 2, 8, 8, decay=0.05, fresh=True)
    pad = torch.zeros(24, dtype=torch.bool)
    pad[8:16] = True
    alone = Inputs._make([*(y[:, ~pad] for y in x[:5]), x.state])
    got = recurrent(x.masked(pad, names))[0][:, ~pad]
    error = relative(got, recurrent(alone)[0])
    assert least <= error <= most
    assert (error == 0) == (least == 0)


def test_leading_pads_prove_nothing() -> None:
    """From a zero state, masking v alone is enough: there is nothing yet that a gate could decay."""
    x = drawn(1, 24, 2, 8, 8, fresh=True)
    pad = torch.arange(24) < 8
    alone = Inputs._make([*(y[:, ~pad] for y in x[:5]), x.state])
    assert torch.equal(recurrent(x.masked(pad, "v"))[0][:, ~pad], recurrent(alone)[0])


BOUNDS = [(0, 37), (37, 88), (88, 128)]
CONV = torch.tensor([0.1, -0.3, 0.7, 0.5], dtype=F64).expand(22, 4)


def packed(x: Inputs, *, conv_resets: bool, state_resets: bool) -> Out:
    """Values through the short convolution, and the outputs, of three sequences laid end to end."""
    cuts = BOUNDS if conv_resets else [(0, 128)]
    fed = [torch.nn.functional.pad(x.v[:, a:b].flatten(2), (0, 0, 3, 0)) for a, b in cuts]
    v = torch.cat([taps(window, CONV) for window in fed], 1).view(x.v.shape)
    x, cuts = x._replace(v=v), BOUNDS if state_resets else [(0, 128)]
    return v, torch.cat([recurrent(x.cut(a, b, x.state))[0] for a, b in cuts], 1)


@pytest.mark.parametrize(("conv", "state"), [(True, True), (True, False), (False, True), (False, False)])
def test_what_leaks_between_packed_sequences_tells_which_part_missed_the_boundary(conv: bool, state: bool) -> None:
    """Lengths 37, 51, 40. The first always matches; a convolution reaches 3 tokens across, a state all of them."""
    x = drawn(1, 128, 2, 8, 11, decay=0.05, fresh=True)
    v, o = packed(x, conv_resets=conv, state_resets=state)
    solo_v, solo_o = packed(x, conv_resets=True, state_resets=True)
    assert first_bad(o[:, :37], solo_o[:, :37]) is None
    for a, b in BOUNDS[1:]:
        reached = ((v - solo_v)[0, a:b].abs() > 1e-9).flatten(1).any(-1)
        assert reached.nonzero().flatten().tolist() == ([] if conv else [0, 1, 2])
        assert first_bad(o[:, a:b], solo_o[:, a:b]) == (None if conv and state else 0)
        if conv and not state:
            assert bool(((o - solo_o)[0, a : a + 20].abs() > 1e-9).flatten(1).any(-1).all())
