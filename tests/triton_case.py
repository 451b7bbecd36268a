"""Inputs for the kernel tests, their float64 references, and the one measure of agreement."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from variants.ops import kda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (1, 31, 63, 64, 65, 130)
LONG = (*LENGTHS, 1900)
# float32 sums of a few hundred terms, each within 2^-24 of its exact value, through a recurrence
F32_BOUND = 4e-6


def error(got: Tensor, reference: Tensor) -> float:
    """|got - reference| / |reference| in the Euclidean norm, NaN where an element was not written."""
    reference = reference.double().cpu()
    return float((got.double().cpu() - reference).norm() / reference.norm())


def agrees(got: Tensor, reference: Tensor, bound: float) -> bool:
    """Whether the error is a number and within the bound."""
    return error(got, reference) <= bound


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values on the device of the tests, the same for a seed on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@dataclass(frozen=True)
class DeltaCase:
    """Raw operands of the delta rule, as they leave the short convolution and the gate projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    beta: Tensor
    a_log: Tensor
    dt_bias: Tensor
    state: Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def changed(self, **more: Tensor) -> "DeltaCase":
        return replace(self, **more)

    def prepared(self) -> tuple[Tensor, ...]:
        """q (normalised and scaled), k, v, g, beta and state in float64 on the CPU."""
        q, k, v, f, beta, a_log, dt_bias, state = (x.double().cpu() for x in vars(self).values())
        g = kda.decay_gate(f, kda.decay_rate(a_log), dt_bias)
        return kda.l2norm(q) * self.scale, kda.l2norm(k), v, g, beta.sigmoid(), state

    def reference(self) -> tuple[Tensor, Tensor]:
        return kda.recurrent(*self.prepared())


def delta_case(
    length: int, *, heads: int, width: int, v_width: int, rows: int = 1, dtype: torch.dtype = torch.float32
) -> DeltaCase:
    """A case of `rows` sequences whose decay is strong in some channels and weak in others."""
    like = (rows, length, heads)
    q, k, f = (draw(*like, width, seed=s, dtype=dtype) for s in (1, 2, 3))
    a_log = draw(heads, 1, seed=4)
    return DeltaCase(
        q, k, draw(*like, v_width, seed=5, dtype=dtype), f, draw(*like, seed=6, dtype=dtype), a_log,
        2 * draw(heads, width, seed=7) - 2, draw(rows, heads, width, v_width, seed=8),
    )  # fmt: skip
