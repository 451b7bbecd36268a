"""Named explanations of a finding, each tested causally: with this one change, is the excess gone?

Local replay holds a run against a meaning. A hypothesis is another meaning at one place: a parameter rounded to bf16
when it was loaded, another eps, or the arithmetic that a named variant has there. The run's values are the same for all
of them, so the run is made once, over the one prompt where the excess was worst, and every meaning walks beside it: a
few tokens of one prompt for each of at most `MOST` hypotheses.

A change may fit by chance. It explains only where it leaves at most a tenth of the squared error, and where a change
without any relation to the error would leave so little with a probability under `CHANCE` for all that were tried.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scipy import special

from harness.forced_errors import Battery
from harness.inspect import Arm, model_under, replay_recipe
from harness.local_replay import LocalReplay, Meaning, replays
from harness.op_error import OpError
from harness.parts import part
from harness.signature import rows_hint
from harness.verdict import Finding
from variants.dtypes import DType, dtype_of
from variants.model import PHASES, Model
from variants.model_config import ModelConfig
from variants.recipe import Place, Recipe, Rule, Semantics
from variants.rounding import Probe
from variants.sites import CHUNK_SITES, INSIDE_ATTENTION, INTEGER, rule_key
from variants.weights import Casts

MOST = 8
TOKENS = 4  # forced at least; more where the worst position lies later
LEFT = 0.1  # share of the squared error that may be left for a change to have explained it
CHANCE = 1e-3  # of a fit without any relation, for all changes that were tried together
ALIKE = 2.0  # changes that leave up to so many times the least explain alike, and the plainest is told
# Where each parameter is first used.
USED = {"A_log": "decay_gate", "dt_bias": "decay_gate", "e_score_correction_bias": "router_ids"}
L2_TEXT = "eps {:.0e}, the config's, in the L2 norm, where 1e-06 is meant"
LATENT_EPS = 1e-6  # of kv_a_layernorm, in the transformers library
# Values on the way to a place that not every engine shows.
INNER = {
    "mla_core": ("mla_q", "mla_k", "mla_v", "q_latent", *INSIDE_ATTENTION, "o_latent"),
    "kda_core": ("q_l2norm", "k_l2norm", "kda_v", *CHUNK_SITES),
    "kda_state": ("q_l2norm", "k_l2norm", "kda_v", *CHUNK_SITES),
}


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """Another meaning at one place. exact: the float64 model's recipe under it. recipe: what would then be declared."""

    text: str
    exact: Recipe
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What was found wanting. arms: the runs by the name of the rung; named: variants whose arithmetic may explain."""

    casts: Casts
    arms: Mapping[str, Arm]
    named: Mapping[str, Recipe]


@part("explaining")
def explain(finding: Finding, subject: Subject) -> str | None:
    """What takes away a local replay's excess, as "explained by ...", or which rows it stays with; None for neither.

    Findings of other instruments have no such test and give None.
    """
    arm = subject.arms.get(finding.rung)
    if arm is None or finding.site is None or finding.layer is None:
        return None
    place = (finding.site, finding.layer)
    tried = hypotheses(place, arm, subject)
    if tried:
        before, *after = _errors(place, finding.worst_at, arm, subject.casts, tried)
        if found := best(before, list(zip(tried, after, strict=True))):
            return f"explained by {found.text}"
    return finding.rows if finding.rows and stays_with_row(place, finding.rows, arm, subject.casts) else None


def best(before: OpError | None, tried: Sequence[tuple[Hypothesis, OpError | None]]) -> Hypothesis | None:
    """The change that explains an error, None where none does; the plainest of those that leave about as little."""
    if before is None or not before.in_excess or before.non_finite:
        return None
    left = [(h, e.error2 / before.error2) for h, e in tried if e is not None and not e.in_excess]
    fits = [(h, x) for h, x in left if x <= LEFT and by_chance(x, before.positions) * len(tried) < CHANCE]
    least = min((x for _, x in fits), default=0.0)
    return next((h for h, x in fits if x <= ALIKE * least), None)


def by_chance(left: float, positions: int) -> float:
    """Probability that a change without any relation to an error leaves no more than a share of its square.

    The square of the correlation of two vectors with as many independent entries as there are positions.
    """
    return float(special.betaincc(0.5, max(positions - 1, 1) / 2, 1 - left)) if left < 1 else 1.0


def stays_with_row(place: Place, told: str, arm: Arm, casts: Casts) -> bool:
    """Whether the rows in excess look the same when the prompts run in the opposite order: then it is the slot."""
    if not arm.together:
        return False
    rows = list(range(len(arm.battery.prompts)))
    for order in (rows, rows[::-1]):
        battery = arm.battery.part(order, TOKENS)
        if _rows_of(_held(place, arm, casts, battery, ())[0]) != {told}:
            return False
    return True


def hypotheses(place: Place, arm: Arm, subject: Subject) -> list[Hypothesis]:
    """What could be meant at a place instead of what is declared, the plainest first."""
    config = subject.casts.checkpoint.config
    plain = Hypothesis(text="", exact=replay_recipe(config, arm.recipe), recipe=arm.recipe)
    found = [*_parameters(place, plain, subject.casts), *_eps(place, plain, config), *_stored(place, plain)]
    return [*found, *_arithmetic(place, plain, arm.precision, subject.named)][:MOST]


def _parameters(place: Place, plain: Hypothesis, casts: Casts) -> list[Hypothesis]:
    """Parameters that the checkpoint stores wider than bf16, used at this place and not declared to be rounded."""
    site, layer = place
    prefix, known = f"model.layers.{layer}.", plain.recipe.semantics
    wide = {
        name.rsplit(".", 1)[-1]
        for name, tensor in casts.checkpoint.tensors.items()
        if name.startswith(prefix) and dtype_of(tensor).precision > DType.bf16.precision
    }
    names = [n for n in sorted(wide - known.bf16_params) if USED.get(n, site) == site]
    meant = {n: replace(known, bf16_params=known.bf16_params | {n}) for n in names}
    return [_meaning(plain, f"{n} rounded to bf16 when loaded", s) for n, s in meant.items()]


def _meaning(plain: Hypothesis, text: str, semantics: Semantics) -> Hypothesis:
    return replace(plain, text=text, exact=replace(plain.exact, semantics=semantics))


def _eps(place: Place, plain: Hypothesis, config: ModelConfig) -> list[Hypothesis]:
    known, own = plain.recipe.semantics, config.rms_norm_eps
    if place[0] in ("q_l2norm", "k_l2norm"):
        return [] if known.l2_eps == own else [_meaning(plain, L2_TEXT.format(own), replace(known, l2_eps=own))]
    if place[0] != "kv_a_norm":
        return []
    here = own if known.kv_eps is None else known.kv_eps
    by = "the config says" if known.kv_eps is None else "the variant declares"
    others = [e for e in dict.fromkeys((LATENT_EPS, own)) if e != here]
    meant = {e: replace(known, kv_eps=None if e == own else e) for e in others}
    return [_meaning(plain, f"eps {e:.0e} where {by} {here:.0e}", s) for e, s in meant.items()]


def _stored(place: Place, plain: Hypothesis) -> list[Hypothesis]:
    """The place's value rounded to a format narrower than what is declared, and nothing else."""
    if place[0] in INTEGER:
        return []
    declared = plain.recipe.rule(*place)
    wide = declared.output or declared.accum
    narrow = [f for f in (DType.bf16, DType.f16) if f.precision < wide.precision]
    return [
        replace(
            plain,
            text=f"{place[0]} rounded to {f.name} where {wide.name} is declared",
            exact=_rounding(plain.exact, place, f),
            recipe=_rounding(plain.recipe, place, f),
        )
        for f in narrow
    ]


