"""Where the time of a run goes: named parts, each charged what no part inside it is charged.

`part` costs nothing outside of `recorded`. It marks a block or, as a decorator, a function; not a generator.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

OTHER = "other"  # what lies in no part


@dataclass
class Parts:
    """Seconds by part in the order of their first end: by the clock, and of all of this process's threads."""

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    _since: tuple[float, float] = (0.0, 0.0)

    def _charge(self) -> None:
        """What went by since the last change goes to the innermost open part."""
        now = time.perf_counter(), time.process_time()
        if self._open:
            for seconds, a, b in zip((self.wall, self.cpu), self._since, now, strict=True):
                seconds[self._open[-1]] = seconds.get(self._open[-1], 0.0) + b - a
        self._since = now

    def begin(self, name: str) -> None:
        self._charge()
        self._open.append(name)

    def end(self) -> None:
        self._charge()
        self._open.pop()

    def record(self) -> dict[str, dict[str, float]]:
        """The ledger's `detail.seconds`."""
        return {"wall": self.wall, "cpu": self.cpu}

    def line(self) -> str:
        """All seconds and those of each part, by the clock, the largest first."""
        sizes = sorted(self.wall.items(), key=lambda item: (item[0] == OTHER, -item[1]))
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in sizes if seconds >= 0.05)
        return f"took {sum(self.wall.values()):.1f} s ({sum(self.cpu.values()):.1f} s of processors): {told}"


_recording: ContextVar[Parts | None] = ContextVar("parts", default=None)


@contextmanager
def recorded() -> Iterator[Parts]:
    """The parts of the block."""
    parts = Parts()
    token = _recording.set(parts)
    parts.begin(OTHER)
    try:
        yield parts
    finally:
        parts.end()
        _recording.reset(token)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Charge the block to a part of the run that is recorded, if one is."""
    parts = _recording.get()
    if parts is None:
        yield
        return
    parts.begin(name)
    try:
        yield
    finally:
        parts.end()
