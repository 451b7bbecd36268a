"""Global floating-point state has one writer, which puts it back."""

import re
from pathlib import Path

import pytest
import torch

from harness.config import DeviceChoice, DeviceKind
from harness.numerics import check_device, policy
from variants.errors import DeviceError

ROOT = Path(__file__).parents[1]
WRITES = re.compile(
    r"torch\.backends[\w.]*\s*(?<![=!<>])=(?!=)|set_num_threads|set_num_interop|set_float32_matmul|"
    r"use_deterministic|fp32_precision\s*=(?!=)|allow_tf32\s*=(?!=)|allow_bf16_reduced\w*\s*=(?!=)"
)


def test_nothing_else_sets_global_state() -> None:
    """In all of harness, variants and experiments only harness/numerics.py writes torch's global state."""
    sources = [p for top in ("harness", "variants", "experiments") for p in (ROOT / top).rglob("*.py")]
    writers = {p.relative_to(ROOT).as_posix() for p in sources if WRITES.search(p.read_text(encoding="utf-8"))}
    assert writers == {"harness/numerics.py"}


def test_policy_holds_inside_and_is_undone_by_an_error() -> None:
    """Threads, TF32 and bf16 partial sums are as named inside, and as before after an error."""
    matmul = torch.backends.cuda.matmul
    before = (torch.get_num_threads(), matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction)

    def fails_inside() -> None:
        with policy(DeviceChoice(threads=before[0] + 1), tf32=True):
            assert torch.get_num_threads() == before[0] + 1
            assert matmul.fp32_precision == "tf32"
            assert matmul.allow_bf16_reduced_precision_reduction is False
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_inside()
    assert (torch.get_num_threads(), matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction) == before


def test_tf32_is_off_unless_named() -> None:
    """Without a word float32 products are IEEE, whatever was set before."""
    with policy(DeviceChoice(), tf32=True), policy(DeviceChoice()):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_a_device_that_is_not_there_is_refused() -> None:
    """The message names the device and how many there are."""
    with pytest.raises(DeviceError, match=r"cuda:99 is not there: torch sees \d+ CUDA devices; use device=cpu"):
        check_device(DeviceChoice(kind=DeviceKind.cuda, index=99))
