"""What a paged runner is asked so that all that its settings allow happens on few tokens, and running it.

A battery alone shares no prefix and, beside its few neighbours, runs out of no page: what a snapshot, an eviction or a
preemption gets wrong would show in none of its tokens here and in every server's.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from harness.forced_errors import Battery
from harness.reach import PAST, repeated, text_of
from harness.verdict import Finding
from variants.axes import ExecutionAxes
from variants.errors import NeartieError, UsageError
from variants.model import Model
from variants.request import Request
from variants.runner import Runner, Stepped

Forced = tuple[tuple[int, ...], tuple[int, ...]]  # a prompt, and the tokens after it

PIECE = 64  # tokens; a longer piece is cut to it, or to one page
ANSWER, EARLY = 8, 3  # tokens of an answer while pages are short, and those before one has to give its pages up


class RunnerBrokeError(NeartieError):
    """A runner ended in an error on requests that it had taken."""

    def finding(self, instrument: str) -> Finding:
        return Finding(instrument=instrument, reason=str(self))


@contextmanager
def _whole() -> Iterator[None]:
    try:
        yield
    except (AssertionError, LookupError, UsageError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise RunnerBrokeError(
            f"a runner breaks on requests that it took, in {Path(where.filename).name} line {where.lineno} ({what})"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Task:
    """Requests in waves, each added when the one before has ended. execution: under which settings of the runner."""

    execution: ExecutionAxes
    waves: tuple[tuple[Forced, ...], ...]

    @property
    def rows(self) -> list[Forced]:
        """The requests in the order of their numbers."""
        return [row for wave in self.waves for row in wave]

    @property
    def longest(self) -> int:
        return max(len(prompt) + len(forced) for prompt, forced in self.rows)

    def runner(self, model: Model) -> Runner:
        """A fresh one for `model`, which is under `execution`."""
        return Runner(model, max_len=self.longest)

    def steps(self, runner: Runner) -> Iterator[Stepped]:
        """Every step of the requests; at the end nothing is left of them in slots and pages.

        Raises RunnerBrokeError where that is not so, or a step of requests that were taken ends in an error.
        """
        for wave in self.waves:
            for prompt, forced in wave:
                runner.add(Request(ids=prompt, max_tokens=len(forced), forced=forced))
            while runner.busy:
                with _whole():
                    stepped = runner.step()
                yield stepped
        with _whole():
            runner.scheduler.audit()


def tasks(run: ExecutionAxes, battery: Battery, max_length: int) -> list[Task]:
    """Shared prefixes where snapshots are kept, too few pages where their number is named; nothing longer than the
    model allows."""
    text = text_of(zip(battery.prompts, battery.continuations, strict=True))
    found = [_shared_prefixes(run, text)] if run.prefix_cache else []
    found += [_short_of_pages(run, text)] if run.pages and run.batch > 1 else []
    return [task for task in found if task.longest <= max_length]


def _shared_prefixes(run: ExecutionAxes, text: Sequence[int]) -> Task:
    """A prompt of two whole pieces and more; then it again, one that shares its first piece, one its second alone."""
    piece = _short_piece(run)
    ids = repeated(text, 2 * piece + PAST)
    other = ids[::-1]
    again = [(ids, ids[:2]), ((*ids[:piece], *other[piece:]), ids[:2]), ((*other[:piece], *ids[piece:]), ids[:2])]
    return Task(execution=replace(run, prefill_piece=piece, pages=0), waves=(((ids, ids[:1]),), tuple(again)))


def _short_of_pages(run: ExecutionAxes, text: Sequence[int]) -> Task:
    """Two prompts fill all pages but one, which the first takes; the second is without after `EARLY` tokens and waits.

    Then a third, before them, ends in the step in which one gives way, so that this one comes back at once.
    """
    piece = _short_piece(run) if run.prefill_piece else 0
    each = -(-max(piece, ANSWER) // run.block_size)
    size = each * run.block_size
    first = repeated(text, size)
    second = repeated([*text[1:], text[0]], size - EARLY)
    later = -(-size // piece) if piece else 0  # steps by which a token budget may keep the second back
    answer = min(ANSWER + later, size + run.block_size)  # no request may need more than all pages
    two = ((first, repeated(text, answer)), (second, repeated(text, ANSWER)))
    ending = (repeated(text, max(1, run.block_size - 1)), repeated(text, 2))
    waves = (two, (ending, *two)) if run.batch > 2 else (two,)
    return Task(execution=replace(run, prefill_piece=piece, pages=2 * each + 1), waves=waves)


def _short_piece(run: ExecutionAxes) -> int:
    whole = -(-PIECE // run.block_size) * run.block_size
    return min(run.prefill_piece, whole)
