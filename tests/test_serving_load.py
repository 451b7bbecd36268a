"""Many clients at once, for seconds or five minutes: no wrong token, nothing left, bounded memory."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the [serve] extra is not installed")
pytest.importorskip("uvicorn", reason="the [serve] extra is not installed")

from serving_load import known_answers, load

from harness.ledger import Ledger

GROWTH_MIB = 64.0  # of the resident set after the first fifth


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "seconds", [5.0, pytest.param(300.0, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=["short", "long"]
)
def test_load(seconds: float, tmp_path: Path) -> None:
    """64 clients that ask, leave, stall and send rubbish: each finished answer has the tokens that are right for it."""
    known = known_answers(8, 24) if seconds > 60 else known_answers(3, 4)
    tally = load(seconds, known, tmp_path)
    print(tally.text())
    assert not tally.wrong, tally.wrong[:5]
    assert tally.counts["whole"] > 0
    assert tally.counts["streamed"] > 0
    assert tally.left == {"live": 0, "running": 0, "pages_used": 0}
    settled = tally.rss_mib[len(tally.rss_mib) // 5]
    assert max(tally.rss_mib) < settled + GROWTH_MIB
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert row["status"] == "ok"
    assert row["detail"]["served"]["left"] == {"sequences": 0, "slots": 0, "pages": 0}
