"""A recipe: for every site of the forward the arithmetic that a variant means there, bound once from its axes.

The model is built from a recipe alone. Two recipes can be compared row by row, mixed place by place (localisation) and
raised to a higher precision as a whole (the ladder), without a line of model code knowing.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from variants.axes import Execution, ExecutionAxes, Graph, KvNormEps, L2NormEps, Param, Variant
from variants.dtypes import DType
from variants.model_config import ModelConfig
from variants.sites import rule_key

Place = tuple[str, int]
NARROW_OPTIONS = ("form", "tf32", "flash_attention")  # how a core rounds inside where that is less than float32
BF16_ALONE = ("vllm", "row")  # implementations that store nothing wider


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The arithmetic of one site.

    input: format of the operands (None: as they arrive). accum: format in which the operation runs; a product run as
    bf16 accumulates inside the library. output: format of the values that leave (None: as computed). storage: format of
    the buffer, wider than `output` where values are rounded in place. options: sizes that name the algorithm fully.
    impl: who computes it (`variants.axes.Impl`). inside: the site whose kernel swallows this one, "" where the value
    of this site is seen; a swallowed site still says how the kernel rounds there. weight: format through which a
    product's weight goes where `input` does not name it: of what a variant is held against.
    """

    input: DType | None = None
    accum: DType = DType.f32
    output: DType | None = None
    storage: DType | None = None
    algorithm: str = "elementwise"
    impl: str = "torch"
    options: tuple[tuple[str, int], ...] = ()
    inside: str = ""
    weight: DType | None = None

    @property
    def weights(self) -> DType | None:
        """The format through which a product's weight goes on its way."""
        return self.weight or self.input

    def option(self, name: str) -> int:
        return dict(self.options)[name]

    def at_least(self, dtype: DType) -> "Rule":
        """This rule with every format narrower than `dtype` raised to it.

        A form of rounding of its own (TF32 products) is narrower than float32, and no kernel has float64: from there
        on torch computes, and in place of those that have bfloat16 alone in any wider format.
        """
        formats = {f: _raise(getattr(self, f), dtype) for f in ("input", "accum", "output", "storage")}
        if dtype.precision < DType.f32.precision:
            return replace(self, **formats)
        raised = replace(self, **formats).without_form()
        widest = DType.f32 if self.impl not in BF16_ALONE else DType.bf16
        if self.impl == "torch" or dtype.precision <= widest.precision:
            return raised
        return replace(raised, impl="torch", inside="")

    def without_form(self) -> "Rule":
        """This rule without a form of rounding inside that is narrower than float32."""
        return replace(self, options=tuple(o for o in self.options if o[0] not in NARROW_OPTIONS))

    def as_dict(self) -> dict[str, object]:
        names = {
            f: getattr(self, f).name if getattr(self, f) else "keep" for f in ("input", "accum", "output", "storage")
        }
        inside = {"inside": self.inside} if self.inside else {}
        return {**names, "algorithm": self.algorithm, "impl": self.impl, **inside, **dict(self.options)}


