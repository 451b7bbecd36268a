"""An answer as text while its tokens come: whole characters, and nothing that a stop may yet take back."""

import codecs
from collections.abc import Sequence

from harness.serving.vocabulary import Vocabulary


class Transcript:
    """The text of one answer. `text` is all of it so far, up to a stop; `add` gives what may be said now.

    stops: strings that end the answer and are not part of it. skip_special: special tokens have no text.
    """

    def __init__(self, vocabulary: Vocabulary, *, stops: Sequence[str] = (), skip_special: bool = True) -> None:
        self._vocabulary, self._stops = vocabulary, tuple(stops)
        self._skip = vocabulary.special if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""
        self._released = 0

    def prompt(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of a prompt that the answer goes on from, and where in it each token begins, in characters.

        Half a character at its end is completed by the answer, and is its text.
        """
        parts: list[str] = []
        offsets, length = [], 0
        for token in ids:
            offsets.append(length)
            parts.append(self._decoder.decode(self._vocabulary.bytes_of(token)))
            length += len(parts[-1])
        return "".join(parts), offsets

    def add(self, token: int) -> tuple[str, bool]:
        """What can be said after one more token, and whether a stop is met: then the answer ends before it."""
        before = len(self.text)
        if token not in self._skip:
            self.text += self._decoder.decode(self._vocabulary.bytes_of(token))
        cut = self._stop_from(before)
        if cut is not None:
            self.text = self.text[:cut]
            return self._release(cut), True
        return self._release(len(self.text) - self._held()), False

    def end(self) -> tuple[str, bool]:
        """What is left when no token follows, and whether that meets a stop; half a character is U+FFFD."""
        before = len(self.text)
        self.text += self._decoder.decode(b"", final=True)
        cut = self._stop_from(before)
        self.text = self.text if cut is None else self.text[:cut]
        return self._release(len(self.text)), cut is not None

    def _stop_from(self, before: int) -> int | None:
        """Where the first stop begins that is complete now and was not when the text had `before` characters."""
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
        return min((i for i in found if i >= 0), default=None)

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop."""
        return max((_overlap(self.text, stop) for stop in self._stops), default=0)

    def _release(self, upto: int) -> str:
        said = self.text[self._released : upto]
        self._released = max(upto, self._released)
        return said


def _overlap(text: str, stop: str) -> int:
    """The longest proper beginning of `stop` that `text` ends with."""
    most = min(len(stop) - 1, len(text))
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
