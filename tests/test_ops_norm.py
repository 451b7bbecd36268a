"""RMSNorm, its gated form and the elementwise functions against definitions in plain loops over float64."""

import math
from collections.abc import Callable

import pytest
import torch
from tiny import relative
from torch import Tensor

from harness.config import DeviceChoice
from harness.numerics import policy
from variants.dtypes import DType, round_to
from variants.ops.norm import GATED, SIGMOID, SILU, gated_rms_norm, rms_norm, rms_norm_fused, sigmoid_lanes, silu_lanes

SHAPES = [(1, 1), (1, 7), (3, 5, 16), (2, 1, 13), (2, 4, 3, 31)]
EPS = 1e-3
Norm = Callable[[Tensor, Tensor, float], Tensor]
Gated = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def defined(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x_i * w_i / sqrt(sum_j x_j^2 / n + eps), element by element."""
    rows = []
    for row in x.reshape(-1, x.shape[-1]).tolist():
        root = math.sqrt(sum(v * v for v in row) / len(row) + eps)
        rows.append([v / root * w for v, w in zip(row, weight.tolist(), strict=True)])
    return torch.tensor(rows, dtype=torch.float64).view(x.shape)


def defined_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    opened = torch.tensor([1 / (1 + math.exp(-v)) for v in gate.flatten().tolist()], dtype=torch.float64)
    return defined(x, weight, eps) * opened.view(gate.shape)


def worst(norm: Norm) -> float:
    inputs = [(drawn(*s), drawn(s[-1], seed=1) + 1.5) for s in SHAPES]
    return max(relative(norm(x, w, EPS), defined(x, w, EPS)) for x, w in inputs)


def worst_gated(norm: Gated) -> float:
    inputs = [(drawn(*s), drawn(s[-1], seed=1) + 1.5, drawn(*s, seed=2)) for s in SHAPES]
    return max(relative(norm(*i, EPS), defined_gated(*i, EPS)) for i in inputs)


def root(x: Tensor, eps: float) -> Tensor:
    return torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


MUTANTS: dict[str, Norm] = {
    "eps outside the root": lambda x, w, e: w * x / (root(x, 0) + e),
    "eps left out": lambda x, w, e: w * x / root(x, 0),
    "sum for mean": lambda x, w, e: w * x / torch.sqrt(x.square().sum(-1, keepdim=True) + e),
    "mean taken off": lambda x, w, e: w * (x - x.mean(-1, keepdim=True)) / root(x, e),
    "weight of 1 + w": lambda x, w, e: (1 + w) * x / root(x, e),
    "float32 inside": lambda x, w, e: rms_norm(x.float(), w.float(), e).double(),
}
GATED_MUTANTS: dict[str, Gated] = {
    "gate before the norm": lambda x, w, g, e: rms_norm(x * torch.sigmoid(g), w, e),
    "silu for sigmoid": lambda x, w, g, e: gated_rms_norm(x, w, g * torch.sigmoid(g), eps=e),
    "gate not opened": lambda x, w, g, e: gated_rms_norm(x, w, g, eps=e),
}


@pytest.mark.parametrize("norm", [rms_norm, rms_norm_fused])
def test_rms_norm_is_its_definition(norm: Norm) -> None:
    """To the rounding of float64, at every shape."""
    assert worst(norm) < 1e-15


@pytest.mark.parametrize("name", GATED)
def test_gated_rms_norm_is_its_definition(name: str) -> None:
    """The sigmoid opens the normalised and weighted value, after the norm."""
    assert worst_gated(lambda x, w, g, e: GATED[name](x, w, SIGMOID[name](g), eps=e)) < 1e-15


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_norm_is_seen(mutant: str) -> None:
    """Each mutant is farther from the definition than any order of float64 sums could be."""
    assert worst(MUTANTS[mutant]) > 1e-8


@pytest.mark.parametrize("mutant", GATED_MUTANTS)
def test_a_wrong_gated_norm_is_seen(mutant: str) -> None:
    """Each mutant of the gated form is far from the definition."""
    assert worst_gated(GATED_MUTANTS[mutant]) > 1e-3


@pytest.mark.parametrize("norm", [rms_norm, rms_norm_fused])
def test_variance_and_value_may_come_from_two_tensors(norm: Callable[..., Tensor]) -> None:
    """With `value`, the variance is of x and what is normalised is `value`: the store may lie between them."""
    x, w = drawn(3, 5, 16), drawn(16, seed=1)
    value = round_to(x, DType.bf16)
    got = norm(x, w, EPS, value=value)
    assert relative(got, defined(x, w, EPS) / x * value) < 1e-14
    assert relative(got, defined(x, w, EPS)) > 1e-4
    assert relative(got, defined(value, w, EPS)) > 1e-6


@pytest.mark.parametrize("norm", [rms_norm, rms_norm_fused])
def test_the_rounding_between_is_before_the_weight(norm: Callable[..., Tensor]) -> None:
    """`between` rounds the normalised value once, and the product with the weight is not rounded."""
    x, w = drawn(2, 9), drawn(9, seed=1)
    got = norm(x, w, EPS, between=lambda y: round_to(y, DType.bf16))
    assert torch.equal(got, w * round_to(norm(x, torch.ones(9, dtype=torch.float64), EPS), DType.bf16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["sigmoid", "silu"])
def test_functions_in_lanes_are_the_functions(name: str, dtype: torch.dtype) -> None:
    """To four units in the last place over the whole range, overflow of the exponential included."""
    x = torch.linspace(-200, 200, 4001, dtype=torch.float64).to(dtype)
    table, unit = {"sigmoid": SIGMOID, "silu": SILU}[name], torch.finfo(dtype).eps
    exact = torch.tensor([_sigmoid(v) * (v if name == "silu" else 1) for v in x.tolist()], dtype=torch.float64)
    for algorithm in (name, f"{name}_lanes"):
        got = table[algorithm](x).double()
        smallest = torch.finfo(dtype).tiny / unit  # below it a quotient is subnormal
        normal = exact.abs() > smallest
        error = (got - exact).abs()
        assert bool((error < torch.where(normal, 4 * unit * exact.abs(), smallest)).logical_or(error == 0).all())


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("function", [sigmoid_lanes, silu_lanes])
@pytest.mark.parametrize("width", [1, 3, 8, 33, 256])
def test_a_place_changes_no_bit(function: Callable[[Tensor], Tensor], width: int, threads: int) -> None:
    """Rows together give the bits of each row alone, also where three threads share a tensor in uneven parts."""
    x = (drawn(40_000 // width, width) * 4).float()
    with policy(DeviceChoice(threads=threads)):
        together = function(x)
        some = [0, 1, x.shape[0] // 3, x.shape[0] // 3 + 1, x.shape[0] - 1]
        assert all(torch.equal(together[i], function(x[i].clone())) for i in some)
        assert torch.equal(together[1:], function(x[1:]))
