"""Prompts that begin alike: full blocks shared by owners' count, and the KDA state where they end.

What is shared ends where a prefill piece does, so a prompt that goes on from it runs the same pieces as one that runs
whole, and every bit is the same. Only what a prefill made is shared; a shared page is never written.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from variants.pool import Pool
from variants.state import State


@dataclass(frozen=True)
class Prefix:
    """The first `tokens` tokens of a prompt: their pages, all full, and the slot that holds the state after them."""

    tokens: int
    pages: tuple[int, ...]
    slot: int


class PrefixCache:
    """At most as many prefixes as `slots` has units; the one that was used longest ago goes first."""

    def __init__(self, state: State, pages: Pool, slots: Pool, *, piece: int) -> None:
        self.state, self.pages, self.slots, self.piece = state, pages, slots, piece
        self.kept: OrderedDict[bytes, Prefix] = OrderedDict()
        self.hit_tokens = 0

    def find(self, ids: Sequence[int]) -> Prefix | None:
        """The longest kept prefix of a prompt that leaves a token to run."""
        if not self.kept:
            return None
        found = [key for tokens, key in self._keys(ids) if tokens < len(ids) and key in self.kept]
        if not found:
            return None
        self.kept.move_to_end(found[-1])
        self.hit_tokens += self.kept[found[-1]].tokens
        return self.kept[found[-1]]

    def keep(self, ids: Sequence[int], computed: int, table: Sequence[int], slot: int) -> None:
        """Share what a slot holds after `computed` tokens of a prompt, where a piece ends there; else do nothing."""
        if not self.slots.count or computed % self.piece:
            return
        key = list(self._keys(ids[:computed]))[-1][1]
        if key in self.kept:
            return
        if not self.slots.free:
            self.evict()
        (snapshot,) = self.slots.take(1)
        self.state.copy_slot(slot, snapshot)
        pages = self.pages.share(table[: computed // self.state.page_size])
        self.kept[key] = Prefix(computed, tuple(pages), snapshot)

    def evict(self) -> bool:
        """Let go of the prefix that was used longest ago; False where there is none."""
        if not self.kept:
            return False
        _, prefix = self.kept.popitem(last=False)
        self.pages.give_back(prefix.pages)
        self.slots.give_back([prefix.slot])
        return True

    def _keys(self, ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Length and hash of every prefix of whole pieces, shortest first; a hash covers all tokens before it."""
        digest = hashlib.sha256()
        for start in range(0, len(ids) - self.piece + 1, self.piece):
            digest.update(b"".join(int(t).to_bytes(8, "little") for t in ids[start : start + self.piece]))
            yield start + self.piece, digest.digest()
