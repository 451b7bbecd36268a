"""The decay gate and the L2 norm of the delta rule against definitions and published figures."""

import math
from collections.abc import Callable

import pytest
import torch
from tiny import relative
from torch import Tensor

from variants.dtypes import DType, round_to
from variants.ops import kda

F64 = torch.float64


def defined_gate(f: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """-exp(A_log[h]) * log(1 + exp(f + dt_bias[h, k])), number by number."""
    out = torch.zeros_like(f)
    for b, t, h, k in torch.cartesian_prod(*(torch.arange(n) for n in f.shape)).reshape(-1, 4).tolist():
        z = float(f[b, t, h, k]) + float(dt_bias[h, k])
        out[b, t, h, k] = -math.exp(float(a_log[h, 0])) * (z if z > 20 else math.log1p(math.exp(z)))
    return out


def gate(f: Tensor, a_log: Tensor, dt_bias: Tensor, *, form: str = "softplus") -> Tensor:
    return kda.GATES[form](f, kda.decay_rate(a_log), dt_bias)


GATE_MUTANTS: dict[str, Callable[..., Tensor]] = {
    "bias of the head's first channel": lambda f, a, d: gate(f, a, d[:, :1].expand_as(d)),
    "bias left out": lambda f, a, d: gate(f, a, torch.zeros_like(d)),
    "A for exp(A)": lambda f, a, d: -a * torch.nn.functional.softplus(f + d),
    "sign": lambda f, a, d: -gate(f, a, d),
    "sigmoid for softplus": lambda f, a, d: -a.exp() * torch.sigmoid(f + d),
}


def gate_inputs(h: int = 2, k: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(4)
    f = torch.randn(2, 3, h, k, generator=random, dtype=F64) * 8
    return f, torch.randn(h, 1, generator=random, dtype=F64), torch.randn(h, k, generator=random, dtype=F64) * 3


@pytest.mark.parametrize("form", kda.GATES)
def test_the_decay_gate_is_its_definition(form: str) -> None:
    """Per channel bias, per head A, softplus; to the rounding of float64 and always at or below zero."""
    f, a_log, dt_bias = gate_inputs()
    got = gate(f, a_log, dt_bias, form=form)
    assert relative(got, defined_gate(f, a_log, dt_bias)) < 1e-14
    assert bool((got <= 0).all())


@pytest.mark.parametrize("mutant", GATE_MUTANTS)
def test_a_wrong_decay_gate_is_seen(mutant: str) -> None:
    """Each mutant differs by more than a percent."""
    f, a_log, dt_bias = gate_inputs()
    assert relative(GATE_MUTANTS[mutant](f, a_log, dt_bias), defined_gate(f, a_log, dt_bias)) > 0.01


def test_a_bias_read_per_head_is_only_seen_with_a_bias_that_varies_in_the_head() -> None:
    """Constant rows are no coverage: there both readings agree to the bit; random rows differ by tens of percent."""
    f, a_log, dt_bias = gate_inputs()
    f = f / 8
    per_head = GATE_MUTANTS["bias of the head's first channel"]
    constant = dt_bias[:, :1].expand_as(dt_bias)
    assert torch.equal(per_head(f, a_log, constant), gate(f, a_log, constant))
    assert relative(per_head(f, a_log, dt_bias), gate(f, a_log, dt_bias)) > 0.1


def test_the_gate_is_the_softplus_form_not_the_bounded_sigmoid() -> None:
    """exp(A_log) = 2, z = -6 to 6: clamped at -5 these are the figures of the softplus form, not of the bounded one."""
    z = torch.tensor([-6.0, -2, 0, 2, 6], dtype=F64).view(1, 5, 1, 1)
    found = gate(z, torch.full((1, 1), math.log(2), dtype=F64), torch.zeros(1, 1, dtype=F64)).flatten()
    assert found.clamp_min(-5).tolist() == pytest.approx([-0.0050, -0.2539, -1.386, -4.254, -5.0], abs=5e-4)
    bounded = (-5 * torch.sigmoid(2 * z)).flatten()
    assert bounded.tolist() == pytest.approx([-0.00003, -0.0899, -2.5, -4.910, -5.0], abs=5e-4)
    assert float((found - bounded).abs().max()) > 1


def test_the_librarys_softplus_keeps_what_a_sum_with_one_loses() -> None:
    """At f = -20 in float32 the gate step by step is zero, the fused one exp(-20) to rounding."""
    f, zero = torch.full((1, 1, 1, 1), -20.0), torch.zeros(1, 1)
    assert float(gate(f, zero, zero)) == 0
    assert float(gate(f, zero, zero, form="softplus_fused")) == pytest.approx(-math.exp(-20), rel=1e-6)


@pytest.mark.parametrize("form", kda.L2NORM)
@pytest.mark.parametrize(("norm", "expected"), [(1.0, 1.0), (1e-3, 0.7071), (1e-4, 0.0995), (0.0, 0.0)])
def test_l2_norm_has_its_eps_inside_the_root_and_on_the_sum(norm: float, expected: float, form: str) -> None:
    """A 128-vector of norm 1, 1e-3, 1e-4 comes out with norm 1, 0.7071, 0.0995; a zero vector stays zero."""
    x = torch.randn(128, generator=torch.Generator().manual_seed(0), dtype=F64)
    x = x / x.norm() * norm
    assert float(kda.L2NORM[form](x).norm()) == pytest.approx(expected, abs=5e-5)


def test_other_l2_norms_agree_on_normal_vectors_and_not_on_small_ones() -> None:
    """The clamp and the bare-eps RMS form look like rounding at norm 1 and are plainly wrong at 1e-4."""
    unit = torch.full((128,), 128**-0.5, dtype=F64)

    def clamp(x: Tensor) -> Tensor:
        return x / x.norm().clamp_min(1e-6)

    def bare(x: Tensor) -> Tensor:
        return x / torch.sqrt(x.square().mean() + 1e-6) * 128**-0.5

    norms = {f: [float(f(unit * n).norm()) for n in (1.0, 1e-3, 1e-4)] for f in (clamp, bare)}
    assert norms[clamp] == pytest.approx([1, 1, 1], abs=1e-9)
    assert norms[bare] == pytest.approx([0.9999, 0.0880, 0.0088], abs=5e-5)
    assert abs(norms[clamp][0] - float(kda.l2norm(unit).norm())) < 1e-6
    assert abs(norms[clamp][2] - float(kda.l2norm(unit * 1e-4).norm())) > 0.5


def forgetting(decay: float, steps: int, *, narrow: bool) -> float:
    """What is left of a state of one after some steps without a write."""
    g = torch.full((1, steps, 1, 1), math.log(decay), dtype=F64)
    g = round_to(g.exp(), DType.bf16).log() if narrow else g
    zero = torch.zeros(1, steps, 1, 1, dtype=F64)
    return float(kda.recurrent(zero, zero, zero, g, zero[..., 0], torch.ones(1, 1, 1, 1, dtype=F64))[1])


def test_a_decay_narrowed_to_bf16_never_forgets() -> None:
    """0.9981 becomes exactly 1 in bf16: after 4096 steps 1.0 is left and not 0.00041; nine steps show 2 % of it."""
    assert forgetting(0.9981, 4096, narrow=False) == pytest.approx(0.00041, abs=1e-5)
    assert forgetting(0.9981, 4096, narrow=True) == 1.0
    assert 1 - forgetting(0.9981, 9, narrow=False) < 0.02
    x = torch.tensor([0.9981, 0.9979], dtype=F64)
    assert round_to(x, DType.bf16).tolist() == [1.0, 0.99609375]
