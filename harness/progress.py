"""A progress bar on stderr with the time left, shown only where somebody looks: never in a pipe, a log or a test."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
REFRESHES = 2  # a second: what is drawn takes time from what is measured
_shown: "list[Progress]" = []  # the display on the terminal, of which there can be one


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of `total` steps for as long as the block runs; what it yields is called after each step.

    A bar within a bar is a line below it; a single step has none.
    """
    if total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    with _display() as display:
        task = display.add_task(title, total=total)
        try:
            yield lambda: display.advance(task)
        finally:
            display.remove_task(task)


def tracked(title: str, steps: Iterable[T], total: int) -> Iterator[T]:
    """The steps, with a bar that moves on after each."""
    with progress(title, total) as done:
        for step in steps:
            yield step
            done()


@contextmanager
def _display() -> "Iterator[Progress]":
    if _shown:
        yield _shown[-1]
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, *times, console=console, transient=True, refresh_per_second=REFRESHES) as display:
        _shown.append(display)
        try:
            yield display
        finally:
            _shown.pop()
