"""From float32 towards an engine: its rounding points turned on one group at a time, each alone and cumulatively.

The start is the target's own code path with every format raised to float32, so that orders and algorithms are the
target's from the first row on and what is turned on is rounding alone. Each row says how near the golden engine's
logprobs the recipe comes, how many tokens it chooses, and what a correct run of that recipe is expected to score: a
score inside the interval is noise, not progress. All prompts run together, in the order of sums that this gives.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from harness.calibration import of_recipe
from harness.expected import expected_score
from harness.golden_data import Golden
from harness.jitter import forced_logprobs, golden_distance
from harness.localize import Runner
from harness.matched import matched
from harness.progress import progress
from harness.significance import Interval
from variants.dtypes import DType
from variants.errors import UsageError
from variants.model_config import ModelConfig
from variants.recipe import Recipe
from variants.sites import CHUNK_SITES, places

# Sites that one engine rounds or does not round together, in the order of the forward.
POINTS: dict[str, tuple[str, ...]] = {
    "embedding": ("embed",),
    "residual stream": ("attn_residual", "mlp_residual"),
    "norms": ("input_norm", "post_attn_norm", "final_norm"),
    "KDA projections": ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj", "f_b_proj", "g_b_proj"),
    "short convolution": ("conv_state", "conv_sum", "short_conv"),
    "q, k and v of KDA": ("q_l2norm", "k_l2norm", "kda_v"),
    "decay gate and beta": ("decay_gate", "beta"),
    "inside chunks": CHUNK_SITES,
    "KDA core": ("kda_core",),
    "KDA state": ("kda_state",),
    "gated norm": ("o_norm",),
    "MLA projections": ("mla_q_proj", "kv_a_proj", "kv_b_proj"),
    "latent": ("kv_a_norm", "kv_cache"),
    "q, k and v of MLA": ("mla_q", "mla_k", "mla_v", "q_latent"),
    "probabilities": ("mla_scores", "mla_probs"),
    "MLA core": ("o_latent", "mla_core"),
    "output projections": ("o_proj",),
    "router": ("router", "router_scores", "router_ids", "router_weights"),
    "experts": ("expert_gate_up", "expert_silu", "expert_act", "expert_down", "expert_out", "routed"),
    "shared expert and dense MLP": (
        "mlp_gate", "mlp_up", "mlp_silu", "mlp_act", "mlp_down",
        "shared_gate", "shared_up", "shared_silu", "shared_act", "shared_down", "combine",
    ),
    "logits": ("lm_head",),
}  # fmt: skip
# Operands of products are no points of their own: a product whose rule is the target's rounds what it reads itself.
OPERANDS = ("attn_in", "f_b_in", "g_b_in", "kv_b_in", "o_proj_in", "mlp_in", "router_in", "expert_down_in",
            "mlp_down_in", "shared_down_in", "lm_head_in")  # fmt: skip
START = "float32"
END = "all of it"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One recipe on the way: the point that was turned on last, with those before it (`cumulative`) or alone.

    median_nats: of |logprob difference| to the golden engine over its recorded top, along its own tokens. forced, free:
    tokens of `total` that agree. expected: what a correct run of this recipe scores freely, None where not asked for.
    """

    point: str
    cumulative: bool
    median_nats: float
    forced: int
    free: int
    total: int
    expected: Interval | None

    @property
    def inside(self) -> bool | None:
        return None if self.expected is None else self.expected.low <= self.free <= self.expected.high


def toward(runner: Runner, start: Recipe, target: Recipe, golden: Golden, *, members: int = 8) -> Iterator[Row]:
    """Measure `start` and every step from it to `target`; members: of the expected score, 0 to leave it out.

    Raises UsageError for a golden without logprobs and for a target that rounds nowhere more than float32 does.
    """
    if golden.top_logprobs is None:
        raise UsageError(f"golden {golden.name} has no logprobs, so no distance to its engine can be measured")
    if members == 1:
        raise UsageError("members=1: expected 0, or 2 or more (a spread is read off them)")
    config = runner.casts.checkpoint.config
    together = {"batch": len(golden.prompts)}
    steps = list(recipes(start.with_execution(**together), target.with_execution(**together), config))
    with progress("towards the engine", len(steps)) as done:
        for point, cumulative, recipe in steps:
            yield _measured(runner, recipe, golden, members=members, point=point, cumulative=cumulative)
            done()


def recipes(start: Recipe, target: Recipe, config: ModelConfig) -> Iterator[tuple[str, bool, Recipe]]:
    """(point, cumulative, recipe) in order: the start, the target's code path in float32, each point, the target."""
    base = target.at_precision(DType.f32)
    points = [name for name, sites in POINTS.items() if _differs(base, target, sites, config)]
    if not points:
        raise UsageError("the target rounds nowhere more than float32 does; name one that does")
    yield START, True, start
    yield "the target's code path in float32", True, base
    on: list[str] = []
    for name in points:
        on.append(name)
        yield name, True, _with(base, target, on, config)
        if len(on) > 1:
            yield name, False, _with(base, target, [name], config)
    yield END, True, target


def _differs(a: Recipe, b: Recipe, sites: tuple[str, ...], config: ModelConfig) -> bool:
    phases = ("prefill", "decode")
    return any(a.rule(*p, phase) != b.rule(*p, phase) for p in places(config) if p[0] in sites for phase in phases)


def _with(base: Recipe, target: Recipe, points: list[str], config: ModelConfig) -> Recipe:
    sites = {site for name in points for site in POINTS[name]}
    return base.with_places(target, [place for place in places(config) if place[0] in sites])


def _measured(runner: Runner, recipe: Recipe, golden: Golden, *, members: int, point: str, cumulative: bool) -> Row:
    casts = runner.casts
    logprobs = forced_logprobs(of_recipe(recipe, casts), casts, golden, range(len(golden.prompts)))
    expected = expected_score(recipe, casts, golden, members=members).interval if members else None
    return Row(
        point=point,
        cumulative=cumulative,
        median_nats=golden_distance(logprobs, golden).median,
        forced=matched(runner, recipe, golden, free=False),
        free=matched(runner, recipe, golden, free=True),
        total=int((golden.tokens[0] >= 0).sum()),
        expected=expected,
    )
