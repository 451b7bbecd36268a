"""Experts of several tokens under implementation row: sorted by expert, and summed as the recipe says."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from variants.ops import row, row_slots_triton, row_triton

BF16 = torch.bfloat16


def stepwise(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The routed sum operation by operation in the library, slots first to last."""
    n, k = ids.shape
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=w13.shape[0]).cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[order // k], w13.transpose(1, 2), offs=ends).chunk(2, -1)
    act = row_triton.silu_and_mul(gate.contiguous(), up.contiguous(), silu=BF16, out_dtype=BF16)
    down = F.grouped_mm(act, w2.transpose(1, 2), offs=ends)
    down = (down * weights.flatten()[order].unsqueeze(1)).to(BF16)
    out = torch.empty_like(down).index_copy_(0, order, down).view(n, k, -1).float()
    total = out[:, 0]
    for j in range(1, k):
        total = total + out[:, j]
    return total.to(BF16)


def test_the_routed_sum_has_the_bits_of_its_operations_one_by_one() -> None:
    """Experts that nobody chose, one that everybody did, a width that is no multiple of a program's, negative zeros."""
    random = torch.Generator().manual_seed(1)
    n, d, inner, count, k = 5, 264, 16, 7, 3
    x, w13, w2 = (torch.randn(*s, generator=random).to(BF16)
                  for s in ((n, d), (count, 2 * inner, d), (count, d, inner)))  # fmt: skip
    ids = torch.stack([torch.randperm(count - 2, generator=random)[:k] for _ in range(n)])
    ids[:, 0] = count - 1
    weights = torch.rand(n, k, generator=random)
    x[2], weights[2] = 0, -weights[2]  # all its products are zeros, some of them negative
    ours, theirs = row._grouped(x, w13, w2, ids, weights), stepwise(x, w13, w2, ids, weights)
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    weights[0, 1] *= 1.5
    assert not torch.equal(row._grouped(x, w13, w2, ids, weights), theirs)


def test_halves_of_one_tensor_are_read_where_they_lie() -> None:
    """The same bits as of copies, for rows of a width that is no multiple of a program's."""
    both = torch.randn(3, 2 * 300, generator=torch.Generator().manual_seed(2)).to(BF16)
    gate, up = both.chunk(2, -1)
    ours = row_triton.silu_and_mul(gate, up, silu=BF16, out_dtype=BF16)
    assert torch.equal(ours, row_triton.silu_and_mul(gate.contiguous(), up.clone(), silu=BF16, out_dtype=BF16))
    assert torch.equal(ours[1], row_triton.silu_and_mul(gate[1], up[1], silu=BF16, out_dtype=BF16))


@pytest.mark.parametrize(("tokens", "k", "count"), [(1, 1, 1), (5, 3, 7), (17, 8, 40), (70, 2, 3)])
def test_slots_that_are_counted_are_sorted_as_the_library_sorts(
    tokens: int, k: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More slots than a program takes, more experts than slots, one expert: places, tokens and ends are the same."""
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, count, (tokens, k), generator=random)
    counted = row_slots_triton.by_expert(ids, count)
    monkeypatch.setattr(row_slots_triton, "COUNTED", 0)
    assert all(torch.equal(a, b) for a, b in zip(counted, row_slots_triton.by_expert(ids, count), strict=True))
    assert [x.dtype for x in counted] == [torch.int64, torch.int64, torch.int32]
    assert torch.equal(counted[1], (ids.flatten().argsort(stable=True)) // k)
