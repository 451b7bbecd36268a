"""Delta debugging: a set of items, as small as taking single ones away can make it, that still has a property.

Source: A. Zeller and R. Hildebrandt, Simplifying and isolating failure-inducing input, IEEE TSE 28 (2002) 183.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T", bound=Hashable)
Holds = Callable[[frozenset[T]], bool]


def ddmin(items: Sequence[T], holds: Holds[T]) -> tuple[T, ...]:
    """A subset of `items`, in their order, that holds while no subset with one item fewer does (1-minimal).

    `holds` must be true of all items and false of none. It need not be monotone: a smaller subset that has other items
    may exist. It is asked about some sets more than once, so it should remember.
    """
    kept, parts = list(items), 2
    while len(kept) > 1:
        chunks = _split(kept, parts)
        smaller = next((c for c in chunks if holds(frozenset(c))), None)
        if smaller is not None:
            kept, parts = smaller, 2
            continue
        rests = ([x for x in kept if x not in set(c)] for c in chunks)
        rest = next((r for r in rests if holds(frozenset(r))), None)
        if rest is not None:
            kept, parts = rest, max(parts - 1, 2)
        elif parts >= len(kept):
            break
        else:
            parts = min(len(kept), 2 * parts)
    return tuple(kept)


def is_one_minimal(items: Sequence[T], holds: Holds[T]) -> bool:
    """Whether a set holds and loses that with any one of its items."""
    whole = frozenset(items)
    return holds(whole) and not any(holds(whole - {item}) for item in whole)


def _split(items: list[T], parts: int) -> list[list[T]]:
    """As many runs as `parts`, of sizes that differ by one at most; needs an item for each."""
    edges = [len(items) * i // parts for i in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(edges)]
