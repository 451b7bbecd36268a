"""What can be done at the places of a run: watch values, add rounding noise, jitter products, compare and substitute.

Each is a `variants.rounding.Probe`, bound once. None changes a bit of a run unless that is its purpose.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from variants.dtypes import DType, ulp
from variants.recipe import Recipe, Rule
from variants.rounding import NoProbe, Probe, RoundAt, Step
from variants.sites import INTEGER

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


class Noise:
    """Monte-Carlo arithmetic: half a unit in the last place of uniform noise wherever `recipe` rounds.

    Bound into a float64 run (`recipe.at_precision(f64)`), it perturbs each value at the sites and formats where
    `recipe` itself would round it, every row of the batch independently. Rows in `clean` stay the oracle's. The width
    is that of ties_to_even rounding to the format: uniform in +-0.5 ulp of the value.
    """

    def __init__(self, recipe: Recipe, *, seed: int, clean: int = 0, device: str = "cpu") -> None:
        self.recipe, self.clean, self.phase = recipe, clean, "prefill"
        self.random = torch.Generator(device=device).manual_seed(seed)

    def begin(self, step: Step) -> None:
        self.phase = step.phase

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        if site in INTEGER:
            return rounding
        return lambda x: self._perturb(x, self._format(site, layer))

    def _format(self, site: str, layer: int) -> DType | None:
        """The narrowest format that the value passes through on its way out of this site."""
        rule = self.recipe.rule(site, layer, self.phase)
        return rule.output if rule.output is not None else None

    def _perturb(self, x: Tensor, dtype: DType | None) -> Tensor:
        if dtype is None or dtype.precision >= DType.f64.precision:
            return x
        noise = torch.rand(x.shape, generator=self.random, dtype=x.dtype, device=x.device) - 0.5
        if self.clean:
            noise[: self.clean] = 0
        return x + noise * ulp(x, dtype).to(x.dtype)


class Jitter:
    """Perturbs the operands of every product by a relative amount, before the recipe's own rounding of them.

    A run against its own jittered self has the least distance that any implementation of the same roundings with
    another order of sums can have.
    """

    def __init__(self, *, relative: float, seed: int, device: str = "cpu") -> None:
        self.relative = relative
        self.random = torch.Generator(device=device).manual_seed(seed)

    def begin(self, step: Step) -> None:
        return None

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        if not site.endswith("_in"):
            return rounding

        def jitter(x: Tensor) -> Tensor:
            noise = torch.rand(x.shape, generator=self.random, dtype=torch.float64, device=x.device) * 2 - 1
            y = (x.double() * (1 + self.relative * noise)).to(x.dtype)
            return y if rounding is None else rounding(y)

        return jitter


class Against:
    """Compares each place with another run's value of the same step, and may go on with that value instead.

    theirs(): the other run's values of the step in the order of their calls, for instance a `Tap`'s `calls`.
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
