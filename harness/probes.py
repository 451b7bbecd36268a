"""What can be done at the places of a run: watch values, compare them with another run's, go on with those.

Each is a `variants.rounding.Probe`, bound once. None changes a bit of a run unless that is its purpose.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from variants.recipe import Rule
from variants.rounding import NoProbe, Probe, RoundAt, Step

Place = tuple[str, int]
Wanted = Callable[[str, int], bool]


def every_place(site: str, layer: int) -> bool:
    return True


class Tap:
    """Keeps the values of the current step at the wanted places, as they leave; the run's bits stay as they were.

    `calls` maps (site, layer) to the values seen there in this step in order (an expert's place is passed once for
    each expert), `values` to the last of them: the tensors themselves, not copies. Both are emptied when the next step
    begins, so memory is bounded by one step.
    """

    def __init__(self, wanted: Wanted = every_place, *, inner: Probe | None = None) -> None:
        self.wanted, self.inner = wanted, inner or NoProbe()
        self.calls: dict[Place, list[Tensor]] = {}
        self.step: Step | None = None

    @property
    def values(self) -> dict[Place, Tensor]:
        return {place: calls[-1] for place, calls in self.calls.items()}

    def begin(self, step: Step) -> None:
        self.inner.begin(step)
        self.calls, self.step = {}, step

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        rounding = self.inner.bind(site, layer, rule, rounding)
        if not self.wanted(site, layer):
            return rounding

        def tap(x: Tensor) -> Tensor:
            y = x if rounding is None else rounding(x)
            self.calls.setdefault((site, layer), []).append(y)
            return y

        return tap


class Passes(Tap):
    """A tap that keeps every pass until `passes` is emptied: a prompt prefilled in pieces has several a step."""

    def __init__(self, wanted: Wanted = every_place, *, inner: Probe | None = None) -> None:
        super().__init__(wanted, inner=inner)
        self.passes: list[tuple[Step, dict[Place, list[Tensor]]]] = []

    def begin(self, step: Step) -> None:
        super().begin(step)
        self.passes.append((step, self.calls))


class Against:
    """Compares each place with another run's value of the same step, and may go on with that value instead.

    theirs(): the other run's values of the same pass in the order of their calls, for instance a `Tap`'s `calls`.
    report(place, mine, other) is called for each value that both have and says whether it was comparable; with
    `substitute`, the run continues from a comparable `other` (exactly, in this run's dtype), so that what is compared
    at the next place is one operation and nothing upstream: local replay.
    """

    def __init__(
        self,
        theirs: Callable[[], Mapping[Place, Sequence[Tensor]]],
        report: Callable[[Place, Tensor, Tensor], bool],
        *,
        substitute: bool = False,
    ) -> None:
        self.theirs, self.report, self.substitute = theirs, report, substitute
        self.calls: dict[Place, Iterator[Tensor]] = {}
        self.step: Step | None = None

    def begin(self, step: Step) -> None:
        self.calls = {place: iter(values) for place, values in self.theirs().items()}
        self.step = step

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        place = (site, layer)

        def compare(x: Tensor) -> Tensor:
            y = x if rounding is None else rounding(x)
            other = next(self.calls.get(place, iter(())), None)
            if other is None or not self.report(place, y, other):
                return y
            return other.to(device=y.device, dtype=y.dtype) if self.substitute else y

        return compare


class AgainstPasses(Against):
    """Against the passes that a tap kept, first to last: the steps of both runs have the same passes.

    The run continues from what it was held against; `again` once the tap was emptied.
    """

    def __init__(self, tap: Passes, report: Callable[[Place, Tensor, Tensor], bool]) -> None:
        super().__init__(self._next, report, substitute=True)
        self.tap, self.done = tap, 0

    def _next(self) -> Mapping[Place, Sequence[Tensor]]:
        self.done += 1
        return self.tap.passes[self.done - 1][1]

    def again(self) -> None:
        self.done = 0


def chain(probes: Iterable[Probe]) -> Probe:
    """Several probes at one place: the first rounds, each later one sees what the earlier gives."""
    found = list(probes)
    return found[0] if len(found) == 1 else _Chain(found)


class _Chain:
    def __init__(self, probes: list[Probe]) -> None:
        self.probes = probes

    def begin(self, step: Step) -> None:
        for probe in self.probes:
            probe.begin(step)

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        for probe in self.probes:
            rounding = probe.bind(site, layer, rule, rounding)
        return rounding
