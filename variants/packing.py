"""Rows of a batch as one packed sequence of tokens, which is what kernels over ragged batches read, and back."""

from collections.abc import Callable

from torch import Tensor

from variants.batch import Batch


def packed(x: Tensor, batch: Batch) -> Tensor:
    """The real tokens of x [B, T, ...] as [1, tokens, ...], row after row."""
    return (x.flatten(0, 1) if batch.real is None else x[batch.real]).unsqueeze(0)


def unpacked(y: Tensor, batch: Batch) -> Tensor:
    """Packed [1, tokens, ...] as rows [B, T, ...] again; tokens that are not real are zero."""
    if batch.real is None:
        return y.view(*batch.positions.shape, *y.shape[2:])
    out = y.new_zeros(*batch.positions.shape, *y.shape[2:])
    out[batch.real] = y[0]
    return out


def show_carried(carry: Callable[[Tensor], Tensor] | None, pool: Tensor, batch: Batch) -> None:
    """Let a probe see, and change, what the slots carry now; a copy, since the kernel writes where it lies."""
    if carry is not None:
        _, slots = batch.owned
        pool.index_copy_(0, slots, carry(pool[slots]).to(pool.dtype))


def seen(batch: Batch) -> Tensor:
    """Positions [B, T] with -1 for tokens that are not real."""
    return batch.positions if batch.real is None else batch.positions.masked_fill(~batch.real, -1)