def _rounding(recipe: Recipe, place: Place, dtype: DType) -> Recipe:
    """A recipe whose value at one place ends in `dtype`, in a buffer that is as wide as it was computed."""
    exceptions = dict(recipe.exceptions)
    for phase in PHASES:
        rule = recipe.rule(*place, phase)
        exceptions[(rule_key(place[0], phase), place[1])] = replace(rule, output=dtype, storage=rule.accum)
    return replace(recipe, exceptions=exceptions)


def _arithmetic(
    place: Place, plain: Hypothesis, precision: DType | None, named: Mapping[str, Recipe]
) -> list[Hypothesis]:
    """Variants whose rules differ at this place, each set of rules once."""
    found, seen = [], {_rules(plain.recipe, place)}
    for name, recipe in named.items():
        other = recipe if precision is None else recipe.at_precision(precision)
        rules = _rules(other, place)
        if rules in seen or any(r.impl != "torch" for r in rules):
            continue
        seen.add(rules)
        found.append(
            Hypothesis(
                text=f"computing {place[0]} as {name} does ({_told(plain.recipe, other, place)})",
                exact=plain.exact.with_places(other, _all_of(place)),
                recipe=plain.recipe.with_places(other, _all_of(place)),
            )
        )
    return found


def _all_of(place: Place) -> list[Place]:
    """A place and those inside the same operation."""
    return [(site, place[1]) for site in (*INNER.get(place[0], ()), place[0])]


