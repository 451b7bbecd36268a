"""The router's choice and weights and the sum over experts, against definitions and published figures."""

import pytest
import torch
from torch import Tensor

from variants.dtypes import DType, round_to, ulp
from variants.ops.moe import SUM, WEIGHTS, sum_grouped, sum_loop, top_k_lowest_id, weights_after

F64 = torch.float64


def scores(*values: float) -> Tensor:
    return torch.tensor([values], dtype=F64)


def defined_top_k(choice: Tensor, k: int) -> list[list[int]]:
    """The k largest of each row, larger first, the lower id first among equals."""
    return [sorted(range(len(row)), key=lambda i: (-row[i], i))[:k] for row in choice.tolist()]


def route(
    score: Tensor, bias: Tensor, k: int, *, factor: float = 1.0, renormalize: bool = True
) -> tuple[Tensor, Tensor]:
    """As the MoE block routes: the bias chooses, the unbiased scores weigh."""
    ids = top_k_lowest_id(score + bias, k)
    return ids, weights_after(score.gather(-1, ids), factor, renormalize)


@pytest.mark.parametrize(("n", "experts", "k"), [(1, 1, 1), (7, 5, 2), (13, 8, 8), (50, 256, 8)])
def test_the_choice_is_its_definition(n: int, experts: int, k: int) -> None:
    """Also where values are drawn from four levels, so that most of a row is tied."""
    choice = torch.randint(0, 4, (n, experts), generator=torch.Generator().manual_seed(n)).double()
    assert top_k_lowest_id(choice, k).tolist() == defined_top_k(choice, k)
    assert top_k_lowest_id(choice.bfloat16(), k).tolist() == defined_top_k(choice, k)


def test_another_choice_is_seen() -> None:
    """Highest id on ties, smallest values, and k + 1 experts are all told from the definition."""
    choice = torch.randint(0, 4, (13, 8), generator=torch.Generator().manual_seed(3)).double()
    highest_id = 7 - top_k_lowest_id(choice.flip(1), 3)
    for wrong in (highest_id, top_k_lowest_id(-choice, 3), top_k_lowest_id(choice, 4)):
        assert wrong.tolist() != defined_top_k(choice, 3)


def test_ties_go_to_the_lowest_id_every_time() -> None:
    """Scores 0.5, 0.7, 0.5, 0.5 choose {1, 0} twenty times of twenty; {1, 2} would be another rule, not another sum."""
    assert all(top_k_lowest_id(scores(0.5, 0.7, 0.5, 0.5), 2).tolist() == [[1, 0]] for _ in range(20))


def test_a_bias_stored_in_bf16_changes_the_set() -> None:
    """Biases near 7 collapse in bf16: float32 picks {0, 1}, bf16 biases {1, 2}; 256 even biases keep 9 values."""
    score, bias = scores(0.400, 0.405, 0.410, 0.100), scores(7.012, 7.010, 6.990, 6.900)
    assert set(route(score, bias, 2)[0][0].tolist()) == {0, 1}
    assert set(route(score, round_to(bias, DType.bf16), 2)[0][0].tolist()) == {1, 2}
    assert round_to(torch.linspace(6.817, 7.063, 256, dtype=F64), DType.bf16).unique().numel() == 9


def test_the_bias_chooses_and_does_not_weigh() -> None:
    """Scores 0.2, 0.6, 0.5 with +0.5 on the first: weights 0.25 and 0.75; a leak would give 0.538 and 0.462."""
    score, bias = scores(0.2, 0.6, 0.5), scores(0.5, 0.0, 0.0)
    ids, weights = route(score, bias, 2)
    assert ids.tolist() == [[0, 1]]
    assert weights[0].tolist() == pytest.approx([0.25, 0.75], abs=1e-12)
    leaked = weights_after((score + bias).gather(-1, ids), 1.0, True)
    assert leaked[0].tolist() == pytest.approx([0.538, 0.462], abs=1e-3)
    no_bias = torch.zeros_like(bias)
    chosen = top_k_lowest_id(score, 2)
    assert torch.equal(route(score, no_bias, 2)[1], weights_after((score + no_bias).gather(-1, chosen), 1.0, True))


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_factor_is_applied_once(name: str) -> None:
    """8 experts, top 4, factor 2.5: weights sum to 2.5 renormalised and to 2.5 times the chosen scores otherwise."""
    score = torch.rand(6, 8, generator=torch.Generator().manual_seed(5), dtype=F64)
    chosen = score.gather(-1, top_k_lowest_id(score, 4))
    weigh = WEIGHTS[name]
    renormalised, plain = weigh(chosen, 2.5, True).sum(-1), weigh(chosen, 2.5, False).sum(-1)
    assert torch.allclose(renormalised, torch.full_like(renormalised, 2.5), rtol=1e-15, atol=0)
    assert torch.allclose(plain, 2.5 * chosen.sum(-1), rtol=1e-15, atol=0)
    twice, never = weigh(weigh(chosen, 2.5, True), 2.5, False).sum(-1), weigh(chosen, 1.0, True).sum(-1)
    assert twice.tolist() == pytest.approx([6.25] * 6)
    assert never.tolist() == pytest.approx([1.0] * 6)


