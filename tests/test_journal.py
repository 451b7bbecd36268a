"""Answers outlive the run that asked for them, and only until a run has them all."""

from pathlib import Path

import pytest

from harness.journal import Journal
from variants.errors import DeviceError


def test_answers_are_there_for_the_next_run(tmp_path: Path) -> None:
    """What was put is found by a second journal of the same question, and by none of another."""
    first = Journal(tmp_path / "j", {"a": 1})
    first.put("p0", {"tokens": [1, 2], "gap": float("inf")})
    again = Journal(tmp_path / "j", {"a": 1})
    assert (again.resumed, again.get("p0")) == (1, {"tokens": [1, 2], "gap": float("inf")})
    assert Journal(tmp_path / "j", {"a": 2}).get("p0") is None
    again.remove()
    assert Journal(tmp_path / "j", {"a": 1}).resumed == 0


def test_a_torn_last_line_costs_that_answer_alone(tmp_path: Path) -> None:
    """A run that was killed while it wrote leaves half a line: it is passed over, and the next line is whole."""
    first = Journal(tmp_path, {})
    first.put("p0", 1)
    first.put("p1", 2)
    first.path.write_bytes(first.path.read_bytes()[:-4])
    again = Journal(tmp_path, {})
    assert (again.get("p0"), again.get("p1")) == (1, None)
    again.put("p2", 3)
    assert (Journal(tmp_path, {}).get("p0"), Journal(tmp_path, {}).get("p2")) == (1, 3)


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    """A file stands where the folder should be: exit code 4, with what to do."""
    (tmp_path / "f").write_text("")
    with pytest.raises(DeviceError, match="choose results=DIR"):
        Journal(tmp_path / "f", {}).put("p", 1)
