"""The nearest name to a misspelt one."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of the names, or nothing where none is near."""
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