def test_scaling_before_or_after_is_a_choice_of_rounding_alone() -> None:
    """In float32 the two orders differ in the last place of some weight and nowhere by more than two."""
    chosen = torch.rand(200, 4, generator=torch.Generator().manual_seed(6))
    a, b = (WEIGHTS[f"scale_{order}"](chosen, 2.446, True) for order in ("before", "after"))
    assert not torch.equal(a, b)
    assert float(((a - b).abs() / ulp(b, DType.f32)).max()) <= 2


def defined_sum(outputs: Tensor) -> Tensor:
    n, k, d = outputs.shape
    return torch.tensor(
        [[sum(float(outputs[i, j, c]) for j in range(k)) for c in range(d)] for i in range(n)], dtype=F64
    )


@pytest.mark.parametrize("name", SUM)
@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (7, 2, 5), (3, 8, 13)])
def test_the_sum_over_experts_is_its_definition(name: str, n: int, k: int, d: int) -> None:
    """Both orders, to the rounding of float64; leaving one expert out is seen."""
    random = torch.Generator().manual_seed(k)
    outputs = torch.randn(n, k, d, generator=random, dtype=F64)
    ids = torch.stack([torch.randperm(16, generator=random)[:k] for _ in range(n)])
    assert torch.allclose(SUM[name](outputs, ids, None), defined_sum(outputs), rtol=0, atol=1e-14)
    if k > 1:
        assert not torch.allclose(SUM[name](outputs[:, 1:], ids[:, 1:], None), defined_sum(outputs), rtol=0, atol=1e-6)


def test_each_order_of_the_sum_is_what_its_name_says() -> None:
    """By expert id or by slot, once or rounded after each expert: four values show which one it was."""
    outputs = torch.tensor([[[1.0], [2.0**-60], [-1.0]]], dtype=F64)
    ids = torch.tensor([[5, 9, 2]])
    assert float(sum_grouped(outputs, ids, None)) == 0.0
    assert float(sum_loop(outputs, ids, None)) == 2.0**-60
    each = torch.tensor([[[1.0], [2.0**-9], [2.0**-9], [2.0**-9]]], dtype=F64)
    slots = torch.tensor([[0, 1, 2, 3]])
    assert float(sum_grouped(each, slots, lambda y: round_to(y, DType.bf16))) == 1.0
    assert float(round_to(sum_grouped(each, slots, None), DType.bf16)) == 1 + 2.0**-7


def test_a_changed_set_has_a_gap_under_the_rounding_of_the_logits() -> None:
    """Router logits rounded to bf16 change the experts of some tokens, each at a boundary the rounding can close."""
    random = torch.Generator().manual_seed(7)
    logits = torch.randn(4000, 64, generator=random)
    narrow = round_to(logits, DType.bf16)
    ids, other = top_k_lowest_id(logits, 8), top_k_lowest_id(narrow, 8)
    changed = (ids.sort(-1).values != other.sort(-1).values).any(-1)
    assert 10 < int(changed.sum()) < 1000
    ranked = logits.sort(-1, descending=True).values[changed]
    gap, step = (ranked[:, 7] - ranked[:, 8]).double(), ulp(ranked[:, 7], DType.bf16)
    assert bool((gap <= step).all())
    same = logits.sort(-1, descending=True).values[~changed]
    assert float((same[:, 7] - same[:, 8]).median()) > float(gap.median())
