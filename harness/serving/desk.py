"""Between requests and the engine's thread, in the event loop: who may come in, and whose piece is whose."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Many
from functools import partial
from itertools import islice
from types import TracebackType

from harness.serving.api_error import ApiError
from harness.serving.engine import ServingEngine
from harness.serving.sequence import Piece, Sequence

KEPT_TIMES = 65536  # of the newest answers, for percentiles
NEWEST = 100  # of them, for what an answer takes now
ENTRIES = 2**21  # tokens and logprobs of all answers that are not read yet, about 100 bytes each
SHARE = 4  # one request may ask for this part of them
STOPPING = ApiError(503, "the server is stopping", code="stopping", headers={"Retry-After": "5"})
DEAD = ApiError(503, "the engine has stopped; see the server's own output", code="engine_dead")


class Ticket:
    """One request's sequences; leaving the `with` block cancels what still runs, whatever ended it.

    What is not read yet lies here, so a reader that is slow holds up nobody; all that may ever lie here is counted when
    a request is let in, until its answer has been written.
    """

    def __init__(self, desk: "Desk") -> None:
        self._desk = desk
        self.sequences: list[Sequence] = []
        self._waiting: list[tuple[int, Piece]] = []
        self._news = asyncio.Event()
        self.open = 0

    def put(self, place: int, piece: Piece) -> None:
        self.open -= piece.last
        self._waiting.append((place, piece))
        self._news.set()

    async def pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """All that has come since the last time, until every sequence has ended.

        Raises ApiError where one fails: then the whole request does.
        """
        left = len(self.sequences)
        while left:
            await self._news.wait()
            self._news.clear()
            batch, self._waiting = self._waiting, []
            for _, piece in batch:
                if piece.error is not None:
                    raise ApiError(500, piece.error, code=piece.code)
                if piece.finish == "cancelled":
                    raise DEAD if self._desk.dead else STOPPING
                left -= piece.last
            if batch:
                yield batch

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._desk.entries -= sum(s.entries for s in self.sequences)
        if self.open > 0:
            self._desk.cancel(self)


class Desk:
    """Lets requests in while there is room. most: sequences that wait or run at a time."""

    def __init__(self, engine: ServingEngine, *, most: int) -> None:
        self.engine, self.most = engine, most
        self.live = 0
        self.entries = 0
        self.stopping = False
        self.dead = False
        self.tickets: set[Ticket] = set()
        self.finished: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.first_s: deque[float] = deque(maxlen=KEPT_TIMES)
        self.whole_s: deque[float] = deque(maxlen=KEPT_TIMES)
        self.watch: Callable[[Sequence, Piece], None] = lambda sequence, piece: None
        self.ended = asyncio.Event()  # set whenever a sequence has ended

    def start(self) -> "asyncio.Future[None]":
        """Start the engine's thread; the future ends with it and raises what it died of."""
        loop = asyncio.get_running_loop()
        future = asyncio.wrap_future(self.engine.start(partial(loop.call_soon_threadsafe, self._hand_out)))
        future.add_done_callback(lambda _: self._died())
        return future

    def check_open(self, count: int = 0) -> None:
        """Raises ApiError: 503 while stopping, 400 where so many answers are never let in."""
        if self.dead:
            raise DEAD
        if self.stopping:
            raise STOPPING
        if count > self.most:
            raise ApiError(400, f"{count} answers asked for in one request, at most {self.most}", param="n")

    def _check_room(self, count: int, entries: int) -> None:
        self.check_open(count)
        if entries > ENTRIES // SHARE:
            raise ApiError(
                400,
                f"{entries} tokens and logprobs asked for in one request, at most {ENTRIES // SHARE}; ask for fewer",
            )
        if self.live + count > self.most or self.entries + entries > ENTRIES:
            raise ApiError(
                429,
                f"{self.live} answers wait or run already, at most {self.most}; try again later",
                code="queue_full",
                headers={"Retry-After": str(self._wait_s())},
            )

    def admit(self, sequences: Many[Sequence], ticket: Ticket) -> None:
        """Hand sequences to the engine; raises ApiError as `check_open` does, and 429 where there is no room now."""
        entries = sum(s.entries for s in sequences)
        self._check_room(len(sequences), entries)
        ticket.sequences = list(sequences)
        self.entries += entries
        ticket.open = len(sequences)
        self.live += len(sequences)
        self.tickets.add(ticket)
        for sequence in sequences:
            self.tokens["prompt"] += len(sequence.request.ids)
            self.engine.submit(sequence)

    def cancel(self, ticket: Ticket) -> None:
        for sequence in ticket.sequences:
            self.engine.cancel(sequence)

    async def drain(self, grace_s: float) -> int:
        """Let nobody in, wait for what runs, cancel what is left after grace_s; the number that was cancelled."""
        self.stopping = True
        try:
            async with asyncio.timeout(grace_s):
                await self._until_idle()
        except TimeoutError:
            pass
        left = self.live
        for ticket in list(self.tickets):
            self.cancel(ticket)
        await self._until_idle()
        return left

    async def _until_idle(self) -> None:
        while self.live:
            self.ended.clear()
            await self.ended.wait()

    def _wait_s(self) -> int:
        """Seconds until there may be room: a share of what an answer takes, 1 to 60."""
        newest = list(islice(reversed(self.whole_s), NEWEST))
        typical = sum(newest) / max(1, len(newest))
        return max(1, min(60, math.ceil(typical / 2)))

    def _hand_out(self, pieces: Many[tuple[Sequence, Piece]]) -> None:
        for sequence, piece in pieces:
            ticket = sequence.owner
            assert isinstance(ticket, Ticket)
            ticket.put(sequence.place, piece)
            self.tokens["completion"] += piece.token is not None
            if piece.last:
                self._note(sequence, piece)
                if not ticket.open:
                    self.tickets.discard(ticket)

    def _note(self, sequence: Sequence, piece: Piece) -> None:
        self.live -= 1
        self.ended.set()
        self.finished[piece.finish or "error"] += 1
        self.watch(sequence, piece)
        if piece.finish in ("stop", "length") and sequence.first_s is not None and sequence.last_s is not None:
            self.first_s.append(sequence.first_s - sequence.arrived_s)
            self.whole_s.append(sequence.last_s - sequence.arrived_s)

    def _died(self) -> None:
        """The thread is gone: whoever still waits is told so."""
        self.dead = True
        for ticket in list(self.tickets):
            for sequence in ticket.sequences:
                ticket.put(sequence.place, Piece(finish="cancelled"))
        self.tickets.clear()
        self.live = 0
        self.ended.set()
