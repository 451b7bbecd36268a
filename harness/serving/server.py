"""The process around the application: a socket, the event loop, and a stop that lets answers finish."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from harness.serving.api_error import ApiError
from harness.serving.app import make_app
from harness.serving.service import Service
from variants.errors import DeviceError, EngineError

CONNECTIONS = 1024
KEEP_ALIVE_S = 10
SEND_BYTES = 2**16
CLOSING_S = 5  # for what is being read or written when all answers are complete


class Protocol(H11Protocol):
    """One connection: one request after the other, each of whose heads must come in time.

    The application may abort it; what waits to be read is bounded in the kernel too; what is no HTTP, and one
    connection too many, are answered in the API's shape.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self.app_state = {**self.app_state, "transport": transport}
        self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_S, self.timeout_keep_alive_handler)
        if len(self.connections) > CONNECTIONS:
            self._last(ApiError(503, f"more than {CONNECTIONS} connections", headers={"Retry-After": "1"}))

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()  # a whole head ends the time for it, not each of its bytes

    def timeout_keep_alive_handler(self) -> None:
        """Close what says nothing; what does not read what it was sent would never be closed."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        self._last(ApiError(400, msg))

    def _last(self, error: ApiError) -> None:
        if not self.transport.is_closing():
            self.transport.write(error.raw())
            self.transport.close()


class Web(uvicorn.Server):
    """uvicorn's server without its own signal handlers."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises DeviceError for an address that is taken or is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise DeviceError(f"cannot listen on {host} port {port} ({why}); name others with host= and port=") from error


def web(service: Service) -> Web:
    config = uvicorn.Config(
        make_app(service),
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2 * CLOSING_S,  # later than `serve` cuts off itself, so that uvicorn says nothing
    )
    return Web(config)


async def serve(service: Service, listening: socket.socket, stop: asyncio.Event, *, grace_s: float) -> int:
    """Serve until `stop` is set or the engine dies; the number of answers that the grace was too short for.

    Raises EngineError where the engine died.
    """
    server = web(service)
    thread = service.desk.start()
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({thread, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    cut = 0 if thread.done() else await service.desk.drain(grace_s)
    server.should_exit = True
    await asyncio.wait({serving}, timeout=CLOSING_S)
    for connection in list(server.server_state.connections):
        connection.transport.abort()  # half a request, or a reader that does not read: uvicorn would print a traceback
    await serving
    service.desk.engine.stop()
    await asyncio.wait({thread})
    if (error := thread.exception()) is not None:
        raise EngineError(f"the engine died of {type(error).__name__}: {error}") from error
    return cut


def serve_until_signal(make: Callable[[], Service], listening: socket.socket, *, grace_s: float) -> tuple[Service, int]:
    """Serve in this thread until SIGTERM or SIGINT; a second one ends the grace at once."""

    async def run() -> tuple[Service, int]:
        stop, service = asyncio.Event(), make()
        loop = asyncio.get_running_loop()

        def asked() -> None:
            if stop.is_set():
                for ticket in list(service.desk.tickets):
                    service.desk.cancel(ticket)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked)
        return service, await serve(service, listening, stop, grace_s=grace_s)

    return asyncio.run(run())


class Beside:
    """A server in a thread of its own, on a port that is free: `url` and `service` while the `with` block lasts.

    Raises what the engine died of.
    """

    def __init__(self, service: Service, *, grace_s: float = 5.0) -> None:
        self.service, self._grace_s = service, grace_s
        self._listening = bound("127.0.0.1", 0)
        self.url = address(self._listening)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="server")

    def __enter__(self) -> "Beside":
        self._ended = self._pool.submit(self._run)
        return self

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(serve(self.service, self._listening, self._stop, grace_s=self._grace_s))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._pool.shutdown()
        self._ended.result()


def address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def key_from(variable: str) -> str | None:
    """The API key, from the environment alone; an empty one is none."""
    return os.environ.get(variable) or None
