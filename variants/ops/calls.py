"""Calls of compiled code that torch's dispatch does not see, told to whoever listens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
Told = Callable[[str, list[Tensor], str], None]
_listening: list[Told] = []


def watched(told: Told) -> AbstractContextManager[None]:
    """told(operation's name, its tensors, its other arguments) before every call for as long as the block runs."""
    return listening(_listening, told)


def tell(name: str, tensors: Sequence[Tensor], settings: str) -> None:
    """Said of every call before it is made, to those that `watched`."""
    for told in _listening:
        told(name, list(tensors), settings)


@contextmanager
def listening(listeners: list[T], listener: T) -> Iterator[None]:
    """One more among the listeners for as long as the block runs."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
