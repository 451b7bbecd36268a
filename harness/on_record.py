"""Whether a named variant still means what it meant when its recipe was last put on record.

Every instrument holds a run against the rules that `variants.rules` makes of a variant's axes; whoever edits those
changes what is expected along with what runs. So `assets/recipes.json` keeps the rules of every named variant beside
the axes that its YAML sets, and rules that changed under the same axes are a finding.

    python -m harness.on_record        # put the recipes as they are on record, after a change that is meant
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from harness.compose import groups, named_variant
from harness.engines.assets import ASSETS, checkpoint_folder
from harness.verdict import Finding
from variants.axes import Variant
from variants.checkpoint import load_config
from variants.model_config import ModelConfig
from variants.recipe import Recipe, resolve

INSTRUMENT = "on_record"
FILE = ASSETS / "recipes.json"
MODEL = "kimi-linear-12m"  # of whose geometry the recipes on record are
FIELDS = ("input", "accum", "output", "storage", "algorithm", "impl", "inside", "options")
MEANT = "if it is meant: python -m harness.on_record"


@dataclass(frozen=True, kw_only=True)
class OnRecord:
    """found: the first rule that is another than on record; left_out: why none was held."""

    found: Finding | None = None
    left_out: str | None = None

    def record(self) -> dict[str, object]:
        return {"left_out": self.left_out}

    def findings(self) -> list[Finding]:
        return [] if self.found is None else [self.found]


def on_record(name: str, variant: Variant, config: ModelConfig, recipe: Recipe) -> OnRecord:
    """A variant's recipe against the one on record under its name, where axes and geometry are those of then."""
    known = recorded()
    then = known["variants"].get(name)
    if then is None or config != load_config(checkpoint_folder(MODEL)):
        return OnRecord(left_out=f"{name} on this geometry is not on record")
    if then["axes"] != axes_of(variant):
        return OnRecord(left_out=f"{name} has other axes than on record")
    now, before = described(recipe), _rules(known, then)
    for key in dict.fromkeys([*now["rules"], *before]):
        if before.get(key) != now["rules"].get(key):
            return OnRecord(found=_finding(name, key, before.get(key), now["rules"].get(key)))
    if then["rest"] != now["rest"]:
        reason = f"what the axes of {name} mean beside its sites (semantics, joined products, tf32) is not as on record"
        return OnRecord(
            found=Finding(instrument=INSTRUMENT, reason=f"{reason}; look at variants/recipe.py, or {MEANT}")
        )
    return OnRecord()


def _rules(known: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, str]:
    return {key: known["rules"][n] for key, n in zip(known["keys"], then["rules"], strict=True) if n >= 0}


def _finding(name: str, key: str, old: str | None, now: str | None) -> Finding:
    then, here = (dict(zip(FIELDS, words.split(), strict=True)) if words else {} for words in (old, now))
    changed = [
        f"{f} {here.get(f, 'none')}, on record {then.get(f, 'none')}" for f in FIELDS if then.get(f) != here.get(f)
    ]
    site, _, layer = key.partition("@")
    reason = f"{key}: the axes of {name} mean another rule than they did: {'; '.join(changed)} (look at the latest "
    return Finding(
        instrument=INSTRUMENT,
        reason=f"{reason}edit of variants/rules.py and its like; {MEANT})",
        site=site.partition(".")[0],
        layer=int(layer) if layer else None,
    )


def described(recipe: Recipe) -> dict[str, Any]:
    """Rules by site and by site@layer, in words in the order of FIELDS; a digest of the rest, less how it runs."""
    whole = recipe.as_dict()
    rules: dict[str, str] = {}
    for part in ("sites", "exceptions"):
        told = whole[part]
        assert isinstance(told, dict)
        rules |= {key: _words(rule) for key, rule in told.items()}
    rest = {k: v for k, v in whole.items() if k not in ("sites", "exceptions", "execution", "batch_dependent")}
    return {"rules": rules, "rest": _digest(rest)}


def _words(rule: Mapping[str, object]) -> str:
    """The rule as words in the order of FIELDS."""
    options = ",".join(f"{k}={v}" for k, v in sorted(rule.items()) if k not in FIELDS)
    return " ".join([*(str(rule.get(f, "-")) for f in FIELDS[:-1]), options or "-"])


def axes_of(variant: Variant) -> str:
    """A digest of what a variant sets otherwise than the defaults."""
    return _digest(dict(_set(variant, type(variant)(), "")))


def _set(value: Any, default: Any, name: str) -> Iterator[tuple[str, object]]:
    for f in fields(value):
        own, usual = getattr(value, f.name), getattr(default, f.name)
        if own != usual and f.compare:
            if is_dataclass(own):
                yield from _set(own, usual, f"{name}{f.name}.")
            else:
                yield f"{name}{f.name}", own.name if isinstance(own, Enum) else repr(own)


def _digest(value: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


@cache
def recorded() -> dict[str, Any]:
    """rules: words. keys: of sites and of site@layer. variants: axes, rest, each key's rule by number, -1 for none."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def current() -> dict[str, Any]:
    """The record as the code is now: every named variant on the shipped geometry."""
    config = load_config(checkpoint_folder(MODEL))
    named = {name: named_variant(name) for name in sorted(groups()["variant"])}
    told = {name: described(resolve(variant, config)) for name, variant in named.items()}
    keys = list(dict.fromkeys(key for t in told.values() for key in t["rules"]))
    number = {rule: n for n, rule in enumerate(dict.fromkeys(r for t in told.values() for r in t["rules"].values()))}
    variants = {}
    for name, t in told.items():
        rules = [number.get(t["rules"].get(key), -1) for key in keys]
        variants[name] = {"axes": axes_of(named[name]), "rest": t["rest"], "rules": rules}
    return {"keys": keys, "rules": list(number), "variants": variants}


if __name__ == "__main__":
    now = current()
    FILE.write_text(json.dumps(now, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{FILE.name}: {len(now['variants'])} named variants")