def _raise(dtype: DType | None, floor: DType) -> DType | None:
    return dtype if dtype is None or dtype.precision >= floor.precision else floor


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """Declared departures from the checkpoint's own function: none of these is rounding of a computed value."""

    kv_eps: float | None = None
    l2_eps: float | None = None
    bf16_params: frozenset[str] = frozenset()

    def as_dict(self) -> dict[str, object]:
        own: dict[str, object] = {"kv_a_layernorm_eps": self.kv_eps}
        own["params_rounded_to_bf16"] = sorted(self.bf16_params)
        # Named only where it departs, so that no recipe known before it has another hash.
        return own if self.l2_eps is None else own | {"l2norm_eps": self.l2_eps}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Rules by site ("site" or "site.phase"), exceptions by place, semantics, execution and the order of products."""

    rules: Mapping[str, Rule]
    execution: ExecutionAxes
    exceptions: Mapping[tuple[str, int], Rule] = field(default_factory=dict)
    semantics: Semantics = Semantics()
    expanded_cache: bool = False
    fused_projections: bool = False
    fused_gate_up: bool = False
    reduced_sums: bool = False
    tf32: bool = False

    def rule(self, site: str, layer: int, phase: str = "prefill") -> Rule:
        key = rule_key(site, phase)
        return self.exceptions.get((key, layer), self.rules[key])

    def own_operands(self) -> dict[tuple[str, int], DType]:
        """Where a single place reads its operand narrower than `rules` say: that rounding is at no site of its own."""
        found = {at: (r.input, self.rules[at[0]].input) for at, r in self.exceptions.items()}
        return {at: own for at, (own, named) in found.items() if own and named and own.precision < named.precision}

    def at_precision(self, dtype: DType) -> "Recipe":
        """The same code path with every format narrower than `dtype` raised to it; parameters stay as declared."""
        return replace(
            self,
            rules={k: r.at_least(dtype) for k, r in self.rules.items()},
            exceptions={k: r.at_least(dtype) for k, r in self.exceptions.items()},
        )

    def with_places(self, other: "Recipe", swapped: Iterable[Place]) -> "Recipe":
        """This recipe with the rules of `other` at the given (site, layer) places."""
        exceptions = dict(self.exceptions)
        for site, layer in swapped:
            for phase in ("prefill", "decode"):
                exceptions[(rule_key(site, phase), layer)] = other.rule(site, layer, phase)
        return replace(self, exceptions=exceptions)

    def with_execution(self, **changes: object) -> "Recipe":
        """This recipe run another way: the same arithmetic at every site, other pieces, batch or carried state."""
        return replace(self, execution=replace(self.execution, **changes))  # pyright: ignore[reportArgumentType]

    def as_dict(self) -> dict[str, object]:
        return {
            "sites": {k: r.as_dict() for k, r in self.rules.items()},
            "exceptions": {f"{k}@{layer}": r.as_dict() for (k, layer), r in sorted(self.exceptions.items())},
            "semantics": self.semantics.as_dict(),
            "execution": self.execution_dict(),
            **({} if self.execution.mode is not Execution.paged else {"batch_dependent": batch_dependent(self)}),
            "cache": "expanded" if self.expanded_cache else "latent",
            "fused_projections": self.fused_projections,
            "fused_gate_up": self.fused_gate_up,
            "reduced_sums": self.reduced_sums,
            "tf32": self.tf32,
        }

    def execution_dict(self) -> dict[str, object]:
        run = self.execution
        plain: dict[str, object] = {
            "mode": run.mode.name, "prefill_piece": run.prefill_piece, "batch": run.batch}  # fmt: skip
        if run.fused:  # named only where it is, so that no recipe known before it has another hash
            plain |= {"fused": True, "graph": run.graph.name}
        if run.mode is not Execution.paged:
            return plain
        own = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in ("fused", "graph")}
        if run.graph is not Graph.off:
            sizes = sorted({run.filled(n) for n in range(1, run.batch + 1)})
            plain |= {"graph": run.graph.name, "decode_filled_up_to": " ".join(map(str, sizes))}
        return {**own, **plain, "preempt": run.preempt.name}

    @property
    def implementations(self) -> frozenset[str]:
        """Names of all implementations (`variants.axes.Impl`) that some site uses."""
        return frozenset(r.impl for r in (*self.rules.values(), *self.exceptions.values()))

    @property
    def hash(self) -> str:
        """SHA-256 of the resolved recipe in canonical JSON."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def rows(self) -> list[dict[str, object]]:
        """One row a rule, for a table."""
        exceptions = [{"site": f"{k}@{layer}", **r.as_dict()} for (k, layer), r in sorted(self.exceptions.items())]
        return [{"site": k, **r.as_dict()} for k, r in self.rules.items()] + exceptions


def difference(a: Recipe, b: Recipe) -> list[dict[str, object]]:
    """The fields in which two recipes differ: a row each with the site or setting, the field and both values.

    A setting that a recipe does not name has its default, and a place that has no exception has the rule of its site.
    """
    places = sorted({*a.exceptions, *b.exceptions})
    return list(_walk("", *(_in_full(recipe, places) for recipe in (a, b))))


