"""How much each of several changes contributes to a difference of scores: Shapley values over orders of the changes.

A change's share is what the score gains when it is made, averaged over the orders in which all are made one after the
other. Where some sets of changes cannot run, only orders that never pass through one count, each alike. Every order's
gains add up to the whole difference, so the shares do. Few axes: every order, exactly; many: a seeded sample of them.

Sources: L. S. Shapley, A value for n-person games (1953); J. Castro, D. Gomez, J. Tejada, Computers & Operations
Research 36 (2009) 1726 for the sample; U. Faigle, W. Kern, Int. J. of Game Theory 21 (1992) 249 for orders under
precedence.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.progress import tracked
from variants.errors import UsageError

Axes = frozenset[str]
Value = Callable[[Axes], float]
Order = tuple[str, ...]
TRIES = 20_000  # orders drawn before it is said that none, or too few, can run


@dataclass(frozen=True, kw_only=True)
class Share:
    """One axis: its mean gain in the score's unit, and the standard error of that mean (0 where every order ran)."""

    axis: str
    share: float
    error: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the axes, largest first by size; they sum to after - before.

    orders: how many were averaged, exact: whether these are all. acceptance: the part of drawn orders that can run.
    evaluated: sets of axes whose score was measured.
    """

    before: float
    after: float
    shares: tuple[Share, ...]
    orders: int
    exact: bool
    acceptance: float
    evaluated: int


def shares(
    axes: Sequence[str],
    value: Value,
    *,
    allowed: Callable[[Axes], bool] = lambda axes: True,
    orders: int = 24,
    seed: int = 0,
) -> Shares:
    """Shares of `axes` in value(all) - value(none); each set is evaluated once.

    orders: how many to draw where there are more. Raises UsageError where no order of single changes can run, or all of
    the axes together cannot.
    """
    if orders < 2:
        raise UsageError(f"orders={orders}: expected 2 or more, a standard error is read off them")
    if not axes:
        raise UsageError("shares: the two variants have the same axes; nothing is to be shared out")
    known: dict[Axes, float] = {}

    def measured(chosen: Axes) -> float:
        if chosen not in known:
            known[chosen] = value(chosen)
        return known[chosen]

    exact = math.factorial(len(axes)) <= orders
    chosen, drawn = _every_order(axes, allowed) if exact else _drawn_orders(axes, allowed, orders, seed)
    gains = np.array(
        [[gain for _, gain in sorted(_gains(order, measured))] for order in tracked("orders", chosen, len(chosen))]
    )
    names = sorted(axes)
    before, after = measured(frozenset()), measured(frozenset(axes))
    assert math.isclose(gains.mean(0).sum(), after - before, rel_tol=1e-9, abs_tol=1e-9), (
        "gains telescope in each order"
    )
    error = np.zeros(len(names)) if exact else gains.std(0, ddof=1) / math.sqrt(len(chosen))
    found = [
        Share(axis=name, share=float(g.mean()), error=float(e), low=float(g.min()), high=float(g.max()))
        for name, g, e in zip(names, gains.T, error, strict=True)
    ]
    return Shares(
        before=before,
        after=after,
        shares=tuple(sorted(found, key=lambda s: (-abs(s.share), s.axis))),
        orders=len(chosen),
        exact=exact,
        acceptance=len(chosen) / drawn,
        evaluated=len(known),
    )


def _gains(order: Order, value: Value) -> Iterable[tuple[str, float]]:
    for i, axis in enumerate(order):
        yield axis, value(frozenset(order[: i + 1])) - value(frozenset(order[:i]))


def _can_run(order: Order, allowed: Callable[[Axes], bool]) -> bool:
    return all(allowed(frozenset(order[:i])) for i in range(1, len(order) + 1))


def _every_order(axes: Sequence[str], allowed: Callable[[Axes], bool]) -> tuple[list[Order], int]:
    found = [o for o in itertools.permutations(axes) if _can_run(o, allowed)]
    if not found:
        _refuse(axes)
    return found, math.factorial(len(axes))


def _drawn_orders(
    axes: Sequence[str], allowed: Callable[[Axes], bool], count: int, seed: int
) -> tuple[list[Order], int]:
    """Orders drawn alike from those that can run, with how many were drawn to find them."""
    draw, found = random.Random(seed), []
    for tried in range(1, TRIES + 1):
        order = tuple(draw.sample(list(axes), len(axes)))
        if _can_run(order, allowed):
            found.append(order)
        if len(found) == count:
            return found, tried
    if len(found) < 2:
        _refuse(axes)
    return found, TRIES


def _refuse(axes: Sequence[str]) -> None:
    raise UsageError(
        f"shares: no order of the changes {', '.join(axes)} can run one at a time; compare variants that are nearer"
    )
