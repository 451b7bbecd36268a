"""The thread that owns the runner: sequences come in through a queue, pieces of answers go out after every step.

Nothing else touches the runner, so what runs is the library's own continuous batching, one step after the other.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue

from harness.serving.sequence import Piece, Sequence
from variants.errors import NeartieError
from variants.model import Model
from variants.runner import Runner

Deliver = Callable[[Many[tuple[Sequence, Piece]]], object]


class ServingEngine:
    """Runs sequences until it is told to stop. stats: as the last step left them.

    around: the numerics policy that the thread computes under.
    """

    def __init__(self, model: Model, *, max_len: int, around: Callable[[], AbstractContextManager[None]]) -> None:
        self.runner = Runner(model, max_len=max_len)
        self.max_len = max_len
        self.stats = self.runner.stats()
        self.steps = 0
        self._around = around
        self._live: dict[int, Sequence] = {}
        self._told: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._deliver: Deliver = lambda pieces: None

    def start(self, deliver: Deliver) -> Future[None]:
        """Begin; `deliver` is called in the thread. The future ends with the thread and holds what it died of."""
        self._deliver = deliver
        return self._pool.submit(self._run)

    def submit(self, sequence: Sequence) -> None:
        self._told.put(partial(self._add, sequence))

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence, and free its slot and pages before the next step; nothing where it has ended."""
        self._told.put(partial(self._cancel, sequence))

    def stop(self) -> None:
        """End the thread after the step that runs; what still lives is cancelled."""
        self._told.put(None)

    def _run(self) -> None:
        with self._around():
            while self._obey():
                if self.runner.busy:
                    self._step()
            for sequence in list(self._live.values()):
                self._cancel(sequence)
            self._settle()

    def _obey(self) -> bool:
        """Do what was told since the last step, waiting for something where there is nothing to run."""
        while not self.runner.busy or not self._told.empty():
            if self._told.empty():
                self._settle()
            told = self._told.get()
            if told is None:
                return False
            told()
        return True

    def _settle(self) -> None:
        """With nothing to run, every slot and page must be free but for kept prefixes; AssertionError where not."""
        if not self.runner.busy:
            self.runner.scheduler.audit()
        self.stats = self.runner.stats()

    def _add(self, sequence: Sequence) -> None:
        try:
            sequence.number = self.runner.add(sequence.request)
        except NeartieError as error:
            self._deliver([(sequence, Piece(error=str(error)))])
            return
        self._live[sequence.number] = sequence

    def _cancel(self, sequence: Sequence) -> None:
        if sequence.number is not None and self._live.pop(sequence.number, None) is not None:
            self.runner.cancel(sequence.number)
            self._deliver([(sequence, Piece(finish="cancelled"))])

    def _step(self) -> None:
        pieces: list[tuple[Sequence, Piece]] = []
        for output in self.runner.step().outputs:
            sequence = self._live[output.request]
            piece = sequence.take(output)
            if piece.last:
                del self._live[output.request]
                self.runner.cancel(output.request)  # where a stop string or a failure ended it, not the runner
            pieces.append((sequence, piece))
        self.steps += 1
        self.stats = self.runner.stats()
        self._deliver(pieces)
