"""A server that this process starts, waits for and stops; it ends when its owner does, however that happens.

The child is `python -m MODULE` with its settings as one JSON word. It prints one line of JSON with its address when it
listens, and ends when its standard input does, which the operating system closes for an owner that was killed.
"""

from __future__ import annotations

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
        return str(json.loads(line[0])["url"])

    def _wait_healthy(self, health: str, ready_s: float) -> None:
        until = time.monotonic() + ready_s
        while time.monotonic() < until:
            if not self.alive:
                raise EngineError(f"the server ended before it was ready: {self._last_words()}")
            try:
                with urllib.request.urlopen(self.url + health, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise EngineError(f"the server was not ready within {ready_s:g} s: {self._last_words()}")

    def _last_words(self) -> str:
        """The last line on its standard error that is an error's, else the last line."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
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
        process.wait()
    process.stdout.close()
    log.close()


def announce(url: str) -> None:
    """In the child: say where it listens."""
    print(json.dumps({"url": url}), flush=True)


def end_with_owner() -> None:
    """In the child: end at once when the owner closes standard input or is gone. Returns; a thread watches."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock would outlive the interpreter
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
