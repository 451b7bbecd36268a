"""From a recipe to callables: what a layer's code holds instead of choices."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from variants.dtypes import DType, round_to
from variants.model_config import ModelConfig
from variants.ops.linear import LINEAR
from variants.recipe import Recipe, Rule
from variants.rounding import Probe, RoundAt, pinned, round_at
from variants.weights import Weights

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Binder:
    """Binds the sites of one layer in one phase; every callable it returns is already specialised."""

    config: ModelConfig
    recipe: Recipe
    weights: Weights
    probe: Probe
    layer: int
    phase: str

    def rule(self, site: str) -> Rule:
        return self.recipe.rule(site, self.layer, self.phase)

    def at(self, site: str, arrives: DType | None = None) -> RoundAt:
        """What a site does to its value; the identity where it does nothing."""
        bound = self.maybe(site, arrives)
        return _same if bound is None else bound

    def maybe(self, site: str, arrives: DType | None = None) -> RoundAt | None:
        return round_at(self.recipe, self.probe, (site, self.layer), phase=self.phase, arrives=arrives)

    def hooks(self, *sites: str) -> dict[str, RoundAt]:
        """The sites inside a kernel that do something, for the kernel to call."""
        bound = {site: self.maybe(site) for site in sites}
        return {site: f for site, f in bound.items() if f is not None}

    def parameter(self, name: str, site: str) -> Tensor:
        """A parameter in the dtype that the site computes in."""
        return self.weights.get(f"model.layers.{self.layer}.{name}", self.rule(site).accum)

    def linear(self, site: str, name: str) -> Linear:
        """A product with the layer's weight `name`; the operand is brought to the dtype that the product runs in."""
        rule, full = self.rule(site), f"model.layers.{self.layer}.{name}.weight"
        return self.product(site, self.weights.get(full, rule.accum, operand=rule.input))

    def product(self, site: str, weight: Tensor) -> Linear:
        rule, weight = self.rule(site), self._laid_out(site, weight)
        multiply, operand, rounding = LINEAR[rule.algorithm], _operand(rule), self.maybe(site, rule.accum)
        if rounding is None:
            return lambda x: multiply(operand(x), weight)
        return lambda x: rounding(multiply(operand(x), weight))

    def linears(self, **names: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """Several products of one operand, site=name; one fused product where the recipe fuses projections."""
        if not self.recipe.fused_projections or len({(self.rule(s).accum, self.rule(s).input) for s in names}) > 1:
            each = [self.linear(site, name) for site, name in names.items()]
            return lambda x: tuple(f(x) for f in each)
        rule = self.rule(next(iter(names)))
        full = tuple(f"model.layers.{self.layer}.{name}.weight" for name in names.values())
        weight = self._laid_out(next(iter(names)), self.weights.cat(full, rule.accum, operand=rule.input))
        sizes = [self.weights.casts.checkpoint.tensors[n].shape[0] for n in full]
        multiply, operand = LINEAR[rule.algorithm], _operand(rule)
        rounding = [self.maybe(site, rule.accum) for site in names]

        def fused(x: Tensor) -> tuple[Tensor, ...]:
            parts = multiply(operand(x), weight).split(sizes, -1)
            return tuple(p if r is None else r(p) for p, r in zip(parts, rounding, strict=True))

        return fused

    def _laid_out(self, site: str, weight: Tensor) -> Tensor:
        return self.weights.casts.by_columns(weight) if self.rule(site).algorithm == "gemm_columns" else weight

    def on(self, layer: int) -> "Binder":
        return replace(self, layer=layer)


def _operand(rule: Rule) -> RoundAt:
    """What a product reads: the operand in the dtype that the product runs in, through a narrower declared format."""
    accum, narrow = rule.accum, rule.input
    if narrow is None or narrow.precision >= accum.precision:
        return lambda x: pinned(x, accum)
    return lambda x: pinned(x if x.dtype == narrow.torch else round_to(x, narrow), accum)


def _same(x: Tensor) -> Tensor:
    return x
