"""Numbered units that are taken, shared and given back, with a count of each one's owners."""

from collections.abc import Iterable, Sequence


class Pool:
    """Units first..first + count - 1; the one that was given back last is taken first, so a run repeats exactly."""

    def __init__(self, count: int, *, first: int = 0) -> None:
        self.count = count
        self._free = list(range(first + count - 1, first - 1, -1))
        self.owners: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n free units, each now with one owner."""
        assert n <= self.free, "whoever takes units has seen that they are free"
        taken = [self._free.pop() for _ in range(n)]
        self.owners.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, units: Sequence[int]) -> list[int]:
        """The same units with one owner more."""
        for unit in units:
            self.owners[unit] += 1
        return list(units)

    def give_back(self, units: Iterable[int]) -> None:
        """One owner less of each; a unit without owners is free."""
        for unit in units:
            self.owners[unit] -= 1
            if not self.owners[unit]:
                del self.owners[unit]
                self._free.append(unit)
