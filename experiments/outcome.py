"""How one job ended: its exit code, and in one line what went wrong, whatever it was."""

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Generator, Sequence
from datetime import UTC, datetime
from types import TracebackType

from harness.failure import one_line, traceback_text
from variants.errors import DeviceError, NeartieError, UsageError

INTERNAL, INTERRUPTED = 6, 130
OUT_OF_MEMORY = {"MemoryError", "OutOfMemoryError"}


class Contained:
    """A `with` block that no error leaves, unless `contain` is false: then it is told and raised on.

    code: the exit code, 0 until set. message: empty, or one line. An error that is none of ours is a defect of this
    program: its traceback goes to a file of its own under the system's temporary folder, named in the message.
    """

    def __init__(self, job: str, *, contain: bool = True) -> None:
        self.job = job
        self.code = 0
        self.message = ""
        self.kind = ""
        self._contain = contain

    def __enter__(self) -> "Contained":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not self._contain:
            return False
        self.kind = type(error).__name__
        self.code, self.message = _told(error)
        return True

    def as_dict(self) -> dict[str, object]:
        return {"class": self.kind, "message": self.message, "exit_code": self.code}


@contextlib.contextmanager
def naming(words: Sequence[str]) -> Generator[None]:
    """A refusal of a variant ends with those of the command's words that set an axis and that it does not name."""
    try:
        yield
    except UsageError as error:
        set_ = [word.lstrip("+") for word in words if word.lstrip("+").startswith("variant.")]
        unnamed = [word for word in set_ if word.removeprefix("variant.") not in str(error)]
        if not unnamed or not str(error).startswith("variant"):
            raise
        raise UsageError(f"{error}; this command sets {', '.join(unnamed)}") from error


@contextlib.contextmanager
def sigterm_as_interrupt() -> Generator[None]:
    """A job that is told to end, by a scheduler say, leaves its row as one does that is interrupted."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("terminated")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _told(error: BaseException) -> tuple[int, str]:
    if isinstance(error, NeartieError):
        return error.exit_code, " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; the same command again does what is missing"
    if isinstance(error, BrokenPipeError):  # whoever read the output has read enough
        return 0, ""
    if type(error).__name__ in OUT_OF_MEMORY:
        return DeviceError.exit_code, f"out of memory: {one_line(error)}; take fewer prompts (limit=) or another device"
    return INTERNAL, f"internal: {one_line(error)}; traceback in {_saved(error)}"


def _saved(error: BaseException) -> str:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    handle, path = tempfile.mkstemp(prefix=f"neartie-{stamp}-{os.getpid()}-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(traceback_text(error))
    return path
