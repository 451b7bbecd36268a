"""What an operation's error looks like: hints that a tired person can act on, each from a fault seen in practice."""

from harness.local_replay import Key
from harness.op_error import OpError
from variants.axes import Execution
from variants.dtypes import DType
from variants.model_config import ModelConfig
from variants.recipe import Recipe

SCALE_SHARE = 0.9  # of the squared error is one common factor
GRIDS = (64, 32, 16)  # chunks of the delta rule in use; of an engine whose recipe names none
CARRYING = ("kda_core", "conv_sum", "mla_core")  # values by token in which a token meets earlier ones


def hints(key: Key, error: OpError, *, recipe: Recipe, config: ModelConfig) -> list[str]:
    """One short line for each pattern that the error of a place fits, the most telling first."""
    found = [
        _not_finite(error),
        _undeclared_rounding(key, error, recipe),
        _position_zero_exact(key, error),
        _on_a_grid(key, error, recipe),
        _scale(error, config),
        _share(error),
    ]
    return [line for line in found if line]


def _not_finite(error: OpError) -> str | None:
    return f"{error.non_finite} values are not finite" if error.non_finite else None


def _undeclared_rounding(key: Key, error: OpError, recipe: Recipe) -> str | None:
    """Values that fit a narrower format than the recipe allows: rounded without saying so."""
    rule = recipe.rule(key[0], key[1], key[2])
    declared = rule.output or rule.accum
    narrow = [f for f in error.fits if DType[f].precision < declared.precision]
    if not narrow or len(narrow) < len(error.fits) or error.non_finite:
        return None
    return f"values fit {'/'.join(sorted(narrow))} where {declared.name} is declared: an undeclared rounding"


def _position_zero_exact(key: Key, error: OpError) -> str | None:
    """A softmax over one key does not depend on its scale, so position 0 is exact."""
    if key[0] != "mla_core" or error.first is None or error.first[1] == 0 or key[2] != "prefill":
        return None
    return "position 0 exact, later ones wrong: scale or position" if error.first[1] == 1 else None


def _on_a_grid(key: Key, error: OpError, recipe: Recipe) -> str | None:
    """The first bad position at a chunk's or a piece's edge: something is not carried over it."""
    if key[0] not in CARRYING or key[2] != "prefill" or error.first is None or error.first[1] <= 0:
        return None
    first, piece = error.first[1], recipe.execution.prefill_piece
    if piece and first % piece == 0 and recipe.execution.mode is not Execution.recompute:
        return f"first bad position {first}, a multiple of the prefill piece {piece}: state not carried into the piece"
    chunk = dict(recipe.rule("kda_core", key[1], key[2]).options).get("chunk_size")
    for grid in GRIDS if chunk is None else (chunk,):
        if first % grid == 0:
            return f"first bad position {first}: the edge of a {grid}-token chunk, so the state's hand-off"
    return None


def rows_hint(error: OpError) -> str | None:
    """Rows that run together and are not all wrong: what that looks like, where there were others to be right.

    A prompt may be the only one that shows a fault, so it is only told once another order of rows has shown the same
    (`harness.hypotheses`).
    """
    if not error.rows or error.rows == error.seen:
        return None
    if error.rows == {0}:
        return "only row 0 (slot 0) is wrong: a slot that something else writes to, or an index clamped to 0"
    if error.seen - error.rows == {0}:
        return "row 0 is right, every later row is wrong: an index into the whole batch taken for one into a row"
    return None


def _scale(error: OpError, config: ModelConfig) -> str | None:
    if error.explained_by_scale < SCALE_SHARE or abs(error.scale) < 1e-7:
        return None
    factor = 1 + error.scale
    known = {
        "the routed scaling factor once too often": config.routed_scaling_factor,
        "the routed scaling factor left out": 1 / config.routed_scaling_factor,
    }
    name = next((n for n, f in known.items() if abs(factor / f - 1) < 1e-3), None)
    return f"errors look like a scale: x {factor:.6g}" + (f" ({name})" if name else "")


def _share(error: OpError) -> str | None:
    if not error.positions or error.over == error.positions:
        return None
    return f"{error.over} of {error.positions} positions are wrong"
