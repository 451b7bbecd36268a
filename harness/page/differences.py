"""How the recipes of the runs on record differ from one of them: a line a change, with all sites that it holds for."""

from collections.abc import Mapping
from typing import Any

from harness.page.entries import Entry


def differences(entry: Entry, base: Entry) -> list[tuple[str, str, str, str]]:
    """(field, in `base`, in `entry`, sites), in the order of the sites; empty where the recipes declare the same."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for site in dict.fromkeys((*base.sites, *entry.sites)):
        a, b = base.sites.get(site, {}), entry.sites.get(site, {})
        for name in dict.fromkeys((*a, *b)):
            if (was := _word(a, name)) != (now := _word(b, name)):
                found.setdefault((name, was, now), []).append(site)
    return [(*change, " ".join(sites)) for change, sites in found.items()]


def base_of(entries: tuple[Entry, ...], name: str | None) -> Entry | None:
    """The entry that the others' recipes are held against: the one of that name, else the first with a recipe."""
    there = [entry for entry in entries if entry.sites and name in (None, entry.label)]
    return there[0] if there else None


def _word(rule: Mapping[str, Any], name: str) -> str:
    return str(rule.get(name, "-"))
