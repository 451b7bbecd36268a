"""The one place that sets torch's global floating-point state; nothing else touches torch.backends or its threads.

Determinism flags stay as torch has them (the record says how): a cumulative sum on CUDA has no deterministic form.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from harness.config import DeviceChoice, DeviceKind
from variants.errors import DeviceError


def check_device(device: DeviceChoice) -> None:
    """Raises DeviceError for a device that this machine does not have."""
    import torch

    there = torch.cuda.device_count()
    if device.kind is DeviceKind.cuda and device.index + device.pipeline > there:
        raise DeviceError(f"device {device.names[-1]} is not there: torch sees {there} CUDA devices; use device=cpu")


@contextmanager
def policy(device: DeviceChoice, *, tf32: bool = False, reduced_sums: bool = False) -> Iterator[None]:
    """Threads, TF32 and the dtype of partial sums for as long as the block runs, then as they were.

    float32 products are IEEE unless `tf32` names the other; partial sums of a bf16 product are float32 unless
    `reduced_sums` lets cuBLAS hold them in bf16, which is torch's own default.
    """
    import torch

    matmul = torch.backends.cuda.matmul
    conv = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    threads = torch.get_num_threads()
    before = (matmul.fp32_precision, conv.fp32_precision, matmul.allow_bf16_reduced_precision_reduction)
    wanted = "tf32" if tf32 else "ieee"
    if device.threads:
        torch.set_num_threads(device.threads)
    matmul.fp32_precision, conv.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = (
        wanted,
        wanted,
        reduced_sums,
    )
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        matmul.fp32_precision, conv.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = before
