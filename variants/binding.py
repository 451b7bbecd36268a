"""From a recipe to callables: what a layer's code holds instead of choices."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from variants.dtypes import DType, round_to, store_as
from variants.kernels import kernel
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
        if self.rule(site).inside:  # its kernel rounds there, and nobody sees the value
            return None
        return round_at(self.recipe, self.probe, (site, self.layer), phase=self.phase, arrives=arrives)

    def hooks(self, *sites: str) -> dict[str, RoundAt]:
        """The sites inside a kernel that do something, for the kernel to call."""
        bound = {site: self.maybe(site) for site in sites}
        return {site: f for site, f in bound.items() if f is not None}

    def parameter(self, name: str, site: str) -> Tensor:
        """A parameter in the dtype that the site computes in."""
        return self.weights.get(f"model.layers.{self.layer}.{name}", self.rule(site).accum)

    def held(self, site: str) -> DType:
        """The format in which a product's weight lies in memory: that of its sum, or a kernel's operand."""
        rule = self.rule(site)
        return rule.accum if rule.impl == "torch" else rule.input or rule.accum

    def kernel(self, operation: str, site: str) -> Callable[..., Any] | None:
        """What binds an operation that a kernel computes (`variants.kernels`), None where torch computes it."""
        impl = self.rule(site).impl
        return None if impl == "torch" else kernel(operation, impl)

    def linear(self, site: str, name: str) -> Linear:
        """A product with the layer's weight `name`; the operand is brought to the dtype that the product runs in."""
        return self.product(site, self.weight(site, f"model.layers.{self.layer}.{name}.weight"))

    def weight(self, site: str, *names: str) -> Tensor:
        """Rows of the weights of a product, [sum N, K], in the format in which it reads them."""
        return self.weights.cat(names, self.lies(site, *names), operand=self.rule(site).weights)

    def lies(self, site: str, *names: str) -> DType:
        """`held`, or the format of the checkpoint itself where the kernels read that as well."""
        held = self.held(site)
        return self.weights.stored(names, within=held) if self.rule(site).impl == "native" else held

    def product(self, site: str, weight: Tensor) -> Linear:
        rule, weight = self.rule(site), self._laid_out(site, weight)
        multiply, operand = self._multiply(site), _operand(rule, self.held(site))
        rounding = self.maybe(site, _made(rule))
        if rounding is None:
            return lambda x: multiply(operand(x), weight)
        return lambda x: rounding(multiply(operand(x), weight))

    def linears(self, *, fused: bool = False, **names: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """Several products of one operand, site=name; one fused product where the recipe or the caller fuses them."""
        if (
            not (fused or self.recipe.fused_projections)
            or len({(self.rule(s).accum, self.rule(s).input) for s in names}) > 1
        ):
            each = [self.linear(site, name) for site, name in names.items()]
            return lambda x: tuple(f(x) for f in each)
        rule = self.rule(next(iter(names)))
        full = tuple(f"model.layers.{self.layer}.{name}.weight" for name in names.values())
        first = next(iter(names))
        weight = self._laid_out(first, self.weight(first, *full))
        sizes = [self.weights.casts.checkpoint.tensors[n].shape[0] for n in full]
        multiply, operand = self._multiply(first), _operand(rule, self.held(first))
        rounding = [self.maybe(site, _made(rule)) for site in names]

        def joined(x: Tensor) -> tuple[Tensor, ...]:
            return multiply(operand(x), weight).split_with_sizes(sizes, -1)

        if not any(rounding):
            return joined
        return lambda x: tuple(p if r is None else r(p) for p, r in zip(joined(x), rounding, strict=True))

    def _multiply(self, site: str) -> Callable[[Tensor, Tensor], Tensor]:
        bind = self.kernel("router" if site == "router" else "linear", site)
        return LINEAR[self.rule(site).algorithm] if bind is None else bind(self.rule(site))

    def _laid_out(self, site: str, weight: Tensor) -> Tensor:
        return self.weights.casts.by_columns(weight) if self.rule(site).algorithm == "gemm_columns" else weight

    def on(self, layer: int) -> "Binder":
        return replace(self, layer=layer)


def _made(rule: Rule) -> DType:
    """The format in which a product's result arrives at its site: torch's own, or as a kernel stored it."""
    return rule.accum if rule.impl == "torch" else rule.storage or rule.accum


def _operand(rule: Rule, held: DType) -> RoundAt:
    """What a product reads: the operand in the dtype that the product runs in, through a narrower declared format.

    A kernel reads the declared format itself (`held`).
    """
    if rule.impl != "torch":
        return lambda x: x if x.dtype == held.torch else store_as(x, held)
    accum, narrow = rule.accum, rule.input
    if narrow is None or narrow.precision >= accum.precision:
        dtype = accum.torch
        return lambda x: x if x.dtype == dtype else x.to(dtype)
    return lambda x: pinned(x if x.dtype == narrow.torch else round_to(x, narrow), accum)


def _same(x: Tensor) -> Tensor:
    return x
