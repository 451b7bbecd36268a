"""`neartie explain`: the recipe that a variant resolves to on a model, and the difference of two."""

import json
import sys
from dataclasses import dataclass

from experiments.words import Flags
from harness.axis_sets import several_axes
from harness.compose import named_variant
from harness.config import Config, EngineKind
from harness.engines.assets import checkpoint_folder
from harness.text_table import text_table
from variants.axes import Execution, ExecutionAxes
from variants.errors import UsageError
from variants.model_config import ModelConfig
from variants.recipe import Recipe, batch_dependent, difference, resolve
from variants.sites import places, rule_key

Rows = list[dict[str, object]]


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """against: the name of the variant to compare with, or None to print one recipe in full."""

    against: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine.kind is not EngineKind.local:
            raise UsageError(f"explain reads variants, and engine={self.engine.kind.name} has none; leave engine= out")


def run(config: Settings, flags: Flags) -> int:
    """Print one recipe, or what differs between two; two that resolve alike are called the same arm."""
    from variants.checkpoint import load_config

    model = load_config(checkpoint_folder(config.model.path))
    recipe = resolve(config.variant, model)
    other = None if config.against is None else resolve(named_variant(config.against), model)
    rows = [] if other is None else _differences(recipe, other, model)
    if flags.json:
        print(json.dumps(_document(config, recipe, other, rows)))
    elif other is None:
        print(_recipe_text(config.label, recipe))
    else:
        print(_difference_text(config, recipe, other, rows))
    return 0


def _differences(recipe: Recipe, other: Recipe, model: ModelConfig) -> Rows:
    """As `difference`, without a rule that exceptions replace at every layer: these are compared themselves."""
    keys = {(rule_key(site, phase), layer) for site, layer in places(model) for phase in ("prefill", "decode")}
    left = {key for key, _ in keys - {*recipe.exceptions, *other.exceptions}}
    replaced = {key for key, _ in keys} - left
    return [row for row in difference(recipe, other) if row["site"] not in replaced]


def _document(config: Settings, recipe: Recipe, other: Recipe | None, rows: Rows) -> dict[str, object]:
    document = {"variant": config.label, "hash": recipe.hash, "recipe": recipe.as_dict()}
    if other is None:
        return document
    return document | {
        "against": config.against,
        "against_hash": other.hash,
        "several": _several(config),
        "difference": rows,
    }


def _several(config: Settings) -> str | None:
    return None if config.against is None else several_axes(config.variant, named_variant(config.against))


RULE = ("site", "input", "accum", "output", "storage", "algorithm", "impl")


def _recipe_text(label: str, recipe: Recipe) -> str:
    rows = [[*(row.pop(name) for name in RULE), _options(row)] for row in recipe.rows()]
    table = text_table((*RULE, "options"), rows)
    return "\n".join([f"{label}  {recipe.hash[:12]}", *_settings(recipe), "", table])


def _settings(recipe: Recipe) -> list[str]:
    """How it runs and what else departs from its default, a line each; over pages, where bits follow the batch."""
    run = recipe.execution
    plain = Recipe(rules=recipe.rules, exceptions=recipe.exceptions, execution=ExecutionAxes(mode=run.mode))
    found = {"execution": [f"mode={run.mode.name}"]}
    for row in difference(recipe, plain):
        site, field = str(row["site"]), str(row["field"])
        if site != "batch_dependent":
            found.setdefault(site, []).append(_plain(row["a"]) if field == site else f"{field}={_plain(row['a'])}")
    lines = [f"{name}: {' '.join(values)}" for name, values in found.items()]
    if run.mode is Execution.paged:
        follow = batch_dependent(recipe)
        lines += [f"batch_dependent {name}: {sites}" for name, sites in follow.items()] or ["batch_dependent: nowhere"]
    return lines


def _options(rest: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in rest.items())


def _plain(value: object) -> str:
    many = value.split() if isinstance(value, str) else value if isinstance(value, list) else [value]
    return ",".join(map(str, many))


def _difference_text(config: Settings, recipe: Recipe, other: Recipe, rows: Rows) -> str:
    names = f"{config.label} ({recipe.hash[:12]}) against {config.against} ({other.hash[:12]})"
    if recipe.hash == other.hash:
        return f"{names}: one variant, the same arm; both resolve to one recipe"
    if not rows:
        return f"{names}: the same at every layer; what differs are rules that all of them override"
    several = _several(config)
    head = [names, *([several] if several else []), ""]
    table = [[row["site"], row["field"], *_cells(row)] for row in rows]
    return "\n".join([*head, text_table(("site", "field", config.label, str(config.against)), table)])


def _cells(row: dict[str, object]) -> list[str | None]:
    """Both values; of lists of sites, which are long, the number if that differs."""
    cells = [None if row[side] in (None, []) else _plain(row[side]) for side in ("a", "b")]
    counts = [cell and f"sites: {cell.count(',') + 1}" for cell in cells]
    return counts if row["site"] == "batch_dependent" and counts[0] != counts[1] else cells


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["explain", *sys.argv[1:]]))
