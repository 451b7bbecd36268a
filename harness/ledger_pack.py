"""How a row is written short: what repeats from site to site and from layer to layer is said once.

`packed` and `unpacked` are each other's inverse, up to the order of names within a map; a part that would not come back
equal is left as it is. Readers see the whole form alone, so this is the file's business and nobody else's.

    "sites":    {"fields": "input accum ...", "rules": {"bf16 f32 bf16 bf16 gemm torch": "q_proj k_proj ..."}}
    "observed": {"fields": "arrives leaves ...", "seen": {"f32 bf16 ... add,mul:f32": {"0-2,4-6": "q_proj k_proj ..."}}}
    lists of maps with the same names: {"columns": [...], "rows": [[...], ...]}

Where a site was seen to do the same in every phase of the run its layers stand alone, else after the phase and `@`.
A null of the schema's own fields is left out, and so is what `detail.agreement` repeats of `agreement`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from harness.ledger_schema import FIELDS

NOTHING, SPACE, COMMA, ABSENT = "-", "~", ";", "!"
PARTS = ("recipe", "detail", "agreement")
Plain = dict[str, Any]


def packed(row: Mapping[str, Any]) -> Plain:
    """The short form of a row in the whole form; neither is changed."""
    recipe, detail, agreement = (dict(row[name] or {}) for name in PARTS)
    if sites := (recipe["declared"] or {}).get("sites"):
        recipe["declared"] = recipe["declared"] | {"sites": _checked(_pack_sites, _sites, sites)}
    if recipe["observed"]:
        recipe["observed"] = _checked(_pack_observed, _observed, recipe["observed"])
    if isinstance(own := detail.get("agreement"), dict):
        missing = [name for name in agreement if name not in own]
        own = {k: v for k, v in own.items() if k not in agreement or not _same(agreement[k], v)}
        detail["agreement"] = {k: _checked(_pack_list, _list, v) for k, v in own.items()} | {"without": missing}
    agreement["first_divergence"] = _checked(_pack_list, _list, agreement["first_divergence"])
    found = {"recipe": recipe, "detail": detail if row["detail"] else row["detail"], "agreement": agreement}
    return _without_nulls(FIELDS, {name: found.get(name, value) for name, value in row.items()})


def unpacked(row: Mapping[str, Any]) -> Plain:
    """The whole form of a row in the short form, but for the nulls of the schema's own fields.

    Raises ValueError for a short form that cannot be read.
    """
    try:
        recipe, detail, agreement = (dict(row.get(name) or {}) for name in PARTS)
        if sites := (recipe.get("declared") or {}).get("sites"):
            recipe["declared"] = recipe["declared"] | {"sites": _sites(sites)}
        if recipe.get("observed"):
            recipe["observed"] = _observed(recipe["observed"])
        agreement = {name: _list(value) for name, value in agreement.items()}
        if isinstance(own := detail.get("agreement"), dict):
            shared = {k: v for k, v in _whole(agreement).items() if k not in own["without"]}
            detail["agreement"] = shared | {k: _list(v) for k, v in own.items() if k != "without"}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its short form cannot be read ({type(error).__name__}: {error})") from error
    found = {"recipe": recipe, "detail": detail, "agreement": agreement}
    return {**row, **{name: value for name, value in found.items() if name in row}}


def _without_nulls(fields: Mapping[str, Any], values: Mapping[str, Any]) -> Plain:
    """The schema's own fields where they hold something; any other name stays, whatever it holds."""
    out: Plain = {}
    for name, value in values.items():
        kind = fields.get(name)
        kept = (_without_nulls(kind, value) or None) if isinstance(kind, Mapping) else value
        if name not in fields or kept is not None:
            out[name] = kept
    return out


def _whole(agreement: Plain) -> Plain:
    fixed = FIELDS["agreement"]
    assert isinstance(fixed, dict)
    return dict.fromkeys(fixed) | agreement


def _checked(pack: Callable, unpack: Callable, value: Any) -> Any:
    """The short form, or `value` itself where there is none or it would read as something else."""
    return _remembered(pack, unpack, json.dumps(value))


@lru_cache(maxsize=256)
def _remembered(pack: Callable, unpack: Callable, text: str) -> Any:
    """The same of a value's JSON: a sweep writes the same recipe for every golden. Nobody may change what it gives."""
    value = json.loads(text)
    try:
        short = pack(value)
        return short if _same(unpack(short), value) else value
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, StopIteration):
        return value


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 is not 1.0 and not true."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _pack_sites(sites: Mapping[str, Mapping]) -> Plain:
    fields = [name for name, value in next(iter(sites.values())).items() if isinstance(value, str)]
    rules: dict[str, list[str]] = {}
    for site, rule in sites.items():
        words = [rule[name] for name in fields]
        words += [f"{name}={value}" for name, value in rule.items() if name not in fields]
        rules.setdefault(" ".join(words), []).append(site)
    return {"fields": " ".join(fields), "rules": {words: " ".join(names) for words, names in rules.items()}}


