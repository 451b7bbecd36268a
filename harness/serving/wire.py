"""Bodies in and answers out with a bound on each: size and time of a body, time of a reader that does not read."""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from harness.serving.api_error import ApiError, dumps
from harness.serving.desk import Ticket

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
CLOSE = {"Connection": "close"}
BODIES = 64  # of the largest, that may be read at a time
PART_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Limits:
    """body_bytes: of one request. read_s: for a whole body. write_s: for a reader to take what lies ready."""

    body_bytes: int = 2**20
    read_s: float = 30.0
    write_s: float = 30.0


def check_key(request: Request, key: str | None) -> None:
    """Raises ApiError unless the request bears the key; compared in a time that does not tell how much is right."""
    if key is None:
        return
    given = request.headers.get("authorization", "").encode("latin-1")
    kind, _, token = given.partition(b" ")
    same = hmac.compare_digest(token.strip(), key.encode())
    if not same or kind.lower() != b"bearer":
        raise ApiError(
            401,
            "no API key, or a wrong one; send Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


@dataclass
class Inbox:
    """Bytes of bodies that are being read."""

    held: int = 0


async def read_body(request: Request, limits: Limits, inbox: Inbox) -> bytes:
    """The body, refused as soon as it says or shows that it, or all that are read, are too large. Raises ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content type {kind[:80]!r}, expected application/json", headers=CLOSE)
    said = request.headers.get("content-length", "0")
    if said.isdigit() and int(said[:20]) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.read_s):
            async for part in request.stream():
                body += part
                inbox.held += len(part)
                if len(body) > limits.body_bytes:
                    raise _too_large(limits)
                if inbox.held > BODIES * limits.body_bytes:
                    raise ApiError(
                        429, "too many bodies at a time; try again later", headers=CLOSE | {"Retry-After": "1"}
                    )
    except TimeoutError as error:
        raise ApiError(408, f"no whole body within {limits.read_s:g} s", headers=CLOSE) from error
    finally:
        inbox.held -= len(body)
    return bytes(body)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes", code="body_too_large", headers=CLOSE)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled, and ClientDisconnect raised, as soon as the client has gone."""
    doing = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        await _end(doing, gone)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Whole(Response):
    """An answer in one body, of a ticket that lasts until a reader in time has taken it."""

    media_type = "application/json"

    def __init__(self, content: object, held: AbstractContextManager[Any], limits: Limits) -> None:
        super().__init__(dumps(content))
        self._held, self._limits = held, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await _Writer(scope, send, self._limits).write(self.raw_headers, _parts(bytes(self.body)))


async def _parts(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), PART_BYTES):
        yield body[start : start + PART_BYTES]


class EventStream(Response):
    """Server-sent events of one ticket: ends when they do, when the client goes, or when it does not read."""

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, events: AsyncGenerator[dict[str, Any], None], limits: Limits) -> None:
        super().__init__(status_code=200, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._ticket, self._events, self._limits = ticket, events, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._ticket:
            writer = _Writer(scope, send, self._limits)
            sending = asyncio.create_task(writer.write(self.raw_headers, self._lines()))
            gone = asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                await _end(sending, gone)

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        """The events; the headers are out, so a failure is one too."""
        async with aclosing(self._events) as events:
            with suppress_api_error() as failed:
                async for event in events:
                    yield b"data: " + dumps(event) + b"\n\n"
        if failed.error is not None:
            yield b"data: " + dumps(failed.error.body()) + b"\n\n"
        yield DONE


class _Writer:
    """Writes an answer part by part, each within write_s; the connection of a reader that stalls is aborted."""

    def __init__(self, scope: Scope, send: Send, limits: Limits) -> None:
        self._send, self._limits = send, limits
        self._transport = scope.get("state", {}).get("transport")

    async def write(self, headers: list[tuple[bytes, bytes]], parts: AsyncGenerator[bytes, None]) -> None:
        try:
            await self._timed({"type": "http.response.start", "status": 200, "headers": headers})
            async with aclosing(parts):
                async for part in parts:
                    await self._timed({"type": "http.response.body", "body": part, "more_body": True})
            await self._timed({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()  # closing it would wait for the reader

    async def _timed(self, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._limits.write_s):
            await self._send(message)


class suppress_api_error:
    """A `with` block that an ApiError ends early, and that keeps it: headers are out, so it becomes an event."""

    def __init__(self) -> None:
        self.error: ApiError | None = None

    def __enter__(self) -> "suppress_api_error":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        self.error = error if isinstance(error, ApiError) else None
        return self.error is not None
