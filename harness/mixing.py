"""Where two recipes differ, as a list of places, and the recipe that has some of these places from the other one.

Beside (site, layer) there are settings that belong to no site: what the function itself means, how it is run, what is
carried. Each is a place of its own, with NOWHERE as its layer.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from variants.model_config import ModelConfig
from variants.recipe import Place, Recipe
from variants.sites import places

NOWHERE = -1
PHASES = ("prefill", "decode")
Take = Callable[[Recipe, Recipe], Recipe]


def _kv_eps(recipe: Recipe, other: Recipe) -> Recipe:
    return replace(recipe, semantics=replace(recipe.semantics, kv_eps=other.semantics.kv_eps))


def _l2_eps(recipe: Recipe, other: Recipe) -> Recipe:
    return replace(recipe, semantics=replace(recipe.semantics, l2_eps=other.semantics.l2_eps))


def _parameter(name: str) -> Take:
    """The rounding of one parameter to bf16, there or not as `other` has it."""

    def take(recipe: Recipe, other: Recipe) -> Recipe:
        mine, theirs = recipe.semantics.bf16_params, other.semantics.bf16_params
        rounded = mine | {name} if name in theirs else mine - {name}
        return replace(recipe, semantics=replace(recipe.semantics, bf16_params=rounded))

    return take


SETTINGS: dict[str, Take] = {
    "kv_norm_eps": _kv_eps,
    "l2_norm_eps": _l2_eps,
    **{f"bf16_{name}": _parameter(name) for name in ("A_log", "dt_bias", "e_score_correction_bias", "weight")},
    "execution.mode": lambda r, o: r.with_execution(mode=o.execution.mode, block_size=o.execution.block_size),
    "execution.prefill_piece": lambda r, o: r.with_execution(prefill_piece=o.execution.prefill_piece),
    "cache": lambda r, o: replace(r, expanded_cache=o.expanded_cache),
    "fused_projections": lambda r, o: replace(r, fused_projections=o.fused_projections),
    "tf32": lambda r, o: replace(r, tf32=o.tf32),
}


def differing_places(a: Recipe, b: Recipe, config: ModelConfig) -> list[Place]:
    """The settings in which two recipes differ, then the places whose rules do, in the order of the forward.

    The number of rows that run together is no place: a token is looked at alone.
    """
    settings = [(name, NOWHERE) for name, take in SETTINGS.items() if take(a, b) != a]
    return settings + [place for place in places(config) if not _alike(a, b, place)]


def _alike(a: Recipe, b: Recipe, place: Place) -> bool:
    return all(a.rule(*place, phase) == b.rule(*place, phase) for phase in PHASES)


def mixed(a: Recipe, b: Recipe, swapped: Collection[Place]) -> Recipe:
    """`a` with the given places as `b` has them."""
    recipe = a.with_places(b, [place for place in swapped if not is_setting(place)])
    for name, take in SETTINGS.items():
        if (name, NOWHERE) in swapped:
            recipe = take(recipe, b)
    return recipe


def is_setting(place: Place) -> bool:
    return place[0] in SETTINGS


def by_site(places: Iterable[Place]) -> dict[str, list[Place]]:
    """Places grouped by their site, all layers together, in the order in which sites first come."""
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(place[0], []).append(place)
    return groups
