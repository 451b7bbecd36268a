"""Parameters in the dtype that an operation reads them in: cast once, shared by every variant of a process."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from variants.checkpoint import Checkpoint
from variants.dtypes import DType, dtype_of, round_to, store_as, widest
from variants.placement import Placement, one
from variants.recipe import Semantics
from variants.side_by_side import joined, stacked

Patch = Callable[[str, Tensor], Tensor]


class Casts:
    """A checkpoint's tensors in the dtypes that were asked for, each made once and kept until `drop`.

    placement: where layers lie on several devices; `device` is then the first of them, which takes the tokens.
    """

    def __init__(self, checkpoint: Checkpoint, *, device: str = "cpu", placement: Placement | None = None) -> None:
        self.checkpoint = checkpoint
        self.placement = placement or one(device)
        self.device = self.placement.devices[0]
        self._made: dict[tuple[object, ...], Tensor] = {}

    def cast(self, names: tuple[str, ...], dtype: DType, through: tuple[DType, ...] = ()) -> Tensor:
        """The named tensors stacked along their first dimension, in `dtype`.

        through: formats that the values are rounded to before, in order (ties_to_even); one that holds them as they
        are stored changes nothing and makes no copy of its own.
        """
        through = self._narrower(names, through)
        key = (names, dtype, through)
        if key not in self._made:
            self._made[key] = self._cast(names, dtype, through)
        return self._made[key]

    def stack(self, groups: Sequence[tuple[str, ...]], dtype: DType, through: tuple[DType, ...] = ()) -> Tensor:
        """The casts of several groups of one shape (the experts of a layer) as [n, ...], kept like a cast.

        A view of the checkpoint where that holds them so; else each is copied in as it is made, so that never more than
        one of them is held beside the stack.
        """
        through = self._narrower(groups[0], through)
        key = (*groups, dtype, through)
        if key not in self._made:
            stored = [self.checkpoint.tensors[n] for n in groups[0]]
            if not through and all(t.dtype is dtype.torch for t in stored):
                self._made[key] = stacked([self._cast(names, dtype, through) for names in groups])
            else:
                shape = (len(groups), sum(len(t) for t in stored), *stored[0].shape[1:])
                stack = torch.empty(shape, dtype=dtype.torch, device=self.placement.of(groups[0][0]))
                for out, names in zip(stack, groups, strict=True):
                    out.copy_(self._cast(names, dtype, through))
                self._made[key] = stack
        return self._made[key]

    def _narrower(self, names: tuple[str, ...], through: tuple[DType, ...]) -> tuple[DType, ...]:
        stored = widest(*(dtype_of(self.checkpoint.tensors[n]) for n in names))
        return tuple(f for f in through if f.precision < stored.precision)

    def _cast(self, names: tuple[str, ...], dtype: DType, through: tuple[DType, ...]) -> Tensor:
        home = self.placement.of(names[0])
        return joined([store_as(_rounded(self.checkpoint.tensors[n].to(home), through), dtype) for n in names])

    def by_columns(self, weight: Tensor) -> Tensor:
        """The same [N, K] lying in memory by columns where it has more rows than columns; made once for each weight."""
        if weight.shape[0] <= weight.shape[1]:
            return weight
        key = ("columns", weight.data_ptr(), weight.shape, weight.dtype)
        if key not in self._made:
            self._made[key] = weight.t().contiguous().t()
        return self._made[key]

    def drop(self) -> None:
        """Forget every cast, so that the next variant starts from the checkpoint's own memory."""
        self._made.clear()

    @property
    def nbytes(self) -> int:
        seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._made.values()}
        return sum(seen.values())


class Weights:
    """The parameters of one run: a checkpoint's, as the recipe declares them, and a patch for planted faults."""

    def __init__(self, casts: Casts, semantics: Semantics, *, patch: Patch | None = None) -> None:
        self.casts = casts
        self.semantics = semantics
        self.patch = patch

    def _through(self, name: str, operand: DType | None) -> tuple[DType, ...]:
        """Formats that a parameter passes on its way: that of its declared rounding, then that of the operand."""
        declared = (DType.bf16,) if name.rsplit(".", 1)[-1] in self.semantics.bf16_params else ()
        return declared if operand is None else (*declared, operand)

    def get(self, name: str, dtype: DType, *, operand: DType | None = None) -> Tensor:
        """A parameter in `dtype`; operand: the format that a product reads it in, where that is narrower."""
        return self.cat((name,), dtype, operand=operand)

    def cat(self, names: tuple[str, ...], dtype: DType, *, operand: DType | None = None) -> Tensor:
        """Rows of several weights as one, [sum N, K]."""
        if self.patch is None:
            return self.casts.cast(names, dtype, self._through(names[0], operand))
        parts = [self._patched(self.patch, name, dtype, operand) for name in names]
        return joined(parts)

    def stored(self, names: tuple[str, ...], *, within: DType) -> DType:
        """The format that the checkpoint has these tensors in where it is bf16 and `within` holds it, else `within`."""
        formats = {dtype_of(self.casts.checkpoint.tensors[n]) for n in names}
        return DType.bf16 if formats == {DType.bf16} and self.patch is None and within is DType.f32 else within

    def _patched(self, patch: Patch, name: str, dtype: DType, operand: DType | None) -> Tensor:
        base = self.casts.cast((name,), DType.f64, self._through(name, None))
        patched = patch(name, base)
        if patched is base:
            return self.casts.cast((name,), dtype, self._through(name, operand))
        return store_as(patched if operand is None else round_to(patched, operand), dtype)

    def experts(
        self, prefix: str, leaves: tuple[str, ...], count: int, dtype: DType, *, operand: DType | None = None
    ) -> Tensor:
        """The experts of a layer as [E, sum N, K]; `leaves` are stacked within each expert."""
        names = [tuple(f"{prefix}.experts.{e}.{leaf}.weight" for leaf in leaves) for e in range(count)]

        if self.patch is None:
            return self.casts.stack(names, dtype, self._through("weight", operand))
        return stacked([self.cat(group, dtype, operand=operand) for group in names])


def _rounded(x: Tensor, through: tuple[DType, ...]) -> Tensor:
    for dtype in through:
        x = round_to(x, dtype)
    return x
