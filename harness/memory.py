"""Peak memory of a stretch of work: resident memory of this process, or what torch allocated on a device."""

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): resets the peak resident set size to the present one


@dataclass
class PeakMemory:
    """bytes: the peak, known when the block has ended. since: "run" (this block) or "process" (all before it too)."""

    bytes: int | None = None
    since: str = "run"


@contextmanager
def peak_memory(device: str = "cpu") -> Iterator[PeakMemory]:
    """Measure the peak within the block.

    On "cpu": the resident set of the whole process, weights and interpreter included. The kernel resets its peak where
    it lets us; elsewhere the figure is that of the process so far, and `since` says so. On "cuda[:n]": the most bytes
    torch had allocated on that device, not what its cache reserved.
    """
    peak = PeakMemory()
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        try:
            yield peak
        finally:
            peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    peak.since = "run" if _reset() else "process"
    try:
        yield peak
    finally:
        peak.bytes = peak_resident_bytes()


def _reset() -> bool:
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:  # not Linux, or a sandbox that keeps it from us
        return False
    return True


def peak_resident_bytes() -> int:
    """The most memory that this process has had resident since it began, or since a run here began to be measured."""
    if STATUS.exists():
        high = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        if high:
            return int(high[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
