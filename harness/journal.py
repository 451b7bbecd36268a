"""Answers that a long run has so far, on disk, so that what finished before a failure is not asked for again.

One JSON line an answer, appended and flushed as it comes. A run that ends well removes its journal: the next run asks
anew, since a gate that read old answers would measure nothing.
"""

import json
import threading
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from variants.errors import DeviceError


class Journal:
    """The journal of one question; safe to write from several threads of one process."""

    def __init__(self, folder: Path, question: Mapping[str, object]) -> None:
        """question: JSON-plain, everything that the answers depend on: another question has another journal.

        Raises DeviceError where the folder cannot be written.
        """
        name = sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{name}.jsonl"
        self._lock = threading.Lock()
        try:
            self._known = _read(self.path)
        except OSError as error:
            raise DeviceError(f"{self.path} cannot be read ({error.strerror}); remove it") from error
        self.resumed = len(self._known)

    def get(self, key: str) -> Any:
        """The answer under `key`, None where there is none."""
        return self._known.get(key)

    def put(self, key: str, answer: Any) -> None:
        """Keep a JSON-plain answer. Raises DeviceError where it cannot be written."""
        with self._lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "answer": answer}) + "\n")
            except OSError as error:
                raise DeviceError(f"{self.path} cannot be written ({error.strerror}); choose results=DIR") from error
            self._known[key] = answer

    def remove(self) -> None:
        """Called when the run that needed the answers has them all."""
        self.path.unlink(missing_ok=True)
        self._known, self.resumed = {}, 0


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            found[entry["key"]] = entry["answer"]
        except (ValueError, KeyError, TypeError):  # the last line of a run that was killed while it wrote
            continue
    if found and not path.read_bytes().endswith(b"\n"):  # what is appended must not join that line
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    return found
