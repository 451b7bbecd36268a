"""An HTTP server that is asked in JSON: time-outs that hold for a whole answer, retries with back-off.

What may pass by itself (no connection, a time-out, 429, 5xx, an answer that is no JSON) is tried again; what a server
refuses is not. Every failure in the end is an EngineError of one line, without the server's address, which would name
somebody's machine in a record.
"""

import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import httpx2

from variants.errors import EngineError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MAX_ANSWER_BYTES = 256 * 2**20
SHOWN_CHARS = 80
BUSY = 429


@dataclass(frozen=True)
class Chunk:
    """One event of a stream and when it came, in seconds since the request was sent."""

    seconds: float
    content: dict[str, Any]


class _PassingError(Exception):
    """A failure that another try may not meet; `wait_s` is what the server asked for, 0 for nothing."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class JsonServer:
    """Asks one server; safe to use from several threads."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        retries: int = 3,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """timeout_s: for one whole answer. Raises EngineError for an address that cannot be one."""
        self.name = sha256(url.encode()).hexdigest()[:16]  # tells two servers apart and names none
        self._timeout_s, self._retries, self._pause = timeout_s, retries, pause
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if not url.startswith(("http://", "https://")):
            raise EngineError(f"engine.url: got {url!r}, expected http://HOST:PORT or https://...")
        base = url.rstrip("/").removesuffix("/v1")
        limits = httpx2.Limits(max_connections=None)
        self._client = httpx2.Client(base_url=base, headers=headers, timeout=timeout_s, limits=limits, trust_env=False)
        weakref.finalize(self, self._client.close)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`."""
        return self._tried(lambda: self._object(self._whole("GET", path, None)))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that answers `body`."""
        return self._tried(lambda: self._object(self._whole("POST", path, body)))

    def stream(self, path: str, body: Mapping[str, Any]) -> list[Chunk]:
        """The events that answer `body`, up to [DONE]."""
        return self._tried(lambda: list(self._events(path, body)))

    def _tried(self, ask: Callable[[], Any]) -> Any:
        pause_s = FIRST_PAUSE_S
        for left in range(self._retries, -1, -1):
            try:
                return ask()
            except _PassingError as error:
                if not left:
                    tries = self._retries + 1
                    raise EngineError(f"{error} ({tries} {'try' if tries == 1 else 'tries'})") from error
                self._pause(min(max(pause_s, error.wait_s), LONGEST_PAUSE_S))
                pause_s *= 2
        raise AssertionError

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        with _passing(self._timeout_s):
            began = time.monotonic()
            with self._client.stream(method, path, json=body) as response:
                content = bytearray()
                for part in response.iter_bytes():
                    content += part
                    self._check_bounds(began, len(content))
                _check_status(response, bytes(content))
                return bytes(content)

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[Chunk]:
        with _passing(self._timeout_s):
            began, size = time.monotonic(), 0
            with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    _check_status(response, response.read())
                for event in httpx2.EventSource(response):
                    size += len(event.data)
                    self._check_bounds(began, size)
                    if event.data.strip() == "[DONE]":
                        return
                    yield Chunk(time.monotonic() - began, self._object(event.data.encode()))
                raise _PassingError("the stream broke off before [DONE]")

    def _check_bounds(self, began: float, size: int) -> None:
        if time.monotonic() - began > self._timeout_s:
            raise _PassingError(_late(self._timeout_s))
        if size > MAX_ANSWER_BYTES:
            raise EngineError(f"the server sent more than {MAX_ANSWER_BYTES} bytes and went on; this is no answer")

    @staticmethod
    def _object(content: bytes) -> dict[str, Any]:
        try:
            found = json.loads(content)
        except ValueError as error:  # also bytes that are no UTF-8
            raise _PassingError(f"the server answered with no JSON: {_shown(content)}") from error
        if not isinstance(found, dict):
            raise _PassingError(f"the server answered with no JSON object: {_shown(content)}")
        return found


class _passing:
    """A `with` block that turns what the client raises on the way into `_PassingError`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx2.TimeoutException):
            raise _PassingError(_late(self._timeout_s)) from error
        if isinstance(error, httpx2.ConnectError):
            raise _PassingError("no server answers at engine.url; start it, or name another") from error
        if isinstance(error, httpx2.HTTPError | httpx2.StreamError | httpx2.SSEError):
            why = " ".join(str(error).split()) or type(error).__name__
            raise _PassingError(f"the server broke off its answer: {why}") from error
        if isinstance(error, httpx2.InvalidURL):
            raise EngineError(f"engine.url cannot be read: {error}") from error


def _late(timeout_s: float) -> str:
    return f"no answer within {timeout_s:g} s; raise engine.timeout_s if the server needs longer"


def _check_status(response: httpx2.Response, content: bytes) -> None:
    code = response.status_code
    if code == 200:
        return
    said = f"the server answered {code}: {_message(content)}"
    if code == BUSY or code >= 500:
        wait = response.headers.get("retry-after", "")
        raise _PassingError(said, float(wait) if wait.isdigit() else 0.0)
    if code in (401, 403):
        said += "; put the API key into the environment variable that engine.key names"
    raise EngineError(said)


def _message(content: bytes) -> str:
    """What an error's body says: its `error.message`, `message` or `detail`, else its beginning."""
    try:
        found = json.loads(content)
    except ValueError:
        return _shown(content)
    inner = found.get("error", found) if isinstance(found, dict) else found
    said = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
    return _shown(str(said or found).encode(), 300)


def _shown(content: bytes, chars: int = SHOWN_CHARS) -> str:
    text = " ".join(content.decode("utf-8", "replace").split())
    return (text[:chars] + "...") if len(text) > chars else text or "nothing"
