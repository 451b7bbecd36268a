"""Which Triton kernels are really launched, and when one is compiled: read off Triton itself, not off declarations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime.jit import KernelInterface

Launched = Callable[[str, list[Tensor], str], None]


@contextmanager
def watched(launched: Launched) -> Iterator[None]:
    """Call launched(kernel's name, its tensors, its other arguments) at every launch for as long as the block runs.

    A kernel inside an autotuner or a heuristic is launched by it and seen once, as what was called.
    """
    real = KernelInterface.__getitem__

    def at_grid(self: Any, grid: object) -> Callable[..., object]:
        launch = real(self, grid)

        def told(*args: object, **kwargs: object) -> object:
            given = [*args, *kwargs.values()]
            settings = [f"{k}={v}" for k, v in kwargs.items() if isinstance(v, int | str | bool)]
            launched(_name(self), [x for x in given if isinstance(x, Tensor)], " ".join(settings))
            return launch(*args, **kwargs)

        return told

    KernelInterface.__getitem__ = at_grid
    try:
        yield
    finally:
        KernelInterface.__getitem__ = real


@contextmanager
def compilations(compiling: Callable[[], None]) -> Iterator[None]:
    """Call compiling() before every kernel that is compiled or loaded from Triton's cache while the block runs."""
    before = knobs.runtime.jit_cache_hook

    def hook(**more: Any) -> bool | None:
        compiling()
        return before(**more) if before is not None else None

    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _name(kernel: Any) -> str:
    """The name of the function that was written, under whatever wraps it."""
    while not isinstance(getattr(kernel, "__name__", None), str):
        kernel = kernel.fn
    return kernel.__name__
