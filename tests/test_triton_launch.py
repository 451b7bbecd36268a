"""What a kernel refuses before it starts, and the rounding that all of them share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.triton_case import DEVICE, draw
from variants.ops.launch_triton import dot, narrow

PROGRAM = """
import torch
from variants.errors import DeviceError
from variants.ops.norm_triton import rms_norm
try:
    rms_norm(torch.zeros(1, 4), torch.zeros(4), 1e-5)
except DeviceError as error:
    print(error)
"""


def test_without_a_gpu_or_the_interpreter_it_stops_in_one_line() -> None:
    """Tensors on the CPU without TRITON_INTERPRET=1 raise DeviceError, which says what to do."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment,
        cwd=Path(__file__).parents[1], check=True,
    )  # fmt: skip
    assert done.stdout.startswith("rms norm: impl triton needs a CUDA device, got cpu")
    assert "TRITON_INTERPRET=1" in done.stdout
    assert done.stdout.count("\n") == 1


@triton.jit
def _narrow_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, narrow(tl.load(x + at), out.dtype.element_ty))


@triton.jit
def _dot_kernel(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, dot(tl.load(x + at), tl.load(y + at), "ieee"))


def awkward() -> Tensor:
    """Values that lie on ties, just beside them, at both ends of the range, and infinities."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x00800000, 0x7F800000, 0],
                        dtype=torch.int32)  # fmt: skip
    special = bits.view(torch.float32)
    return torch.cat([special, -special, draw(112, seed=1).cpu()]).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_rounds_ties_to_even(dtype: torch.dtype) -> None:
    """The kernels' rounding is torch's, bit for bit, ties and infinities included."""
    x = awkward()
    if dtype is torch.float16:
        x = x.clamp(-6e4, 6e4)
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    _narrow_kernel[(1,)](x, out, N=128)  # pyright: ignore[reportArgumentType]
    assert torch.equal(out, x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_multiplies_exactly(dtype: torch.dtype) -> None:
    """The product of small integers is exact in every dtype (the interpreter alone would multiply bfloat16's bits)."""
    x, y = ((4 * draw(32, 32, seed=s)).round().to(dtype) for s in (1, 2))
    out = torch.full((32, 32), float("nan"), device=DEVICE)
    _dot_kernel[(1,)](x, y, out, N=32)  # pyright: ignore[reportArgumentType]
    assert torch.equal(out, x.float() @ y.float())
