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
from variants.errors import UsageError
from variants.recipe import Recipe, difference, resolve


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
    if flags.json:
        print(json.dumps(_document(config, recipe, other)))
    elif other is None:
        print(_recipe_text(config.label, recipe))
    else:
        print(_difference_text(config, recipe, other))
    return 0


def _document(config: Settings, recipe: Recipe, other: Recipe | None) -> dict[str, object]:
    document = {"variant": config.label, "hash": recipe.hash, "recipe": recipe.as_dict()}
    if other is None:
        return document
    return document | {
        "against": config.against,
        "against_hash": other.hash,
        "several": _several(config),
        "difference": difference(recipe, other),
    }


def _several(config: Settings) -> str | None:
    return None if config.against is None else several_axes(config.variant, named_variant(config.against))


def _recipe_text(label: str, recipe: Recipe) -> str:
    rows = [[*(row.pop(name) for name in RULE), _options(row)] for row in recipe.rows()]
    settings = {k: v for k, v in recipe.as_dict().items() if k not in ("sites", "exceptions")}
    lines = [f"{name}: {_plain(value)}" for name, value in settings.items()]
    return "\n".join([f"{label}  {recipe.hash[:12]}", *lines, "", text_table((*RULE, "options"), rows)])


RULE = ("site", "input", "accum", "output", "storage", "algorithm", "impl")


def _options(rest: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in rest.items())


def _plain(value: object) -> str:
    return _options(value) if isinstance(value, dict) else str(value)


def _difference_text(config: Settings, recipe: Recipe, other: Recipe) -> str:
    names = f"{config.label} ({recipe.hash[:12]}) against {config.against} ({other.hash[:12]})"
    rows = [[row["site"], row["field"], row["a"], row["b"]] for row in difference(recipe, other)]
    if not rows:
        return f"{names}: the same arm; they resolve to one recipe"
    several = _several(config)
    head = [names, *([several] if several else []), ""]
    return "\n".join([*head, text_table(("site", "field", config.label, str(config.against)), rows)])


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["explain", *sys.argv[1:]]))