def _in_full(recipe: Recipe, places: Iterable[Place]) -> dict[str, object]:
    named = recipe.as_dict()
    every = {k: v.name if isinstance(v, Enum) else v for k, v in vars(recipe.execution).items()}
    rules = {f"{k}@{n}": recipe.exceptions.get((k, n), recipe.rules[k]).as_dict() for k, n in places}
    follow = named.get("batch_dependent", {})
    run = every | recipe.execution_dict()
    return named | {"execution": run, "batch_dependent": follow, "exceptions": rules}


def _walk(path: str, a: object, b: object) -> Iterable[dict[str, object]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _walk(f"{path}.{key}" if path else str(key), a.get(key), b.get(key))
    elif a != b:
        where, _, name = path.removeprefix("sites.").rpartition(".")
        yield {"site": where or name, "field": name, "a": a, "b": b}


def resolve(variant: Variant, config: ModelConfig) -> Recipe:
    """Bind a variant to a model's geometry; raises UsageError for an override without a site or without effect."""
    from variants.impl_rules import check_inside, implemented
    from variants.rules import build_rules
    from variants.site_overrides import exceptions

    rules = implemented(variant, build_rules(variant, config))
    changed = exceptions(variant, config, rules)
    check_inside(changed)
    return Recipe(
        rules=rules,
        execution=variant.execution,
        exceptions=changed,
        semantics=_semantics(variant, config),
        expanded_cache=variant.mla.cache.name == "expanded",
        fused_projections=variant.fused_projections,
        fused_gate_up=variant.fused_gate_up,
        reduced_sums=variant.reduced_sums,
        tf32=variant.tf32,
    )


def _semantics(variant: Variant, config: ModelConfig) -> Semantics:
    p = variant.params
    named = {"A_log": p.a_log, "dt_bias": p.dt_bias, "e_score_correction_bias": p.correction_bias, "weight": p.weights}
    return Semantics(
        kv_eps=1e-6 if variant.norm.kv_eps is KvNormEps.eps_1e6 else None,
        l2_eps=config.rms_norm_eps if variant.kda.l2_eps is L2NormEps.config else None,
        bf16_params=frozenset(name for name, choice in named.items() if choice is Param.bf16),
    )


def is_incremental(recipe: Recipe) -> bool:
    """Whether anything is carried from step to step."""
    return recipe.execution.mode is not Execution.recompute


# Algorithms whose order of sums is the library's and may follow the number of rows, or an element's place among them.
LIBRARY_ORDER = ("gemm", "gemm_columns", "bmm", "conv1d", "chunk", "recurrent_gemv", "silu", "sigmoid")


def batch_dependent(recipe: Recipe) -> dict[str, str]:
    """Where a token's bits may depend on the rows that run beside it: algorithm -> sites; empty if batch-invariant.

    A chunk's grid counts from where a prefill piece begins, so pieces off it are named here too.
    """
    found: dict[str, list[str]] = {}
    never_latent = recipe.rules["mla_core.decode"].impl == "native"  # it reads keys and values
    for key, rule in (*recipe.rules.items(), *((f"{k}@{n}", r) for (k, n), r in recipe.exceptions.items())):
        name, size = rule.algorithm, dict(rule.options).get("chunk_size")
        if rule.impl == "native" or (name == "bmm" and never_latent):
            continue
        softmax = key.startswith("mla_core") and not name.endswith("_rows")
        compiled = rule.impl == "inductor" and not rule.inside  # its order of sums is the compiler's
        if name in LIBRARY_ORDER or softmax or compiled:
            found.setdefault(name, []).append(key)
        if size and key.startswith("kda_core.prefill") and recipe.execution.prefill_piece % size:
            found.setdefault(f"pieces of {recipe.execution.prefill_piece} off the chunk grid of {size}", []).append(key)
    return {name: " ".join(keys) for name, keys in found.items()}
