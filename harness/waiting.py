"""How long this thread stood in line for a processor that other work of the machine had."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")  # nanoseconds run, nanoseconds in line, turns


@dataclass
class Waiting:
    """share: of the seconds of the block, those in line for a processor; None where the system does not say."""

    share: float | None = None


@contextmanager
def waiting() -> Iterator[Waiting]:
    """Measures the block; threads that this one waits for are not looked at, nor is another machine."""
    found = Waiting()
    began, before = time.perf_counter(), _in_line_s()
    try:
        yield found
    finally:
        after, seconds = _in_line_s(), time.perf_counter() - began
        if before is not None and after is not None and seconds > 0:
            found.share = min(max((after - before) / seconds, 0.0), 1.0)


def _in_line_s() -> float | None:
    try:
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # another system, or a kernel that does not count
        return None
