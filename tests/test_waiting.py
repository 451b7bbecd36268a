"""Time in line for a processor is told from time of one's own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import waiting as waiting_module
from harness.waiting import waiting

SPIN = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"


def _spin(seconds: float) -> float:
    """Work for so many processor seconds; the share of the time that was spent in line."""
    with waiting() as found:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
    assert found.share is not None
    return found.share


@pytest.mark.skipif(not waiting_module.SCHEDSTAT.is_file(), reason="this system does not say")
def test_a_shared_processor_is_seen_and_a_sleep_is_not() -> None:
    """With three others on one processor this thread stands in line most of the time; asleep it does not."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(3)]
    try:
        time.sleep(0.2)
        assert _spin(0.05) > 0.3
        with waiting() as asleep:
            time.sleep(0.1)
    finally:
        os.sched_setaffinity(0, mine)
        for other in others:
            other.kill()
            other.wait()
    assert asleep.share is not None
    assert asleep.share < 0.5


def test_a_system_that_does_not_say_gives_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file, or one in another form, is None and no error."""
    (tmp_path / "other").write_text("words")
    for name in ("missing", "other"):
        monkeypatch.setattr(waiting_module, "SCHEDSTAT", tmp_path / name)
        with waiting() as found:
            pass
        assert found.share is None
