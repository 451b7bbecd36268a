"""Calls of compiled code that torch's dispatch does not see, told to whoever listens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

Told = Callable[[str, list[Tensor], str], None]
_listening: list[Told] = []


@contextmanager
def watched(told: Told) -> Iterator[None]:
    """told(operation's name, its tensors, its other arguments) before every call for as long as the block runs."""
    _listening.append(told)
    try:
        yield
    finally:
        _listening.remove(told)


def tell(name: str, tensors: Sequence[Tensor], settings: str) -> None:
    for told in _listening:
        told(name, list(tensors), settings)
