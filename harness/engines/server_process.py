"""A server that this process starts, waits for and stops; it ends when its owner does, however that happens.

The child is `python -m MODULE` with its settings as one JSON word. It writes one line of JSON with its address when it
listens, and ends when its standard input does, which the operating system closes for an owner that was killed. All else
that it prints goes to a file: nobody reads a pipe after that line, and a full one would stop the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from variants.errors import EngineError


class Scratch:
    """A temporary folder that is removed when it is no longer used; `path` / NAME is a place in it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="neartie-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


READY_S = 120.0
STOP_S = 10.0
# This host's own server is asked directly, whatever proxy the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
ROOT = Path(__file__).resolve().parents[2]


class ServerProcess:
    """One child. url: where it listens."""

    def __init__(
        self, module: str, settings: Mapping[str, Any], *, health: str = "/health", ready_s: float = READY_S
    ) -> None:
        """Start it and wait until `health` answers 200. Raises EngineError with its last words where it never does."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _stop)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(dict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._stop = weakref.finalize(self, _stop, self._process, self._log)
        try:
            self.url = self._announced(ready_s)
            self._wait_healthy(health, ready_s)
        except BaseException:
            self.stop()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End the child and wait for it; a second call does nothing."""
        self._stop()

    def _announced(self, ready_s: float) -> str:
        assert self._process.stdout is not None
        line: list[bytes] = []
        reader = threading.Thread(target=lambda out: line.append(out.readline()), args=(self._process.stdout,))
        reader.daemon = True
        reader.start()
        reader.join(ready_s)
        if not line or not line[0].strip():
            raise EngineError(
                f"the server did not start{'' if line else f' within {ready_s:g} s'}: {self._last_words()}"
            )
        try:
            return str(json.loads(line[0])["url"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"the server did not say where it listens, but {line[0][:80]!r}") from error

    def _wait_healthy(self, health: str, ready_s: float) -> None:
        until = time.monotonic() + ready_s
        while time.monotonic() < until:
            if not self.alive:
                raise EngineError(f"the server ended before it was ready: {self._last_words()}")
            try:
                with _DIRECT.open(self.url + health, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise EngineError(f"the server was not ready within {ready_s:g} s: {self._last_words()}")

    def _last_words(self) -> str:
        """The last line on its standard error that is an error's, else the last line."""
        if self._process.poll() is None:
            self._process.kill()
        _wait(self._process)
        self._log.seek(0)
        lines = [x.strip() for x in self._log.read().decode(errors="replace").splitlines() if x.strip()]
        telling = [x for x in lines if "error" in x.lower()] or lines
        return telling[-1][:300] if telling else "it said nothing"


def _stop(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _wait(process)
    process.stdout.close()
    log.close()


def _wait(process: subprocess.Popen[bytes]) -> None:
    """For a child that was killed; one that the kernel does not let go is not waited for."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)


def announce(out: int, url: str) -> None:
    """In the child: say where it listens on what `end_with_owner` gave, and close it."""
    with os.fdopen(out, "w") as owner:
        owner.write(json.dumps({"url": url}) + "\n")


def end_with_owner() -> int:
    """In the child, first of all: end at once when the owner closes standard input or is gone; a thread watches.

    Returns the descriptor to announce on; from here on standard output is standard error.
    """
    out = os.dup(1)
    os.dup2(2, 1)

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock would outlive the interpreter
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    return out
