"""What was observed of a run: at each site and phase, and the whole of it as a record with a hash."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class SiteObservation:
    """One (site, phase) over the layers: dtypes by name, the formats of the values, operations and our functions.

    launches: "function of ours/kernel:dtypes of its tensors" of every Triton kernel.
    """

    arrives: set[str] = field(default_factory=set)
    leaves: set[str] = field(default_factory=set)
    arriving_values: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)
    arithmetic: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    launches: set[str] = field(default_factory=set)

    def as_dict(self) -> dict[str, list[str]]:
        return {k: sorted(v) for k, v in vars(self).items() if v or k != "launches"}


@dataclass(frozen=True)
class Observed:
    """Observations keyed "site.phase@layer", and what in them contradicts the recipe."""

    places: Mapping[str, SiteObservation]
    contradictions: tuple[str, ...]
    sequence: str = ""
    passes: str = ""

    def as_dict(self) -> dict[str, object]:
        """Layers that observed the same are one entry: "site.phase" with the list of layers.

        "sequence" is a hash over every arithmetic operation in order, with the dtype and shape of its result: it tells
        apart arms that differ in the size of a chunk or a tile alone. "passes", of paged execution: the rows and tokens
        of each forward, by which the library may choose the order of its sums.
        """
        grouped: dict[str, list[tuple[str, dict[str, list[str]]]]] = {}
        for key, seen in self.places.items():
            name, layer = key.split("@")
            grouped.setdefault(name, []).append((layer, seen.as_dict()))
        found = {name: _by_layers(entries) for name, entries in grouped.items()}
        return {**found, "sequence": self.sequence, **({"passes": self.passes} if self.passes else {})}

    @property
    def hash(self) -> str:
        """Equal for two arms that were seen to do the same at every site."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _by_layers(entries: list[tuple[str, dict[str, list[str]]]]) -> list[dict[str, object]]:
    merged: dict[str, tuple[list[int], dict[str, list[str]]]] = {}
    for layer, seen in entries:
        merged.setdefault(json.dumps(seen, sort_keys=True), ([], seen))[0].append(int(layer))
    return [{"layers": layers, **seen} for layers, seen in merged.values()]