def _rules(recipe: Recipe, place: Place) -> tuple[Rule, ...]:
    return tuple(recipe.rule(s, layer, phase) for s, layer in _all_of(place) for phase in PHASES)


def _told(declared: Recipe, other: Recipe, place: Place) -> str:
    """The fields in which the rules of the place itself differ, in the first phase in which any do."""
    for phase in PHASES:
        a, b = (r.rule(place[0], place[1], phase).as_dict() for r in (declared, other))
        told = [f"{k} {b[k]}" for k in b if b[k] != a.get(k) and k != "storage"]
        if told:
            return ", ".join(told)
    return f"other rules inside {rule_key(place[0], 'prefill')}"


def _errors(
    place: Place, worst_at: tuple[int, int], arm: Arm, casts: Casts, tried: Sequence[Hypothesis]
) -> list[OpError | None]:
    """The place's error as declared, then under each hypothesis, over the prompt with the worst position."""
    row = max(worst_at[0], 0)
    prompt = arm.battery.prompts[row]
    battery = arm.battery.part([row], max(TOKENS, worst_at[1] - len(prompt) + 2))
    return [_joined(replay) for replay in _held(place, arm, casts, battery, tried)]


def _held(place: Place, arm: Arm, casts: Casts, battery: Battery, tried: Sequence[Hypothesis]) -> list[LocalReplay]:
    """Local replay of one place over a battery, as declared and then under each hypothesis."""

    def only(site: str, layer: int) -> bool:
        return (site, layer) == place

    plain = replay_recipe(casts.checkpoint.config, arm.recipe)
    meanings = [Meaning(_maker(casts, plain), arm.recipe, only)]
    meanings += [Meaning(_maker(casts, h.exact), h.recipe, only) for h in tried]
    return replays(lambda tap: arm.make(battery, tap), meanings, battery.prompts, battery.continuations)


def _maker(casts: Casts, recipe: Recipe) -> Callable[[Probe], Model]:
    return lambda probe: model_under(casts, recipe, probe)


def _joined(replay: LocalReplay) -> OpError | None:
    """Prefill and decode of one place together; None where it was not compared."""
    joined = OpError()
    for error in replay.errors.values():
        joined.include(error, 0)
    return joined if replay.errors else None


def _rows_of(replay: LocalReplay) -> set[str | None]:
    """What the rows of a place look like, in each phase that is in excess."""
    return {rows_hint(error) for error in replay.errors.values() if error.in_excess}
