"""The noise that a recipe's roundings amount to: what is added where, to a float64 run, to make one envelope member.

- A value that an operation computes and a rule rounds gets uniform noise of +-half a unit in the last place, once for
  each rounding in a row (a norm rounded twice, a sum rounded after each expert).
- A value that is only moved (an operand, a copy, the embedding) is rounded only if it did not fit its format yet: that
  is read off a short run of the variant itself, not off its declaration.
- An operation in float32 also rounds inside. Its own error is up to seven times that of storing its result, so a
  recipe of float32 needs it, in units of u(float32) times the rms of the result's last dimension: `INTERNAL`, and of a
  product what this machine's library loses at as many rows as it has there (`harness.product_error`).
- After the first place of at most 11 bits, finer roundings are left out: they add under 2^-24 to the variance there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from harness.product_error import product_units, shape_of
from variants import decode
from variants.axes import Execution
from variants.dtypes import DType, round_to
from variants.model import PHASES, Model
from variants.model_config import ModelConfig
from variants.recipe import Recipe, Rule, is_incremental
from variants.rounding import RoundAt, Step
from variants.sites import BY_EXPERT, CHUNK_SITES, INTEGER, places
from variants.weights import Casts, Weights

Where = tuple[str, int, str]
MOVES = ("operand", "copy", "gather")
CARRIED = ("conv_state", "kda_state")
LATENT_SITES = ("q_latent", "o_latent")
PRODUCTS = ("gemm", "bmm")
COARSE_BITS = DType.f16.precision
# rms error of one float32 operation on its own inputs, by local replay of `f32` and `incremental_chunk` on the shipped
# checkpoint. tests/test_envelope.py measures the table's effect on whole runs again.
INTERNAL = {
    "taps": 0.7, "conv1d": 0.7, "silu": 0.6, "sdpa": 1.1,
    "silu_lanes": 0.6, "sigmoid": 0.9, "sigmoid_lanes": 0.9, "l2norm": 0.8, "softmax": 4.1,
    "rms_norm": 1.0, "scale_before": 1.0, "scale_after": 1.0, "island_f32": 2.5, "recurrent": 2.5,
    "recurrent_gemv": 2.5, "chunk": 2.5, "dense_f32": 1.1, "online_f32": 1.1, "flash": 1.1, "absorbed": 1.1,
}  # fmt: skip
KDA_STATE_INTERNAL = 1.5


@dataclass(frozen=True)
class PlaceNoise:
    """Noise of one place: a draw of +-half an ulp for each format, one of an rms relative to the row's, one absolute.

    absolute: rms for each head [H, 1], or None.
    """

    formats: tuple[DType, ...] = ()
    internal: float = 0.0
    absolute: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self.formats) or self.internal > 0 or self.absolute is not None

    @property
    def coarse(self) -> bool:
        return any(f.precision <= COARSE_BITS for f in self.formats)

    @property
    def fine(self) -> bool:
        internal = self.internal > 0 or self.absolute is not None
        return internal or any(f.precision > COARSE_BITS for f in self.formats)

    def without_fine(self) -> "PlaceNoise":
        return PlaceNoise(tuple(f for f in self.formats if f.precision <= COARSE_BITS))

    def add(self, x: Tensor, random: torch.Generator) -> Tensor:
        """x (float64 or float32) with its noise, in the same dtype."""
        y = x
        for dtype in self.formats:
            y = torch.addcmul(y, _uniform(x, random), last_place(x, dtype))
        if self.internal:
            rms = x.pow(2).mean(-1, keepdim=True).sqrt_()
            y = torch.addcmul(y, _uniform(x, random), rms, value=self.internal * 12**0.5)
        if self.absolute is not None:
            y = torch.addcmul(y, _uniform(x, random), self.absolute, value=12**0.5)
        return y


def _uniform(x: Tensor, random: torch.Generator) -> Tensor:
    """Uniform in -0.5 .. 0.5, 24 bits of it, in the dtype of x."""
    draw = torch.rand(x.shape, generator=random, dtype=torch.float32, device=x.device)
    return draw.to(x.dtype).sub_(0.5)


EXPONENT = {torch.float64: (torch.int64, 0x7FF0_0000_0000_0000), torch.float32: (torch.int32, 0x7F80_0000)}


def last_place(x: Tensor, dtype: DType) -> Tensor:
    """Size of `dtype`'s last place at `x` (float64 or float32), by its exponent bits: `ulp` in fewer passes."""
    bits, mask = EXPONENT[x.dtype]
    power = x.contiguous().view(bits).bitwise_and(mask).view(x.dtype)
    return power.mul_(2.0 ** (1 - dtype.precision)).clamp_min_(2.0 ** (dtype.min_exponent + 1 - dtype.precision))


Plan = dict[Where, PlaceNoise]