def _sites(short: Mapping[str, Any]) -> Plain:
    if "rules" not in short:
        return dict(short)
    fields = short["fields"].split()
    return {site: _rule(fields, words.split()) for words, names in short["rules"].items() for site in names.split()}


def _rule(fields: list[str], words: list[str]) -> Plain:
    options = (word.split("=") for word in words[len(fields) :])
    return dict(zip(fields, words, strict=False)) | {name: _number_or_word(value) for name, value in options}


def _number_or_word(text: str) -> int | str:
    """An option of a rule: a whole number, or a word such as the site whose kernel swallows this one."""
    return int(text) if text.lstrip("-").isdigit() else text


def _pack_observed(observed: Mapping[str, Any]) -> Plain:
    entries_of = [entries for entries in observed.values() if not isinstance(entries, str)]
    fields = list(dict.fromkeys(name for entries in entries_of for e in entries for name in e if name != "layers"))
    phases = list(dict.fromkeys(phase for place in observed for site, _, phase in [place.rpartition(".")] if site))
    where: dict[tuple[str, str, str], list[str]] = {}
    for place, entries in observed.items():
        site, _, phase = place.rpartition(".")
        for entry in entries if site else ():
            words = " ".join(_word(entry.get(name)) for name in fields)
            where.setdefault((words, site, _ranges(entry["layers"])), []).append(phase)
    seen: dict[str, dict[str, list[str]]] = {}
    for (words, site, layers), found in where.items():
        for prefix in [""] if found == phases else [f"{phase}@" for phase in found]:
            seen.setdefault(words, {}).setdefault(prefix + layers, []).append(site)
    short = {words: {at: " ".join(sites) for at, sites in places.items()} for words, places in seen.items()}
    own = {name: value for name, value in observed.items() if isinstance(value, str)}
    return own | {"phases": " ".join(phases), "fields": " ".join(fields), "seen": short}


def _observed(short: Mapping[str, Any]) -> Plain:
    if "seen" not in short:
        return dict(short)
    fields, whole = short["fields"].split(), {}
    for words, places in short["seen"].items():
        values = {f: _words(word) for f, word in zip(fields, words.split(), strict=True) if word != ABSENT}
        for at, sites in places.items():
            phase, _, layers = at.rpartition("@")
            entry = {"layers": _numbers(layers), **values}
            for name in (f"{site}.{p}" for p in phase.split() or short["phases"].split() for site in sites.split()):
                whole.setdefault(name, []).append(dict(entry))
    for entries in whole.values():
        entries.sort(key=lambda entry: entry["layers"])
    return whole | {name: value for name, value in short.items() if name not in ("phases", "fields", "seen")}


def _word(words: Iterable[str] | None) -> str:
    if words is None:
        return ABSENT
    return (_folded(word.replace(",", COMMA) for word in words) or NOTHING).replace(" ", SPACE)


def _words(word: str) -> list[str]:
    words = [] if word == NOTHING else _unfolded(word.replace(SPACE, " "))
    return [word.replace(COMMA, ",") for word in words]


def _folded(words: Iterable[str]) -> str:
    """["add:f32", "mul:f32", "sum:bf16"] as "add,mul:f32,sum:bf16": a word takes the dtype of the next that has one."""
    out: list[str] = []
    for word in words:
        _, colon, dtype = word.rpartition(":")
        if colon and out and out[-1].endswith(f":{dtype}"):
            out[-1] = out[-1].removesuffix(f":{dtype}")
        out.append(word)
    return ",".join(out)


def _unfolded(text: str) -> list[str]:
    out: list[str] = []
    dtype = ""
    for word in reversed(text.split(",")):
        name, colon, own = word.rpartition(":")
        dtype = own if colon else dtype
        out.insert(0, f"{name if colon else word}:{dtype}" if dtype else word)
    return out


def _ranges(numbers: Iterable[int]) -> str:
    """[-1], [0, 1, 2, 4] as "-1", "0-2,4"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1 and n > 0:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _numbers(text: str) -> list[int]:
    out: list[int] = []
    for part in text.split(","):
        first, dash, last = part.rpartition("-")
        out += range(int(first), int(last) + 1) if first and dash else [int(part)]
    return out


def _pack_list(items: list[Mapping]) -> Any:
    names = list(items[0])
    if any(list(item) != names for item in items):
        raise ValueError("the maps have other names")
    return {"columns": names, "rows": [[item[name] for name in names] for item in items]}


def _list(value: Any) -> Any:
    if not isinstance(value, dict) or set(value) != {"columns", "rows"}:
        return value
    return [dict(zip(value["columns"], row, strict=True)) for row in value["rows"]]
