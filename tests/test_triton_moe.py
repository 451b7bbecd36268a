"""The expert kernels and the batch-invariant product against their float64 references."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.triton_case import F32_BOUND, agrees, draw, error
from variants.errors import UsageError
from variants.ops.linear_triton import gemm
from variants.ops.moe import sum_grouped, sum_loop
from variants.ops.moe_triton import VLLM, Rounding, experts

pytestmark = pytest.mark.usefixtures("poisoned")
BF16 = torch.bfloat16


def routed(tokens: int, count: int, chosen: int) -> tuple[Tensor, Tensor]:
    """Expert ids in order of score and weights; the last expert gets nobody."""
    scores = draw(tokens, count, seed=5)
    scores[:, -1] = -10.0
    ids = scores.argsort(-1, descending=True)[:, :chosen]
    return ids, scores.gather(-1, ids).sigmoid()


def reference(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, rule: Rounding) -> Tensor:
    """Token by token in float64, every named dtype applied; sums of bfloat16 products are exact to float64."""
    x, w13, w2, weights = (y.double().cpu() for y in (x, w13, w2, weights))
    ids = ids.cpu()

    def at(dtype: torch.dtype, y: Tensor) -> Tensor:
        return y if dtype is torch.float32 else y.to(dtype).double()

    out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64)
    for n, row in enumerate(ids.tolist()):
        for j, e in enumerate(row):
            gate, up = at(rule.expert_gate_up, w13[e] @ x[n]).chunk(2)
            act = at(rule.expert_act, at(rule.expert_silu, F.silu(gate)) * up)
            out[n, j] = at(rule.expert_out, at(rule.expert_down, w2[e] @ act) * weights[n, j])
    each = (lambda y: at(rule.routed, y)) if rule.round_each else None
    return at(rule.routed, (sum_loop if rule.by_id else sum_grouped)(out, ids, each))


def check(tokens: int, sizes: tuple[int, int, int], chosen: int, rule: Rounding, bound: float) -> None:
    """sizes: experts, D, I."""
    count, d, inner = sizes
    dtype = torch.float32 if rule.expert_act is torch.float32 else BF16
    x = draw(tokens, d, seed=1, dtype=dtype)
    w13, w2 = draw(count, 2 * inner, d, seed=2) * d**-0.5, draw(count, d, inner, seed=3) * inner**-0.5
    w13, w2 = w13.to(dtype), w2.to(dtype)
    ids, weights = routed(tokens, count, chosen)
    out = experts(x, w13, w2, ids, weights, rounding=rule)
    expected = reference(x, w13, w2, ids, weights, rule)
    assert agrees(out, expected, bound), error(out, expected)
    assert torch.equal(out, experts(x, w13, w2, ids, weights, rounding=rule))
    one = experts(x[1:2], w13, w2, ids[1:2], weights[1:2], rounding=rule)
    assert torch.equal(out[1:2], one), "a token has its bits whatever stands beside it"
    assert not agrees(out, reference(x, w13, w2, ids.flip(-1), weights, rule), bound), "swapped slots must be seen"


@pytest.mark.parametrize("tokens", [2, 37])
def test_experts_are_the_reference_in_float32(tokens: int) -> None:
    """More tokens than a tile for one expert, none for another, odd sizes: within float32 rounding."""
    check(tokens, (4, 40, 24), 2, Rounding(), F32_BOUND)


@pytest.mark.parametrize("rule", [VLLM, replace(VLLM, expert_down=BF16, round_each=True, by_id=True)],
                         ids=["vllm", "each_in_order_of_id"])  # fmt: skip
def test_experts_round_where_they_are_told(rule: Rounding) -> None:
    """With bfloat16 at every named place the result differs from the same roundings in float64 by single ties only:
    ten times less than from no rounding at all."""
    check(9, (3, 32, 16), 2, rule, 1e-3)
    with pytest.raises(AssertionError):
        check(9, (3, 32, 16), 2, replace(rule, routed=torch.float32, expert_out=torch.float32), 1e-9)


@pytest.mark.gpu
def test_experts_are_the_reference_at_model_size() -> None:
    """The same with 16 experts, D 2304, I 1024 and four slots, and at batches of one tile and of many."""
    for tokens in (2, 40):
        check(tokens, (16, 2304, 1024), 4, Rounding(), 2e-5)
        check(tokens, (16, 2304, 1024), 4, VLLM, 2e-3)


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 130, 65), pytest.param((300, 2304, 4096), marks=pytest.mark.gpu)])
def test_gemm_is_the_reference_and_its_rows_are_alone(shape: tuple[int, int, int]) -> None:
    """The product is within float32 rounding of the exact one, and a row's bits do not depend on its neighbours."""
    m, k, n = shape
    x, weight = draw(m, k, seed=1), draw(n, k, seed=2)
    out = gemm(x, weight)
    assert agrees(out, F.linear(x.double(), weight.double()), F32_BOUND)
    assert torch.equal(out[-1:], gemm(x[-1:], weight))
    weight[0, 0] += 0.1
    assert not agrees(out, F.linear(x.double(), weight.double()), F32_BOUND), "one weight off must be seen"


def test_bf16_products_are_exact_and_rounded_once() -> None:
    """bfloat16 operands: the float32 sum, rounded once."""
    x, weight = draw(3, 40, seed=1, dtype=BF16), draw(20, 40, seed=2, dtype=BF16)
    wide = gemm(x, weight)
    assert agrees(wide, F.linear(x.double(), weight.double()), F32_BOUND)
    assert torch.equal(gemm(x, weight, out_dtype=BF16), wide.to(BF16))


def test_operands_of_two_dtypes_are_refused() -> None:
    """A product takes one dtype; nothing is widened without being asked."""
    with pytest.raises(UsageError, match="both must have one dtype"):
        gemm(draw(1, 16, seed=1), draw(16, 16, seed=2, dtype=BF16))