class RoundingNoise:
    """Adds a plan's noise to a run of `twin(recipe)`; one seed is one stream of draws.

    plan_at(length): the plan of a pass whose rows then stand at so many tokens; the same places in each.
    """

    def __init__(self, plan_at: Callable[[int], Plan], *, seed: int, device: str = "cpu") -> None:
        self.plan_at, self.plan, self.phase = plan_at, plan_at(1), "prefill"
        self.random = torch.Generator(device=device).manual_seed(seed)

    def restart(self, seed: int) -> None:
        """Begin another stream of draws."""
        self.random.manual_seed(seed)

    def begin(self, step: Step) -> None:
        """Rows that run together are of like length: the middle one stands for all."""
        ends = sorted(start + n for start, n in zip(step.starts, step.lengths, strict=True))
        self.phase, self.plan = step.phase, self.plan_at(ends[len(ends) // 2])

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        if not any(self.plan.get((site, layer, phase)) for phase in PHASES):
            return rounding

        def add(x: Tensor) -> Tensor:
            y = self.plan[site, layer, self.phase].add(x, self.random)
            # what a query does not see is minus infinity and stays so
            return torch.where(x.isinf(), x, y) if site == "mla_scores" else y

        return add


class _Arrivals:
    """Which moved values did not fit the format they are moved into, in a run of the variant itself."""

    def __init__(self) -> None:
        self.phase, self.rounded = "prefill", set[Where]()

    def begin(self, step: Step) -> None:
        self.phase = step.phase

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        output = rule.output
        if rule.algorithm not in MOVES or output is None or site in INTEGER:
            return rounding

        def see(x: Tensor) -> Tensor:
            if not torch.equal(round_to(x, output), x):
                self.rounded.add((site, layer, self.phase))
            return x if rounding is None else rounding(x)

        return see


def noise_plan(recipe: Recipe, casts: Casts, prompt: Sequence[int]) -> Callable[[int], Plan]:
    """The noise at every (site, layer, phase) at which `recipe` rounds, by the tokens of its prefix, as a power of two.

    prompt: what the variant is watched on.
    """
    config, seen = casts.checkpoint.config, _Arrivals()
    model = Model(config, recipe, Weights(casts, recipe.semantics), probe=seen)
    decode.steps(model, [list(prompt)], 3, lambda t, logits: decode.greedy(logits))

    @cache
    def plan_at(length: int) -> Plan:
        plan = {w: _noise_of(recipe, casts, w, seen.rounded, length) for w in _wheres(config)}
        for where in plan:
            rule = recipe.rule(*where)
            if rule.algorithm == "softplus" and rule.accum is DType.f32 and plan[where]:
                plan[where] = replace(plan[where], absolute=_one_plus(casts, recipe, where[1]))
        return _without_fine(plan)

    return lambda length: plan_at(1 << (length - 1).bit_length())


def _one_plus(casts: Casts, recipe: Recipe, layer: int) -> Tensor:
    """What log(1 + exp(x)) loses in float32 where exp(x) is small: the rounding of the sum, times exp(A_log) [H, 1]."""
    a_log = Weights(casts, recipe.semantics).get(f"model.layers.{layer}.self_attn.A_log", DType.f64)
    return a_log.reshape(-1, 1).exp() * (DType.f32.unit_roundoff / 3**0.5)


def _wheres(config: ModelConfig) -> list[Where]:
    return [(site, layer, phase) for phase in PHASES for site, layer in places(config) if site not in INTEGER]


def _noise_of(recipe: Recipe, casts: Casts, where: Where, rounded: set[Where], length: int) -> PlaceNoise:
    site, layer, phase = where
    config = casts.checkpoint.config
    rule = recipe.rule(site, layer, phase)
    if site in CARRIED and not is_incremental(recipe):
        return PlaceNoise()  # what is carried out of a whole prefix is never read
    if rule.algorithm in MOVES:
        run = phase if is_incremental(recipe) else "prefill"
        moved = (site, layer, run) in rounded and rule.output is not None
        core = recipe.rule("kda_core", layer, phase).accum if site == "kda_state" else DType.f64
        return PlaceNoise((rule.output,) if moved and rule.output else (), _internal(core, KDA_STATE_INTERNAL))
    known = INTERNAL.get(rule.algorithm.removesuffix("_rows").removesuffix("_fused"), 0.0)
    if rule.algorithm.startswith("rms_norm"):
        known = INTERNAL["rms_norm"]
    if rule.algorithm.startswith(PRODUCTS) and rule.accum.precision < DType.f64.precision:
        rows = 1 if rule.algorithm.endswith("_rows") else _rows(recipe, config, site, phase, length)
        known = product_units(shape_of(site, layer, config), rows, device=casts.device, rule=rule)
    if site == "mla_scores":
        narrow = rule.accum if rule.accum.precision <= COARSE_BITS else None
        return PlaceNoise((narrow, narrow) if narrow else ())  # the product's rounding and the scaling's
    return PlaceNoise(_formats(rule, config), _internal(rule.accum, known))


def _rows(recipe: Recipe, config: ModelConfig, site: str, phase: str, length: int) -> int:
    """How many rows a product has in a pass whose rows then stand at `length` tokens."""
    run = recipe.execution
    one = site == "lm_head" or (phase == "decode" and is_incremental(recipe))
    rows = run.batch * (1 if one else min(length, run.prefill_piece or length))
    return rows * config.experts_per_token // config.num_experts if site in BY_EXPERT else rows


def _formats(rule: Rule, config: ModelConfig) -> tuple[DType, ...]:
    """The roundings in a row at a place where an operation computes."""
    if rule.output is None or rule.output.precision >= DType.f64.precision:
        return ()
    times = 2 if rule.algorithm.endswith("_twice") else 1
    if rule.algorithm.startswith("sum_") and rule.option("round_each"):
        times = config.experts_per_token
    return (rule.output,) * times


def _internal(accum: DType, units: float) -> float:
    return 0.0 if accum.precision >= DType.f64.precision else units * DType.f32.unit_roundoff


def _without_fine(plan: Plan) -> Plan:
    kept: Plan = {}
    coarse: dict[str, bool] = dict.fromkeys(PHASES, False)
    for where, noise in plan.items():
        kept[where] = noise.without_fine() if coarse[where[2]] else noise
        coarse[where[2]] |= noise.coarse and where[0] not in CARRIED
    return kept


def stream(seed: int, group: int) -> int:
    """The seed of one group's draws: independent of every other pair of seed and group."""
    return int(np.random.SeedSequence((seed, group)).generate_state(1, np.uint64)[0] >> 1)


def member(recipe: Recipe, casts: Casts, prompt: Sequence[int], *, seed: int) -> tuple[Recipe, RoundingNoise]:
    """What an envelope member runs, and its noise: float64, or float32 where all is coarse from the first layer on.

    There float32's own rounding is under 2^-12 of the noise, and a member costs half. `prompt` is what the variant is
    watched on (`noise_plan`).
    """
    plan_at = noise_plan(recipe, casts, prompt)
    plan = plan_at(len(prompt))
    early = {phase for (_, layer, phase), noise in plan.items() if layer <= 0 and noise.coarse}
    coarse = early == set(PHASES) and not any(noise.fine for (_, layer, _), noise in plan.items() if layer > 0)
    up = twin(recipe, DType.f32 if coarse else DType.f64)
    rough = {where: noise.without_fine() for where, noise in plan.items()}
    return up, RoundingNoise((lambda _: rough) if coarse else plan_at, seed=seed, device=casts.device)


def twin(recipe: Recipe, dtype: DType = DType.f64) -> Recipe:
    """The recipe's code path in one wide format in its cheapest form: the same function, state carried, no chunk, tile.

    Chunks and the absorbed attention stay where a rule rounds inside them, and operands that a single place rounds.
    Keys and values are otherwise expanded once: a value that is rounded again at each step is rounded to the same bits.
    """
    keep = {"chunk": _rounds_inside(recipe, CHUNK_SITES), "absorbed": _rounds_inside(recipe, LATENT_SITES)}
    rules = {key: _plain(key, _in(rule, dtype), keep) for key, rule in recipe.rules.items()}
    exceptions = {at: _plain(at[0], _in(rule, dtype), keep) for at, rule in recipe.exceptions.items()}
    exceptions |= {at: replace(exceptions[at], input=own) for at, own in recipe.own_operands().items()}
    latent = any(r.algorithm == "absorbed" for r in (*rules.values(), *exceptions.values()))
    changed = replace(recipe, rules=rules, exceptions=exceptions, expanded_cache=not latent, fused_projections=False)
    return changed.with_execution(mode=Execution.incremental)


def _in(rule: Rule, dtype: DType) -> Rule:
    """The rule with every format set to `dtype`; what a weight loses on its way is no noise, and stays lost."""
    names = ("input", "accum", "output", "storage")
    return replace(rule, weight=rule.weights, **{f: dtype for f in names if getattr(rule, f) is not None})


def _rounds_inside(recipe: Recipe, sites: Sequence[str]) -> bool:
    """Whether some rule of `sites` rounds to at most 11 bits."""
    inside = [recipe.rules[k] for k in sites] + [r for (k, _), r in recipe.exceptions.items() if k in sites]
    return any(r.output is not None and r.output.precision <= COARSE_BITS for r in inside)


def _plain(key: str, rule: Rule, keep: Mapping[str, bool]) -> Rule:
    rule = replace(rule, algorithm=rule.algorithm.removesuffix("_rows"), impl="torch", inside="")
    if keep.get(rule.algorithm, False):
        return rule.without_form()
    if key.startswith("kda_core."):
        return replace(rule, algorithm="recurrent_gemv", options=())
    if key.startswith("mla_core."):
        return replace(rule, algorithm="dense_f32", options=())
    return rule
