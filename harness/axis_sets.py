"""The axes in which two variants differ, and the variant that has some of them from the other one.

An axis is a field of `Variant` or of one of its groups. A core's two phases and its sizes are one axis: the one has no
effect, or cannot run, without the other.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from variants.axes import Variant
from variants.errors import UsageError

JOINED = {
    "kda.prefill": "kda.core",
    "kda.decode": "kda.core",
    "kda.chunk_size": "kda.core",
    "kda.chunk_form": "kda.core",
    **{f"mla.{name}": "mla.core" for name in ("prefill", "decode", "tile_q", "tile_k", "kv_splits")},
}


def differing_axes(a: Variant, b: Variant) -> tuple[str, ...]:
    """Names of the axes in which two variants differ, in the order of the dataclass."""
    return tuple(dict.fromkeys(JOINED.get(path, path) for path, x, y in _leaves(a, b) if x != y))


def several_axes(a: Variant, b: Variant) -> str | None:
    """A line for two variants that differ in more than one axis: what is seen between them has no single cause."""
    axes = differing_axes(a, b)
    if len(axes) < 2:
        return None
    named = ", ".join(axes[:6]) + (f" and {len(axes) - 6} more" if len(axes) > 6 else "")
    return f"not single-variable: {len(axes)} axes differ ({named})"


def mixed_variant(a: Variant, b: Variant, axes: Collection[str]) -> Variant:
    """`a` with the given axes as `b` has them; raises UsageError where `variants.axes` refuses the combination."""
    changes: dict[str, dict[str, object]] = {}
    for path, x, y in _leaves(a, b):
        if x != y and JOINED.get(path, path) in axes:
            group, _, name = path.rpartition(".")
            changes.setdefault(group, {})[name] = y
    top: dict[str, Any] = changes.pop("", {})
    return replace(a, **top, **{g: replace(getattr(a, g), **change) for g, change in changes.items()})


def _leaves(a: object, b: object, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    assert is_dataclass(a)
    for field in (f for f in fields(a) if f.compare):  # what is known of a variant is no axis
        x, y = getattr(a, field.name), getattr(b, field.name)
        if is_dataclass(x):
            yield from _leaves(x, y, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", x, y


@dataclass
class Allowed:
    """Which sets of axes make a variant that can run, each asked once; `refusals`: why not, by set."""

    make: Callable[[frozenset[str]], object]

    def __post_init__(self) -> None:
        self.refusals: dict[frozenset[str], str] = {}
        self._fine: set[frozenset[str]] = set()

    def __call__(self, axes: frozenset[str]) -> bool:
        if axes not in self._fine and axes not in self.refusals:
            try:
                self.make(axes)
                self._fine.add(axes)
            except UsageError as error:
                self.refusals[axes] = str(error)
        return axes in self._fine
