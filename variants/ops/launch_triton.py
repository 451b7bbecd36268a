"""What every Triton kernel here shares: the checks before a launch, rounding and products that name their precision.

The kernels run on a CUDA device, or on the CPU when TRITON_INTERPRET=1 was set before triton was first imported. They
never fall back to other arithmetic: what a kernel cannot do is refused in one line.
"""
# The language inside the kernels is Triton's, whose constants and launch options are not Python's to check.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from variants.errors import DeviceError, UsageError

try:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError as error:
    raise DeviceError("impl triton needs the triton package (>= 3.6): install it, or choose impl torch") from error

INTERPRETED = bool(knobs.runtime.interpret)
INTERPRET = tl.constexpr(INTERPRETED)
FORMATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Precision(Enum):
    """How a product of two float32 operands is computed; narrower operands are multiplied exactly whatever it says."""

    ieee = "ieee"
    tf32 = "tf32"
    tf32x3 = "tf32x3"


def require(name: str, allowed: Sequence[torch.dtype] = tuple(FORMATS), **tensors: Tensor | None) -> None:
    """Refuse operands that the kernel `name` cannot take: DeviceError for where they lie, UsageError for their dtype.

    allowed: dtypes of every tensor given. All must lie on one device.
    """
    given = {n: x for n, x in tensors.items() if x is not None}
    homes = {x.device for x in given.values()}
    if len(homes) > 1:
        raise UsageError(f"{name}: operands lie on {sorted(map(str, homes))}; move them to one device")
    (home,) = homes
    if home.type != "cuda" and not (INTERPRETED and home.type == "cpu"):
        raise DeviceError(
            f"{name}: impl triton needs a CUDA device, got {home}; move the tensors there, set TRITON_INTERPRET=1 "
            "before the start to run on the CPU, or choose impl torch"
        )
    for label, x in given.items():
        if x.dtype not in allowed:
            names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            raise UsageError(f"{name}: {label} is {str(x.dtype).removeprefix('torch.')}, expected one of: {names}")


def expect(name: str, shapes: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Refuse operands whose shapes do not fit together: shapes maps a label to (tensor, expected shape)."""
    for label, (x, shape) in shapes.items():
        if tuple(x.shape) != shape:
            raise UsageError(f"{name}: {label} has shape {list(x.shape)}, expected {list(shape)}")


def format_of(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a dtype that the kernels can store."""
    if dtype not in FORMATS:
        raise UsageError(f"the kernels store float32, bfloat16 or float16, got {dtype}")
    return FORMATS[dtype]


def block(n: int) -> int:
    """The least power of two that covers n, at least 16: the width of a tile that holds a whole dimension."""
    return max(16, 1 << (n - 1).bit_length())


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of a packed batch: where each begins, which state slot it owns, and how it falls into chunks.

    cu_seqlens int32 [N + 1]; slots int32 [N], -1 for padding, whose state is neither read nor written and whose output
    is zero; chunks int32 [NT, 2] of (sequence, chunk within it); chunk_starts int32 [N]: a sequence's first chunk.
    Built once a step on the host and used by every layer.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    slots: Tensor
    chunks: Tensor = field(repr=False)
    chunk_starts: Tensor = field(repr=False)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def ragged(lengths: Sequence[int], slots: Sequence[int], *, device: str | torch.device, chunk_size: int = 64) -> Ragged:
    """Describe a packed batch; two sequences may not own one slot."""
    if len(lengths) != len(slots) or not lengths or min(lengths) < 1:
        raise UsageError(f"a packed batch needs one slot a sequence and lengths of 1 or more, got {lengths}, {slots}")
    live = [s for s in slots if s >= 0]
    if len(set(live)) != len(live):
        raise UsageError(f"two sequences of a packed batch own one state slot: {list(slots)}")
    starts, first, chunks = [0], [], []
    for n, length in enumerate(lengths):
        starts.append(starts[-1] + length)
        first.append(len(chunks))
        chunks += [(n, c) for c in range(-(-length // chunk_size))]
    cu, where, table, begin = (torch.tensor(x, dtype=torch.int32) for x in (starts, slots, chunks, first))
    return Ragged(tuple(lengths), cu.to(device), where.to(device), table.to(device), begin.to(device))


@triton.jit
def enter(PDL: tl.constexpr):
    """Wait for the launch before this one, then let the next one begin; loads above it run beside the former's end."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """x rounded to dtype, ties_to_even (the interpreter's own cast to bfloat16 truncates)."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b, precision: tl.constexpr):
    """a @ b summed in float32: one narrow dtype as it is, anything else widened to float32 and taken at `precision`.

    The interpreter multiplies bfloat16 as integers, so there narrow operands are widened too: the products are exact.
    """
    if a.dtype == b.dtype and a.dtype != tl.float32 and not INTERPRET:
        return tl.dot(a, b)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=precision)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in float32."""
    return 1.0 / (1.0 + tl.exp(-x))
