"""Products with a weight against a definition in plain loops, and row by row bit for bit."""

from collections.abc import Callable

import pytest
import torch
from tiny import relative
from torch import Tensor

from variants.ops.linear import LINEAR, gemm, gemm_rows

SHAPES = [((1, 1), 1), ((1, 7), 3), ((2, 3, 5), 11), ((4, 1, 1, 16), 2), ((17, 13), 13)]  # shape of x, N
Linear = Callable[[Tensor, Tensor], Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def defined(x: Tensor, weight: Tensor) -> Tensor:
    """out[..., n] = sum over k of x[..., k] * weight[n, k], number by number."""
    rows, weights = x.reshape(-1, x.shape[-1]).tolist(), weight.tolist()
    out = [[sum(a * b for a, b in zip(row, w, strict=True)) for w in weights] for row in rows]
    return torch.tensor(out, dtype=torch.float64).view(*x.shape[:-1], -1)


def worst(linear: Linear) -> float:
    inputs = [(drawn(*s), drawn(n, s[-1], seed=1)) for s, n in SHAPES]
    return max(relative(linear(x, w), defined(x, w)) for x, w in inputs)


MUTANTS: dict[str, Linear] = {
    "weight rows reversed": lambda x, w: gemm(x, w.flip(0)),
    "last column left out": lambda x, w: gemm(x[..., :-1], w[:, :-1]) if x.shape[-1] > 1 else gemm(x, w),
    "first row for all": lambda x, w: gemm(x.reshape(-1, x.shape[-1])[:1].expand_as(x), w),
    "float32 inside": lambda x, w: gemm(x.float(), w.float()).double(),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_product_is_its_definition(name: str) -> None:
    """To the rounding of float64, one row, many rows, any number of dimensions."""
    assert worst(LINEAR[name]) < 1e-14


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_product_is_seen(mutant: str) -> None:
    """Each mutant is farther from the definition than any order of float64 sums could be."""
    assert worst(MUTANTS[mutant]) > 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 13, 67), (5, 13, 67), (33, 23, 11), (7, 256, 512)])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(dtype: torch.dtype, rows: int, k: int, n: int) -> None:
    """Alone, in a batch, behind other rows and as a strided slice at any alignment."""
    x, w = drawn(rows, k).to(dtype), drawn(n, k, seed=1).to(dtype)
    together = gemm_rows(x, w)
    wide = torch.cat([drawn(rows, 3, seed=2).to(dtype), x], 1)
    assert torch.equal(gemm_rows(wide[:, 3:], w), together)
    assert torch.equal(gemm_rows(x.view(rows, 1, k), w).view(rows, n), together)
    for i in range(rows):
        assert torch.equal(gemm_rows(x[i : i + 1], w)[0], together[i])
        assert torch.equal(gemm_rows(x[i:], w)[0], together[i])


def test_row_by_row_is_the_same_product_to_rounding() -> None:
    """In float32 both forms are within a few units of each other, and neither is the float64 product."""
    x, w = drawn(33, 23).float(), drawn(11, 23, seed=1).float()
    assert relative(gemm(x, w), gemm_rows(x, w)) < 1e-6
    assert 0 < relative(gemm_rows(x, w), defined(x, w)) < 1e-6
