"""Kernels that compile at the first call of a shape: said on screen, run before the clock starts, counted where not."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass
class Compiling:
    """How many kernels one engine has compiled, or loaded from where they are kept, so far."""

    impls: tuple[str, ...]
    count: int = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count for as long as the block runs; the first says so on stderr, and the end how long the block took."""
        if not self.impls:
            yield
            return
        first, began = self.count, time.perf_counter()
        with ExitStack() as waiting:
            if "inductor" in self.impls:
                from variants.ops import inductor

                waiting.enter_context(inductor.compilations(self._one))
            if self.impls != ("inductor",):
                from harness.launches_triton import compilations

                waiting.enter_context(compilations(self._one))
            yield
        if self.count > first:
            took = time.perf_counter() - began
            print(f"neartie: {self.count - first} kernels ready, {took:.1f} s with the first calls", file=sys.stderr)

    def _one(self) -> None:
        if self.count == 0:
            names = ", ".join(self.impls)
            print(f"neartie: compiling kernels (impl {names}), which are kept for later runs ...", file=sys.stderr)
        self.count += 1
