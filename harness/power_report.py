"""The confusion matrix of the power experiment: what each rule caught, what it alarmed on for nothing, and where.

Defects that leave every value of a run bit-identical are not exercised by its battery: they are listed apart, with
what would exercise them, and count for no rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.power_rows import PLACED, Row
from harness.power_rules import RULES
from harness.significance import wilson

EFFECTS = (0.01, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Share:
    """hits of trials with the 95 % Wilson interval; None where there was no trial."""

    hits: int
    trials: int

    @property
    def value(self) -> float | None:
        return self.hits / self.trials if self.trials else None

    @property
    def interval(self) -> tuple[float, float] | None:
        if not self.trials:
            return None
        found = wilson(self.hits, self.trials)
        return found.low, found.high

    def __str__(self) -> str:
        if self.interval is None:
            return "-"
        low, high = (100 * bound for bound in self.interval)
        return f"{self.hits}/{self.trials} = {100 * self.hits / self.trials:.1f} % [{low:.1f}, {high:.1f}]"


@dataclass(frozen=True, kw_only=True)
class RuleRow:
    """One rule over all runs that it could judge. caught: by severity too; site, layer: of the defects it caught."""

    rule: str
    alarms: Share
    caught: Share
    by_severity: dict[str, Share]
    auc: float | None
    site: Share | None
    layer: Share | None

    @property
    def title(self) -> str:
        return RULES[self.rule].title


Keep = Callable[[Row], bool]


def exercised(row: Row) -> bool:
    return bool(row["defect"]) and row["exercised"] == "1"


def benign(row: Row) -> bool:
    return not row["defect"]


def share(rows: Sequence[Row], rule: str, keep: Keep) -> Share:
    """How many of the kept runs a rule flags, of those that it can judge."""
    flags = [row[f"{rule}_flag"] for row in rows if keep(row) and row[f"{rule}_flag"]]
    return Share(hits=flags.count("1"), trials=len(flags))


def confusion(rows: Sequence[Row]) -> list[RuleRow]:
    """Every rule over the same runs, ours first."""
    return [_rule_row(rows, rule) for rule in RULES]


def _rule_row(rows: Sequence[Row], rule: str) -> RuleRow:
    severities = ("heavy", "medium", "light")
    return RuleRow(
        rule=rule,
        alarms=share(rows, rule, benign),
        caught=share(rows, rule, exercised),
        by_severity={s: share(rows, rule, lambda r, s=s: exercised(r) and r["severity"] == s) for s in severities},
        auc=area(rows, rule),
        site=_placed(rows, rule, _right_site) if rule in PLACED and rule not in ("ladder", "envelope") else None,
        layer=_placed(rows, rule, _right_layer) if rule in PLACED else None,
    )


def _right_site(row: Row, rule: str) -> bool:
    return row[f"{rule}_site"] in row["want_sites"].split("/")


def _right_layer(row: Row, rule: str) -> bool:
    return row[f"{rule}_layer"] == row["want_layer"]


def _placed(rows: Sequence[Row], rule: str, right: Callable[[Row, str], bool]) -> Share:
    caught = [row for row in rows if exercised(row) and row[f"{rule}_flag"] == "1"]
    return Share(hits=sum(right(row, rule) for row in caught), trials=len(caught))


def area(rows: Sequence[Row], rule: str) -> float | None:
    """Area under the curve: the share of (defect, benign) pairs in which the defect scores higher, ties half."""

    def scores(keep: Keep) -> np.ndarray:
        found = np.array([float(row[f"{rule}_score"]) for row in rows if keep(row)])
        return found[~np.isnan(found)]

    bad, good = scores(exercised), scores(benign)
    if not bad.size or not good.size:
        return None
    order = np.sort(good)
    below = np.searchsorted(order, bad, side="left")
    upto = np.searchsorted(order, bad, side="right")
    return float((below + upto).mean() / (2 * good.size))


def by_family(rows: Sequence[Row], rules: Sequence[str], severity: str = "light") -> list[tuple[str, list[Share]]]:
    """Share of each family's exercised defects that each rule catches at one severity."""
    families = dict.fromkeys(row["family"] for row in rows if row["defect"])
    return [
        (family, [share(rows, rule, lambda r, f=family: exercised(r) and r["family"] == f and r["severity"] == severity)
                  for rule in rules])
        for family in families
    ]  # fmt: skip


def by_effect(rows: Sequence[Row], rules: Sequence[str]) -> list[tuple[str, list[Share]]]:
    """Share of exercised defects that each rule catches, by what they do to the logits in units of rounding's noise."""
    bounds = [*zip((0.0, *EFFECTS), (*EFFECTS, float("inf")), strict=True)]
    names = [f"under {EFFECTS[0]:g}", *(f"{a:g} to {b:g}" for a, b in bounds[1:-1]), f"{EFFECTS[-1]:g} and more"]

    def within(low: float, high: float) -> Keep:
        return lambda r: exercised(r) and (low <= float(r["effect"]) < high or float(r["effect"]) == high)

    return [(name, [share(rows, rule, within(*b)) for rule in rules]) for name, b in zip(names, bounds, strict=True)]


def missed(rows: Sequence[Row], rule: str) -> list[Row]:
    """Exercised defects that a rule let pass."""
    return [row for row in rows if exercised(row) and row[f"{rule}_flag"] == "0"]


def misplaced(rows: Sequence[Row], rule: str) -> list[Row]:
    """Exercised defects that a rule caught at another site or layer than they sit in."""
    caught = [row for row in rows if exercised(row) and row[f"{rule}_flag"] == "1"]
    return [row for row in caught if not (_right_site(row, rule) and _right_layer(row, rule))]


def false_alarms(rows: Sequence[Row], rule: str) -> list[Row]:
    return [row for row in rows if benign(row) and row[f"{rule}_flag"] == "1"]


def unexercised(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["defect"] and row["exercised"] == "0"]
