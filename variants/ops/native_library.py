"""The CPU kernels of `native_source/`: compiled once for this machine by its own compiler, kept, and called."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from variants.errors import DeviceError, EngineError
from variants.ops.calls import tell

SOURCE = Path(__file__).with_name("native_source")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
COMPILERS = ("g++", "c++")
COMPILE_S = 300
POINTERS, SIZES = 12, 12


class Code(IntEnum):
    """What an operation is; the numbers are those of the switch in `kernels.cpp`."""

    embed = 0
    rms_norm = 1
    linear = 2
    short_conv = 3
    delta_rule = 4
    gated_rms_norm = 5
    attention = 6
    silu_and_mul = 7
    route = 8
    experts = 9
    add = 10
    append = 11
    finish = 12


class Op(ctypes.Structure):
    """One operation: its code, where its operands lie, sizes and numbers, in the order that the kernel reads them."""

    _fields_ = [
        ("code", ctypes.c_int64),
        ("p", ctypes.c_void_p * POINTERS),
        ("n", ctypes.c_int64 * SIZES),
        ("f", ctypes.c_double * 2),
    ]


FLOAT, INTEGER = (torch.float32,), (torch.int64,)
WEIGHT = (torch.float32, torch.bfloat16)
# what an operand is in, by its place, where that is not float32
FORMATS: dict[Code, dict[int, tuple[torch.dtype, ...]]] = {
    Code.embed: {0: INTEGER, 1: WEIGHT},
    Code.linear: {1: WEIGHT},
    Code.short_conv: {3: INTEGER, 4: INTEGER},
    Code.delta_rule: {8: INTEGER, 9: INTEGER},
    Code.attention: {3: INTEGER},
    Code.route: {2: INTEGER},
    Code.experts: {1: INTEGER, 3: WEIGHT, 4: WEIGHT},
    Code.append: {0: INTEGER},
    Code.finish: {1: INTEGER, 2: INTEGER, 3: INTEGER, 4: INTEGER},
}


def op(code: Code, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float] = ()) -> Op:
    """An operation over tensors, whose memory the caller keeps.

    Raises EngineError for a tensor that the kernel would read otherwise than it lies: it sees an address alone.
    """
    others = FORMATS.get(code, {})
    for i, x in enumerate(tensors):
        formats = others.get(i, FLOAT)
        if x.dtype not in formats or not x.is_contiguous() or not x.is_cpu:
            lies = f"{x.dtype} on {x.device}{'' if x.is_contiguous() else ', not contiguous'}"
            raise EngineError(f"impl native: operand {i} of {code.name} is {lies}, expected {formats[0]} in one piece")
    made = Op(code=code)
    made.p[: len(tensors)] = [x.data_ptr() for x in tensors]
    made.n[: len(sizes)] = sizes
    made.f[: len(numbers)] = numbers
    return made


def call(code: Code, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float] = ()) -> None:
    """Run one operation on as many threads as torch has."""
    tell(code.name, tensors, f"{tuple(sizes)} {tuple(numbers)}")
    run((Op * 1)(op(code, tensors, sizes, numbers)))


def run(ops: "ctypes.Array[Op]", times: int = 1) -> None:
    """So many times the operations, first to last."""
    if library().neartie_run(ops, len(ops), times, torch.get_num_threads()):
        raise EngineError("impl native: memory or a thread was not to be had; set device.threads=1, or free some")


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels. Raises DeviceError where there is no compiler, or where it fails."""
    found = ctypes.CDLL(str(built()))
    found.neartie_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
    found.neartie_run.restype = ctypes.c_int64
    found.neartie_op_size.restype = ctypes.c_int64
    assert found.neartie_op_size() == ctypes.sizeof(Op), "an operation is the same on both sides"
    return found


def compiler() -> str:
    """The one that CXX names, else g++; it says which build is kept. Raises DeviceError where there is none."""
    named = os.environ.get("CXX")
    found = next((path for name in ([named] if named else COMPILERS) if (path := shutil.which(name))), None)
    if found is None and named:
        raise DeviceError(
            f"impl native: CXX={named} is no program that is found; name one, unset it, or choose impl torch"
        )
    if found is None:
        raise DeviceError(
            f"impl native needs a C++ compiler, found no {' or '.join(COMPILERS)}: install g++, or choose impl torch"
        )
    return found


def built(machine: str = "native") -> Path:
    """The library for a machine as the compiler names it; compiled where it is not kept yet.

    It is kept under XDG_CACHE_HOME (~/.cache), by its source, flags, compiler and this processor's instruction set.
    """
    cxx, flags = compiler(), (*FLAGS, f"-march={machine}")
    said = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False).stdout
    source = (file.read_text() for file in sorted(SOURCE.iterdir()) if file.is_file())
    known = "\n".join((*source, *flags, said, platform.machine(), _instructions()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neartie"
    file = folder / f"native-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if not file.exists():
        _compile(cxx, flags, file)
    return file


def _instructions() -> str:
    """What the processor can do, where the system says so: a folder may be shared by unlike machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(cxx: str, flags: Sequence[str], file: Path) -> None:
    """Beside its place first and then into it, so that two processes do not see each other's half."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=file.parent, suffix=".so")
    except OSError as error:
        raise DeviceError(f"impl native keeps its kernels in {file.parent}: {error}; set XDG_CACHE_HOME") from error
    os.close(handle)
    command = [cxx, *flags, "-o", unfinished, str(SOURCE / "kernels.cpp")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        told = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        why = "" if done.returncode == 0 else told or f"it ended with {done.returncode} and no word"
    except subprocess.TimeoutExpired:
        why = f"it took over {COMPILE_S} s"
    if why:
        os.unlink(unfinished)
        raise DeviceError(f"impl native: {cxx} could not compile its kernels: {why}; set CXX, or choose impl torch")
    os.chmod(unfinished, 0o755)
    os.replace(unfinished, file)
