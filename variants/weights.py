"""Parameters in the dtype that an operation reads them in: cast once, shared by every variant of a process."""

from collections.abc import Callable

import torch
from torch import Tensor

from variants.checkpoint import Checkpoint
from variants.dtypes import DType, round_to
from variants.recipe import Semantics

Patch = Callable[[str, Tensor], Tensor]


class Casts:
    """Cache of a checkpoint's tensors by (name, dtype, device), least recently made dropped beyond a budget."""

    def __init__(self, checkpoint: Checkpoint, *, device: str = "cpu") -> None:
        self.checkpoint = checkpoint
        self.device = device
        self._made: dict[tuple[object, ...], Tensor] = {}

    def cast(self, names: tuple[str, ...], dtype: DType, rounded: bool) -> Tensor:
        """The named tensors stacked along their first dimension, in `dtype`; rounded to bf16 first when asked."""
        key = (names, dtype, rounded)
        if key not in self._made:
            parts = [self.checkpoint.tensors[n].to(self.device) for n in names]
            if rounded:
                parts = [round_to(p, DType.bf16) for p in parts]
            self._made[key] = (
                torch.cat([p.to(dtype.torch) for p in parts]) if len(parts) > 1 else parts[0].to(dtype.torch)
            )
        return self._made[key]

    def stack(self, names: tuple[str, ...], dtype: DType, make: Callable[[], Tensor]) -> Tensor:
        """A tensor derived from several parameters (the experts of a layer), kept like a cast."""
        key = ("stack", names, dtype)
        if key not in self._made:
            self._made[key] = make()
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

    def _rounded(self, name: str) -> bool:
        kinds = self.semantics.bf16_params
        leaf = name.rsplit(".", 1)[-1]
        return leaf in kinds

    def get(self, name: str, dtype: DType) -> Tensor:
        return self.cat((name,), dtype)

    def cat(self, names: tuple[str, ...], dtype: DType) -> Tensor:
        """Rows of several weights as one, [sum N, K]."""
        if self.patch is None:
            return self.casts.cast(names, dtype, self._rounded(names[0]))
        parts = []
        for name in names:
            base = self.casts.cast((name,), DType.f64, self._rounded(name))
            patched = self.patch(name, base)
            parts.append(
                self.casts.cast((name,), dtype, self._rounded(name)) if patched is base else patched.to(dtype.torch)
            )
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def experts(self, prefix: str, leaves: tuple[str, ...], count: int, dtype: DType) -> Tensor:
        """The experts of a layer as [E, sum N, K]; `leaves` are stacked within each expert."""
        names = [tuple(f"{prefix}.experts.{e}.{leaf}.weight" for leaf in leaves) for e in range(count)]
        flat = tuple(n for group in names for n in group)

        def make() -> Tensor:
            return torch.stack([self.cat(group, dtype) for group in names])

        return make() if self.patch is not None else self.casts.stack(flat, dtype, make)
